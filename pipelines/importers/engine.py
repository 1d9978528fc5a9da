"""Import transcripts of any format: files -> events, with every record accounted for.

Takes: files, and a format's two parts: how a file is read into records, and a `Mapper` from records to events. Gives: events, and
counts in which every record (a line that is not blank, or an entry of a JSON document) is exactly one of accepted (it carries an
event), duplicate (its identity was seen before, in any file), or rejected with a reason:

    lines = accepted + duplicates + sum(rejected)

Reasons: those of `records.py`, `missing_field:<name>`, `unmappable`, and `not_a_session_event:<what>` for records that say nothing
about what policy or user did. The facts (`edits`, `tool_calls`, ...) are taken by the mapper from the records themselves, not from
the events, so that they check the mapping.
Leaves out: what a record means (each format's module), delivery.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final, Protocol

from pydantic import ValidationError

from pipelines.errors import ConfigError
from pipelines.events import Event
from pipelines.importers.records import Advance, Record
from pipelines.importers.registry import matches

SHOWN_FAULTS: Final = 20
"""Faulty records shown with file and number; the rest is only counted."""
FACTS: Final = ("edits", "tool_calls", "tool_errors", "tool_rejections", "interrupts", "user_messages")
"""What every importer counts from the records themselves."""
SKIPPED_FOLDERS: Final = frozenset({".git", "node_modules", ".venv", "__pycache__", ".tidegate"})

Read = Callable[[Path, IO[bytes], Advance], Iterator[Record]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """What one record became."""

    events: Sequence[Event] = ()
    reason: str | None = None
    """None when the record carries an event (a completion counts for each of its lines), else why it does not."""


class Mapper(Protocol):
    """Turns the records of one import into events; holds what later records need from earlier ones. Reads no clock."""

    def identity(self, record: Record) -> str | None:
        """Return what makes a repeated record recognisable, in any file; None when nothing does."""
        ...

    def facts(self, record: Record) -> Iterable[str]:
        """Name the `FACTS` that a record holds, one name for each occurrence."""
        ...

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one record; with `emit` false it is a duplicate, which only gives context."""
        ...

    def end_file(self) -> Iterator[Event]:
        """Yield what could be made only now that a file has ended."""
        ...

    def end(self) -> Iterator[Event]:
        """Yield what could be made only now that all files have ended."""
        ...


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
    """`file:line: reason` of damaged records, the first `SHOWN_FAULTS`."""
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
            **{name: self.facts[name] for name in FACTS},
        }

    def add(self, other: "Counts") -> None:
        """Add another import's counts to this one's."""
        self.files += other.files
        self.lines += other.lines
        self.accepted += other.accepted
        self.duplicates += other.duplicates
        self.rejected += other.rejected
        self.events += other.events
        self.facts += other.facts
        self.faults = (self.faults + other.faults)[:SHOWN_FAULTS]
        self.fault_count += other.fault_count
        self.unreadable += other.unreadable


def find_files(paths: Sequence[Path], *, names: Sequence[str], where: str, order: Callable[[Path], Any] = str) -> list[Path]:
    """Return the files under `paths`, sorted, each once; in folders those whose names fit.

    Args:
        paths: Files, taken whatever their name, and folders.
        names: Patterns of names inside folders; none: every file.
        where: Where such files usually are, for the message.
        order: What they are sorted by.

    Raises:
        ConfigError: A path does not exist, is neither a file nor a folder, or nothing fits under a folder.
    """
    found: dict[Path, Path] = {}
    wanted = ", ".join(names) or "any file"
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; give transcripts or folders of them ({where})")
        if path.is_dir():
            inside = sorted(item for item in _walk(path) if not names or any(matches(item, name) for name in names))
            if not inside:
                raise ConfigError(f"no transcript ({wanted}) is under {path}; look for {where}")
        elif path.is_file():
            inside = [path]
        else:
            raise ConfigError(f"{path} is neither a file nor a folder")
        for item in inside:
            found.setdefault(item.resolve(), item)
    if not found:
        raise ConfigError(f"no transcript was named; give files or folders ({where})")
    return sorted(found.values(), key=order)


def _walk(folder: Path) -> Iterator[Path]:
    for item in folder.rglob("*"):
        if not SKIPPED_FOLDERS.intersection(item.relative_to(folder).parts) and (item.is_file() or item.is_symlink()) and not item.is_dir():
            yield item


class Importer:
    """One import of one format: `events()` yields, `counts` tells."""

    def __init__(self, read: Read, mapper: Mapper, *, advance: Advance = lambda _bytes: None) -> None:
        """Prepare an import.

        Args:
            read: The format's reader.
            mapper: The format's mapper, new: it holds the state of one import.
            advance: Called with the bytes just read.
        """
        self.counts = Counts()
        self._read = read
        self._mapper = mapper
        self._advance = advance
        self._seen: set[int] = set()

    def events(self, files: Sequence[Path]) -> Iterator[Event]:
        """Yield the events of `files`, in the order of their records; what needs the whole file follows at its end."""
        for path in files:
            try:
                with path.open("rb") as file:
                    self.counts.files += 1
                    for record in self._read(path, file, self._advance):
                        yield from self._record(path, record)
            except OSError as error:
                self.counts.unreadable.append(f"{path}: {error.strerror or error}")
            yield from self._count(self._mapper.end_file())
        yield from self._count(self._mapper.end())

    def _count(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            self.counts.events[event.type] += 1
            yield event

    def _record(self, path: Path, record: Record) -> Iterable[Event]:
        counts = self.counts
        if record.counted:
            counts.lines += 1
        if record.fault is not None:
            self._fault(path, record, record.fault)
            return ()
        duplicate = record.counted and self._is_duplicate(record)
        if not duplicate:
            counts.facts.update(self._mapper.facts(record))
        try:
            mapped = self._mapper.record(record, path=path, emit=not duplicate)
        except ValidationError as error:
            if duplicate:
                counts.duplicates += 1
            elif record.counted:
                self._fault(path, record, "unmappable", str(error.errors()[0]["loc"]))
            return ()
        if duplicate:
            counts.duplicates += 1
        elif not record.counted:
            pass
        elif mapped.reason is None:
            counts.accepted += 1
        elif mapped.reason.startswith("not_a_session_event"):
            counts.rejected[mapped.reason] += 1
        else:
            self._fault(path, record, mapped.reason)
        return self._count(mapped.events)

    def _is_duplicate(self, record: Record) -> bool:
        """Remember a record's identity as a 64-bit hash: a million records cost some 60 MB, and two meet once in 10^7 imports."""
        own = self._mapper.identity(record)
        if own is None:
            return False
        key = int.from_bytes(blake2b(own.encode("utf-8", "replace"), digest_size=8).digest())
        known = key in self._seen
        self._seen.add(key)
        return known

    def _fault(self, path: Path, record: Record, reason: str, detail: str = "") -> None:
        self.counts.rejected[reason] += 1
        self.counts.fault_count += 1
        if len(self.counts.faults) < SHOWN_FAULTS:
            self.counts.faults.append(f"{path}:{record.number}: {reason}{' ' + detail if detail else ''}")
