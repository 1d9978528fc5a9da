"""What kind of transcript a file is, from its first 64 KiB. Pure but for `look`, which reads them.

Takes: a path. Gives: `Head`, the beginning as bytes and as JSON where it is JSON; one yes-or-no function a format; and `describe`,
which says what an unknown file looks like.
Leaves out: names (`registry.py` asks them last).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

HEAD_BYTES: Final = 65_536
"""Enough for the first lines of every format; a first line may be longer (a system prompt), see `Head.opening`."""
_LINES: Final = 8
"""Parsed lines of a head. A format's mark is in its first few lines."""


@dataclass(frozen=True)
class Head:
    """The beginning of a file."""

    path: Path
    data: bytes
    """The first `HEAD_BYTES` bytes, fewer when the file is shorter."""

    @cached_property
    def text(self) -> str:
        """The beginning as text, undecodable bytes replaced, without a byte order mark."""
        return self.data.decode("utf-8-sig", "replace")

    @cached_property
    def lines(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON objects among the first lines."""
        found = []
        for line in self.text.splitlines()[:_LINES]:
            value = _parsed(line) if line.lstrip()[:1] == "{" else None
            if isinstance(value, dict):
                found.append(value)
        return tuple(found)

    @cached_property
    def whole(self) -> object:
        """The file as one JSON value, when all of it is in the head; else None."""
        return _parsed(self.text) if len(self.data) < HEAD_BYTES and self.text.lstrip()[:1] in ("{", "[") else None

    @cached_property
    def opening(self) -> str:
        """The first 4,096 characters without white space outside words: for marks in documents that are longer than the head."""
        return "".join(self.text[:4_096].split())


def look(path: Path) -> Head:
    """Read a file's beginning.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return Head(path=path, data=file.read(HEAD_BYTES))


def describe(head: Head) -> str:
    """Say in a few words what an unknown file looks like."""
    if not head.data.strip():
        return "empty"
    if b"\0" in head.data:
        return "binary"
    if len(head.lines) > 1 or (head.lines and head.whole is None):
        return f"JSON lines with {_keys(head.lines[0])}"
    if isinstance(head.whole, dict):
        return f"a JSON object with {_keys(head.whole)}"
    if isinstance(head.whole, list):
        first = head.whole[0] if head.whole else None
        return f"a JSON list of {len(head.whole)} entries" + (f" with {_keys(first)}" if isinstance(first, dict) else "")
    if head.opening[:1] in ("{", "["):
        return "the beginning of a JSON document, or broken JSON"
    return "text that is no JSON"


def claude_code(head: Head) -> bool:
    """Claude Code: a line with `sessionId` and `uuid` beside a message, or its own bookkeeping lines."""
    return any(
        ("sessionId" in line and "uuid" in line and ("message" in line or line.get("type") == "system"))
        or (line.get("type") == "summary" and "leafUuid" in line)
        or (line.get("type") == "file-history-snapshot" and "snapshot" in line)
        for line in head.lines
    )


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _keys(value: Mapping[str, Any]) -> str:
    """Name an object's keys, never its values; keys that may be content are cut."""
    names = [str(name)[:30] for name in list(value)[:6]]
    return f"keys {', '.join(names)}" if names else "no keys"
