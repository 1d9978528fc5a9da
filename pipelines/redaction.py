"""What must not leave the process that saw a user's text: secrets, names of users, paths.

Takes: text, or an event. Gives: the text with typed placeholders (`<redacted:aws_key>`) and counts, features derived from the text
that can be kept without it, and keyed hashes. `redact` is pure and idempotent: it repeats its patterns until nothing changes, and
no placeholder can match a pattern.
Leaves out: names of people and postal addresses. Telling them from code needs a model; deployments that need it set
`privacy.keep_text = false` and keep only the derived features.
"""

import hashlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelines.events import Evaluation, Event, TurnStarted
from pipelines.storage import Home, fsync_folder

MESSAGE_MAX_CHARS: Final = 20_000
"""Redacted text kept of one message. Longer ones are pasted logs; their length and features are kept whole."""
MAX_ROUNDS: Final = 8
"""Each round removes at least one secret; two rounds are usual, more only for text made to nest them."""
_KEY_BYTES: Final = 32
_HASH_BYTES: Final = 16

_LABELLED: Final = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?key|credentials?)"
    r"(?:[_-]?(?:key|value|base64|\d{1,3}))?"
)

_PATTERNS: Final[tuple[tuple[str, re.Pattern[str], str], ...]] = (
    (
        "private_key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r".*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
            re.S,
        ),
        "",
    ),
    ("url_password", re.compile(r"(?<![\w+.-])([a-zA-Z][\w+.-]{1,20}://[^\s/:@<>\"']{0,100}:)[^\s/@<>\"']{1,200}(?=@)"), r"\1"),
    ("jwt", re.compile(r"(?<![\w-])eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?"), ""),
    ("aws_key", re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"), ""),
    ("google_key", re.compile(r"(?<![\w-])AIza[\w-]{35}"), ""),
    ("github_token", re.compile(r"(?<![\w-])(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"), ""),
    ("gitlab_token", re.compile(r"(?<![\w-])glpat-[\w-]{16,}"), ""),
    ("slack_token", re.compile(r"(?<![\w-])xox[abeoprs]-[\w-]{10,}"), ""),
    ("api_key", re.compile(r"(?<![\w-])(?:sk|pk|rk)[-_][\w-]{16,}"), ""),
    ("package_token", re.compile(r"(?<![\w-])(?:npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|hf_[A-Za-z0-9]{20,}|dop_v1_[a-f0-9]{40,})"), ""),
    ("bearer_token", re.compile(r"(?i)\b((?:bearer|basic)[ \t]{1,4})[A-Za-z0-9+/=._~-]{8,}"), r"\1"),
    (
        "labelled_value",
        re.compile(rf"(?i)(?<![\w-])([\w-]{{0,40}}?{_LABELLED}[\"']?[ \t]{{0,4}}(?::=|=>|[=:])[ \t]{{0,4}}[\"']?)[^\s\"'<>,;]{{4,}}"),
        r"\1",
    ),
    (
        "high_entropy",  # an environment-style assignment of something long with letters and digits; also catches hashes, on purpose
        re.compile(
            r"(?<![\w-])([A-Z][A-Z0-9_]{1,60}[ \t]{0,2}=[ \t]{0,2}[\"']?)"
            r"(?=[\w+=-]{0,200}\d)(?=[\d+=_-]{0,200}[A-Za-z])[A-Za-z0-9+_][\w+/=-]{15,}"
        ),
        r"\1",
    ),
    ("email", re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+"), ""),
    (
        "phone",
        re.compile(
            r"(?<![\w.+/:-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
            r"|\(\d{3}\)[ .-]?\d{3}[ .-]\d{4}|\d{3}[-.]\d{3}[-.]\d{4})(?![\w:])"
        ),
        "",
    ),
)
"""Name, pattern, and what of the match stays before the placeholder. Every repeat is bounded or guarded by a look-behind, so
that the time is linear in the text."""

_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "private_key": ("PRIVATE KEY",), "url_password": ("://",), "jwt": ("eyJ",), "aws_key": ("AKIA", "ASIA", "ABIA", "ACCA"),
    "google_key": ("AIza",), "github_token": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"), "gitlab_token": ("glpat-",),
    "slack_token": ("xox",), "api_key": ("sk-", "sk_", "pk-", "pk_", "rk-", "rk_"), "package_token": ("npm_", "pypi-", "hf_", "dop_v1_"),
    "bearer_token": ("bearer", "basic"), "labelled_value": ("pass", "pwd", "secret", "token", "key", "cred"), "high_entropy": ("=",),
    "email": ("@",),
}  # fmt: skip
"""Texts of which one stands in every match of a pattern. They are looked for first, which costs a hundredth of the pattern."""
_ANY_CASE: Final = frozenset({"bearer_token", "labelled_value"})
_BY_LINE: Final = frozenset(_MARKS.keys() - {"private_key"} | {"phone"})
"""Patterns that are tried only on lines with a mark or a head. None of them matches across a line's end, and a line's end is no part of a
word, so that a line alone gives what it gives in the text."""
_HEADS: Final[dict[str, tuple[re.Pattern[str], ...]]] = {
    "labelled_value": (re.compile(r"(?:pass|pwd|secret|token|key|cred)[\w-]{0,30}[\"']?[ \t]{0,4}[=:]"),),
    "high_entropy": (re.compile(r"=[ \t]{0,2}[\"']?[\w+][\w/+=-]{15}"),),
    "phone": (re.compile(r"\+\d"), re.compile(r"\(\d\d\d\)"), re.compile(r"[-.]\d\d\d[-.]\d\d\d\d")),
}
"""Parts of which one stands in every match, each beginning with what a search finds fast; in lower case for those in any case."""
_FOLDED: Final = frozenset("\u017f\u0131\u0130\u212a")
"""Letters that a pattern takes for others in any case, but `lower()` does not: with one of them the marks say nothing."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STOPWORDS: Final[dict[str, frozenset[str]]] = {
    "en": _words("the and is are was to of in it that this you for not with do did can have still doesn't please what why how"),
    "de": _words("der die das und ist nicht ich du es ein eine mit auf für den dem bitte wie warum noch geht immer kann wird"),
    "fr": _words("le la les et est ne pas je tu un une des du que pour avec dans ça c'est pourquoi comment encore merci"),
    "es": _words("el la los las y es no un una que de en por para con esto pero como porque todavía funciona gracias"),
    "pt": _words("o a os as e é não um uma que de em por para com isso mas como porque ainda você obrigado"),
    "it": _words("il lo la gli e è non un una che di in per con questo ma come perché ancora funziona grazie"),
    "nl": _words("de het een en is niet ik je dat van op voor met maar hoe waarom nog steeds werkt kan wordt"),
}
_SCRIPTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("ja", re.compile(r"[\u3040-\u30ff]")),
    ("ko", re.compile(r"[\uac00-\ud7af]")),
    ("zh", re.compile(r"[\u4e00-\u9fff]")),
    ("ru", re.compile(r"[\u0400-\u04ff]")),
    ("ar", re.compile(r"[\u0600-\u06ff]")),
    ("hi", re.compile(r"[\u0900-\u097f]")),
)
_WORD: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_LANGUAGE_CHARS: Final = 2_000
"""The guess reads this much from the start: enough for stop words, and pasted logs come after the words."""
_SCRIPT_SHARE: Final = 0.2
"""Share of letters in a script that decides; low, because code and identifiers in the message are Latin."""

_TRACE_HEADS: Final = re.compile(
    r"Traceback \(most recent call last\)|^panic: |^goroutine \d+ \[|thread '[^'\n]{0,80}' panicked at|^Exception in thread ", re.M
)
_TRACE_FRAMES: Final = re.compile(r"(?:^[ \t]+at [^\n]{1,300}[:)][^\n]{0,20}\n?){2,}", re.M)
_TRACE_MARKS: Final = ("Traceback (most", "panic: ", "goroutine ", "panicked at", "Exception in thread ")
"""One of them stands in every head of a trace."""
_DIFF_FILES: Final = re.compile(r"^diff --git ", re.M)
_DIFF_HUNKS: Final = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What may be kept of a message without its text."""

    chars: int
    language: str | None
    """ISO 639-1; None when the text does not tell."""
    stack_traces: int
    diffs: int


