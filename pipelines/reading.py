"""What can be told from the text of a message or a reply by plain rules, so that the fact can be kept without the text (pure).

Takes: texts. Gives: whether a prompt asks for a change, whether a reply ends in a question, which files it speaks of without having looked,
and whether a call could have gone out earlier. Rules of thumb on purpose: they run where the events are made, in microseconds, and are
the same for every agent that works on named files or documents. Leaves out: rewards, and privacy (`redaction.py`).
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

MAX_CHARS: Final = 4_000
"""Of a message: what is asked stands at its start; pasted logs follow."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHANGE: Final = _words(
    "add append apply bump build change clean convert correct create decrease delete deprecate disable drop edit enable ensure extend "
    "extract fix format generate handle implement improve include increase inline insert install introduce leave make merge migrate modify "
    "move optimise optimize port put refactor remove rename reorder reorganise replace resolve restore revert rewrite set simplify split "
    "swap switch tidy translate turn undo uninstall unify update upgrade use validate wire wrap write "
    "ändere änder benenne bau baue behebe ergänze entferne ersetze erstelle erzeuge füge implementiere korrigiere lösche mach mache "
    "nimm repariere schreib schreibe setze stelle tausche verschiebe verwende "
    "ajoute ajoutez change changez corrige corrigez crée créez déplace écris écrivez enlève fais implémente mets modifie refais remplace "
    "renomme répare retire supprime supprimez utilise utilisez "
    "agrega añade arregla borra cambia corrige crea cambiar edita elimina escribe haz implementa modifica mueve pon quita reemplaza "
    "refactoriza renombra usa "
    "adicione altere apague corrija crie escreva implemente mude remova renomeie substitua use "
    "aggiungi cambia correggi crea elimina modifica rinomina rimuovi scrivi sostituisci sposta usa "
    "добавь замени измени исправь переименуй перепиши почини реализуй сделай создай удали убери"
)
"""Words that ask for a change: imperatives in the languages that users of the first deployments write."""
CHANGE_SIGNS: Final = (
    "修改", "添加", "增加", "删除", "重命名", "替换", "修复", "实现", "改成", "改为", "追加", "変更", "削除", "修正して", "直して", "実装",
    "置き換え", "書いて",
)  # fmt: skip
"""The same where words are not parted by spaces."""
ASKING: Final = _words(
    "what whats why how where which who when explain describe tell show list summarise summarize does do is are did was were should "
    "was warum wieso wie wo welche welcher welches wer wann erkläre erklär zeig zeige ist sind "
    "quoi quel quelle pourquoi comment où qui quand explique explain est "
    "qué que cómo como cuál cuándo dónde quién explica explícame muestra es "
    "por qual quando onde quem explique mostre "
    "che cosa come perché dove quando chi spiega mostra "
    "что почему как где какой кто когда объясни покажи"
)
"""First words that ask for an answer."""
ASKING_SIGNS: Final = ("什么", "为什么", "怎么", "如何", "哪", "解释", "なぜ", "どう", "何が", "何です", "説明")
INTERCEPT: Final = -1.0
"""Without a sign in either direction a prompt is more likely no request for a change: then asking back is never charged. This and the
next five are log-odds, set by hand on the labelled prompts of the tests, not fitted: there is no large labelled set yet."""
FIRST_WORD: Final = 2.8
ANY_WORD: Final = 1.6
ASKED_FIRST: Final = -2.0
QUESTION_MARK: Final = -0.5
PASTED: Final = 0.4

_POLITE: Final = _words(
    "please pls kindly ok okay now then next also and so hey hi great good thanks thx thank you no nope just "
    "bitte danke jetzt dann und nein nur merci maintenant ensuite et non gracias ahora por favor y obrigado agora e grazie ora per"
)
"""Words before the one that says what is wanted."""
_REQUEST: Final = re.compile(
    r"^(?:can|could|would|will|i (?:want|need|would like)|kannst|könntest|peux|pouvez|pourrais|puedes|podrías|pode)\b"
)
_WORDS: Final = re.compile(r"[^\W\d_]+", re.UNICODE)
_CODE: Final = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|[\"'«“][^\"'»”\n]{0,200}[\"'»”]", re.S)
_PASTED: Final = re.compile(r"Traceback \(most recent call last\)|^\s*at .+:\d+|^diff --git |^@@ |\w+(?:Error|Exception)\b", re.M)


