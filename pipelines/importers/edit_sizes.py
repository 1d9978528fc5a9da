"""How much an edit adds and removes, whatever notation it came in. Pure.

Takes: an old and a new text, a patch in the `*** Begin Patch` notation, a unified diff, or SEARCH/REPLACE blocks. Gives: sizes, by
file where the notation has files. Lines are those of `str.splitlines`; characters are counted without line ends. Common first and
last lines of a replacement are not part of the edit. In diffs and patches the `-` and `+` lines are, as they stand.
Leaves out: whether an edit fits its file.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSize:
    """How much an edit adds and removes."""

    lines_added: int = 0
    lines_removed: int = 0
    chars_added: int = 0
    chars_removed: int = 0

    def __add__(self, other: "EditSize") -> "EditSize":
        return EditSize(
            lines_added=self.lines_added + other.lines_added,
            lines_removed=self.lines_removed + other.lines_removed,
            chars_added=self.chars_added + other.chars_added,
            chars_removed=self.chars_removed + other.chars_removed,
        )


def _size(added: Iterable[str], removed: Iterable[str]) -> EditSize:
    added, removed = list(added), list(removed)
    return EditSize(
        lines_added=len(added), lines_removed=len(removed), chars_added=sum(map(len, added)), chars_removed=sum(map(len, removed))
    )


def replaced(old: object, new: object) -> EditSize:
    """Return the size of replacing one text by another; what is no text is empty."""
    before = old.splitlines() if isinstance(old, str) else []
    after = new.splitlines() if isinstance(new, str) else []
    first, last = 0, 0
    shorter = min(len(before), len(after))
    while first < shorter and before[first] == after[first]:
        first += 1
    while last < shorter - first and before[-1 - last] == after[-1 - last]:
        last += 1
    return _size(after[first : len(after) - last], before[first : len(before) - last])


_PATCH_FILE: Final = re.compile(r"\*\*\* (Add|Update|Delete) File: (.+)")


def patch_files(patch: str) -> list[tuple[str, EditSize]]:
    """Return (path, size) of each file of a `*** Begin Patch` patch, in order; empty when it holds none.

    A deleted file's content is not in the patch: it removes 0.
    """
    found: list[tuple[str, list[str], list[str]]] = []
    for line in patch.splitlines():
        if header := _PATCH_FILE.match(line):
            found.append((header[2].strip(), [], []))
        elif found and not line.startswith("***"):
            if line.startswith("+"):
                found[-1][1].append(line[1:])
            elif line.startswith("-"):
                found[-1][2].append(line[1:])
    return [(path, _size(added, removed)) for path, added, removed in found]


_HUNK: Final = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def diff_files(diff: str) -> list[tuple[str, EditSize]]:
    """Return (path, size) of each file of a unified diff, in order; hunks before any file header are a file with an empty path.

    Inside a hunk the header's counts say how many lines follow, so that a removed line which looks like a header is not taken for one.
    """
    found: list[tuple[str, list[str], list[str]]] = []
    old_left = new_left = 0
    old_path = ""
    for line in diff.splitlines():
        if old_left > 0 or new_left > 0:
            mark = line[:1]
            if mark == "\\":  # "No newline at end of file"
                continue
            if mark == "+":
                found[-1][1].append(line[1:])
                new_left -= 1
            elif mark == "-":
                found[-1][2].append(line[1:])
                old_left -= 1
            else:
                old_left -= 1
                new_left -= 1
        elif line.startswith("--- "):
            old_path = _path(line)
        elif line.startswith("+++ "):
            path = _path(line)
            found.append((old_path if path == "/dev/null" else path, [], []))
        elif hunk := _HUNK.match(line):
            if not found:
                found.append(("", [], []))
            old_left = int(hunk[1]) if hunk[1] is not None else 1
            new_left = int(hunk[2]) if hunk[2] is not None else 1
    return [(path, _size(added, removed)) for path, added, removed in found]


def _path(line: str) -> str:
    name = line[4:].split("\t")[0].strip().strip('"')
    return name[2:] if name.startswith(("a/", "b/")) else name


_SEARCH: Final = re.compile(r"<{5,9} ?SEARCH>?\s*$")
_DIVIDE: Final = re.compile(r"={5,9}\s*$")
_REPLACE: Final = re.compile(r">{5,9} ?REPLACE\s*$")
_FENCE: Final = re.compile(r"\s*(?:`{3,}|~{3,}|<[a-z]+>)")


def search_replace_blocks(text: str) -> list[tuple[str, EditSize]]:
    """Return (path, size) of each complete SEARCH/REPLACE block, in order.

    The path stands on the last line before the block that is neither blank nor a fence; a block without one has the previous
    block's path.
    """
    found: list[tuple[str, EditSize]] = []
    path = name = ""
    search: list[str] | None = None
    replace: list[str] | None = None
    for line in text.splitlines():
        if _SEARCH.match(line):
            search, replace = [], None
            path, name = name or path, ""
        elif search is None:
            if line.strip() and not _FENCE.match(line):
                name = line.strip().strip("*`#:").strip()
        elif replace is None:
            if _DIVIDE.match(line):
                replace = []
            else:
                search.append(line)
        elif _REPLACE.match(line):
            found.append((path, replaced("\n".join(search), "\n".join(replace))))
            search = replace = None
        else:
            replace.append(line)
    return found


def fenced_edits(text: str) -> list[tuple[str, EditSize]]:
    """Return (path, size) of the fenced blocks of an answer that are edits: diffs without line numbers, and whole files.

    A whole file is a fence whose path stands alone on the line before it; its old content is not known: it removes 0. A fence with
    SEARCH/REPLACE blocks is none of these.
    """
    found: list[tuple[str, EditSize]] = []
    fence = name = ""
    body: list[str] = []
    for line in text.splitlines():
        mark = line[:3] if line.startswith(("```", "~~~")) else ""
        if not fence:
            if mark:
                fence, body = mark, [line[3:].strip()]
            elif line.strip():
                name = line.strip().strip("*`#:").strip()
        elif mark == fence and not line.strip(mark[0] + " "):
            found += _fenced(name, body[0], body[1:])
            fence = name = ""
        else:
            body.append(line)
    return found


def _fenced(name: str, language: str, body: list[str]) -> list[tuple[str, EditSize]]:
    if any(_SEARCH.match(line) for line in body):
        return []
    if language != "diff":
        return [(name, _size(body, []))] if name and " " not in name else []
    found: list[tuple[str, list[str], list[str]]] = []
    for line in body:
        if line.startswith("+++ "):
            found.append((_path(line), [], []))
        elif found and line.startswith("+"):
            found[-1][1].append(line[1:])
        elif found and line.startswith("-") and not line.startswith("--- "):
            found[-1][2].append(line[1:])
    return [(path, _size(added, removed)) for path, added, removed in found]