def redact(text: str) -> tuple[str, dict[str, int]]:
    """Replace secrets by typed placeholders.

    Returns:
        The text, and how many of each kind were replaced.
    """
    counts: Counter[str] = Counter()
    text = text.encode("utf-8", "replace").decode("utf-8")
    for _ in range(MAX_ROUNDS):
        before = text
        for name, pattern, kept in _PATTERNS:
            text, found = _replaced(name, pattern, f"{kept}<redacted:{name}>", text)
            counts[name] += found
        if text == before:
            break
    return text, {name: found for name, found in counts.items() if found}


def _replaced(name: str, pattern: re.Pattern[str], by: str, text: str) -> tuple[str, int]:
    """Do what `pattern.subn(by, text)` does, passing over what cannot match."""
    seen = text
    if name in _ANY_CASE:
        if any(letter in text for letter in _FOLDED):
            return pattern.subn(by, text)
        seen = text.lower()
    marks, heads = _MARKS.get(name, ()), _HEADS.get(name, ())
    if marks and not any(mark in seen for mark in marks):
        return text, 0
    if name not in _BY_LINE:
        return pattern.subn(by, text) if not heads or any(head.search(seen) for head in heads) else (text, 0)
    places = [found.start() for head in heads for found in head.finditer(seen)] if heads else _places(seen, marks)
    pieces: list[str] = []
    total = looked = copied = 0
    for place in sorted(places):
        if place < looked:
            continue  # another mark of a line that was done
        start, end = seen.rfind("\n", 0, place) + 1, seen.find("\n", place)
        looked = len(seen) if end < 0 else end
        line, found = pattern.subn(by, text[start:looked])
        if found:
            pieces += [text[copied:start], line]
            copied = looked
            total += found
    return ("".join([*pieces, text[copied:]]) if total else text), total


