"""What happened in a turn, as Spark columns: one row a turn, before it is judged.

Mirror of `facts.py` and the first half of `sessions.py`. One aggregate by turn, by tool call, by session; a window only for what an
aggregate cannot say: which turn comes next.

Takes: de-duplicated events of whole sessions and their completions. Gives: turns with their facts, window and next user message.
Leaves out: edits (`edit_columns.py`), components (`component_columns.py`).
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from signals.components import FAILED, PASSED
from signals.config import RewardsConfig
from signals.facts import CONSENT, INVALID
from signals.sessions import ACTING, CHECKED, OPENING, SAID
from signals.tables import DAY

SESSION: Final = ("session_id",)
TURN: Final = (*SESSION, "turn_id")
MOMENT: Final = ("occurred_at_ms", "event_id")
"""What orders a session's events."""
CHECKS: Final = (
    "issues_before", "issues_after", "rules_checked", "rules_broken", "passed_before", "failed_before", "passed_after", "failed_after",
)  # fmt: skip


def p(name: str) -> Column:
    """Return a payload field."""
    return F.col(f"payload.{name}")


def is_type(*types: str) -> Column:
    """Return whether an event is of one of these types."""
    return F.col("type").isin(*types)


def moment() -> Column:
    """Return what orders a session's events."""
    return F.struct(*MOMENT)


def instant(name: str) -> Column:
    """Return epoch milliseconds as an instant."""
    return F.timestamp_millis(F.col(name))


def day(name: str) -> Column:
    """Return the UTC day of epoch milliseconds."""
    return F.to_date(instant(name))


def count_if(condition: Column) -> Column:
    """Count rows for which a condition holds; null is no."""
    return F.count_if(F.coalesce(condition, F.lit(False)))


def _score() -> Column:
    """Mirror of `facts.score`."""
    label = F.lower(F.trim(F.coalesce(p("score_label"), F.lit(""))))
    value = p("score_value")
    read = (
        F.when(label.isin(*PASSED), F.lit(1.0))
        .when(label.isin(*FAILED), F.lit(-1.0))
        .when((value >= 0.0) & (value <= 1.0), 2.0 * value - 1.0)
    )
    return F.when(is_type("feedback"), p("score")).when(is_type("evaluation"), read)


def _sampled(done: DataFrame) -> DataFrame:
    """Aggregate a turn's completions."""
    microseconds = F.floor(p("duration_ms") * 1000.0 + F.lit(0.5))
    return done.groupBy(*TURN).agg(
        F.count("*").alias("completions"),
        F.max("policy_version").alias("sampled_version"),
        F.min_by("arm", moment()).alias("sampled_arm"),
        F.sum(p("prompt_tokens")).alias("prompt_tokens"),
        F.sum(p("response_tokens")).alias("response_tokens"),
        (F.sum(microseconds) / F.lit(1000.0)).alias("sampling_ms"),
        F.max_by(p("ends_in_question"), moment()).alias("asked"),
        F.sum(p("claims")).alias("claims"),
        F.sum(p("claims_unread")).alias("claims_unread"),
        count_if(F.col("without_ids")).alias("without_ids"),
        count_if(F.col("broken")).alias("broken"),
        count_if(F.col("truncated")).alias("truncated"),
        count_if(p("finish_reason") == "error").alias("error_finishes"),
    )


def tool_calls(kept: DataFrame) -> DataFrame:
    """Return one row a tool call of a turn: its completion, and whether it was invalid, repeatable or serial. Mirror of `facts.calls`."""
    call = is_type("tool_call")
    bad = (call & ~p("arguments_valid")) | p("result_class").isin(*INVALID)
    said = F.struct(
        *MOMENT,
        p("completion_id").alias("completion_id"),
        F.coalesce(p("independent"), F.lit(False)).alias("serial"),
        F.when(
            p("arguments_hash").isNotNull() & p("changes_before").isNotNull(),
            F.struct(p("name").alias("name"), p("arguments_hash").alias("hash"), p("changes_before").alias("changes")),
        ).alias("same"),
    )
    return (
        kept.where(F.col("turn_id").isNotNull() & (call | (is_type("tool_result") & p("result_class").isin(*INVALID))))
        .groupBy(*TURN, p("tool_call_id").alias("tool_call_id"))
        .agg(F.min(F.when(call, said)).alias("said"), F.max(F.coalesce(bad, F.lit(False))).alias("bad"))
        .select(*TURN, "bad", "said.completion_id", "said.serial", "said.same")
    )


