"""What one Spark task of the distil does: read the events of some sessions, apply the rules, write their rows as files.

The files are no part of a table until the driver commits them, so nothing that a task does is seen before all have done theirs; what a
failed one leaves behind is deleted with old table versions (`signals retain`). Rows do not travel through Spark: token arrays would be most
of the traffic.

Takes: chunks of sessions, settings. Gives: what was written and what it replaces, as JSON. Leaves out: Spark itself, and
commits (`distil.py`).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from signals import counts, parts
from signals.chunks import Chunk
from signals.config import RewardsConfig
from signals.judge import Judged
from signals.norms import Norms
from signals.tables import DAY
from signals.transforms import LEAVES, Distilled, distilled, flat

DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every task of a distil has to know."""

    lake: Path
    tables: tuple[str, ...]
    """Which of the tables are written."""
    rewards: RewardsConfig
    now_ms: int
    tombstoned: frozenset[int]
    norms: Norms
    judged: Judged
    since: date
    span: tuple[date, date] | None = None
    """Only rows of turns that started from the first day up to, not including, the second."""
    into: Mapping[str, str] = field(default_factory=dict)
    """Table -> the table of the same columns, and more, that its rows go to instead."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Columns that such rows have besides: name -> Arrow scalar."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Further partition columns of their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What one task did."""

    parts: dict[str, list[parts.Part]]
    """Files by table."""
    sessions: dict[date, list[str]]
    """Day -> sessions with events that happened then: where rows of theirs can lie that these replace."""
    straddling: dict[str, list[str]]
    """Session -> turns, of sessions with events on the first day of the look-back: those may have begun before it."""
    turns: int
    conflicts: int
    counts: list[dict[str, Any]]
    """Turns by `counts.KEYS`."""
    fault: str
    """What is wrong with the turns; empty when every one has exactly one outcome."""


def compute(work: Work, chunk: Chunk) -> str:
    """Compute one chunk; returns `Done` as JSON.

    Raises:
        OSError: The disk is full.
    """
    pa.set_cpu_count(1)
    events, straddling = read(chunk, work.since)
    found = distilled(events, work.rewards, now_ms=work.now_ms, tombstoned=work.tombstoned, norms=work.norms, judged=work.judged)
    with ExitStack() as undo:
        written: dict[str, list[dict[str, Any]]] = {}
        for name in work.tables:
            folder = work.lake / work.into.get(name, name)
            own = parts.write(folder, _fitted(work, getattr(found, name)), values=work.values)
            for part in own:
                undo.callback((folder / part.path).unlink, missing_ok=True)
            written[name] = [part.dumped() for part in own]
        undo.pop_all()
    return json.dumps({
        "parts": written, "sessions": _days(events), "straddling": _turns_of(found, straddling), "turns": found.turns.num_rows,
        "conflicts": found.conflicts.num_rows, "counts": counts.counted(found.turns).to_pylist(), "fault": _fault(found.turns),
    }, default=str)  # fmt: skip


def loaded(text: str) -> Done:
    """Read what `compute` gave."""
    found = json.loads(text)
    return Done(
        parts={name: [parts.Part(**part) for part in own] for name, own in found["parts"].items()},
        sessions={date.fromisoformat(day): ids for day, ids in found["sessions"].items()},
        straddling=found["straddling"], turns=found["turns"], conflicts=found["conflicts"],
        counts=[row | {DAY: date.fromisoformat(row[DAY])} for row in found["counts"]], fault=found["fault"],
    )  # fmt: skip


def _fault(turns: pa.Table) -> str:
    distinct, without = turns.group_by(["session_id", "turn_id"]).aggregate([]).num_rows, turns["outcome"].null_count
    return f"{turns.num_rows} rows for {distinct} turns, {without} without an outcome" if without or distinct != turns.num_rows else ""


def read(chunk: Chunk, since: date) -> tuple[pa.Table, pa.Array]:
    """Read the events of some sessions as the rules take them.

    Args:
        chunk: The sessions and their files.
        since: First day that is looked back to.

    Returns:
        Events, and the sessions of those that arrived on that very day.
    """
    ids = pa.array(chunk.sessions, pa.string())
    found: list[pa.Table] = []
    edge: list[pa.Table] = []
    for path, day in zip(chunk.files, chunk.days, strict=True):
        with pq.ParquetFile(path) as file:
            own = list(_rows(file, ids, chunk.sessions[0], chunk.sessions[-1]))
        found += own
        edge += own if day == since else []
    sessions = pa.concat_tables([own.select(["session_id"]) for own in edge])["session_id"].unique() if edge else pa.array([], pa.string())
    return pa.concat_tables(found, promote_options="default"), sessions


def _rows(file: pq.ParquetFile, ids: pa.Array, low: str, high: str) -> Iterator[pa.Table]:
    """Yield what the rules read of the events of some sessions, flat, a row group at a time."""
    leaves = [file.schema.column(number).path for number in range(len(file.schema))]
    wanted = [name for name in LEAVES if name in set(leaves)]
    place = leaves.index("session_id")
    for group in range(file.num_row_groups):
        known = file.metadata.row_group(group).column(place).statistics
        if known is not None and known.has_min_max and (known.max < low or known.min > high):
            continue
        rows = file.read_row_group(group, columns=wanted, use_threads=False)
        yield flat(rows.filter(pc.is_in(rows["session_id"], value_set=ids)))


def _fitted(work: Work, rows: pa.Table) -> pa.Table:
    """Leave out what lies outside the span, and add the columns that rows of another table have."""
    if work.span is not None:
        days = rows[DAY]
        rows = rows.filter(pc.and_(pc.greater_equal(days, work.span[0]), pc.less(days, work.span[1])))
    for name, value in work.more.items():
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    return rows


def _days(events: pa.Table) -> dict[str, list[str]]:
    """Return by UTC day the sessions that events happened in, duplicates and contradictions included; each list sorted."""
    day = pc.divide(events["occurred_at_ms"], DAY_MS)
    pairs = pa.table({"day": day, "session_id": events["session_id"]}).group_by(["day", "session_id"]).aggregate([])
    found: dict[str, list[str]] = {}
    for row in pairs.sort_by([("day", "ascending"), ("session_id", "ascending")]).to_pylist():
        found.setdefault(str(datetime.fromtimestamp(row["day"] * DAY_MS / 1000, UTC).date()), []).append(row["session_id"])
    return found


def _turns_of(found: Distilled, sessions: pa.Array) -> dict[str, list[str]]:
    """Return the turns of some sessions."""
    own = found.turns.filter(pc.is_in(found.turns["session_id"], value_set=sessions)) if len(sessions) else found.turns.slice(0, 0)
    turns: dict[str, list[str]] = {}
    for row in own.select(["session_id", "turn_id"]).to_pylist():
        turns.setdefault(row["session_id"], []).append(row["turn_id"])
    return turns
