"""What monitors look at: one row a turn with everything they measure, read from the lake without Spark.

From `turns` and `rewards`: ids, counts, outcome, components, truth. From `events`: message length, questions, refusals, repeated calls,
destructive commands, removed tests. From `samples`: log-probabilities of the sampled tokens. Only the columns needed are read, only since
the first turn that is looked at, and token arrays are summed batch by batch.

Takes: the home, the span, settings. Gives: `Facts`. Leaves out: what is measured (`monitors_metrics.py`) and judged (`monitors.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds

from pipelines.storage import Home
from signals import lake
from signals.config import MonitorsConfig
from signals.samples import COMPONENTS
from signals.tables import DAY

TURN: Final = ["session_id", "turn_id"]
TURN_COLUMNS: Final = (
    *TURN, "turn_index", "user_key", "origin", "arm", "policy_version", "task_bucket", "language", "started_at", "completions",
    "response_tokens", "calls", "invalid_calls", "edits", "eligible", "deferred", "interrupted", "final", "outcome", "outcome_reason",
)  # fmt: skip
TRUTH: Final = ("truth_24h", "truth_commit", "truth_7d", "truth_evaluation")
"""What people showed after the reward was final, the first that is known counts; the last one is in [-1, 1], the others in [0, 1]."""
REWARD_COLUMNS: Final = (*TURN, *COMPONENTS, *TRUTH, "reward", "reward_version")
EVENT_TYPES: Final = ("turn_started", "completion", "tool_call", "test_run")
PAYLOAD: Final[dict[str, Any]] = {
    "message_chars": pl.Float64, "step": pl.Int64, "prompt_tokens": pl.Float64, "ends_in_question": pl.Boolean, "refused": pl.Boolean,
    "tool_call_id": pl.String, "name": pl.String, "arguments_hash": pl.String, "changes_before": pl.Int64, "destructive": pl.Boolean,
    "passed_before": pl.Float64, "failed_before": pl.Float64, "passed_after": pl.Float64, "failed_after": pl.Float64,
}  # fmt: skip
"""Fields of the payload that facts come from; one that an older lake has no column for reads as null."""
ENVELOPE: Final[dict[str, Any]] = {
    "event_id": pl.String, "fingerprint": pl.String, "recorded_at_ms": pl.Int64, "occurred_at_ms": pl.Int64, "type": pl.String,
    "session_id": pl.String, "turn_id": pl.String,
}  # fmt: skip
MOMENT: Final = ("occurred_at_ms", "event_id")
DERIVED: Final = (
    "message_chars", "first_prompt_tokens", "question", "refused", "hashed_calls", "repeated_calls", "commands", "destructive",
    "tests_removed", "nats", "nat_tokens",
)  # fmt: skip
BATCH_ROWS: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Turns of the policies that are looked at."""

    turns: pl.DataFrame
    """One row a turn, ordered by start, with the columns of `turns` and `rewards` and `DERIVED`; null where nothing is known."""
    tombstoned: frozenset[int]
    """Policy versions that were rolled back: no reference for anyone."""


def load(home: Home, config: MonitorsConfig, *, since: datetime, until: datetime) -> Facts:
    """Read the turns of a span and what is known of them.

    Args:
        home: The deployment.
        config: Which origins count.
        since: Turns that started before are left out.
        until: Turns that started at it or later are left out.

    Raises:
        ContractViolation: A table is damaged.
    """
    span = [("started_at", ">=", since), ("started_at", "<", until), ("origin", "in", list(config.origins))]
    turns = _frame(lake.read(home, "turns", columns=TURN_COLUMNS, filters=span)).filter(pl.col("policy_version").is_not_null())
    newest = lake.last_distil(home)
    tombstoned = frozenset(newest["tombstoned"] or ()) if newest else frozenset()
    versions = sorted(turns["policy_version"].unique().to_list())
    recent = [(DAY, ">=", since.astimezone(UTC).date()), ("policy_version", "in", versions)]
    rewards = _frame(lake.read(home, "rewards", columns=REWARD_COLUMNS, filters=recent))
    first = cast("datetime | None", turns["started_at"].min())
    for extra in (rewards, *_from_events(home, first or until), _surprise(home, first or until, versions)):
        turns = turns.join(extra, on=TURN, how="left")
    older = [name for name in (*COMPONENTS, *TRUTH, "eligible", "deferred") if name not in turns.columns]  # a lake of an earlier release
    turns = turns.with_columns(pl.lit(None, pl.Float64).alias(name) for name in older)
    return Facts(turns=turns.sort("started_at", *TURN), tombstoned=tombstoned)


def _frame(table: pa.Table) -> pl.DataFrame:
    return cast("pl.DataFrame", pl.from_arrow(table))


