"""Where a stretch of text went when the text around it changed (pure).

Takes: two texts. Gives: what changed between them, by lines and then by tokens, and regions carried over the change.
Leaves out: what a region is worth (`survival.py`). The standard library's difflib does the comparing between anchors; it alone
pairs the longest equal runs, which in code are blank lines and braces.
"""

import difflib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

LINE_PAIRS: Final = 2_000_000
"""Pairs of equal lines that a diff may look at (about a second); beyond, very common lines are no anchors."""
TOKEN_PAIRS: Final = 200_000
"""Pairs of tokens that a changed block may have to be compared token by token (about 50 ms); beyond, only its ends are."""
LINES_ALIKE: Final = 2_000
"""Pairs of lines of a changed block that are compared for likeness (about 20 ms)."""
ALIKE: Final = 0.5
"""Share of words that two lines must have in common to be taken for one line before and after."""
WORD: Final = re.compile(r"\w+|[^\w\s]")
TOKEN: Final = re.compile(r"\w+|[^\S\n]+|\n|[^\w\s]")

Gap = tuple[int, int, int, int]
"""A changed stretch: [from, to) in the old text and [from, to) in the new one, in characters."""


def _changes(old: Sequence[str], new: Sequence[str], *, junk: bool) -> Iterator[Gap]:
    """Yield the stretches that differ, as [from, to) of items in both, in order and apart from each other.

    Items that occur once in both are anchors, as in a patience diff; without them the longest run of blank lines would pair up,
    wherever it is.
    """
    a_at = b_at = 0
    for a_next, b_next in [*_anchors(old, new), (len(old), len(new))]:
        a, b = old[a_at:a_next], new[b_at:b_next]
        head = _shared(a, b)
        tail = min(_shared(a[::-1], b[::-1]), min(len(a), len(b)) - head)
        a, b = a[head : len(a) - tail], b[head : len(b) - tail]
        a_at, b_at = a_at + head, b_at + head
        if a and b:
            for kind, a_from, a_to, b_from, b_to in difflib.SequenceMatcher(a=a, b=b, autojunk=junk).get_opcodes():
                if kind != "equal":
                    yield a_at + a_from, a_at + a_to, b_at + b_from, b_at + b_to
        elif a or b:
            yield a_at, a_at + len(a), b_at, b_at + len(b)
        a_at, b_at = a_next + 1, b_next + 1


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return the longest ascending chain of places at which both have the same item, which neither has twice.

    Source: Bram Cohen's patience diff; the chain by patience sorting (Schensted 1961), O(n log n).
    """
    seen_old, seen_new = Counter(old), Counter(new)
    where = {item: at for at, item in enumerate(new) if seen_new[item] == 1}
    pairs = [(at, where[item]) for at, item in enumerate(old) if seen_old[item] == 1 and item in where]
    ends: list[int] = []
    last: list[int] = []
    previous: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(ends, place)
        previous.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [place]
        last[length : length + 1] = [index]
    chain: list[tuple[int, int]] = []
    index = last[-1] if last else -1
    while index >= 0:
        chain.append(pairs[index])
        index = previous[index]
    return chain[::-1]


def _shared(one: Sequence[str], two: Sequence[str]) -> int:
    count = 0
    for left, right in zip(one, two, strict=False):
        if left != right:
            break
        count += 1
    return count


def _starts(items: Sequence[str]) -> list[int]:
    """Return where each item starts, and where the last ends."""
    starts = [0]
    for item in items:
        starts.append(starts[-1] + len(item))
    return starts


def line_gaps(old: str, new: str) -> Iterator[Gap]:
    """Yield the changed blocks of whole lines, in characters.

    Lines pair up when they differ in blanks only, so that a block which was indented anew is still followed line by line.
    """
    a, b = old.splitlines(keepends=True), new.splitlines(keepends=True)
    a_key, b_key = ["".join(line.split()) for line in a], ["".join(line.split()) for line in b]
    counts = Counter(b_key)
    junk = sum(counts[key] for key in a_key) > LINE_PAIRS
    a_at, b_at = _starts(a), _starts(b)
    a_from = b_from = 0
    for a_next, b_next in [*_anchors(a, b), (len(a), len(b))]:
        i, j = a_from, b_from
        ends = (a_next - a_from,) * 2 + (b_next - b_from,) * 2
        for a_low, a_high, b_low, b_high in [*_changes(a_key[a_from:a_next], b_key[b_from:b_next], junk=junk), ends]:
            while i < a_from + a_low:
                if a[i] != b[j]:
                    yield a_at[i], a_at[i + 1], b_at[j], b_at[j + 1]
                i, j = i + 1, j + 1
            i, j = a_from + a_high, b_from + b_high
            if a_high > a_low or b_high > b_low:
                yield a_at[a_from + a_low], a_at[i], b_at[b_from + b_low], b_at[j]
        a_from, b_from = a_next + 1, b_next + 1


def trimmed(old: str, new: str, gap: Gap) -> Gap:
    """Take off the whole tokens that both sides of a change share at its ends."""
    o_from, o_to, n_from, n_to = gap
    a, b = TOKEN.findall(old[o_from:o_to]), TOKEN.findall(new[n_from:n_to])
    head = _shared(a, b)
    tail = min(_shared(a[::-1], b[::-1]), min(len(a), len(b)) - head)
    front, back = len("".join(a[:head])), len("".join(a[len(a) - tail :]))
    return o_from + front, o_to - back, n_from + front, n_to - back


def gaps(old: str, new: str) -> list[Gap]:
    """Return what changed between two texts: by lines, and inside changed blocks by tokens (words, blanks, signs).

    Returns:
        Changed stretches in order, apart from each other; what lies between them is equal in both texts.
    """
    found: list[Gap] = []
    for block in line_gaps(old, new):
        parts = _paired(old, new, block)
        for gap in (gap for part in parts for gap in _token_gaps(old, new, trimmed(old, new, part))):
            if found and found[-1][1] == gap[0] and found[-1][3] == gap[2]:
                found[-1] = (found[-1][0], gap[1], found[-1][2], gap[3])
            else:
                found.append(gap)
    return found


def _paired(old: str, new: str, block: Gap) -> Iterator[Gap]:
    """Split a changed block at the lines that are most alike, so that one that was reworded is not lost among many that are new.

    Source: the synchronising of difflib.Differ, here by the words that two lines share.
    """
    o_from, o_to, n_from, n_to = block
    a, b = old[o_from:o_to].splitlines(keepends=True), new[n_from:n_to].splitlines(keepends=True)
    if not a or not b or len(a) == len(b) == 1 or len(a) * len(b) > LINES_ALIKE:
        yield block
        return
    a_at, b_at = _starts(a), _starts(b)
    a_words, b_words = [Counter(WORD.findall(line)) for line in a], [Counter(WORD.findall(line)) for line in b]
    alike = {(i, j): _alike(a_words[i], b_words[j]) for i in range(len(a)) for j in range(len(b))}
    waiting = [(0, len(a), 0, len(b))]
    while waiting:
        i_from, i_to, j_from, j_to = waiting.pop()
        inside = [(alike[i, j], -i, -j) for i in range(i_from, i_to) for j in range(j_from, j_to)]
        best, i, j = max(inside, default=(0.0, 0, 0))
        i, j = -i, -j
        if best > 0 and (i_to - i_from, j_to - j_from) != (1, 1):
            waiting += [(i + 1, i_to, j + 1, j_to), (i, i + 1, j, j + 1), (i_from, i, j_from, j)]
        elif i_to > i_from or j_to > j_from:
            yield o_from + a_at[i_from], o_from + a_at[i_to], n_from + b_at[j_from], n_from + b_at[j_to]


def _alike(one: Counter[str], two: Counter[str]) -> float:
    """Return how likely two lines are one line before and after, 0 when too little is common; the more if one holds the other whole."""
    shared, fewer, total = (one & two).total(), min(one.total(), two.total()), one.total() + two.total()
    return shared / total + shared / (2 * fewer) if fewer and 2 * shared > ALIKE * total else 0.0


def _token_gaps(old: str, new: str, block: Gap) -> Iterator[Gap]:
    o_from, o_to, n_from, n_to = block
    a, b = TOKEN.findall(old[o_from:o_to]), TOKEN.findall(new[n_from:n_to])
    if not a or not b or len(a) * len(b) > TOKEN_PAIRS:
        yield block
        return
    a_at, b_at = _starts(a), _starts(b)
    for a_from, a_to, b_from, b_to in _changes(a, b, junk=False):
        yield o_from + a_at[a_from], o_from + a_at[a_to], n_from + b_at[b_from], n_from + b_at[b_to]


def follow(start: int, end: int, changes: Sequence[Gap], *, beside: bool = False) -> tuple[int, int]:
    """Carry a region over a change.

    What replaced any of the region belongs to it; what was inserted at its edge does not, unless the region is empty (then there is
    nothing else by which to see that a deletion was taken back).

    Args:
        start: First character of the region in the old text.
        end: Character after it.
        changes: What changed, from `gaps`.
        beside: Whether text inserted at the region's edges belongs to it too.

    Returns:
        The region in the new text, `start <= end`.
    """
    low, high = start, end
    into_low: int | None = None
    into_high: int | None = None
    for o_from, o_to, n_from, n_to in changes:
        inside = o_from < end and o_to > start
        if not inside and o_from <= end and o_to >= start:  # they touch
            inside = start == end or (beside and o_from == o_to)
        if inside and o_from <= start and into_low is None:
            into_low = n_from
        if inside and o_to >= end:
            into_high = n_to
        if not inside and o_to <= start:
            low = start + n_to - o_to
        if o_to <= (end if inside else start):
            high = end + n_to - o_to
    low = low if into_low is None else into_low
    return low, max(low, high if into_high is None else into_high)


def carry(start: int, end: int, texts: tuple[str, str], changes: Sequence[Gap], *, beside: bool = False) -> tuple[int, int]:
    """Carry a region from one text into the next, as `follow`, with changes that could as well lie outside of it laid there.

    A diff cannot tell whether a function was inserted before the two blank lines in front of another or after them: what is inserted is
    the same. Inside a region such an insertion, or a deletion that takes a part of it, is moved to where it touches the region least.

    Args:
        start: First character of the region in the old text.
        end: Character after it.
        texts: The old text and the new one.
        changes: What changed between them, from `gaps`.
        beside: See `follow`.
    """
    laid = list(changes)
    for at, (o_from, o_to, n_from, n_to) in enumerate(changes):
        inserted, deleted = o_from == o_to, n_from == n_to
        inside = inserted and start < o_from < end
        partly = deleted and o_from < end and o_to > start and not (o_from <= start and o_to >= end)
        if not inside and not partly:
            continue
        room = o_from - (changes[at - 1][1] if at else 0), (changes[at + 1][0] if at + 1 < len(changes) else len(texts[0])) - o_to
        text, low, high = (texts[1], n_from, n_to) if inserted else (texts[0], o_from, o_to)
        left, right = o_to - start, end - o_from
        if left <= room[0] and text[high - left : high] == text[low - left : low]:
            laid[at] = (o_from - left, o_to - left, n_from - left, n_to - left)
        elif right <= room[1] and text[low : low + right] == text[high : high + right]:
            laid[at] = (o_from + right, o_to + right, n_from + right, n_to + right)
    return follow(start, end, laid, beside=beside)
