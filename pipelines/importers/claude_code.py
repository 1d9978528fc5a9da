"""Claude Code transcripts (`~/.claude/projects/**/*.jsonl`): JSON lines, subagents in files of their own.

Takes and gives: see `registry.py`. `user_messages` are all user lines with plain text that the program did not mark as meta, which
includes subagent prompts and command echoes. How many a person wrote is `events.turn_started`.
Leaves out: mapping one line (`claude_lines.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from pipelines.importers.claude_lines import Mapper
from pipelines.importers.records import Advance, Record, json_lines

__all__ = ["SAMPLE", "VERSION", "Mapper", "order", "read"]

SAMPLE: Final = Path(__file__).parent / "samples" / "claude_code.jsonl"
"""An invented transcript in the true shape, with every kind of line that the mapping knows; for demos and tests."""
VERSION: Final = "2"
"""Of the mapping, stamped on the events; raise it when the same transcript gives other events."""


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the lines of a transcript."""
    del path
    return json_lines(file, advance)


def order(path: Path) -> tuple[bool, str]:
    """Sort sessions before their subagents, which join the turn that was open at their time."""
    return path.name.startswith("agent-"), str(path)
