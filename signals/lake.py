"""The lake for people and later stages: Delta tables read without Spark.

Takes: the deployment's home. Gives: tables as Arrow, at the newest or a pinned version, with documented columns; small transactional
writes for the stage's own bookkeeping. Leaves out: what the tables hold (`tables.py`) and how they are kept small (`maintenance.py`).

    from signals import lake
    rows = lake.turns(home, date(2026, 3, 1), date(2026, 3, 8), columns=["turn_id", "outcome"], policy_version=7)
    rows.to_pandas()                                                        # pandas
    polars.from_arrow(rows)                                                 # polars
    duckdb.sql("select outcome, count(*) from rows group by outcome")       # DuckDB sees the variable by its name

Columns and conditions reach the files: only the columns named are read, and only the days and row groups that can match. What does not
fit into memory is read lazily from `lake.dataset(home, "turns")`, which polars (`scan_pyarrow_dataset`) and DuckDB query in pieces.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError

from pipelines.errors import ConfigError, ContractViolation, StorageFull
from pipelines.storage import Home
from signals.samples import SAMPLES
from signals.tables import DAY, TABLES, Table

Condition = ds.Expression | None


@contextmanager
def boundary(path: Path) -> Iterator[None]:
    """Turn what deltalake raises inside the block into our errors.

    Raises:
        StorageFull: The disk is full.
        ContractViolation: The table is missing, damaged or of another shape.
    """
    try:
        yield
    except (DeltaError, OSError) as error:
        if "No space left" in str(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no space left to write {path}; free some and run the same command again") from error
        raise ContractViolation(f"the table {path} cannot be read or written: {str(error)[:300]}") from error


def path(home: Home, name: str) -> Path:
    """Return a table's folder.

    Raises:
        ContractViolation: There is no such table; the known ones are named.
    """
    if name not in TABLES:
        raise ContractViolation(f"{name!r} is no table of the lake; it has {', '.join(TABLES)}")
    return home.lake / name


def exists(home: Home, name: str) -> bool:
    """Return whether a table was created."""
    return (path(home, name) / "_delta_log").exists()


def create_missing(home: Home) -> None:
    """Create the tables that do not exist yet, and add to older ones the columns they lack (null in the rows they have).

    Raises:
        ContractViolation: A table is partitioned as by an earlier release; says what to do.
        StorageFull: No space left.
    """
    for name, table in TABLES.items():
        schema = nullable(table.schema)
        with boundary(path(home, name)):
            if not exists(home, name):
                DeltaTable.create(
                    path(home, name),
                    schema=schema,
                    partition_by=list(table.partition_by) or None,
                    name=name,
                    description=table.row,
                    configuration={"delta.checkpointInterval": "50"},
                )
                continue
            found = DeltaTable(path(home, name))
            if found.metadata().partition_columns != list(table.partition_by):
                raise ContractViolation(_other_layout(home, name))
            if not _holds(pa.schema(found.schema().to_arrow()), schema):
                write_deltalake(found, schema.empty_table(), mode="append", schema_mode="merge")


def _other_layout(home: Home, name: str) -> str:
    if name in ("events", "quarantine", "offset_ledger", "gaps", "distilled"):
        return f"the table {path(home, name)} was written by an earlier release and cannot be read on; start a new lake in another home"
    derived = ", ".join(key for key, table in TABLES.items() if table.partition_by == (DAY,) and key not in ("events", "quarantine"))
    return (
        f"the table {path(home, name)} was written by an earlier release; move these folders out of {home.lake}: {derived}; then make them "
        "again from the events: tidegate signals run --once --everything"
    )


def _holds(found: pa.Schema, wanted: pa.Schema) -> bool:
    """Return whether a table has all columns, nested ones included."""

    def names(fields: Sequence[pa.Field], prefix: str = "") -> set[str]:
        own = {prefix + field.name for field in fields}
        return own.union(*[names(list(f.type), f"{prefix}{f.name}.") for f in fields if pa.types.is_struct(f.type)])

    return names(list(wanted)) <= names(list(found))


def nullable(schema: pa.Schema) -> pa.Schema:
    """Return the schema with every column nullable: Delta checks NOT NULL row by row, and the jobs' tests already hold it."""
    return pa.schema([field.with_nullable(True) for field in schema])


