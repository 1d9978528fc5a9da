"""Import Claude Code transcripts (`~/.claude/projects/**/*.jsonl`): files -> events, with every line accounted for.

Takes: files or folders. Gives: events, and counts in which every non-empty line is exactly one of accepted (it carries an event),
duplicate (its uuid was seen before, in any file), or rejected with a reason:

    lines = accepted + duplicates + sum(rejected)

Reasons: `malformed_json`, `truncated_last_line` (a session still being written, or a cut copy), `not_an_object`, `oversized_line`,
`missing_field:timestamp`, `unmappable`, and `not_a_session_event:<what>` for lines that say nothing about what policy or user did.
The five counts `edits`, `tool_calls`, `tool_errors`, `tool_rejections`, `interrupts` and `user_messages` are taken from the lines
themselves, not from the events, so that they check the mapping; `user_messages` are all user lines with plain text that the program
did not mark as meta, which includes subagent prompts and command echoes. How many a person wrote is `events.turn_started`.
Leaves out: mapping one line (`claude_lines.py`), delivery.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from pipelines.errors import ConfigError
from pipelines.events import Event
from pipelines.importers.claude_lines import Mapper, Stamp
from pipelines.importers.claude_text import EDIT_TOOLS, INTERRUPT, REJECTION

SAMPLE: Final = Path(__file__).parent / "samples" / "claude_code.jsonl"
"""An invented transcript in the true shape, with every kind of line that the mapping knows; for demos and tests."""
MAX_LINE_BYTES: Final = 64_000_000
"""A line with pasted images reaches some MB; far above that it is not a transcript and must not fill the memory."""
SHOWN_FAULTS: Final = 20
"""Faulty lines shown with file and number; the rest is only counted."""


@dataclass(slots=True)
class Counts:
    """What an import found; see the module's account."""

    files: int = 0
    lines: int = 0
    accepted: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """`file:line: reason` of damaged lines, the first `SHOWN_FAULTS`."""
    fault_count: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Files that could not be opened or read to the end, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Return the machine-readable result."""
        return {
            "files": self.files,
            "lines": self.lines,
            "accepted": self.accepted,
            "events": dict(sorted(self.events.items())),
            "duplicates": self.duplicates,
            "rejected": dict(sorted(self.rejected.items())),
            **{name: self.facts[name] for name in ("edits", "tool_calls", "tool_errors", "tool_rejections", "interrupts", "user_messages")},
        }


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the transcripts under `paths`: sessions first, then their subagents, each group sorted by path, each file once.

    Raises:
        ConfigError: A path does not exist, is neither a file nor a folder, or no `*.jsonl` is under the folders.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; give a transcript (*.jsonl) or a folder such as ~/.claude/projects")
        if path.is_dir():
            inside = sorted(item for item in path.rglob("*.jsonl") if item.is_file() or item.is_symlink())
            if not inside:
                raise ConfigError(f"no transcript (*.jsonl) is under {path}; Claude Code keeps them in ~/.claude/projects")
        elif path.is_file():
            inside = [path]
        else:
            raise ConfigError(f"{path} is neither a file nor a folder")
        for item in inside:
            found.setdefault(item.resolve(), item)
    if not found:
        raise ConfigError("no transcript was named; give files (*.jsonl) or a folder such as ~/.claude/projects")
    return sorted(found.values(), key=lambda item: (item.name.startswith("agent-"), str(item)))


class Importer:
    """One import: `events()` yields, `counts` tells."""

    def __init__(self, stamp: Stamp, *, advance: Callable[[int], None] = lambda _bytes: None) -> None:
        """Prepare an import.

        Args:
            stamp: What every event carries.
            advance: Called with the bytes just read.
        """
        self.counts = Counts()
        self._mapper = Mapper(stamp)
        self._advance = advance
        self._seen: set[str] = set()

    def events(self, files: Sequence[Path]) -> Iterator[Event]:
        """Yield the events of `files`, in the order of their lines; completions follow at the end of each file."""
        for path in files:
            try:
                with path.open("rb") as file:
                    self.counts.files += 1
                    yield from self._file(path, file)
            except OSError as error:
                self.counts.unreadable.append(f"{path}: {error.strerror or error}")
            yield from self._count(list(self._mapper.end_file()))
        yield from self._count(list(self._mapper.end()))

    def _count(self, events: list[Event]) -> list[Event]:
        for event in events:
            self.counts.events[event.type] += 1
        return events

    def _file(self, path: Path, file: IO[bytes]) -> Iterator[Event]:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            self._advance(len(line))
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                self.counts.lines += 1
                self._fault(path, number, "oversized_line")
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    self._advance(len(rest))
                self._advance(len(rest))
                continue
            if not line.strip():
                continue
            self.counts.lines += 1
            parsed = _parse(line)
            if parsed is _BAD:
                self._fault(path, number, "malformed_json" if line.endswith(b"\n") else "truncated_last_line")
            elif not isinstance(parsed, dict):
                self._fault(path, number, "not_an_object")
            else:
                yield from self._line(path, number, parsed)

    def _line(self, path: Path, number: int, line: dict[str, Any]) -> list[Event]:
        own = line.get("uuid")
        duplicate = False
        if own:
            key = own if isinstance(own, str) else repr(own)
            duplicate = key in self._seen
            self._seen.add(key)
        if not duplicate:
            self._take_facts(line)
        try:
            mapped = self._mapper.line(line, stem=path.stem, number=number, emit=not duplicate)
        except ValidationError as error:
            if duplicate:
                self.counts.duplicates += 1
            else:
                self._fault(path, number, "unmappable", str(error.errors()[0]["loc"]))
            return []
        if duplicate:
            self.counts.duplicates += 1
        elif mapped.reason is None:
            self.counts.accepted += 1
        elif mapped.reason.startswith("not_a_session_event"):
            self.counts.rejected[mapped.reason] += 1
        else:
            self._fault(path, number, mapped.reason)
        return self._count(mapped.events)

    def _fault(self, path: Path, number: int, reason: str, detail: str = "") -> None:
        self.counts.rejected[reason] += 1
        self.counts.fault_count += 1
        if len(self.counts.faults) < SHOWN_FAULTS:
            self.counts.faults.append(f"{path}:{number}: {reason}{' ' + detail if detail else ''}")

    def _take_facts(self, line: dict[str, Any]) -> None:
        """Count what the line itself says, independent of the mapping."""
        message = line.get("message")
        if not isinstance(message, dict):
            return
        facts, content = self.counts.facts, message.get("content")
        if isinstance(content, str):
            facts["user_messages"] += line.get("type") == "user" and not line.get("isMeta")
            return
        for block in content if isinstance(content, list) else ():
            if not isinstance(block, dict):
                continue
            kind = block.get("type")
            if kind == "tool_use":
                facts["tool_calls"] += 1
                name = block.get("name")
                facts["edits"] += isinstance(name, str) and name in EDIT_TOOLS
            elif kind == "tool_result" and block.get("is_error"):
                facts["tool_errors"] += 1
                facts["tool_rejections"] += REJECTION in json.dumps(block.get("content"))
            elif kind == "text":
                facts["interrupts"] += INTERRUPT in str(block.get("text", ""))


_BAD: Final = object()


def _parse(line: bytes) -> object:
    """Parse one line; `_BAD` when it is not JSON. The fast parser refuses lone surrogates, which Claude Code writes: those go to json."""
    try:
        return from_json(line, cache_strings="keys")
    except ValueError:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return _BAD
