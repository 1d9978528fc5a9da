"""In which files the events of some sessions lie, and how the sessions are cut into tasks.

Files are chosen by what the log says of them (day, smallest and largest session id); of those, the column of session ids alone is read. Ids
that sort by time keep that to a few files, however large the lake is. Sessions that begin in the same file come to the same task, so that
a file is seldom decoded twice; how much a task takes is bounded by what it holds in memory.

Takes: the lake, session ids. Gives: tasks. Leaves out: which sessions (`distil.py`) and what a task does (`distil_task.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from math import ceil
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.storage import Home
from signals import delta, parts

EVENTS_A_TASK: Final = 50_000
"""With the rows that are made of them some hundred megabytes in a task's process, beside the model of follow-ups; twice as many were
hardly faster."""
BYTES_A_TASK: Final = 32 * 2**20
"""The same in compressed bytes of the files: where prompts are long, events are large."""
WORTH_A_TASK: Final = 0.1
"""Share of a full task below which one more costs more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Sessions that are computed together."""

    sessions: list[str]
    """Sorted."""
    files: list[str]
    """Where their events lie, absolute."""
    days: list[date]
    """On which day each file's events arrived."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One file that holds events of the sessions."""

    file: parts.Held
    places: np.ndarray
    """Which sessions [K] int64, by their place among all."""
    events: np.ndarray
    """How many events of each [K] int64."""


def cut(home: Home, sessions: Sequence[str], *, since: date, slots: int = 1, most: int | None = None) -> list[Chunk]:
    """Cut sessions into tasks; those without events that arrived since a day are left out.

    Args:
        home: The deployment.
        sessions: Ids, sorted.
        since: Files of earlier days are not looked at.
        slots: How many tasks can run at once; with less to do than fills them, there are fewer tasks.
        most: Most sessions of a task; None leaves that to their events.

    Raises:
        ContractViolation: The table `events` cannot be read.
    """
    if not sessions or not delta.exists(home, "events"):
        return []
    found = list(_search(home, sessions, since))
    events, size = np.zeros(len(sessions), np.int64), np.zeros(len(sessions), np.float64)
    first = np.full(len(sessions), len(found), np.int64)
    for number, own in enumerate(found):
        events[own.places] += own.events
        size[own.places] += own.events * (own.file.size_bytes / max(1, own.file.rows))
        first[own.places] = np.minimum(first[own.places], number)
    order = np.lexsort((np.arange(len(sessions)), first))[: np.count_nonzero(events)]
    chunk = np.full(len(sessions), -1, np.int64)
    chunk[order] = _numbered(np.maximum(events / EVENTS_A_TASK, size / BYTES_A_TASK)[order], slots, most)
    return [_chunk(home, sessions, chunk, number, found) for number in range(chunk.max(initial=-1) + 1)]


def _search(home: Home, sessions: Sequence[str], since: date) -> Iterator[_Found]:
    """Yield the files that hold events of the sessions, by day of arrival and then in the order of their smallest ids."""
    folder, ids = delta.path(home, "events"), pa.array(sessions, pa.string())
    with delta.boundary(folder):
        near = parts.held(delta.open_table(home, "events"), low=sessions[0], high=sessions[-1], since=since)
        for own in sorted(near, key=lambda own: (own.day, own.low or "", own.path)):
            if not own.may_hold(sessions):
                continue
            places = pc.index_in(parts.session_ids(own.where(folder)), value_set=ids).drop_null().to_numpy()
            if len(places):
                yield _Found(own, *np.unique(places, return_counts=True))


def _numbered(load: np.ndarray, slots: int, most: int | None) -> np.ndarray:
    """Return for sessions in order the number of their task [N]: tasks of about the same load.

    Args:
        load: Share of a full task that each session is [N].
        slots: See `cut`.
        most: See `cut`.
    """
    total = float(load.sum())
    tasks = max(1, ceil(total), min(slots, round(total / WORTH_A_TASK)))
    middle = np.cumsum(load) - load / 2
    numbers = np.minimum((middle * tasks / total).astype(np.int64), tasks - 1)
    if most is not None:
        first = np.searchsorted(numbers, numbers)  # where the session's task begins
        numbers = numbers * len(load) + (np.arange(len(load)) - first) // most
    return np.unique(numbers, return_inverse=True)[1]


def _chunk(home: Home, sessions: Sequence[str], chunk: np.ndarray, number: int, found: Sequence[_Found]) -> Chunk:
    folder = delta.path(home, "events").absolute()
    files = [own.file for own in found if np.any(chunk[own.places] == number)]
    return Chunk(
        sessions=[sessions[place] for place in np.flatnonzero(chunk == number).tolist()],
        files=[str(own.where(folder)) for own in files],
        days=[own.day for own in files],
    )