def open_table(home: Home, name: str, as_of: int | datetime | None = None) -> DeltaTable:
    """Open a table.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        as_of: Delta version, or an instant; None means the newest.

    Raises:
        ContractViolation: There is no such table or version.
    """
    folder = path(home, name)
    if not exists(home, name):
        raise ContractViolation(f"the lake at {home.lake} has no table {name} yet; run: tidegate signals run --once")
    with boundary(folder):
        if as_of is None or isinstance(as_of, int):
            return DeltaTable(folder, version=as_of)
        found = DeltaTable(folder)
        found.load_as_version(as_of)
        return found


def holds_rows(home: Home, name: str) -> bool:
    """Return whether a table has any row, from its log alone."""
    return count(home, name) > 0


def count(home: Home, name: str) -> int:
    """Return how many rows a table has, from its log alone; 0 when it was never written."""
    return open_table(home, name).count() if exists(home, name) else 0


def dataset(home: Home, name: str, *, as_of: int | datetime | None = None) -> ds.Dataset:
    """Open a table lazily, for queries that read it in pieces.

    Raises:
        ContractViolation: There is no such table or version.
    """
    if as_of is None and not exists(home, name):
        return ds.dataset(nullable(TABLES[name].schema).empty_table())
    with boundary(path(home, name)):
        return open_table(home, name, as_of).to_pyarrow_dataset()


def scan(
    home: Home, name: str, columns: Sequence[str] | None = None, condition: Condition = None, *, as_of: int | datetime | None = None
) -> pa.Table:
    """Read columns of the rows that match; a table that was never written is empty, a column it does not have yet is null.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        columns: Columns to read; None means all.
        condition: A pyarrow expression.
        as_of: Delta version, or an instant; None means the newest.

    Raises:
        ContractViolation: There is no such table, column or version.
    """
    path(home, name)
    schema = nullable(TABLES[name].schema)
    if unknown := sorted(set(columns or ()) - set(schema.names)):
        raise ContractViolation(f"the table {name} has no column {', '.join(unknown)}; it has {', '.join(schema.names)}")
    wanted = pa.schema([field for field in schema if columns is None or field.name in columns])
    source = dataset(home, name, as_of=as_of)
    known = [field for field in wanted if field.name in source.schema.names]
    with boundary(path(home, name)):
        found = source.to_table(columns=[field.name for field in known], filter=condition).cast(pa.schema(known))
    for position, field in enumerate(wanted):
        if field.name not in found.schema.names:
            found = found.add_column(position, field, pa.nulls(found.num_rows, field.type))
    return found


def read(
    home: Home,
    name: str,
    *,
    as_of: int | datetime | None = None,
    columns: Sequence[str] | None = None,
    filters: Sequence[tuple[str, str, Any]] | None = None,
) -> pa.Table:
    """Read a table as Arrow; a table that was never written is empty.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        as_of: Delta version, or an instant; None means the newest.
        columns: Columns to read; None means all.
        filters: Conditions that all hold, each (column, operator, value): ("session_id", "=", "...").

    Raises:
        ContractViolation: There is no such table, column or version.
    """
    condition: Condition = None
    for column, operator, value in filters or ():
        condition = _and(condition, _compare(column, operator, value))
    return scan(home, name, columns, condition, as_of=as_of)


def _compare(column: str, operator: str, value: Any) -> ds.Expression:
    field = ds.field(column)
    operators = {
        "=": field == value, "==": field == value, "!=": field != value, "<": field < value, "<=": field <= value, ">": field > value,
        ">=": field >= value,
    } if operator not in ("in", "not in") else {"in": field.isin(list(value)), "not in": ~field.isin(list(value))}  # fmt: skip
    if operator not in operators:
        raise ContractViolation(f"{operator!r} is no operator of a filter; use =, !=, <, <=, >, >=, in, not in")
    return operators[operator]


def _and(one: Condition, other: Condition) -> Condition:
    return other if one is None else one if other is None else one & other


