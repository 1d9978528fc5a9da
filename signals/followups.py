"""How likely the next user message shows that the user was not satisfied: a small calibrated model on readable features.

A first heuristic, to be replaced by a model on sentence embeddings. It looks at what people do when an answer missed: they say so,
ask for it undone or done differently, repeat themselves, paste the error, stop the agent, come back at once. Phrases are matched in eight
languages on normalised text; a lexicon of "negative words" is unfit ("kill the process, fix the error" is a new task).

Takes: two consecutive user messages and what lay between them. Gives: features and P(dissatisfied).
The coefficients were fitted on `signals/data/followups.jsonl` by `python -m signals fit-followups`, and a test refits them.
Leaves out: the same rules as Spark columns (`transforms.py`).
"""

import math
import re
from dataclasses import astuple, dataclass
from typing import Final

MAX_CHARS: Final = 2000
"""Longer messages are pasted files; what the user says comes first."""
TRIGRAM_CHARS: Final = 300
"""Similarity looks at the start of both messages; quadratic cost is bounded."""
DELAY_CAP_LOG: Final = 7.0
"""log(1 + seconds) of about 18 minutes; later replies are all the same to us."""

APOSTROPHES: Final = "['’`]"
SEPARATORS: Final = r"[\t\n\r !-/:-@\[-_{-~«»„“”…。，！？、：；（）¿¡]+"

MISSED: Final = (
    " not what i ", " wrong ", " incorrect ", " doesnt work ", " didnt work ", " does not work ", " did not work ", " not working ",
    " still fails ", " still failing ", " still broken ", " still not ", " still doesnt ", " still didnt ", " still wrong ",
    " still the same ", " still get ", " still getting ", " still see ", " isnt right ", " not right ", " thats not ", " that is not ",
    " you broke ", " you missed ", " you forgot ", " why did you ", " dont want ", " did not want ", " didnt want ", " didnt ask ",
    " did not ask ", " i said ", " i asked ", " i told you ", " you ignored ", " broke ", " broken now ", " makes no sense ",
    " same error ", " no thats ", " nope ", " bad ", " falsch ", " geht nicht ", " funktioniert nicht ", " immer noch ",
    " das ist nicht ", " nicht das ", " stimmt nicht ", " ich wollte ", " kaputt ", " no funciona ", " sigue fallando ", " sigue sin ",
    " está mal ", " esta mal ", " eso no ", " no es lo que ", " mal hecho ", " te dije ", " ne marche pas ", " ne fonctionne pas ",
    " toujours pas ", " cest faux ", " ce nest pas ", " pas ce que ", " encore une erreur ", " não funciona ", " nao funciona ",
    " ainda não ", " está errado ", " não é isso ", " continua falhando ", " не работает ", " неправильно ", " не то ", " всё ещё ",
    " все еще ", " опять ", " сломал ", " я просил ", "不对", "不行", "还是", "错了",
    "没有用", "不是我", "不工作", "動きません", "動かない", "違います", "違う", "まだ",
    "間違って", "ではなく",
)  # fmt: skip
"""The user says that it missed."""

REDO: Final = (
    " undo ", " revert ", " roll back ", " put it back ", " put back ", " try again ", " once more ", " redo ", " start over ",
    " change it back ", " go back ", " instead of what ", " remove what you ", " stop ", " rückgängig ", " mach das weg ", " nochmal ",
    " noch einmal ", " deshaz ", " otra vez ", " de nuevo ", " revierte ", " annule ", " reviens ", " refais ", " desfaça ",
    " de novo ", " reverta ", " отмени ", " верни ", " заново ", " переделай ", "撤销", "重做", "改回", "重新", "元に戻", "やり直",
)  # fmt: skip
"""The user wants it undone or done again."""

PRAISE: Final = (
    " thanks ", " thank you ", " thx ", " great ", " perfect ", " nice ", " awesome ", " works now ", " works well ", " it works ",
    " good ", " lgtm ", " looks good ", " excellent ", " cool ", " danke ", " super ", " perfekt ", " passt ", " gracias ",
    " perfecto ", " genial ", " merci ", " parfait ", " obrigado ", " perfeito ", " ótimo ", " спасибо ", " отлично ", " супер ", "谢谢",
    "很好", "完美", "可以了", "ありがと", "完璧", "いいね",
)  # fmt: skip
"""The user is pleased."""

