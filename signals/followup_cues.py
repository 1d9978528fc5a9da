"""What a follow-up shows on its surface: cue phrases and words, pasted output, shape, and how much of it repeats the message before.

Phrases say what the embedding of a whole sentence blurs: who did what ("you deleted", "I said"), that something goes on ("still"), that a
topic is new. Two together can say another thing than each alone ("thanks, but"). All words are counted by a hash, whole and by their
beginning, so that endings matter less. No phrase or word decides anything; the head weighs all together with the embedding
(`followups.py`).

Takes: the text of a message and of the one before. Gives: small whole numbers, the same on every machine.
Leaves out: the embedding (`followup_encoder.py`), weights and probabilities (`followups.py`).
"""

import re
import zlib
from functools import lru_cache
from math import isqrt
from typing import Final

from signals.followup_phrases import PHRASES

MAX_CHARS: Final = 2000
"""Longer messages are pasted files; what the user says comes first."""
SIMILARITY_CHARS: Final = 300
"""Similarity looks at the start of both messages."""
UNIT: Final = 16
"""A feature of full strength: shares in [0, 1] become whole numbers in [0, 16], so that sums do not depend on their order."""
MAX_WORDS: Final = 4
"""Words of the longest phrase."""
MAX_CHARACTERS: Final = 6
"""Characters of the longest phrase in a language without spaces."""
BUCKETS: Final = 1024
"""Words are told apart by a hash into this many."""
WORD_CHARS: Final = 240
"""Words are counted in the start of a message; what follows is mostly pasted."""
STEM: Final = 4
"""Characters of a word's beginning."""
WORD_UNIT: Final = 64
"""What a message's words amount to together, so that a long message is not certain because it is long."""
FEW_WORDS: Final = 4
"""Fewer distinct buckets than this count as so many: one word alone is no certainty."""

APOSTROPHES: Final = re.compile("['’`´]")
SEPARATORS: Final = re.compile(r"[\s!-/:-@\[-_{-~«»„“”…。，！？、：；（）¿¡「」・]+")
UNSPACED: Final = re.compile("[぀-ヿ㐀-鿿豈-﫿]+")
ANSI: Final = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
PASTED: Final = re.compile(
    r"""^\s*(?:
      Traceback\ \(|File\ ".*",\ line|at\ [\w.$<>]+\s?\(|at\ \S+:\d+|[\w.$]*\w(?:Error|Exception|Rejection|Violation)\b|
      (?:Error|Exception):|panic:|goroutine\ \d|fatal:|E\s{2,}|CONFLICT\ \(|make(?:\[\d+\])?:|PHP\ \w+\ error|\S+\(\d+,\d+\):|
      dial\ tcp|\$\ |➜\ |>\ |[│❌✗✓]|\w+:\ command\ not\ found|bash:|zsh:|sh:\ |npm\ ERR!|error(?:\[\w+\])?:|ERROR|FAIL|---\ FAIL|
      BUILD\ FAIL|\#\#\[|
      \[ERROR\]|={3,}|-->|✕|●|×|Found\ \d+\ error|Tests?:|\d+\ (?:failed|passed|errors?)\b|Process\ completed|\S+\.\w{1,4}:\d+(?::\d+)?:?\ |
      exit\ (?:code|status)|WARN|INFO|DEBUG|Uncaught|Caused\ by|segfault|Segmentation
    )""",
    re.VERBOSE,
)
"""A line that no person types: frames, compilers, test runners, shells."""
BROKEN: Final = re.compile(
    r"(?:\w(?:Error|Exception|Rejection)\b|\berror(?:\[\w+\])?: |\bERROR\b|\bFAIL(?:ED|URE)?\b|\b[1-9]\d* (?:failed|errors?)\b|npm ERR!|✕|"
    r"panic:|fatal:|command not found|no encontrada|introuvable|nicht gefunden|未找到命令|Permission denied|did not complete successfully|"
    r"exit (?:code|status):? ?[1-9]|CrashLoop|unhealthy|EADDRINUSE|[Cc]onnection refused|undefined reference|unrecognized option|"
    r"undeclared|Found [1-9]\d* errors?|Traceback|Segmentation|segfault|CONFLICT \()"
)
"""Output that tells of a failure."""
CLEAN: Final = re.compile(
    r"(?:\b0 (?:failed|errors?|warnings?|failures?)|\bpassed\b|\bBuild succeeded|\bok +\w|✓|0 échec|0 errores)", re.IGNORECASE
)
"""Output that tells of success."""

