"""Parquet files of a table, and the commit that makes them its rows: written by any process, added by one, with others taken away at once.

A commit of Delta is a list of files that come and files that go. So rows of some sessions are replaced without a moment in which they are
missing or double, and without touching what lies in other files: a file that holds rows of these sessions and of others goes, and what it
holds of the others comes back in a new one. What is left of small files is put together, so that a table of many small commits stays a
table of few files.

Takes: rows as Arrow, a table's folder. Gives: files with their statistics, commits. Leaves out: what the rows say (`transforms.py`) and
what is replaced when (`distil.py`).
"""

import bisect
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction, RemoveAction

from pipelines.storage import Home
from signals import delta
from signals.tables import DAY, TABLES

BOUND_CHARS: Final = 64
"""Longer texts are cut for statistics: what is above a text need not be one that is there."""
BEYOND: Final = "\U0010ffff"
"""Put behind a cut text, it is above all that begin with it."""
AT_ONCE: Final = CommitProperties(max_commit_retries=0)
"""A commit follows the version that was read, or fails. Left to itself, deltalake would put it after a later one too, and does not see that
a file which goes was merged into another meanwhile: the rows of both would stay."""
GROUP_BYTES: Final = 16 * 2**20
"""Size in memory of one row group: what a reader holds at once."""
FILE_BYTES: Final = 2 * GROUP_BYTES
"""Size in memory of one file: what is written again when one session of it changes. Files of days that are over are merged."""
SMALL_BYTES: Final = 2**20
"""What is left of a file of less than this is put together with the like: it costs more to open than to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file that was written and is not yet part of a table."""

    path: str
    """Below the table's folder."""
    values: dict[str, str]
    """Partition column -> value as the log has it."""
    rows: int
    size_bytes: int
    statistics: str
    """As the log has them: rows, smallest and largest values, nulls."""

    def dumped(self) -> dict[str, Any]:
        """Return it as plain data; `Part(**data)` is the way back."""
        return asdict(self)

    def action(self) -> AddAction:
        """Return what a commit says of it."""
        return AddAction(self.path, self.size_bytes, self.values, _now_ms(), data_change=True, stats=self.statistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One file of a table."""

    path: str
    day: date
    rows: int
    size_bytes: int
    low: str | None
    """A text not above its smallest session id; None when unknown."""
    high: str | None
    """A text not below its largest."""

    def may_hold(self, sessions: Sequence[str]) -> bool:
        """Return whether it can hold rows of one of these sessions (sorted)."""
        if self.low is None or self.high is None:
            return bool(sessions)
        first = bisect.bisect_left(sessions, self.low)
        return first < len(sessions) and sessions[first] <= self.high

    def removal(self) -> RemoveAction:
        """Return what a commit says when it goes."""
        return RemoveAction(
            self.path, data_change=True, deletion_timestamp=_now_ms(), size=self.size_bytes, partition_values={DAY: str(self.day)}
        )

    def where(self, folder: Path) -> Path:
        """Return its place on disk."""
        return folder / unquote(self.path)


def _now_ms() -> int:
    return int(time.time() * 1000)


def held(table: DeltaTable, *, low: str | None = None, high: str | None = None, since: date | None = None) -> list[Held]:
    """Return the files of a table that is partitioned by day, from its log alone.

    Args:
        table: The table.
        low: Files whose session ids are all below it are left out.
        high: Files whose session ids are all above it are left out.
        since: Files of earlier days are left out.
    """
    listed = pa.table(table.get_add_actions(flatten=True))
    names = {
        "path": "path", "day": f"partition.{DAY}", "rows": "num_records", "size_bytes": "size_bytes", "low": "min.session_id",
        "high": "max.session_id",
    }  # fmt: skip
    empty = pa.nulls(listed.num_rows, pa.string())
    files = pa.table({key: listed[name] if name in listed.column_names else empty for key, name in names.items()})
    if low is not None:
        files = files.filter(pc.fill_null(pc.greater_equal(files["high"], low), fill_value=True))
    if high is not None:
        files = files.filter(pc.fill_null(pc.less_equal(files["low"], high), fill_value=True))
    if since is not None:
        files = files.filter(pc.greater_equal(files["day"], since))
    return [Held(**row) for row in files.to_pylist()]


def session_ids(path: Path) -> pa.ChunkedArray:
    """Return the session of each row of a file."""
    with pq.ParquetFile(path) as file:
        return file.read(columns=["session_id"], use_threads=False).column(0)


def write(folder: Path, rows: pa.Table, *, values: Mapping[str, str] | None = None) -> list[Part]:
    """Write rows to files, each of one day; when it fails, nothing is left of them.

    Args:
        folder: The table's.
        rows: With the column `date`, sorted as readers shall find them.
        values: Further partition columns, which the rows do not have.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    with ExitStack() as undo:
        found: list[Part] = []
        for own in sorted(rows[DAY].unique().to_pylist()):
            of_day = rows.filter(pc.equal(rows[DAY], own)).drop_columns([DAY])
            partition = {**(values or {}), DAY: str(own)}
            step = _rows_in(of_day, FILE_BYTES)
            for begin in range(0, of_day.num_rows, step):
                path = f"{DAY}={own}/part-{uuid.uuid4()}.parquet"
                undo.callback((folder / path).unlink, missing_ok=True)
                some = of_day.slice(begin, step)
                size = _write_file(folder / path, some.schema, [some])
                found.append(Part(path=path, values=partition, rows=some.num_rows, size_bytes=size, statistics=_statistics([some])))
        undo.pop_all()
        return found


def _write_file(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Write tables of one schema to a file; returns its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=_rows_in(table, GROUP_BYTES))
    return path.stat().st_size


def _rows_in(table: pa.Table, size_bytes: int) -> int:
    """Return how many of its rows have about a size in memory, at least one."""
    return max(1, size_bytes * table.num_rows // max(1, table.nbytes))


def _measured(rows: pa.Table) -> pa.Table:
    """Return the columns that statistics are of: all but those of bytes, maps and other values of several parts.

    Readers take a column whose bounds the log does not have, beside others that have some, for one that nothing compares with.
    """
    kinds = pa.types
    simple = [kinds.is_string, kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_timestamp, kinds.is_date]
    return rows.select([field.name for field in rows.schema if any(is_kind(field.type) for is_kind in simple)])


def _statistics(tables: Sequence[pa.Table]) -> str:
    """Return what the log says of a file with these rows."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    joined = pa.concat_tables([_measured(table) for table in tables])
    for name in joined.column_names:
        found = pc.min_max(joined[name]).as_py()
        nulls[name] = joined[name].null_count
        if found["min"] is not None:
            low[name], high[name] = _bound(found["min"], upper=False), _bound(found["max"], upper=True)
    return json.dumps({"numRecords": joined.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _bound(value: Any, *, upper: bool) -> Any:
    """Return a bound as statistics have it: JSON, instants in UTC, a long text cut, no infinite number (no table has one)."""
    match value:
        case datetime():
            return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        case date():
            return str(value)
        case str() if len(value) > BOUND_CHARS:
            return value[:BOUND_CHARS] + BEYOND if upper else value[:BOUND_CHARS]
        case float() if not isfinite(value):
            return sys.float_info.max if upper else -sys.float_info.max
        case _:
            return value


def replace(
    home: Home, name: str, parts: Sequence[Part], *, gone: Mapping[date, Sequence[str]], told: Callable[[pa.Table], None] | None = None
) -> None:
    """Make files part of a table and take the rows that some sessions had away, in one commit; with nothing to do there is none.

    Args:
        home: The deployment.
        name: A table that is partitioned by day alone.
        parts: The new files, from `write`.
        gone: Day -> the sessions (sorted) whose rows of that day go.
        told: Given the rows that go, once they are gone; without it they are not read.

    Raises:
        ContractViolation: The table cannot be read or written.
        StorageFull: No space left; the table is as it was.
        TransientError: Another writer was first every time.
    """
    folder = delta.path(home, name)
    ids = [bound for sessions in gone.values() if sessions for bound in (sessions[0], sessions[-1])]

    def act() -> list[pa.Table]:
        table = delta.open_table(home, name)
        files = held(table, low=min(ids), high=max(ids)) if ids else []
        taken = [found for own in files if (found := _taken(folder, own, gone.get(own.day, ()), rows=told is not None))]
        if not taken and not parts:
            return []
        with ExitStack() as undo:
            rests = list(_rests(folder, taken, undo))
            _commit(table, name, [*parts, *rests], [found.file for found in taken])
            undo.pop_all()
        return [found.rows for found in taken if found.rows is not None]

    with delta.boundary(folder):
        rows = delta.committed(f"writing {name}", act)
    if told is not None and rows:
        told(pa.concat_tables(rows))


def is_added(home: Home, name: str, transaction: tuple[str, int]) -> bool:
    """Return whether a transaction, (application id, number), or a later one of its id is in a table."""
    done = delta.open_table(home, name).transaction_version(transaction[0])
    return done is not None and done >= transaction[1]


def add(home: Home, name: str, parts: Sequence[Part], *, transaction: tuple[str, int]) -> None:
    """Make files part of a table, together with the number of a transaction; without any file the number alone is written.

    Args:
        home: The deployment.
        name: The table.
        parts: The new files, from `write`.
        transaction: (application id, number), which `is_added` then knows; one writer an id.

    Raises:
        ContractViolation, StorageFull, TransientError: As `replace`.
    """
    properties = CommitProperties(app_transactions=[Transaction(*transaction)])

    def act() -> None:
        table = delta.open_table(home, name)
        actions: list[AddAction | RemoveAction] = [part.action() for part in parts]
        table.create_write_transaction(
            actions, "append", table.schema(), list(TABLES[name].partition_by), commit_properties=properties
        )  # fmt: skip

    with delta.boundary(delta.path(home, name)):
        delta.committed(f"writing {name}", act)


def overwrite(home: Home, name: str, parts: Sequence[Part], where: Sequence[tuple[str, str, str]]) -> None:
    """Make files the only ones of some partitions, in one commit.

    Args:
        home: The deployment.
        name: The table.
        parts: Its new files, from `write`.
        where: The partitions: (column, operator, value) that all hold.

    Raises:
        ContractViolation, StorageFull, TransientError: As `replace`.
    """
    with delta.boundary(delta.path(home, name)):
        delta.committed(
            f"writing {name}",
            lambda: (table := delta.open_table(home, name)).create_write_transaction(
                [part.action() for part in parts],
                "overwrite",
                table.schema(),
                list(TABLES[name].partition_by),
                list(where),
                commit_properties=AT_ONCE,
            ),
        )


def _commit(table: DeltaTable, name: str, parts: Sequence[Part], files: Sequence[Held]) -> None:
    actions = [*(part.action() for part in parts), *(own.removal() for own in files)]
    table.create_write_transaction(actions, "append", table.schema(), list(TABLES[name].partition_by), commit_properties=AT_ONCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A file that goes, because rows of it do."""

    file: Held
    stays: pa.Array
    """For each row whether it stays."""
    rows: pa.Table | None
    """The rows that go, where somebody is told of them."""

    def kept(self) -> int:
        """Return how many rows stay."""
        return pc.sum(self.stays).as_py() or 0


def _taken(folder: Path, own: Held, sessions: Sequence[str], *, rows: bool) -> _Taken | None:
    """Return what of a file goes; None when nothing does."""
    if not own.may_hold(sessions):
        return None
    goes = pc.is_in(session_ids(own.where(folder)), value_set=pa.array(sessions, pa.string())).combine_chunks()
    if not pc.any(goes).as_py():
        return None
    return _Taken(file=own, stays=pc.invert(goes), rows=_going(folder, own, goes) if rows else None)


def _going(folder: Path, own: Held, goes: pa.Array) -> pa.Table:
    with pq.ParquetFile(own.where(folder)) as file:
        found = file.read(use_threads=False).filter(goes).replace_schema_metadata()
    return found.append_column(DAY, pa.repeat(pa.scalar(own.day, pa.date32()), found.num_rows))


def _rests(folder: Path, taken: Iterable[_Taken], undo: ExitStack) -> Iterator[Part]:
    """Write what stays of files that go: the little that is left of some together, the others each to its own."""
    pools: dict[date, list[_Taken]] = {}
    for found in taken:
        kept = found.kept()
        if kept and found.file.size_bytes * kept < SMALL_BYTES * found.file.rows:
            pools.setdefault(found.file.day, []).append(found)
        elif kept:
            yield _rest(folder, [found], undo)
    for pool in pools.values():
        yield _rest(folder, pool, undo)


def _rest(folder: Path, taken: Sequence[_Taken], undo: ExitStack) -> Part:
    day = taken[0].file.day
    path = f"{DAY}={day}/part-{uuid.uuid4()}.parquet"
    undo.callback((folder / path).unlink, missing_ok=True)
    with ExitStack() as files:
        opened = [(files.enter_context(pq.ParquetFile(found.file.where(folder))), found.stays) for found in taken]
        schema = pa.unify_schemas([file.schema_arrow.remove_metadata() for file, _ in opened])
        seen: list[pa.Table] = []
        size = _write_file(folder / path, schema, _staying(opened, schema, seen))
    rows = sum(found.kept() for found in taken)
    return Part(path=path, values={DAY: str(day)}, rows=rows, size_bytes=size, statistics=_statistics(seen))


def _staying(opened: Iterable[tuple[pq.ParquetFile, pa.Array]], schema: pa.Schema, seen: list[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows that stay, a row group at a time, and note of each what statistics are made from."""
    for file, stays in opened:
        begin = 0
        for group in range(file.num_row_groups):
            number = file.metadata.row_group(group).num_rows
            mask = stays.slice(begin, number)
            begin += number
            if not pc.any(mask).as_py():
                continue
            rows = file.read_row_group(group, use_threads=False).filter(mask)
            missing = [field for field in schema if field.name not in rows.column_names]
            for field in missing:
                rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
            rows = rows.select(schema.names).cast(schema)
            seen.append(_measured(rows))
            yield rows
