"""The lake for people and later stages: Delta tables read without Spark.

Takes: the deployment's home. Gives: tables as Arrow (and from there pandas, polars, DuckDB), at the newest or a pinned version, with
documented columns; small transactional writes for the stage's own bookkeeping. Leaves out: what the tables hold (`tables.py`).

    from signals import lake
    lake.read(home, "rewards").to_pandas()          # polars.from_arrow(...), duckdb.sql("select ... from rewards") work on the same table
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError

from pipelines.errors import ContractViolation, StorageFull
from pipelines.storage import Home
from signals.samples import SAMPLES
from signals.tables import BUCKET, TABLES, Table

if TYPE_CHECKING:
    import pandas


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
    """Create the tables that do not exist yet, empty, with their columns and partitions.

    Raises:
        StorageFull: No space left.
    """
    for name, table in TABLES.items():
        if not exists(home, name):
            with boundary(path(home, name)):
                DeltaTable.create(
                    path(home, name),
                    schema=nullable(table.schema),
                    partition_by=list(table.partition_by) or None,
                    name=name,
                    description=table.row,
                    configuration={"delta.checkpointInterval": "50"},
                )


def nullable(schema: pa.Schema) -> pa.Schema:
    """Return the schema with every column nullable: Delta checks NOT NULL row by row, and the jobs' tests already hold it."""
    return pa.schema([field.with_nullable(True) for field in schema])


def open_table(home: Home, name: str, version: int | None = None) -> DeltaTable:
    """Open a table.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        version: Delta version; None means the newest.

    Raises:
        ContractViolation: There is no such table or version.
    """
    folder = path(home, name)
    if not exists(home, name):
        raise ContractViolation(f"the lake at {home.lake} has no table {name} yet; run: tidegate signals run --once")
    with boundary(folder):
        return DeltaTable(folder, version=version)


def read(
    home: Home,
    name: str,
    *,
    version: int | None = None,
    columns: Sequence[str] | None = None,
    filters: Sequence[tuple[str, str, Any]] | None = None,
) -> pa.Table:
    """Read a table as Arrow; a table that was never written is empty.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        version: Delta version; None means the newest.
        columns: Columns to read; None means all.
        filters: Conditions that all hold, each (column, operator, value): ("session_id", "=", "...").

    Raises:
        ContractViolation: There is no such table or version.
    """
    wanted = [field for field in nullable(TABLES[name].schema if name in TABLES else pa.schema([])) if not columns or field.name in columns]
    if version is None and not exists(home, name):
        return pa.schema(wanted).empty_table()
    table = open_table(home, name, version)
    with boundary(path(home, name)):
        found = table.to_pyarrow_table(columns=list(columns) if columns else None, filters=list(filters) if filters else None)
    known = [field for field in wanted if field.name in found.schema.names]
    return found.select([field.name for field in known]).cast(pa.schema(known))


def samples(home: Home, *, version: int | None = None) -> pa.Table:
    """Read the training samples with exactly the schema of `signals.samples.SAMPLES`."""
    return read(home, "samples", version=version).drop_columns([BUCKET]).cast(SAMPLES)


def turns(home: Home, *, version: int | None = None) -> pa.Table:
    """Read the turns: one row each, with its outcome."""
    return read(home, "turns", version=version)


def edits(home: Home, *, version: int | None = None) -> pa.Table:
    """Read the edits: one row each, with what became of it."""
    return read(home, "edits", version=version)


def rewards(home: Home, *, version: int | None = None) -> pa.Table:
    """Read the rewards: one row a turn, trainable or not."""
    return read(home, "rewards", version=version)


def events(home: Home, *, session_id: str | None = None, version: int | None = None) -> pa.Table:
    """Read the events as they arrived, duplicates included; of one session if named."""
    return read(home, "events", version=version, filters=[("session_id", "=", session_id)] if session_id else None)


def counts(home: Home, *, version: int | None = None) -> list[dict[str, Any]]:
    """Return turns by policy version, arm, origin, outcome and reason."""
    keys = ["policy_version", "arm", "origin", "outcome", "outcome_reason"]
    grouped = read(home, "ledger_counts", version=version).group_by(keys).aggregate([("turns", "sum")])
    rows = [{key: row[key] for key in keys} | {"turns": row["turns_sum"]} for row in grouped.to_pylist()]
    return sorted(rows, key=lambda row: tuple(str(row[key]) for key in keys))


def sessions(home: Home, *, version: int | None = None) -> "pandas.DataFrame":
    """Return one row a session: turns, outcomes and mean reward, as pandas."""
    frame = read(home, "rewards", version=version).to_pandas()
    grouped = frame.groupby(["session_id", "user_key", "origin", "arm"], dropna=False)
    return grouped.agg(
        turns=("turn_id", "size"), scored=("outcome", lambda o: (o == "scored").sum()), reward=("reward", "mean")
    ).reset_index()


def versions(home: Home) -> dict[str, int]:
    """Return the newest Delta version of each table that exists."""
    return {name: open_table(home, name).version() for name in TABLES if exists(home, name)}


def consistent_versions(home: Home) -> dict[str, int]:
    """Return table versions that belong together: those after the last finished distil; empty before the first.

    Pin these to reproduce a training set: `lake.samples(home, version=consistent_versions(home)["samples"])`.
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


def replace_buckets(home: Home, name: str, rows: Sequence[Mapping[str, Any]], buckets: Sequence[int]) -> None:
    """Replace all rows of some session buckets in one commit.

    Raises:
        StorageFull: No space left.
    """
    with boundary(path(home, name)):
        write_deltalake(
            open_table(home, name),
            _arrow(TABLES[name], rows),
            mode="overwrite",
            predicate=f"{BUCKET} IN ({', '.join(map(str, buckets))})",
        )


def _arrow(table: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows], schema=nullable(table.schema))