def _chosen(start: date | None, end: date | None, policy_version: int | Sequence[int] | None) -> Condition:
    """Return the condition of the readers below.

    Raises:
        ConfigError: An instant was given where whole days are meant.
    """
    for bound in (start, end):
        if isinstance(bound, datetime):
            raise ConfigError(f"start and end are whole UTC days; give {bound.date()!r}, and choose by started_at in the result")
    condition: Condition = None
    if start is not None:
        condition = _and(condition, ds.field(DAY) >= start)
    if end is not None:
        condition = _and(condition, ds.field(DAY) < end)
    if policy_version is not None:
        versions = [policy_version] if isinstance(policy_version, int) else list(policy_version)
        condition = _and(condition, ds.field("policy_version").isin(versions))
    return condition


def turns(
    home: Home,
    start: date | None = None,
    end: date | None = None,
    *,
    columns: Sequence[str] | None = None,
    policy_version: int | Sequence[int] | None = None,
    as_of: int | datetime | None = None,
) -> pa.Table:
    """Read the turns: one row each, with its outcome.

    Args:
        home: The deployment.
        start: First UTC day of the turns' start; None means from the beginning.
        end: The day after the last; None means to the end.
        columns: Columns to read; None means all.
        policy_version: Policies that served them; None means all, foreign ones included.
        as_of: Delta version, or an instant; None means the newest. Versions that belong together: `consistent_versions`.

    Raises:
        ConfigError: `start` or `end` is an instant.
        ContractViolation: There is no such column or version.
    """
    return scan(home, "turns", columns, _chosen(start, end, policy_version), as_of=as_of)


def edits(
    home: Home,
    start: date | None = None,
    end: date | None = None,
    *,
    columns: Sequence[str] | None = None,
    policy_version: int | Sequence[int] | None = None,
    as_of: int | datetime | None = None,
) -> pa.Table:
    """Read the edits: one row each, with what became of it. Arguments and errors as `turns`."""
    return scan(home, "edits", columns, _chosen(start, end, policy_version), as_of=as_of)


def rewards(
    home: Home,
    start: date | None = None,
    end: date | None = None,
    *,
    columns: Sequence[str] | None = None,
    policy_version: int | Sequence[int] | None = None,
    as_of: int | datetime | None = None,
) -> pa.Table:
    """Read the rewards: one row a turn, trainable or not. Arguments and errors as `turns`."""
    return scan(home, "rewards", columns, _chosen(start, end, policy_version), as_of=as_of)


def samples(
    home: Home,
    start: date | None = None,
    end: date | None = None,
    *,
    policy_version: int | Sequence[int] | None = None,
    as_of: int | datetime | None = None,
) -> pa.Table:
    """Read the training samples with exactly the schema of `signals.samples.SAMPLES`. Arguments and errors as `turns`."""
    return scan(home, "samples", SAMPLES.names, _chosen(start, end, policy_version), as_of=as_of).cast(SAMPLES)


def events(
    home: Home, *, session_id: str | None = None, columns: Sequence[str] | None = None, as_of: int | datetime | None = None
) -> pa.Table:
    """Read the events as they arrived, duplicates included; of one session if named."""
    return scan(home, "events", columns, ds.field("session_id") == session_id if session_id else None, as_of=as_of)


def counts(home: Home, *, as_of: int | datetime | None = None) -> list[dict[str, Any]]:
    """Return turns by policy version, arm, origin, outcome and reason."""
    keys = ["policy_version", "arm", "origin", "outcome", "outcome_reason"]
    grouped = read(home, "ledger_counts", as_of=as_of).group_by(keys).aggregate([("turns", "sum")])
    rows = [{key: row[key] for key in keys} | {"turns": row["turns_sum"]} for row in grouped.to_pylist()]
    return sorted(rows, key=lambda row: tuple(str(row[key]) for key in keys))


