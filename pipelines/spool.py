"""Events on disk between a process and the broker: append-only segment files, one event a line.

Takes: encoded events. Gives: them back in order, with a note of which ones were acknowledged, and their files gone when all were.
A line reaches the kernel before `append` returns, so it survives a `kill -9` of the process; a segment is fsynced when it closes
and whenever `sync` is called, so that a power cut loses at most the open segment's tail. A truncated last line is dropped.

Every live process has its own folder under `spool/`, held by a lock that the kernel frees when it dies. `adopt` takes over the
folders of dead processes.
Leaves out: Kafka, encoding, threads (the recorder's lock guards every call).
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from pipelines.errors import StorageFull
from pipelines.events import new_id
from pipelines.storage import Home, give_up_folder, hold_folder

SEGMENT_BYTES: Final = 4_000_000
"""A few thousand events: large enough that files stay few, small enough that disk is given back soon."""
QUARANTINE: Final = "quarantine"
"""Folder of rejected records under `spool/`."""


class Segment:
    """One file of events and which of them were acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts: list[int] = []
        """Byte offset of each line."""
        self.size_bytes = 0
        self.acknowledged = bytearray()
        self.waiting = 0
        """Lines not acknowledged yet."""
        self.sent = 0
        """Lines before this one went out over the current connection."""

    def add(self, length: int) -> None:
        """Note a line of `length` bytes, newline included, at the end."""
        self.starts.append(self.size_bytes)
        self.size_bytes += length
        self.acknowledged.append(0)
        self.waiting += 1

    def acknowledge(self, index: int) -> bool:
        """Note that line `index` was delivered; False when it was already."""
        if self.acknowledged[index]:
            return False
        self.acknowledged[index] = 1
        self.waiting -= 1
        return True

    def read(self, index: int, count: int) -> list[tuple[int, bytes]]:
        """Return up to `count` lines from `index` on, with their indices, without those acknowledged."""
        last = min(index + count, len(self.starts))
        if index >= last:
            return []
        end = self.starts[last] if last < len(self.starts) else self.size_bytes
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            block = file.read(end - self.starts[index])
        base = self.starts[index]
        edges = [*self.starts[index:last], end]
        return [
            (index + k, block[edges[k] - base : edges[k + 1] - base - 1]) for k in range(last - index) if not self.acknowledged[index + k]
        ]


def _load(path: Path) -> Segment:
    segment = Segment(path)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # else: the last line, cut off by a crash
                segment.add(len(line))
    return segment


class Spool:
    """The segments of one process, oldest first; the last one is open for appending."""

    def __init__(self, home: Home, *, max_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Make the process's folder and adopt what dead processes left.

        Args:
            home: The deployment.
            max_bytes: Bound of this process's spool; more is refused.
            segment_bytes: A segment that would grow past this is closed.

        Raises:
            OSError: The folder cannot be written.
        """
        self._root = home.spool
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self.folder = self._root / f"recorder-{new_id()}"
        self.folder.mkdir(parents=True)
        own = _lock(self.folder)
        assert own is not None, "a folder with a fresh random name is nobody else's"
        self._locks: list[tuple[Path, IO[str]]] = [(self.folder, own)]
        self._open: IO[bytes] | None = None
        self.segments: deque[Segment] = deque()
        self.recovered = self._adopt()

    def _adopt(self) -> int:
        """Take over the segments of processes that are gone; return how many events they hold."""
        found = 0
        for folder in sorted(self._root.glob("recorder-*")):
            if folder == self.folder or (lock := _lock(folder)) is None:
                continue
            segments = [_load(path) for path in sorted(folder.glob("*.jsonl"))]
            self.segments.extend(segments)
            found += sum(segment.waiting for segment in segments)
            self._locks.append((folder, lock))
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def waiting(self) -> int:
        """Events not acknowledged yet."""
        return sum(segment.waiting for segment in self.segments)

    def append(self, line: bytes) -> bool:
        """Write one event (no newline in it); False when the spool is at its bound.

        Raises:
            StorageFull: The disk is full.
        """
        if self.size_bytes + len(line) + 1 > self._max_bytes:
            return False
        if self._open is None or self.segments[-1].size_bytes + len(line) > self._segment_bytes:
            self.roll()
            path = self.folder / f"{new_id()}.jsonl"
            self._open = path.open("ab", buffering=0)
            self.segments.append(Segment(path))
        segment = self.segments[-1]
        try:
            written = self._open.write(line + b"\n")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no space left for events at {self.folder}") from error
            raise
        if written != len(line) + 1:  # a short write is a full disk too: take the half line back
            os.ftruncate(self._open.fileno(), segment.size_bytes)
            raise StorageFull(f"no space left for events at {self.folder}")
        segment.add(len(line) + 1)
        return True

    def sync(self) -> None:
        """Make the open segment survive a power cut."""
        if self._open is not None:
            os.fsync(self._open.fileno())

    def roll(self) -> None:
        """Close the open segment; the next append starts another."""
        if self._open is not None:
            if self.segments[-1].waiting:
                self.sync()
            self._open.close()
            self._open = None

    def prune(self) -> None:
        """Delete closed segments that were delivered whole, and adopted folders that are empty."""
        for segment in [item for item in self.segments if not item.waiting]:
            if self._open is not None and segment is self.segments[-1]:
                continue
            segment.path.unlink(missing_ok=True)
            self.segments.remove(segment)
        used = {segment.path.parent for segment in self.segments} | {self.folder}
        for folder, lock in [entry for entry in self._locks if entry[0] not in used]:
            give_up_folder(folder, lock)
            self._locks.remove((folder, lock))

    def close(self) -> None:
        """Close the files and give the folders up; what is not delivered stays for the next process."""
        self.roll()
        self.prune()
        for folder, lock in self._locks:
            if any(segment.path.parent == folder for segment in self.segments):
                lock.close()
            else:
                give_up_folder(folder, lock)
        self._locks.clear()


def _lock(folder: Path) -> IO[str] | None:
    """Hold a folder; None when a live process does, or it is gone."""
    try:
        return hold_folder(folder)
    except FileNotFoundError:
        return None


def waiting_files(home: Home) -> Iterator[Path]:
    """Yield the segment files that no live process holds, oldest first."""
    for folder in sorted(home.spool.glob("recorder-*")):
        if (lock := _lock(folder)) is not None:
            lock.close()
            yield from sorted(folder.glob("*.jsonl"))
