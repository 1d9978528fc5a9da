"""What an edit changed and how much of it still stands (pure).

Takes: texts before, as proposed, and now. Gives: counts, the sketch of the added text, and the two survival figures of
`edit_survival`. Leaves out: files and who decided.
"""

import difflib
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Final

from pipelines.events import pack_ids

GRAM: Final = 4
"""Characters in one gram: long enough to be specific to a phrase, short enough to survive a renamed variable."""
SKETCH_GRAMS: Final = 512
"""Most grams in a sketch, the commonest first, so that an event stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of one file."""

    path: str
    """Relative to the workspace."""
    before: str | None
    """Whole text before; None when the file did not exist."""
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSize:
    """How much an edit changed."""

    lines_added: int
    lines_removed: int
    chars_added: int
    chars_removed: int


def common_affixes(one: str, two: str) -> tuple[int, int]:
    """Return the lengths of the common prefix and of the common suffix that does not overlap it."""
    shortest = min(len(one), len(two))
    prefix = 0
    while prefix < shortest and one[prefix] == two[prefix]:
        prefix += 1
    suffix = 0
    while suffix < shortest - prefix and one[-1 - suffix] == two[-1 - suffix]:
        suffix += 1
    return prefix, suffix


def changed(before: str, after: str) -> tuple[str, str]:
    """Return the text that was removed and the text that stands in its place."""
    prefix, suffix = common_affixes(before, after)
    return before[prefix : len(before) - suffix], after[prefix : len(after) - suffix]


def size(edit: Edit) -> EditSize:
    """Count lines (as in a diff) and characters (after taking off what both texts share at both ends)."""
    before = edit.before or ""
    removed, added = changed(before, edit.after)
    lines_added = lines_removed = 0
    matcher = difflib.SequenceMatcher(a=before.splitlines(), b=edit.after.splitlines(), autojunk=False)
    for kind, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if kind != "equal":
            lines_removed += a_to - a_from
            lines_added += b_to - b_from
    return EditSize(lines_added=lines_added, lines_removed=lines_removed, chars_added=len(added), chars_removed=len(removed))


def grams(text: str) -> Counter[str]:
    """Count the character 4-grams of a text; a shorter text is one gram."""
    if not text:
        return Counter()
    return Counter(text[at : at + GRAM] for at in range(max(1, len(text) - GRAM + 1)))


def similarity(one: str, two: str) -> float:
    """Multiset similarity of two texts' 4-grams, `2 |A & B| / (|A| + |B|)`, in [0, 1]; two empty texts are equal."""
    left, right = grams(one), grams(two)
    total = left.total() + right.total()
    return 1.0 if total == 0 else 2 * (left & right).total() / total


def sketch(edit: Edit) -> str:
    """Pack (hash, count) pairs of the added text's 4-grams; hashes are CRC-32 as signed int32."""
    _, added = changed(edit.before or "", edit.after)
    pairs: list[int] = []
    for gram, count in grams(added).most_common(SKETCH_GRAMS):
        value = zlib.crc32(gram.encode())
        pairs += [value - 2**32 if value >= 2**31 else value, count]
    return pack_ids(pairs)


def survival(edit: Edit, now: str) -> tuple[float, float]:
    """Say how much of an edit stands in the text now.

    `four_gram` = similarity(added text, text now in its region);
    `no_revert` = 1 - max(sim(now, before) - sim(after, before), 0) / (1 - sim(after, before)): it falls only as the text goes back
    to what it was, so that building further on an edit does not count against it.

    Returns:
        (four_gram, no_revert), each in [0, 1].
    """
    before = edit.before or ""
    _, added = changed(before, edit.after)
    prefix, suffix = common_affixes(before, edit.after)
    region = now[prefix : len(now) - suffix] if len(now) >= prefix + suffix else now
    four_gram = similarity(added, region) if now != edit.after else 1.0
    proposed = similarity(edit.after, before)
    if now == before or proposed >= 1.0:
        return four_gram, 0.0 if now == before else 1.0
    back = max(similarity(now, before) - proposed, 0.0) / (1.0 - proposed)
    return four_gram, max(0.0, 1.0 - back)