ONWARD: Final = (
    " now ", " next ", " also ", " then ", " another ", " additionally ", " commit ", " push ", " new ", " jetzt ", " als nächstes ",
    " außerdem ", " ahora ", " también ", " después ", " maintenant ", " ensuite ", " aussi ", " agora ", " também ", " теперь ",
    " дальше ", " ещё добавь ", "现在", "接下来", "另外", "次に", "次は", "今度",
)  # fmt: skip
"""The user moves on."""

FAILURE: Final = (
    " traceback ", " exception ", " error ", " errors ", " failed ", " fails ", " typeerror ", " nameerror ", " syntaxerror ",
    " segfault ", " fehler ", " erreur ", " erro ", " ошибка ", "报错", "エラー",
)  # fmt: skip
"""Words of a pasted failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the model looks at; each in [0, 1]."""

    missed: float
    redo: float
    praise: float
    onward: float
    failure: float
    """A stack trace is attached or failure words are in the text."""
    repeat: float
    """Trigram similarity of the two messages."""
    interrupted: float
    """The user stopped the turn between them."""
    delay: float
    """log(1 + seconds to reply) / 7, capped; 0.5 when unknown."""


INTERCEPT: Final = 0.61
COEFFICIENTS: Final = Features(missed=2.84, redo=1.51, praise=-1.61, onward=-1.05, failure=0.64, repeat=1.32, interrupted=0.3, delay=-2.37)
"""Logistic regression, L2 penalty 1 on all but the intercept; refit with `python -m signals fit-followups`.
Leave-one-out on 128 rows: Brier .056, 95 % right, calibration error .12. Optimistic: phrases and labels are by the same hands."""


def normalise(text: str) -> str:
    """Lower-case, drop apostrophes, turn punctuation into single spaces, pad with one space on both sides."""
    plain = re.sub(APOSTROPHES, "", text[:MAX_CHARS].lower())
    return f" {re.sub(SEPARATORS, ' ', plain).strip(' ')} "


def pattern(phrases: tuple[str, ...]) -> str:
    """Return one regular expression for a phrase list, read alike by Python and Java (phrases are letters and spaces)."""
    return "|".join(phrases)


def trigrams(normalised: str) -> set[str]:
    """Return the distinct character trigrams of the start of a normalised text."""
    head = normalised[:TRIGRAM_CHARS]
    return {head[start : start + 3] for start in range(len(head) - 2)}


def similarity(one: str, other: str) -> float:
    """Return the Jaccard similarity of two normalised texts' trigrams, in [0, 1]; 0 when neither has any."""
    first, second = trigrams(one), trigrams(other)
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def features(message: str, *, previous: str | None, stack_traces: int, reply_delay_ms: int | None, interrupted: bool) -> Features:
    """Describe a follow-up.

    Args:
        message: The next user message.
        previous: The user message of the turn that is judged; None when its text was not kept.
        stack_traces: Stack traces attached to the next message.
        reply_delay_ms: From the turn's end to the message; None when unknown.
        interrupted: Whether the user stopped the turn.
    """
    text = normalise(message)

    def has(phrases: tuple[str, ...]) -> float:
        return 1.0 if re.search(pattern(phrases), text) else 0.0

    delay = 0.5 if reply_delay_ms is None else min(math.log1p(max(reply_delay_ms, 0) / 1000.0), DELAY_CAP_LOG) / DELAY_CAP_LOG
    return Features(
        missed=has(MISSED),
        redo=has(REDO),
        praise=has(PRAISE),
        onward=has(ONWARD),
        failure=1.0 if stack_traces > 0 else has(FAILURE),
        repeat=0.0 if previous is None else similarity(normalise(previous), text),
        interrupted=float(interrupted),
        delay=delay,
    )


def dissatisfied(x: Features) -> float:
    """Return P(dissatisfied) = 1 / (1 + exp(-(b + w x))), in (0, 1)."""
    score = INTERCEPT
    for weight, value in zip(astuple(COEFFICIENTS), astuple(x), strict=True):
        score += weight * value
    return 1.0 / (1.0 + math.exp(-score))