def _called(calls: DataFrame) -> DataFrame:
    """Aggregate a turn's tool calls."""
    same = F.when(~F.col("bad"), F.col("same"))
    return calls.groupBy(*TURN).agg(
        F.count("*").alias("calls"),
        F.count_if("bad").alias("invalid_calls"),
        (F.count(same) - F.size(F.collect_set(same))).cast("bigint").alias("repeats"),
        count_if(F.col("serial") & ~F.col("bad")).alias("serial_calls"),
    )


def _opened(kept: DataFrame) -> DataFrame:
    """Aggregate a turn's own events; only turns that something opened."""
    opening, acting = is_type(*OPENING), is_type(*ACTING)
    rank = F.array_position(F.lit(list(CONSENT)), F.col("consent"))
    message = F.struct(
        F.col("occurred_at_ms").alias("at"),
        p("turn_index").alias("turn_index"),
        p("message").alias("message"),
        p("language").alias("language"),
        F.coalesce(p("stack_traces"), F.lit(0)).alias("stack_traces"),
        p("reply_delay_ms").alias("reply_delay_ms"),
        p("edit_expected").alias("edit_expected"),
    )
    first = F.min_by(F.when(opening, F.struct("user_key", "origin", "arm")), F.when(opening, moment())).alias("first")
    said = F.struct(F.col("occurred_at_ms").alias("at"), "event_id", is_type("evaluation").alias("external"), _score().alias("score"))
    checked = F.struct(
        F.col("occurred_at_ms").alias("at"), "event_id", is_type("lint_delta").alias("lint"), *[p(name).alias(name) for name in CHECKS]
    )
    grouped = (
        kept.where(F.col("turn_id").isNotNull())
        .groupBy(*TURN)
        .agg(
            first,
            F.min(F.when(opening, F.col("occurred_at_ms"))).alias("started_at_ms"),
            F.max(F.when(acting, F.col("occurred_at_ms"))).alias("last_acted_at_ms"),
            F.max(F.when(opening, F.col("policy_version"))).alias("opening_version"),
            F.min(F.when(opening, rank)).alias("consent_rank"),
            F.min_by(F.when(is_type("turn_started"), message), F.when(is_type("turn_started"), moment())).alias("opening"),
            F.collect_list(F.when(is_type(*SAID) & _score().isNotNull(), said)).alias("said"),
            F.collect_list(F.when(is_type(*CHECKED), checked)).alias("checked"),
            count_if(p("result_class") == "provider_error").alias("provider_results"),
            (count_if(is_type("interrupted") & (p("by") == "user")) > 0).alias("interrupted"),
            (count_if(is_type("interrupted") & (p("by") == "system")) > 0).alias("stopped_by_system"),
        )
    )
    return grouped.where(F.col("started_at_ms").isNotNull())


def _session_facts(kept: DataFrame) -> DataFrame:
    started = is_type("session_started")
    start = F.struct(p("task_bucket").alias("task_bucket"), p("surface").alias("surface"), p("edits_observed").alias("edits_observed"))
    said = F.struct(F.col("occurred_at_ms").alias("at"), "event_id", _score().alias("score"))
    return (
        kept.where(is_type("session_started", "session_ended") | (is_type(*SAID) & F.col("turn_id").isNull()))
        .groupBy(*SESSION)
        .agg(
            F.min_by(F.when(started, start), F.when(started, moment())).alias("start"),
            F.collect_list(F.when(is_type("session_ended"), F.col("occurred_at_ms"))).alias("ended_at"),
            F.collect_list(F.when(is_type(*SAID) & _score().isNotNull(), said)).alias("session_said"),
        )
    )


