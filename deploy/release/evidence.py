"""What a gate decides on: facts about files, distances, attempts and process, as frozen records.

Takes the result files of `python -m deploy.benchmark run` and `python -m trainer score`. Gives records; a file that breaks its
contract is an error here, so that the checks can trust their input. Leaves out: verdicts (`gates.py`).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deploy.release.artifact import ArtifactFacts
from pipelines.errors import ContractViolation

INFRA_ERROR: Final = "infra_error"


class Attempt(BaseModel):
    """One attempt at one benchmark task (a row of the benchmark's results)."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    suite: str
    task: str
    attempt: int
    user_key: str
    """The unit of every rate: attempts of one user resemble each other."""
    outcome: str
    """pass, fail or infra_error; an infra_error says nothing about the policy."""
    solved: bool
    turns: int = Field(ge=0)
    unscored_turns: int = Field(ge=0)
    calls: int = Field(ge=0)
    invalid_calls: int = Field(ge=0)
    asks: int = Field(ge=0)
    edits_proposed: int = Field(ge=0)


class ScoreRow(BaseModel):
    """One sample of the serving policy, scored by serving and candidate (a row of the trainer's scores)."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    user_key: str
    session_id: str
    n_tokens: int = Field(gt=0)
    self_gap: float
    """Mean |log p_serving recomputed - logged|, nats a token."""
    kl: float
    """Mean r - 1 - ln r with r = p_candidate / p_serving, nats a token."""

    @field_validator("self_gap", "kl", mode="before")
    @classmethod
    def _not_a_number(cls, value: object) -> object:
        return math.nan if value is None else value  # JSON has no NaN; the trainer writes null


class Pooled(BaseModel):
    """Figures over all scored tokens together (the totals of the trainer's scores)."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    p99_abs_log_ratio: float
    """99th percentile of |ln r| over all tokens, nats."""
    ess_share: float
    """Effective sample size over rows, of the rows' importance ratios."""
    entropy_ratio: float
    """Mean token entropy of the candidate over serving's."""

    @field_validator("*", mode="before")
    @classmethod
    def _not_a_number(cls, value: object) -> object:
        return math.nan if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What the ledger says at the time of the gate."""

    lease_held: bool
    frozen: str | None
    ships_today: int
    tombstoned: bool
    parent_serves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything one gate decides on; None or empty is no data, which never passes."""

    serving: str
    candidate: str
    anchor: str
    artifact: ArtifactFacts | None
    scores: tuple[ScoreRow, ...] = ()
    pooled: Pooled | None = None
    benchmark_serving: tuple[Attempt, ...] = ()
    benchmark_candidate: tuple[Attempt, ...] = ()
    benchmark_anchor: tuple[Attempt, ...] = ()
    process: ProcessFacts | None = None


def parse_attempts(rows: Iterable[Mapping[str, Any]], *, source: str) -> tuple[Attempt, ...]:
    """Parse benchmark rows.

    Raises:
        ContractViolation: A row breaks the schema; `source` says where it came from.
    """
    try:
        return tuple(Attempt.model_validate(row) for row in rows)
    except ValidationError as error:
        raise _broken(error, source) from error


def parse_scores(rows: Iterable[Mapping[str, Any]], *, source: str) -> tuple[ScoreRow, ...]:
    """Parse score rows; a NaN or infinite figure is kept, it is evidence against the candidate.

    Raises:
        ContractViolation: A row breaks the schema.
    """
    try:
        return tuple(ScoreRow.model_validate(row) for row in rows)
    except ValidationError as error:
        raise _broken(error, source) from error


def read_pooled(path: Path) -> Pooled | None:
    """Read the totals beside the score rows; None when the file holds rows alone.

    Raises:
        ContractViolation: A figure is not a number or null.
    """
    data = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
    if not Pooled.model_fields.keys() <= data.keys():
        return None
    try:
        return Pooled.model_validate(data)
    except ValidationError as error:
        raise _broken(error, str(path)) from error


def _broken(error: ValidationError, source: str) -> ContractViolation:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return ContractViolation(f"{source}: {where}: {first['msg']}; the gate needs rows of its own schema (deploy/release/evidence.py)")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows from JSON lines, or from the `rows` of a JSON object.

    Raises:
        ContractViolation: The file is missing or not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return list(json.loads(text)["rows"])
    except FileNotFoundError as error:
        raise ContractViolation(f"{path} does not exist; the stage that writes it did not finish, run it again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ContractViolation(f"{path} is not the result of a stage (JSON lines, or an object with `rows`)") from error


def by_user(rows: Iterable[tuple[str, float, float]]) -> tuple[list[float], list[float]]:
    """Sum (user, numerator, denominator) over each user's rows."""
    sums: dict[str, list[float]] = {}
    for user, numerator, denominator in rows:
        total = sums.setdefault(user, [0.0, 0.0])
        total[0] += numerator
        total[1] += denominator
    return [numerator for numerator, _ in sums.values()], [denominator for _, denominator in sums.values()]


def all_finite(values: Iterable[float]) -> bool:
    """Tell whether every value is a number."""
    return all(math.isfinite(value) for value in values)
