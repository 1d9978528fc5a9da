"""Delta tables on disk, without Spark: made, brought up to date, opened, and written in small transactions.

Takes: the deployment's home and rows. Gives: tables with the columns and partitions of `tables.py`, commits that are written once, and our
errors for deltalake's. Leaves out: reading for people (`lake.py`, which also hands these functions on) and large writes (Spark).
"""

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from pyarrow import fs

from pipelines.errors import ContractViolation, StorageFull, TransientError
from pipelines.storage import Home
from signals.tables import DAY, TABLES, Table

STATISTICS: Final = {"events": {"delta.dataSkippingStatsColumns": "event_id,session_id,user_key,partition,offset,arrived_at"}}
"""Columns of which the log keeps each file's smallest and largest value: what readers select by. By default those are the first 32 columns,
long texts among them and `offset` not."""


TRIES: Final = 5
RETRY_S: Final = 0.5

Result = TypeVar("Result")


@contextmanager
def boundary(path: Path) -> Iterator[None]:
    """Turn what deltalake and Arrow raise inside the block into our errors.

    Raises:
        StorageFull: The disk is full.
        ContractViolation: The table is missing, damaged or of another shape.
    """
    try:
        yield
    except (DeltaError, OSError, pa.ArrowInvalid) as error:
        if "No space left" in str(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no space left to write {path}; free some and run the same command again") from error
        raise ContractViolation(f"the table {path} cannot be read or written: {str(error)[:300]}") from error


def committed(what: str, act: Callable[[], Result]) -> Result:
    """Try a commit again when another writer was first.

    Raises:
        TransientError: It lost every time.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return act()
        except CommitFailedError as error:
            if attempt == TRIES:
                raise TransientError(f"{what}: another writer was first {TRIES} times; run the same command again") from error
            time.sleep(RETRY_S * attempt)
    raise AssertionError("unreachable")


def as_dataset(table: DeltaTable, files: str | None = None) -> ds.Dataset:
    """Open a table on a local folder for Arrow, which reads its files itself.

    Args:
        table: The table.
        files: SQL condition on what the log says of files: those that cannot hold such a row are left out. Rows are still to be filtered.

    By default Arrow's threads ask deltalake's Python object for every block; one that still does so when the interpreter ends takes
    the process down with SIGABRT (seen in one of two runs of a busy machine).
    """
    folder = fs.SubTreeFileSystem(unquote(urlsplit(table.table_uri).path), fs.LocalFileSystem())
    return table.to_pyarrow_dataset(filesystem=folder, file_pruning_predicate=files)


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
                    configuration={"delta.checkpointInterval": "50"} | STATISTICS.get(name, {}),
                )
                continue
            found = DeltaTable(path(home, name))
            if found.metadata().partition_columns != list(table.partition_by):
                raise ContractViolation(_other_layout(home, name))
            if not _holds(pa.schema(found.schema().to_arrow()), schema):
                known = set(found.schema().to_arrow().names)
                own = pa.schema([field if field.name not in known else field.remove_metadata() for field in schema])
                write_deltalake(found, own.empty_table(), mode="append", schema_mode="merge")


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


def count(home: Home, name: str) -> int:
    """Return how many rows a table has, from its log alone; 0 when it was never written."""
    return open_table(home, name).count() if exists(home, name) else 0


def holds_rows(home: Home, name: str) -> bool:
    """Return whether a table has any row, from its log alone."""
    return count(home, name) > 0


def day_predicate(days: Sequence[date]) -> str:
    """Return the SQL condition that names whole days."""
    return f"{DAY} IN ({', '.join(repr(str(day)) for day in days)})"


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
    with boundary(path(home, name)):
        write_deltalake(
            table, _arrow(TABLES[name], rows), mode="append", schema_mode="merge", commit_properties=_carrying(transaction)
        )  # fmt: skip
    return True


def _carrying(transaction: tuple[str, int] | None) -> CommitProperties | None:
    return CommitProperties(app_transactions=[Transaction(*transaction)]) if transaction else None


def replace_days(
    home: Home, name: str, rows: Sequence[Mapping[str, Any]], days: Sequence[date], *, transaction: tuple[str, int] | None = None
) -> None:
    """Replace all rows of some days in one commit; without days, nothing is written.

    Args:
        home: The deployment.
        name: One of `tables.TABLES`.
        rows: Rows with the table's columns.
        days: The days.
        transaction: (application id, number) that the commit carries.

    Raises:
        StorageFull: No space left.
    """
    if not days:
        return
    with boundary(path(home, name)):
        write_deltalake(
            open_table(home, name), _arrow(TABLES[name], rows), mode="overwrite", schema_mode="merge", predicate=day_predicate(days),
            commit_properties=_carrying(transaction),
        )  # fmt: skip


def _arrow(table: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows without what columns say of themselves: Delta refuses a column whose words differ from those it was made with."""
    schema = pa.schema([field.remove_metadata() for field in nullable(table.schema)])
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