def edit_expected(message: str) -> float:
    """Return P(the message asks for something to be changed), in (0, 1).

    A logistic of five signs: the first word that matters is a verb of change, such a verb stands anywhere, the first word asks for an
    answer, the message ends in a question mark, a stack trace or diff is pasted. "Could you rename it?" is a request, not a question.
    """
    head = message[:MAX_CHARS]
    plain = _CODE.sub(" ", head).lower()
    words = _WORDS.findall(plain)
    body = [word for word in words if word not in _POLITE]
    first = body[0] if body else ""
    request = bool(_REQUEST.match(" ".join(body[:4])))
    change = any(word in CHANGE for word in body) or any(sign in plain for sign in CHANGE_SIGNS)
    starts = first in CHANGE or (request and change) or any(sign in plain for sign in CHANGE_SIGNS)
    asks = (first in ASKING or any(sign in plain for sign in ASKING_SIGNS)) and not request
    score = INTERCEPT + FIRST_WORD * (starts and not asks) + ANY_WORD * change + ASKED_FIRST * asks
    score += QUESTION_MARK * (head.rstrip().endswith(("?", "？")) and not request) + PASTED * bool(_PASTED.search(head))
    return 1.0 / (1.0 + math.exp(-score))


_CLOSERS: Final = " \t\r\n*_`\"'”’»)]}>"


def ends_in_question(reply: str) -> bool:
    """Return whether a text ends in a question mark of any script, whatever quotes, brackets or markup close it."""
    return reply.rstrip(_CLOSERS).endswith(("?", "？", "؟", ";?"))


_EXTENSIONS: Final = (
    "py pyi js jsx ts tsx mjs cjs java kt kts scala go rs rb php c h cc cpp hpp cs swift m sh bash zsh ps1 sql html css scss less vue "
    "svelte "
    "json jsonl yaml yml toml ini cfg conf env xml csv tsv parquet proto graphql md rst txt tex ipynb lock gradle tf dockerfile mk cmake "
    "pdf doc docx xls xlsx ppt pptx log"
)
_FILE: Final = re.compile(rf"(?<![\w./@-])(?:[\w.@-]+/)*[\w@-][\w.@-]*\.(?:{'|'.join(_EXTENSIONS.split())})(?![\w/])", re.IGNORECASE)
_PRODUCTS: Final = _words("node.js next.js vue.js nuxt.js react.js three.js d3.js express.js nest.js ember.js backbone.js")
"""Products that are called like files."""
_LINK: Final = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://\S+")
MAX_FILES: Final = 50
"""Of one reply: a listing of a whole folder is no fifty claims more."""


def files_named(text: str) -> list[str]:
    """Return the files that a text names, each once, in order: a path or a name with a common extension. Links are no files."""
    names = dict.fromkeys(match.group().removeprefix("./") for match in _FILE.finditer(_LINK.sub(" ", text)))
    return [name for name in names if name.lower() not in _PRODUCTS][:MAX_FILES]


def claims(reply: str, looked_at: Iterable[str]) -> tuple[int, int]:
    """Count the files that a reply speaks of, and those of them that nothing stands behind.

    Args:
        reply: The text for the user, without tool calls.
        looked_at: Arguments of the session's earlier tool calls and what the tools gave back. What the user wrote is not among them: that
            a user named a file is no reason to know what is in it.

    Returns:
        (files named, files named that occur in nothing that was looked at).
    """
    files = files_named(reply)
    if not files:
        return 0, 0
    seen = "\n".join(looked_at).lower()
    unread = sum(name.lower() not in seen and name.rsplit("/", 1)[-1].lower() not in seen for name in files)
    return len(files), unread


_TOKEN: Final = re.compile(r"[\w./-]{4,}")


def independent(arguments: str, *, results: Sequence[str], known: str) -> bool:
    """Return whether a call could have been made before any of the turn's results came back.

    It depends on a result when a word of its arguments (four characters or more) stands in a result and was not known before. A call that
    repeats nothing new from the results needed none of them.

    Args:
        arguments: The call's arguments as text.
        results: What the turn's earlier calls gave back; not empty.
        known: What the policy could know before: the conversation up to the user's message.
    """
    words = {word.lower() for word in _TOKEN.findall(arguments)}
    before, after = known.lower(), "\n".join(results).lower()
    return not any(word in after and word not in before for word in words)
