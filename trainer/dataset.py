"""Rows on disk: the samples of a pinned lake version, and a job's training rows as one Arrow file.

Takes: a Delta table (without Spark) or an Arrow/Parquet file with the schema `signals.samples.SAMPLES`. Gives: records, and
training rows that every rank reads alike. Leaves out: which rows are trained on (`selection.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.errors import ContractViolation
from pipelines.storage import Home, write_atomic
from signals.samples import SAMPLES
from trainer.packing import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One row as the ranks see it."""

    row_id: str
    packed: PackedRow
    mu: np.ndarray
    """[trained tokens] fp32, nats; zeros for supervised rows."""
    advantage: float
    omega: float
    same_version: bool
    """Sampled by the very checkpoint the update starts from: usable for the parity gate."""
    hint_ids: np.ndarray | None = None
    """[H] tokens of what the user said next (`hindsight.py`); None where nothing followed, or where hindsight is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """The samples of one lake version."""

    version: int | None
    """Delta version; None for a plain file."""
    table: pa.Table

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one dictionary a row, a batch at a time."""
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def read_samples(lake: Path, *, version: int | None = None, since_us: int | None = None) -> SampleTable:
    """Read the table `samples`.

    Args:
        lake: The lake's folder.
        version: Delta version; None for the newest.
        since_us: Rows served before this (UTC microseconds) are not read at all; None reads everything.

    Raises:
        ContractViolation: There is no such table or version, or its columns are not the contract's.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    from signals.delta import as_dataset

    location = lake / "samples"
    try:
        delta = DeltaTable(location, version=version)
    except (TableNotFoundError, DeltaError, OSError) as error:
        what = "no table" if version is None else f"no version {version} of"
        raise ContractViolation(f"there is {what} samples in {lake}; run `tidegate signals run --once` first") from error
    dataset = as_dataset(delta)
    columns = [field.name for field in SAMPLES]
    if missing := sorted(set(columns) - set(dataset.schema.names)):
        raise ContractViolation(f"the table samples in {lake} lacks {', '.join(missing)}; it was written by another version of Tidegate")
    condition = None
    if since_us is not None:
        import pyarrow.compute as pc

        condition = pc.field("served_at") >= pa.scalar(since_us, pa.timestamp("us", tz="UTC"))
    return SampleTable(version=delta.version(), table=dataset.to_table(columns=columns, filter=condition))


def frontier(home: Home, version: int | None) -> dict[str, int]:
    """Return how far the events reach that a version of `samples` was distilled from: "topic-partition" -> offset; empty when unknown."""
    from signals import lake

    rows = lake.read(home, "distilled").to_pylist() if lake.exists(home, "distilled") else []
    fitting = [row for row in rows if dict(row["versions"]).get("samples") == version]
    return dict(max(fitting, key=lambda row: row["distilled_at"])["frontier"]) if fitting else {}


def write_rows(path: Path, rows: Sequence[TrainingRow]) -> None:
    """Write training rows as one Arrow file, atomically."""
    table = pa.table(
        {
            "row_id": [row.row_id for row in rows],
            "prompt_ids": pa.array([row.packed.prompt_ids.tolist() for row in rows], pa.list_(pa.int32())),
            "response_ids": pa.array([row.packed.response_ids.tolist() for row in rows], pa.list_(pa.int32())),
            "trained": pa.array([row.packed.trained.tolist() for row in rows], pa.list_(pa.int32())),
            "mu": pa.array([row.mu.tolist() for row in rows], pa.list_(pa.float32())),
            "temperature": pa.array([row.packed.temperature for row in rows], pa.float64()),
            "group": [row.packed.group for row in rows],
            "advantage": pa.array([row.advantage for row in rows], pa.float64()),
            "omega": pa.array([row.omega for row in rows], pa.float64()),
            "same_version": pa.array([row.same_version for row in rows], pa.bool_()),
            "hint": pa.array([None if row.hint_ids is None else row.hint_ids.tolist() for row in rows], pa.list_(pa.int32())),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_atomic(path, sink.getvalue().to_pybytes())


def read_rows(path: Path) -> list[TrainingRow]:
    """Read what `write_rows` wrote.

    Raises:
        ContractViolation: The file is missing or damaged.
    """
    try:
        with pa.memory_map(str(path)) as source:
            records = pa.ipc.open_file(source).read_all().to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ContractViolation(f"{path} is missing or damaged; remove its folder and run the update again") from error
    return [
        TrainingRow(
            row_id=record["row_id"],
            packed=PackedRow(
                prompt_ids=np.asarray(record["prompt_ids"], np.int64),
                response_ids=np.asarray(record["response_ids"], np.int64),
                trained=np.asarray(record["trained"], np.int64),
                temperature=record["temperature"],
                group=record["group"],
            ),
            mu=np.asarray(record["mu"], np.float32),
            advantage=record["advantage"],
            omega=record["omega"],
            same_version=record["same_version"],
            hint_ids=None if record["hint"] is None else np.asarray(record["hint"], np.int64),
        )
        for record in records
    ]
