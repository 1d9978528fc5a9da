"""What a measurement costs beyond its time: processor seconds and resident memory of this process, its JVM and Python workers.

Takes: process trees as the kernel shows them. Gives: peaks and sums. Leaves out: what is measured (`bench.py`).
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import psutil

SAMPLE_S: Final = 0.2

Started = tuple[int, float]
"""A process: its id and when it began."""


@dataclass(frozen=True, slots=True)
class Used:
    """What one process has at a moment."""

    rss_bytes: int
    cpu_s: float
    """So far, without its children."""


def used(root: int, without: frozenset[int]) -> dict[Started, Used]:
    """Return what a process and its descendants use, without some (and theirs)."""
    found: dict[Started, Used] = {}
    left_out = set(without)
    try:
        process = psutil.Process(root)
        everyone = [process, *process.children(recursive=True)]  # parents before their children
    except psutil.NoSuchProcess:
        return found
    for process in everyone:
        try:
            if process.pid != root and {process.pid, process.ppid()} & left_out:
                left_out.add(process.pid)
                continue
            with process.oneshot():
                times = process.cpu_times()
                found[process.pid, process.create_time()] = Used(process.memory_info().rss, times.user + times.system)
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass(slots=True)
class Reading:
    """What one block cost."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0


class Meter:
    """Samples a process tree in a thread for the life of the block."""

    def __init__(self, root: int, *, without: frozenset[int] = frozenset()) -> None:
        """Watch the tree below `root`, without the processes named (the broker)."""
        self._root, self._without = root, without
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._lock = threading.Lock()
        self._open: list[Reading] = []
        self._cpu_s: dict[Started, float] = {}
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
        found = used(self._root, self._without)
        total = sum(own.rss_bytes for own in found.values())
        with self._lock:
            self._cpu_s |= {process: own.cpu_s for process, own in found.items()}
            self.peak = max(self.peak, total)
            for reading in self._open:
                reading.peak_rss_bytes = max(reading.peak_rss_bytes, total)

    def _processor_s(self) -> float:
        """Return the processor time that the tree has used so far, seconds; what a process does in its last moments is not seen."""
        self.look()
        with self._lock:
            return sum(self._cpu_s.values())

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