CUES: Final = tuple(PHRASES)
OPENERS: Final = ("no", "still", "wrong", "praise", "onward", "request", "question", "not", "undo", "stop", "you_did", "almost")
"""Cues whose place at the very start of the message is a feature of its own."""
PAIRS: Final = tuple(
    (one, other)
    for one, others in (
        ("praise", "almost broken not request onward sarcasm"),
        ("resolved", "almost not broken still"),
        ("not", "broken request condition report topic verb"),
        ("request", "broken wrong undo expected i_said still"),
        ("broken", "condition topic question own report verb onward"),
        ("wrong", "own verb"),
        ("question", "you_did"),
        ("no", "almost"),
    )
    for other in others.split()
)
"""Cues that together say another thing than each alone: thanks with a "but", not broken any more, broken when, wrong and mine."""
SHAPES: Final = (
    "length",
    "lines",
    "short",
    "pasted",
    "bare_paste",
    "failed_output",
    "passed_output",
    "fence",
    "list",
    "quote",
    "asks",
    "shouts",
    "many_marks",
)
REPEATS: Final = ("jaccard", "contained", "same", "novel_short")
NAMES: Final = (*CUES, *(f"{name}_first" for name in OPENERS), *(f"{one}+{other}" for one, other in PAIRS), *SHAPES, *REPEATS)
"""All surface features, in order; each a whole number in [0, UNIT]."""


def _index() -> tuple[dict[str, int], dict[str, int]]:
    """Return phrase -> bits of its cues, for words and for text without spaces."""
    spaced: dict[str, int] = {}
    unspaced: dict[str, int] = {}
    for bit, phrases in enumerate(PHRASES.values()):
        for raw in phrases.split("|"):
            phrase = " ".join(raw.split())
            if phrase:
                table = unspaced if UNSPACED.fullmatch(phrase) else spaced
                table[phrase] = table.get(phrase, 0) | 1 << bit
    return spaced, unspaced


SPACED, UNSPACED_PHRASES = _index()
PAIR_BITS: Final = tuple(1 << CUES.index(one) | 1 << CUES.index(other) for one, other in PAIRS)


def cleaned(text: str) -> str:
    """Return the first characters of a message without terminal colours, and without halves of characters that no text can hold."""
    return ANSI.sub("", text[:MAX_CHARS]).encode("utf-8", "replace").decode("utf-8")


def normalise(text: str) -> str:
    """Lower-case, drop apostrophes, turn punctuation into single spaces, pad with one space on both sides."""
    return f" {SEPARATORS.sub(' ', APOSTROPHES.sub('', text.lower())).strip(' ')} "


def cue_bits(normalised: str) -> tuple[int, int]:
    """Return the cues of a normalised text as bits, and those that it starts with."""
    words = normalised.split()
    bits = first = 0
    get = SPACED.get
    for start, word in enumerate(words):
        phrase, found = word, get(word, 0)
        for follower in words[start + 1 : start + MAX_WORDS]:
            phrase = f"{phrase} {follower}"
            found |= get(phrase, 0)
        bits |= found
        if start == 0:
            first = found
    for run in UNSPACED.finditer(normalised):
        part = run.group()
        for start in range(len(part)):
            found = 0
            for end in range(start + 1, min(start + MAX_CHARACTERS, len(part)) + 1):
                found |= UNSPACED_PHRASES.get(part[start:end], 0)
            bits |= found
            if start == 0 and run.start() == 1:
                first |= found
    return bits, first