def _places(text: str, marks: tuple[str, ...]) -> list[int]:
    """Return where the marks stand."""
    found: list[int] = []
    for mark in marks:
        at = text.find(mark)
        while at >= 0:
            found.append(at)
            at = text.find(mark, at + len(mark))
    return found


def guess_language(text: str) -> str | None:
    """Guess the language from its script, else from stop words; None when neither tells.

    At least two stop words (one in a message of up to three words) and strictly more than in any other language are asked for.
    """
    head = text[:_LANGUAGE_CHARS]
    letters = sum(map(str.isalpha, head))
    if not letters:
        return None
    for language, script in () if head.isascii() else _SCRIPTS:
        if len(script.findall(head)) >= _SCRIPT_SHARE * letters:
            return language
    words = _WORD.findall(head.lower())
    scores = sorted(((sum(word in stop for word in words), language) for language, stop in _STOPWORDS.items()), reverse=True)
    best, second = scores[0], scores[1]
    needed = 1 if len(words) <= 3 else 2
    return best[1] if best[0] >= needed and best[0] > second[0] else None


def features(text: str) -> Features:
    """Derive what may be kept without the text."""
    files = len(_DIFF_FILES.findall(text)) if "diff --git " in text else 0
    traces = len(_TRACE_HEADS.findall(text)) if any(mark in text for mark in _TRACE_MARKS) else 0
    if " at " in text or "\tat " in text:
        traces += len(_TRACE_FRAMES.findall(text))
    hunks = "@@ -" in text and _DIFF_HUNKS.search(text) is not None
    return Features(chars=len(text), language=guess_language(text), stack_traces=traces, diffs=files or int(hunks))


def clean_event(event: Event, *, keep_text: bool) -> Event:
    """Return the event with free text redacted, or removed without consent.

    Args:
        event: Any event; only `turn_started` and `evaluation` carry free text.
        keep_text: The deployment's setting; consent `none` removes the text in any case.
    """
    kept = keep_text and event.consent != "none"
    if isinstance(event, TurnStarted) and event.payload.message is not None:
        text = redact(event.payload.message)[0][:MESSAGE_MAX_CHARS] if kept else None
        return event.model_copy(update={"payload": event.payload.model_copy(update={"message": text})})
    if isinstance(event, Evaluation) and event.payload.explanation is not None:
        text = redact(event.payload.explanation)[0][:MESSAGE_MAX_CHARS] if kept else None
        return event.model_copy(update={"payload": event.payload.model_copy(update={"explanation": text})})
    return event


def _load_key(home: Home) -> bytes:
    """Read the deployment's hash key, made on first use; two processes starting together agree on one."""
    path = home.keys / "user.key"
    if not path.exists():
        home.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, temporary = tempfile.mkstemp(dir=home.keys)  # mkstemp gives 0600
        with os.fdopen(fd, "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails if another process was first: its key stays
        except FileExistsError:
            pass
        finally:
            Path(temporary).unlink()
        fsync_folder(home.keys)
    return path.read_bytes()


def hasher(home: Home) -> Callable[[str, str], str]:
    """Return `hash(kind, raw)`: a keyed hash (32 hex digits) that nobody without this deployment's key can recompute.

    `kind` (user, path, repository, arguments) separates the spaces, so that equal texts of two kinds do not show as equal.
    """
    key = _load_key(home)

    def keyed(kind: str, raw: str) -> str:
        person = kind.encode()[:16]
        return hashlib.blake2b(raw.encode("utf-8", "replace"), key=key, person=person, digest_size=_HASH_BYTES).hexdigest()

    return keyed


def user_key(home: Home, raw: str) -> str:
    """Return the keyed hash that stands for a user in every event."""
    return hasher(home)("user", raw)