def sessions(home: Home, ids: Sequence[str] | None = None, *, as_of: int | datetime | None = None) -> pa.Table:
    """Return one row a session, sorted by id: who, where, turns, turns scored, mean reward of those (null without any).

    Args:
        home: The deployment.
        ids: Session ids; None means all.
        as_of: Version of the table `rewards`.
    """
    keys = ["session_id", "user_key", "origin", "arm"]
    chosen = None if ids is None else ds.field("session_id").isin(list(ids))
    rows = scan(home, "rewards", [*keys, "turn_id", "outcome", "reward"], chosen, as_of=as_of)
    scored = pc.equal(rows["outcome"], "scored").cast(pa.int64())
    grouped = rows.append_column("scored", scored).group_by(keys).aggregate([("turn_id", "count"), ("scored", "sum"), ("reward", "mean")])
    return grouped.rename_columns([*keys, "turns", "scored", "reward"]).sort_by("session_id")


def versions(home: Home) -> dict[str, int]:
    """Return the newest Delta version of each table that exists."""
    return {name: open_table(home, name).version() for name in TABLES if exists(home, name)}


def consistent_versions(home: Home) -> dict[str, int]:
    """Return table versions that belong together: those after the last finished distil; empty before the first.

    Pin these to reproduce a training set: `lake.samples(home, as_of=consistent_versions(home)["samples"])`.
    """
    newest = last(read(home, "distilled"), "distilled_at")
    return dict(newest["versions"]) if newest else {}


def last(table: pa.Table, by: str) -> dict[str, Any] | None:
    """Return the row with the largest `by`, or None."""
    rows = table.sort_by([(by, "descending")]).slice(0, 1).to_pylist()
    return rows[0] if rows else None


def frontier(home: Home) -> dict[str, int]:
    """Return "topic-partition" -> offset after the last one that lies in the lake."""
    grouped = read(home, "offset_ledger").group_by(["topic", "partition"]).aggregate([("end", "max")])
    return {f"{row['topic']}-{row['partition']}": row["end_max"] for row in grouped.to_pylist()}


def removals(home: Home) -> list[dict[str, Any]]:
    """Return the rows of `removals` that came true: announced first, then carried as a transaction by the delete itself."""
    rows = read(home, "removals").to_pylist()
    ids = {(row["table"], row["removal_id"]) for row in rows}
    done = {(name, own) for name, own in ids if open_table(home, name).transaction_version(removal_transaction(own)) is not None}
    return [row for row in rows if (row["table"], row["removal_id"]) in done]


def removal_transaction(removal_id: str) -> str:
    """Return the Delta application id of a removal."""
    return f"removal:{removal_id}"


def duckdb_line(home: Home, name: str) -> str:
    """Return a line of Python that opens a table in DuckDB, to paste into a shell.

    DuckDB's own Delta extension is a download; deltalake hands the table over as Arrow instead, with no copy and no network.
    """
    return (
        f"import duckdb, deltalake; {name} = deltalake.DeltaTable({str(path(home, name))!r}).to_pyarrow_dataset(); "
        f'print(duckdb.sql("SELECT * FROM {name} LIMIT 20"))'
    )


def append(home: Home, name: str, rows: Sequence[Mapping[str, Any]], *, transaction: tuple[str, int] | None = None) -> bool:
    """Append a few rows in one commit.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        rows: Rows with the table's columns.
        transaction: (application id, number); a number already committed for that id is not written again.

    Returns:
        Whether anything was written.

    Raises:
        StorageFull: No space left.
    """
    table = open_table(home, name)
    if transaction and (done := table.transaction_version(transaction[0])) is not None and done >= transaction[1]:
        return False
    properties = CommitProperties(app_transactions=[Transaction(*transaction)]) if transaction else None
    with boundary(path(home, name)):
        write_deltalake(table, _arrow(TABLES[name], rows), mode="append", commit_properties=properties)
    return True


def day_predicate(days: Sequence[date]) -> str:
    """Return the SQL condition that names whole days."""
    return f"{DAY} IN ({', '.join(repr(str(day)) for day in days)})"


def replace_days(home: Home, name: str, rows: Sequence[Mapping[str, Any]], days: Sequence[date]) -> None:
    """Replace all rows of some days in one commit; without days, nothing is written.

    Raises:
        StorageFull: No space left.
    """
    if not days:
        return
    with boundary(path(home, name)):
        write_deltalake(open_table(home, name), _arrow(TABLES[name], rows), mode="overwrite", predicate=day_predicate(days))


def _arrow(table: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows], schema=nullable(table.schema))