@lru_cache(maxsize=8192)
def word_buckets(word: str) -> tuple[int, ...]:
    """Return the buckets of a word: itself and its beginning, or of text without spaces each one, two and three characters."""
    if UNSPACED.search(word) is None:
        parts = [f"w{word}", f"p{word[:STEM]}"]
    else:
        runs = UNSPACED.findall(word)
        parts = [run[start : start + size] for run in runs for size in (1, 2, 3) for start in range(len(run) - size + 1)]
    return tuple(zlib.crc32(part.encode()) % BUCKETS for part in parts)


def words(normalised: str) -> tuple[set[int], int]:
    """Return the buckets that hold a word of the start of a normalised text, and what each counts: WORD_UNIT / sqrt(how many they are)."""
    buckets = {bucket for word in normalised[:WORD_CHARS].split() for bucket in word_buckets(word)}
    return buckets, isqrt(WORD_UNIT * WORD_UNIT // max(len(buckets), FEW_WORDS))


def trigrams(normalised: str) -> set[str]:
    """Return the distinct character trigrams of the start of a normalised text."""
    head = normalised[:SIMILARITY_CHARS]
    return {head[start : start + 3] for start in range(len(head) - 2)}


def _share(part: float, whole: float) -> int:
    """Return part / whole as a whole number of UNIT, rounded down; 0 when there is no whole."""
    return int(part * UNIT // whole) if whole else 0


def _shapes(text: str, normalised: str) -> tuple[int, ...]:
    lines = [line for line in text.split("\n") if line.strip()]
    pasted = [line for line in lines if PASTED.match(line)]
    pasted_chars = sum(map(len, pasted))
    chars = max(sum(map(len, lines)), 1)
    length = len(normalised) - 2
    bare = bool(pasted) and chars - pasted_chars < 24
    marks = text.count("?") + text.count("!") + text.count("？") + text.count("！")
    letters = sum(character.isalpha() for character in text)
    shouting = letters >= 3 and sum(character.isupper() for character in text) * 2 > letters
    return (
        min(length.bit_length() * 2, UNIT),
        min(len(lines) * 2, UNIT),
        UNIT if length <= 16 else 0,
        _share(pasted_chars, chars),
        UNIT if bare else 0,
        UNIT if BROKEN.search(text) else 0,
        UNIT if CLEAN.search(text) else 0,
        UNIT if "```" in text else 0,
        UNIT if re.search(r"(?m)^\s*(?:[-*#]|\d+[.)]) ", text) else 0,
        UNIT if text.startswith(">") else 0,
        UNIT if text.rstrip().endswith(("?", "？")) else 0,
        UNIT if shouting else 0,
        UNIT if marks >= 2 else 0,
    )


def _repeats(normalised: str, previous: str | None) -> tuple[int, ...]:
    if previous is None:
        return (0, 0, 0, 0)
    own, before = trigrams(normalised), trigrams(previous)
    both = len(own & before)
    words, earlier = set(normalised.split()), set(previous.split())
    novel = len(words - earlier)
    repeated = len(words & earlier)
    return (
        _share(both, len(own | before)),
        _share(both, len(before)) if len(before) > 3 else 0,
        UNIT if normalised == previous else 0,
        UNIT if repeated >= 2 and 0 < novel <= 2 else 0,
    )


def surface(text: str, previous: str | None) -> tuple[int, ...]:
    """Describe a message, in the order of NAMES.

    Args:
        text: From `cleaned`.
        previous: The message before, from `cleaned`; None when it was not kept.
    """
    normalised = normalise(text)
    bits, first = cue_bits(normalised)
    return (
        *(UNIT if bits >> bit & 1 else 0 for bit in range(len(CUES))),
        *(UNIT if first >> CUES.index(name) & 1 else 0 for name in OPENERS),
        *(UNIT if bits & pair == pair else 0 for pair in PAIR_BITS),
        *_shapes(text, normalised),
        *_repeats(normalised, None if previous is None else normalise(previous)),
    )
