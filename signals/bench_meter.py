"""What a measurement costs beyond its time: processor seconds and resident memory of this process, its JVM and Python workers.

Takes: process trees as the kernel shows them. Gives: peaks and sums. Leaves out: what is measured (`bench.py`).
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import psutil

SAMPLE_S: Final = 0.2


def tree(root: int, without: frozenset[int]) -> Iterator[psutil.Process]:
    """Yield a process and its descendants, without some (and theirs)."""
    try:
        process = psutil.Process(root)
        children = process.children()
    except psutil.NoSuchProcess:
        return
    yield process
    for child in children:
        if child.pid not in without:
            yield from tree(child.pid, without)


def memory(root: int, without: frozenset[int]) -> dict[str, int]:
    """Return resident bytes of a tree by kind: `jvm`, `python`."""
    found = {"jvm": 0, "python": 0}
    for process in tree(root, without):
        try:
            found["jvm" if process.name() == "java" else "python"] += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def processor_s(root: int, without: frozenset[int]) -> dict[tuple[int, float], float]:
    """Return the processor time of each process of a tree so far, seconds, by its id and when it began."""
    found: dict[tuple[int, float], float] = {}
    for process in tree(root, without):
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass(slots=True)
class Reading:
    """What one block cost."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    peak_by_kind: dict[str, int] = field(default_factory=dict)


class Meter:
    """Samples a process tree in a thread for the life of the block."""

    def __init__(self, root: int, *, without: frozenset[int] = frozenset()) -> None:
        """Watch the tree below `root`, without the processes named (the broker)."""
        self._root, self._without = root, without
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._lock = threading.Lock()
        self._open: list[Reading] = []
        self._used: dict[tuple[int, float], float] = {}
        """Also of processes that ended: Spark replaces its Python workers, and their parent may not have waited for them."""
        self.peak = 0
        """Largest sum of resident bytes seen."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.look()

    def look(self) -> None:
        """Take one sample now."""
        found, used = memory(self._root, self._without), processor_s(self._root, self._without)
        total = sum(found.values())
        with self._lock:
            self._used |= used
            self.peak = max(self.peak, total)
            for reading in self._open:
                if total > reading.peak_rss_bytes:
                    reading.peak_rss_bytes, reading.peak_by_kind = total, found

    def _processor_s(self) -> float:
        """Return the processor time that the tree has used so far, seconds; what a process does in its last moments is not seen."""
        self.look()
        with self._lock:
            return sum(self._used.values())

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Measure the block; the reading is complete when the block ends."""
        reading = Reading()
        cpu = self._processor_s()
        with self._lock:
            self._open.append(reading)
        begun = time.monotonic()
        try:
            yield reading
        finally:
            reading.seconds = time.monotonic() - begun
            reading.cpu_s = self._processor_s() - cpu
            with self._lock:
                self._open.remove(reading)
