"""Rewards and outcomes as Spark columns, row by row on turns.

Mirrors of `rewards.py`, `outcomes.py` and `filters.py`, held equal by property tests. Written step by step through helper
columns: as one expression, shared parts would be planned and computed many times over.

Takes: turns with their facts and edit evidence. Gives: the same rows with components, reward and outcome.
Leaves out: how facts come from events (`transforms.py`).
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals.config import RewardsConfig
from signals.followup_columns import with_dissatisfied
from signals.rewards import ANY_BUCKET
from signals.samples import COMPONENTS, Outcome


def _median(config: RewardsConfig) -> Column:
    medians = config.latency_medians_ms
    fallback = F.lit(medians.get(ANY_BUCKET)).cast("double")
    named = [F.when(F.col("task_bucket") == bucket, F.lit(median)) for bucket, median in medians.items() if bucket != ANY_BUCKET]
    return F.coalesce(*named, fallback) if named else fallback


def with_components(turns: DataFrame, config: RewardsConfig) -> DataFrame:
    """Add components, P(dissatisfied), the scalar and late counts. Mirror of `rewards.components` and `rewards.scalar`."""
    in_time = F.col("reply.at") <= F.col("closes_at_ms")
    allowed = F.col("consent") != "none"
    latency = F.when(F.col("sampling_ms") > 0, -F.tanh(F.log(F.col("sampling_ms") / _median(config))))
    calls = F.when(F.col("calls") > 0, -F.least(F.col("invalid_calls"), F.lit(1)).cast("double"))
    judged = with_dissatisfied(
        turns,
        F.when(in_time & allowed, F.col("reply.message")),
        F.col("opening.message"),
        stack_traces=F.col("reply.stack_traces"),
        reply_delay_ms=F.col("reply.reply_delay_ms"),
        interrupted=F.col("interrupted"),
    )
    scored = judged.withColumns(
        {
            "followed_up": F.coalesce(in_time, F.lit(False)),
            "late": F.coalesce("late_edits", F.lit(0)) + F.when(F.col("reply.at") > F.col("closes_at_ms"), 1).otherwise(0),
            "edits_kept": F.when(allowed, F.col("edits_kept")),
            "follow_up": 1.0 - 2.0 * F.col("dissatisfied"),
            "latency": F.when(allowed, latency),
            "tool_calls": F.when(allowed, calls),
        }
    )
    total = value = F.lit(0.0)
    for name in COMPONENTS:
        counts = F.col(name).isNotNull() & ((F.col(name) != 0.0) if name == "tool_calls" else F.lit(True))
        weight = F.lit(config.weights.get(name, 0.0))
        total = total + F.when(counts, weight).otherwise(0.0)
        value = value + F.when(counts, weight * F.col(name)).otherwise(0.0)
    evident = F.col("edits_kept").isNotNull() | F.col("follow_up").isNotNull() | F.coalesce(F.col("tool_calls") < 0, F.lit(False))
    summed = scored.withColumns({"evident": evident, "_total": total, "_value": value})
    reward = F.when(F.col("final") & F.col("evident") & (F.col("_total") > 0), F.col("_value") / F.col("_total"))
    return summed.withColumn("reward", reward).drop("_total", "_value")


def with_outcome(turns: DataFrame, tombstoned: frozenset[int]) -> DataFrame:
    """Add the one outcome and its reason. Mirror of `outcomes.outcome` and `filters.not_trainable`."""
    infra = (
        F.when(F.col("provider_errors") > 0, "provider_error")
        .when(F.col("stopped_by_system"), "stopped_by_system")
        .when((F.col("completions") == 0) & F.col("final") & ~F.col("interrupted"), "no_completion")
    )
    dead = F.coalesce(F.col("policy_version").isin(*sorted(tombstoned)), F.lit(False)) if tombstoned else F.lit(False)
    untrainable = (
        F.when(F.col("consent") != "train", "no_consent")
        .when(dead, "quarantined_release")
        .when(F.col("broken") > 0, "capture_error")
        .when(F.col("without_ids") > 0, "no_token_ids")
        .when(F.col("truncated") > 0, "truncated_sampling")
    )
    name = (
        F.when(F.col("_infra").isNotNull(), Outcome.INFRA_ERROR.value)
        .when(F.col("_untrainable").isNotNull(), Outcome.NOT_TRAINABLE.value)
        .when(~F.col("final"), Outcome.PENDING.value)
        .when(F.col("evident"), Outcome.SCORED.value)
        .otherwise(Outcome.NO_EVIDENCE.value)
    )
    return turns.withColumns({"_infra": infra, "_untrainable": untrainable}).withColumns(
        {"outcome": name, "outcome_reason": F.coalesce("_infra", "_untrainable")}
    )
