"""A training job as a folder: what every rank reads, what rank 0 reports. Torch-free.

    job.json       the job (below), written last by whoever starts it
    rows.arrow     training rows; gone when the job is finished
    checkpoints/   transaction checkpoints; gone when the job is finished
    progress.jsonl one line a step
    result.json    the candidate and its figures; a finished job is never run twice
    failure.json   class and sentence of a foreseen failure

The folder's name is a digest of everything that determines the result, so the same command finds its own work again.
"""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

import pipelines.errors as errors
from pipelines.config import digest
from pipelines.errors import ContractViolation, StageError, TerminalError
from pipelines.storage import write_atomic
from trainer.config import UpdateConfig

JOB: Final = "job.json"
ROWS: Final = "rows.arrow"
RESULT: Final = "result.json"
FAILURE: Final = "failure.json"
PROGRESS: Final = "progress.jsonl"
CHECKPOINTS: Final = "checkpoints"
AGENTS: Final = "agents"
"""torchrun's own files."""
TRAINER_STATE: Final = "trainer_state.json"
"""Inside a checkpoint of kind `update`: baselines and consumed rows, so that they follow the lineage that really serves."""


class Job(BaseModel):
    """One training job."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["update", "warmstart", "sabotage"]
    parent: str
    parent_folder: str
    store: str
    base_model: str
    settings: UpdateConfig
    kl_limited: bool
    """Whether the KL budget and the parity gate apply (reinforcement) or not (supervised)."""
    warmup_steps: int = 0
    created_at: str
    """ISO 8601, UTC; fixed at the first start, so that a resumed job exports the very same checkpoint."""
    config_digest: str
    reward_version: str | None = None
    lake_version: int | None = None
    frontier: dict[str, int] = {}
    """ "topic-partition" -> offset after the last event behind that version of the lake."""
    facts: dict[str, float | int | str | None] = {}
    """Figures known before training (rows, rejected.<code>, ...), for the manifest."""
    state: dict[str, Any] = {}
    """Content of `trainer_state.json` of the candidate; empty for none."""


def folder_for(root: Path, job: Job, rows_sha: str) -> Path:
    """Name a job's folder by what determines its result (start time, places and settings of other stages do not)."""
    apart = {"created_at", "parent_folder", "store", "facts", "config_digest", "frontier"}
    identity = digest({**job.model_dump(mode="json", exclude=apart), "rows": rows_sha})
    return root / f"{job.kind}-{identity[:24]}"


def read(folder: Path) -> Job:
    """Read a job.

    Raises:
        ContractViolation: The job file is missing or malformed.
    """
    try:
        return Job.model_validate_json((folder / JOB).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise ContractViolation(f"{folder / JOB} is missing or malformed; remove the folder and start the job again") from error


def result(folder: Path) -> dict[str, Any] | None:
    """Return a finished job's result, None while there is none."""
    try:
        return json.loads((folder / RESULT).read_bytes())
    except FileNotFoundError:
        return None


def tidy(folder: Path) -> None:
    """Remove what a finished job needs no more: checkpoints as large as six models, and rows, whose home is the lake."""
    for name in (CHECKPOINTS, AGENTS):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / ROWS).unlink(missing_ok=True)


def write_failure(folder: Path, failure: StageError) -> None:
    """Leave a foreseen failure for the process that started the ranks."""
    write_atomic(folder / FAILURE, json.dumps({"error": type(failure).__name__, "message": str(failure)}).encode())


def read_failure(folder: Path) -> StageError | None:
    """Return the failure that a rank left, as the error it was."""
    try:
        entry = json.loads((folder / FAILURE).read_bytes())
    except FileNotFoundError:
        return None
    kind = getattr(errors, entry["error"], TerminalError)
    return kind(entry["message"])