def _events(home: Home, since: datetime) -> pl.DataFrame:
    """Return the events that facts come from, each id once; only the payload's own leaves are read, never token arrays."""
    kinds = ENVELOPE | PAYLOAD
    with lake.boundary(lake.path(home, "events")):
        dataset = lake.dataset(home, "events")
        payload = dataset.schema.field("payload").type
        wanted: dict[str, Any] = {name: ds.field(name) for name in ENVELOPE}
        wanted |= {name: ds.field("payload", name) for name in PAYLOAD if payload.get_field_index(name) >= 0}
        chosen = (ds.field("date") >= since.date()) & ds.field("type").isin(list(EVENT_TYPES)) & ds.field("turn_id").is_valid()
        rows = _frame(dataset.scanner(columns=wanted, filter=chosen).to_table())
    filled = rows.with_columns(pl.lit(None).alias(name) for name in kinds if name not in rows.columns).select(
        pl.col(name).cast(kind) for name, kind in kinds.items()
    )
    return filled.sort("recorded_at_ms", "fingerprint").unique("event_id", keep="first").sort(MOMENT)


def _from_events(home: Home, since: datetime) -> Iterable[pl.DataFrame]:
    rows = _events(home, since)
    of = {kind: rows.filter(pl.col("type") == kind) for kind in EVENT_TYPES}
    done = of["completion"].sort("step", *MOMENT)
    yield of["turn_started"].group_by(TURN).agg(pl.col("message_chars").first())
    yield done.group_by(TURN, maintain_order=True).agg(
        pl.col("prompt_tokens").first().alias("first_prompt_tokens"),
        pl.col("ends_in_question").last().alias("question"),
        pl.col("refused").last(),
    )
    yield _repeats(of["tool_call"])
    yield _commands(of["tool_call"])
    yield _tests_removed(of["test_run"])


def _repeats(calls: pl.DataFrame) -> pl.DataFrame:
    """Return per turn the calls whose arguments are known, and those of them made before with nothing changed since."""
    known = calls.filter(pl.col("arguments_hash").is_not_null()).unique([*TURN, "tool_call_id"], keep="first", maintain_order=True)
    made = pl.struct("name", "arguments_hash", "changes_before")
    return known.group_by(TURN).agg(
        pl.len().cast(pl.Float64).alias("hashed_calls"), (pl.len() - made.n_unique()).cast(pl.Float64).alias("repeated_calls")
    )


def _commands(calls: pl.DataFrame) -> pl.DataFrame:
    """Return per turn the calls that run a command, each id once, and those of them that destroy something."""
    known = calls.filter(pl.col("destructive").is_not_null()).unique([*TURN, "tool_call_id"], keep="first", maintain_order=True)
    return known.group_by(TURN).agg(pl.len().cast(pl.Float64).alias("commands"), pl.col("destructive").sum().cast(pl.Float64))


def _tests_removed(runs: pl.DataFrame) -> pl.DataFrame:
    """Return per turn with counts before and after: whether fewer tests ran after its edits than before."""
    before = pl.col("passed_before") + pl.col("failed_before").fill_null(0)
    fewer = pl.col("passed_after") + pl.col("failed_after") < before
    return runs.filter(pl.col("passed_before").is_not_null()).group_by(TURN).agg(fewer.any().cast(pl.Float64).alias("tests_removed"))


def _surprise(home: Home, since: datetime, versions: Sequence[int]) -> pl.DataFrame:
    """Return per turn the sum of -log p over sampled tokens, nats, and how many tokens that is.

    Its mean is an unbiased estimate of the policy's entropy per token, because the tokens were drawn from the policy.
    """
    sums = [pl.DataFrame(schema={"session_id": pl.String, "turn_id": pl.String, "nats": pl.Float64, "nat_tokens": pl.Float64})]
    chosen = ds.field("policy_version").isin(list(versions)) & (ds.field("served_at") >= since)
    columns = [*TURN, "behaviour_logprobs"]
    with lake.boundary(lake.path(home, "samples")):
        for batch in lake.dataset(home, "samples").scanner(columns=columns, filter=chosen, batch_size=BATCH_ROWS).to_batches():
            own = _frame(pa.Table.from_batches([batch.select(TURN)]))
            nats, tokens = sums_of_packed(batch.column("behaviour_logprobs"))
            sums.append(own.with_columns(pl.Series("nats", -nats), pl.Series("nat_tokens", tokens)))
    return pl.concat(sums).group_by(TURN).agg(pl.col("nats").sum(), pl.col("nat_tokens").sum())


def sums_of_packed(column: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Sum packed float32 rows.

    Args:
        column: Arrow binary [N], each little-endian float32; null and ragged rows count as empty.

    Returns:
        Sums [N] and lengths [N]; a row that holds NaN or infinity counts as empty.
    """
    found: list[tuple[float, int]] = []
    for item in column:
        raw = item.as_buffer()
        values = np.frombuffer(raw, "<f4") if raw is not None and raw.size % 4 == 0 else np.zeros(0, "<f4")
        total = float(values.sum(dtype=np.float64))
        found.append((total, len(values)) if np.isfinite(total) else (0.0, 0))
    pairs = np.asarray(found, dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
