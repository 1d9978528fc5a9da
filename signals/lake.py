"""The lake for people and later stages: Delta tables read without Spark.

Takes: the deployment's home. Gives: tables as Arrow, at the newest or a pinned version, with documented columns. Hands on `delta.py`, which
makes and writes them. Leaves out: what the tables hold (`tables.py`, `DICTIONARY.md`) and how they are kept small (`maintenance.py`).

    from signals import lake
    rows = lake.turns(home, date(2026, 3, 1), date(2026, 3, 8), columns=["turn_id", "outcome"], policy_version=7)
    rows.to_pandas()                                                        # pandas
    polars.from_arrow(rows)                                                 # polars
    duckdb.sql("select outcome, count(*) from rows group by outcome")       # DuckDB sees the variable by its name

Columns and conditions reach the files: only the columns named are read, and only the days and row groups that can match. What does not
fit into memory is read lazily from `lake.dataset(home, "turns")`, which polars (`scan_pyarrow_dataset`) and DuckDB query in pieces.
"""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipelines.errors import ConfigError, ContractViolation
from pipelines.storage import Home
from signals import delta
from signals.samples import SAMPLES
from signals.tables import DAY, TABLES

Condition = ds.Expression | None

# One name for the lake: what makes and writes tables is called through this module too.
append = delta.append
boundary = delta.boundary
committed = delta.committed
count = delta.count
create_missing = delta.create_missing
day_predicate = delta.day_predicate
exists = delta.exists
holds_rows = delta.holds_rows
nullable = delta.nullable
open_table = delta.open_table
path = delta.path
replace_days = delta.replace_days


def dataset(home: Home, name: str, *, as_of: int | datetime | None = None, files: str | None = None) -> ds.Dataset:
    """Open a table lazily, for queries that read it in pieces.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        as_of: Delta version, or an instant; None means the newest.
        files: SQL condition that leaves out files whose statistics say that no row of theirs meets it.

    Raises:
        ContractViolation: There is no such table or version.
    """
    if as_of is None and not exists(home, name):
        return ds.dataset(nullable(TABLES[name].schema).empty_table())
    with boundary(path(home, name)):
        return delta.as_dataset(open_table(home, name, as_of), files)


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
    newest = last_distil(home)
    return dict(newest["versions"]) if newest else {}


def last_distil(home: Home) -> dict[str, Any] | None:
    """Return the row of the last finished distil, or None before the first."""
    if not exists(home, "distilled"):
        return None
    with boundary(path(home, "distilled")):
        table = open_table(home, "distilled")
        ends = pa.table(table.get_add_actions(flatten=True))
        if "max.distilled_at" not in ends.column_names or (newest := pc.max(ends["max.distilled_at"]).as_py()) is None:
            return last(read(home, "distilled"), "distilled_at")
        # The log has milliseconds, cut off; the newest row is not before them.
        near = delta.as_dataset(table, f"distilled_at >= '{newest:%Y-%m-%d %H:%M:%S.%f}Z'")
        return last(near.to_table(filter=ds.field("distilled_at") >= newest), "distilled_at")


def last(table: pa.Table, by: str) -> dict[str, Any] | None:
    """Return the row with the largest `by`, or None."""
    rows = table.sort_by([(by, "descending")]).slice(0, 1).to_pylist()
    return rows[0] if rows else None


def frontier(home: Home) -> dict[str, int]:
    """Return "topic-partition" -> offset after the last one that lies in the lake."""
    ends = read(home, "offset_ledger", columns=["topic", "partition", "end"])
    grouped = ends.group_by(["topic", "partition"]).aggregate([("end", "max")])
    return {f"{row['topic']}-{row['partition']}": row["end_max"] for row in grouped.to_pylist()}


def offsets_between(topic: str, partition: int, *, start: int, end: int) -> ds.Expression:
    """Return the condition of one Kafka partition's records from `start` up to, not including, `end`."""
    own = (ds.field("topic") == topic) & (ds.field("partition") == partition)
    return own & (ds.field("offset") >= start) & (ds.field("offset") < end)


def removals(home: Home) -> list[dict[str, Any]]:
    """Return the rows of `removals` that came true: announced first, then carried as a transaction by the delete itself."""
    rows = read(home, "removals").to_pylist()
    tables = {name: open_table(home, name) for name in {row["table"] for row in rows}}
    return [row for row in rows if tables[row["table"]].transaction_version(removal_transaction(row["removal_id"])) is not None]


def removal_transaction(removal_id: str) -> str:
    """Return the Delta application id of a removal."""
    return f"removal:{removal_id}"


def duckdb_line(home: Home, name: str) -> str:
    """Return a line of Python that opens a table in DuckDB, to paste into a Python shell.

    DuckDB's own Delta extension is a download; Arrow hands the table over instead, with no copy and no network.
    """
    return (
        "from pathlib import Path; import duckdb; from pipelines.storage import Home; from signals import lake; "
        f"{name} = lake.dataset(Home(Path({str(home.root.absolute())!r})), {name!r}); "
        f'print(duckdb.sql("SELECT * FROM {name} LIMIT 20"))'
    )
