"""What an edit of the harness changed (pure).

Takes: texts before and as proposed. Gives: counts, the sketch of the added text, and the two survival figures of `edit_survival`,
which `pipelines.survival` defines. Leaves out: files and who decided.
"""

import difflib
from dataclasses import dataclass

from pipelines import survival as standing


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


def sketch(edit: Edit) -> str:
    """Pack the 4-grams of the added text."""
    return standing.sketch(standing.added_grams(standing.track(edit.before, edit.after)))


def survival(edit: Edit, now: str) -> tuple[float, float]:
    """Say how much of an edit stands in the text now: (four_gram, no_revert), each in [0, 1]."""
    found = standing.survival(edit.before, edit.after, now)
    return found.four_gram, found.no_revert