def _shared(discount: float) -> Column:
    """Return the turn's share of what was said about the session, and the score, in order. Mirror of `credit.shares`."""

    def weight(last: Column, place: Column) -> Column:
        return F.pow(F.lit(discount), (last - place).cast("double"))

    def share(said: Column) -> Column:
        is_open = F.filter("windows", lambda w: (w["started_at_ms"] <= said["at"]) & (said["at"] <= w["closes_at_ms"]))
        last = F.array_max(F.transform(is_open, lambda w: w["position"]))
        whole = F.aggregate(is_open, F.lit(0.0), lambda total, w: total + weight(last, w["position"]))
        mine = (F.col("started_at_ms") <= said["at"]) & (said["at"] <= F.col("closes_at_ms"))
        return F.when(mine, F.struct((weight(last, F.col("position")) / whole).alias("share"), said["score"].alias("score")))

    given = F.filter(F.transform(F.array_sort("session_said"), share), lambda item: item.isNotNull())
    return F.when(F.size("session_said") > 0, given)


def facts(kept: DataFrame, done: DataFrame, calls: DataFrame, config: RewardsConfig, now_ms: int) -> DataFrame:
    """Return one row a turn: who, when, how it went, when its window closes, and the next user message.

    Args:
        kept: De-duplicated events.
        done: Its completions, one row each.
        calls: From `tool_calls`.
        config: Window and discount.
        now_ms: The instant that windows are closed against.
    """
    turns = _opened(kept).join(_sampled(done), [*TURN], "left").join(_called(calls), [*TURN], "left")
    turns = turns.join(_session_facts(kept), [*SESSION], "left")
    order = Window.partitionBy(*SESSION).orderBy(F.col("opening.turn_index").asc_nulls_last(), "started_at_ms", "turn_id")
    whole = order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    spoken = F.filter("said", lambda item: ~item["external"])
    ends = F.concat(F.coalesce("ended_at", F.array().cast("array<bigint>")), F.transform(spoken, lambda item: item["at"]))
    window = F.when(F.size("session_said") > 0, F.struct("position", "started_at_ms", "closes_at_ms"))
    placed = (
        turns.withColumn("acted_at_ms", F.coalesce(F.col("last_acted_at_ms"), F.col("started_at_ms")))
        .withColumn("early_at_ms", F.array_min(F.filter(ends, lambda at: at >= F.col("acted_at_ms"))))
        .withColumn("closes_at_ms", F.least(F.col("acted_at_ms") + config.window_s * 1000, F.col("early_at_ms")))
        .withColumns({"reply": F.lead("opening").over(order), "position": F.row_number().over(order) - 1})
        .withColumn("windows", F.collect_list(window).over(whole))
    )
    return placed.select(*TURN, *_described(config, now_ms))


def _described(config: RewardsConfig, now_ms: int) -> list[Column | str]:
    """Return a turn's facts by name."""
    zero = [
        F.coalesce(F.col(name), F.lit(0)).cast("bigint").alias(name)
        for name in (
            "completions", "prompt_tokens", "response_tokens", "without_ids", "broken", "truncated", "calls", "invalid_calls", "repeats",
            "serial_calls", "claims", "claims_unread",
        )
    ]  # fmt: skip
    return [
        F.col("first.user_key").alias("user_key"),
        F.col("first.origin").alias("origin"),
        "opening",
        "reply",
        "started_at_ms",
        day("started_at_ms").alias(DAY),
        "acted_at_ms",
        "closes_at_ms",
        "said",
        "checked",
        _shared(config.session_discount).alias("shared"),
        "sampling_ms",
        "interrupted",
        "stopped_by_system",
        *zero,
        F.coalesce("asked", F.lit(False)).alias("asked"),
        F.coalesce("sampled_arm", "first.arm").alias("arm"),
        F.coalesce("sampled_version", "opening_version").alias("policy_version"),
        F.coalesce(F.col("opening.turn_index"), F.col("position")).cast("int").alias("turn_index"),
        F.element_at(F.lit(list(CONSENT)), F.col("consent_rank").cast("int")).alias("consent"),
        F.col("start.task_bucket").alias("task_bucket"),
        F.col("start.surface").alias("surface"),
        F.coalesce("start.edits_observed", F.lit(False)).alias("edits_observed"),
        F.col("opening.language").alias("language"),
        F.col("opening.edit_expected").alias("edit_expected"),
        F.col("early_at_ms").isNotNull().alias("closed_early"),
        (F.col("early_at_ms").isNotNull() | (F.lit(now_ms) >= F.col("closes_at_ms"))).alias("final"),
        (F.col("provider_results") + F.coalesce("error_finishes", F.lit(0))).alias("provider_errors"),
    ]
