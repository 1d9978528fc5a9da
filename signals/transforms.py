"""The rules of distilling as Spark columns: native SQL expressions only, no Python per row, one shuffle.

The plain-Python mirror is `sessions.py`; property tests hold both equal. Rows of a session stay together: everything is
grouped by (session_bucket, session_id, ...) on data partitioned by session_bucket once.

Takes: accepted events of whole sessions. Gives: the tables turns, edits, rewards, samples and conflicts as data frames.
Leaves out: which sessions to compute, reading and writing (`distil.py`).
"""

from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from signals.config import RewardsConfig
from signals.judgement import with_components, with_outcome
from signals.rewards import PARTLY_KEPT, SEVERITY, reward_version
from signals.samples import COMPONENTS, Outcome
from signals.sessions import ACTING, CONSENT, INVALID, OPENING
from signals.tables import BUCKET, CONFLICTS, DAY, EDITS, REWARDS, SAMPLES_TABLE, TURNS, Table

SESSION: Final = (BUCKET, "session_id")
TURN: Final = (*SESSION, "turn_id")
ARRAYS: Final = ("prompt_ids", "response_ids", "behaviour_logprobs")
MOMENT: Final = ("occurred_at_ms", "event_id")
"""What orders a session's events."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """The results of one distil, lazily."""

    turns: DataFrame
    edits: DataFrame
    rewards: DataFrame
    samples: DataFrame
    conflicts: DataFrame


def with_bucket(events: DataFrame, buckets: int) -> DataFrame:
    """Add the number that keeps a session's rows together in a shuffle."""
    return events.withColumn(BUCKET, F.pmod(F.xxhash64("session_id"), F.lit(buckets)).cast("int"))


def _p(name: str) -> Column:
    return F.col(f"payload.{name}")


def _is(*types: str) -> Column:
    return F.col("type").isin(*types)


def _moment() -> Column:
    return F.struct(*MOMENT)


def _instant(name: str) -> Column:
    return F.timestamp_millis(F.col(name))


def _day(name: str) -> Column:
    return F.to_date(_instant(name))


def deduplicated(events: DataFrame) -> DataFrame:
    """Mark for every row whether it is the one kept of its event id (`_kept`) and whether it contradicts that one (`_conflict`)."""
    window = Window.partitionBy(*SESSION, "event_id").orderBy("recorded_at_ms", "fingerprint")
    return (
        events.withColumn("_kept", F.row_number().over(window) == 1)
        .withColumn("_conflict", F.col("fingerprint") != F.first("fingerprint").over(window))
        .where("_kept OR _conflict")
    )


def completions(kept: DataFrame) -> DataFrame:
    """Return one row a completion id, with its packed arrays and what its capture lacks."""
    window = Window.partitionBy(*SESSION, "payload.completion_id").orderBy(*MOMENT)
    rows = kept.where(_is("completion")).withColumn("_nth", F.row_number().over(window)).where("_nth = 1")
    decoded = {name: F.octet_length(F.try_to_binary(_p(name), F.lit("base64"))) for name in ARRAYS}
    whole = [decoded[name] % 4 == 0 for name in ARRAYS]
    fits = whole[0] & whole[1] & whole[2] & (decoded["response_ids"] == decoded["behaviour_logprobs"])
    all_present = _p(ARRAYS[0]).isNotNull() & _p(ARRAYS[1]).isNotNull() & _p(ARRAYS[2]).isNotNull()
    return (
        rows.withColumn("without_ids", ~all_present)
        .withColumn("broken", _p("capture_error").isNotNull() | (all_present & ~F.coalesce(fits, F.lit(False))))
        .withColumn("truncated", F.coalesce(_p("top_p") < 1, F.lit(False)) | (F.coalesce(_p("top_k"), F.lit(0)) > 0))
    )


def _count(condition: Column) -> Column:
    return F.count_if(F.coalesce(condition, F.lit(False)))


def _distinct(value: Column, condition: Column) -> Column:
    return F.collect_set(F.when(condition, value))


def _sampled(done: DataFrame) -> DataFrame:
    """Aggregate a turn's completions."""
    microseconds = F.floor(_p("duration_ms") * 1000.0 + F.lit(0.5))
    return done.groupBy(*TURN).agg(
        F.count("*").alias("completions"),
        F.max("policy_version").alias("sampled_version"),
        F.min_by("arm", _moment()).alias("sampled_arm"),
        F.sum(_p("prompt_tokens")).alias("prompt_tokens"),
        F.sum(_p("response_tokens")).alias("response_tokens"),
        (F.sum(microseconds) / F.lit(1000.0)).alias("sampling_ms"),
        _count(F.col("without_ids")).alias("without_ids"),
        _count(F.col("broken")).alias("broken"),
        _count(F.col("truncated")).alias("truncated"),
        _count(_p("finish_reason") == "error").alias("error_finishes"),
    )


def _opened(kept: DataFrame) -> DataFrame:
    """Aggregate a turn's own events; only turns that something opened."""
    opening, acting = _is(*OPENING), _is(*ACTING)
    rank = F.array_position(F.lit(list(CONSENT)), F.col("consent"))
    call, result = _is("tool_call"), _is("tool_result")
    bad = (call & ~_p("arguments_valid")) | (result & _p("result_class").isin(*INVALID))
    message = F.struct(
        F.col("occurred_at_ms").alias("at"),
        _p("turn_index").alias("turn_index"),
        _p("message").alias("message"),
        _p("language").alias("language"),
        F.coalesce(_p("stack_traces"), F.lit(0)).alias("stack_traces"),
        _p("reply_delay_ms").alias("reply_delay_ms"),
    )
    first = [F.min_by(F.when(opening, F.col(name)), F.when(opening, _moment())).alias(name) for name in ("user_key", "origin", "arm")]
    grouped = (
        kept.where(F.col("turn_id").isNotNull())
        .groupBy(*TURN)
        .agg(
            *first,
            F.min(F.when(opening, F.col("occurred_at_ms"))).alias("started_at_ms"),
            F.max(F.when(acting, F.col("occurred_at_ms"))).alias("last_acted_at_ms"),
            F.max(F.when(opening, F.col("policy_version"))).alias("opening_version"),
            F.min(F.when(opening, rank)).alias("consent_rank"),
            F.min_by(F.when(_is("turn_started"), message), F.when(_is("turn_started"), _moment())).alias("opening"),
            F.collect_list(F.when(_is("feedback"), F.col("occurred_at_ms"))).alias("feedback_at"),
            F.size(F.array_union(_distinct(_p("tool_call_id"), call), _distinct(_p("tool_call_id"), bad))).cast("bigint").alias("calls"),
            F.size(_distinct(_p("tool_call_id"), bad)).cast("bigint").alias("invalid_calls"),
            _count(result & (_p("result_class") == "provider_error")).alias("provider_results"),
            (_count(_is("interrupted") & (_p("by") == "user")) > 0).alias("interrupted"),
            (_count(_is("interrupted") & (_p("by") == "system")) > 0).alias("stopped_by_system"),
        )
    )
    return grouped.where(F.col("started_at_ms").isNotNull())


def _session_facts(kept: DataFrame) -> DataFrame:
    started = _is("session_started")
    return kept.groupBy(*SESSION).agg(
        F.min_by(
            F.when(started, F.struct(_p("task_bucket").alias("task_bucket"), _p("surface").alias("surface"))), F.when(started, _moment())
        ).alias("start"),
        F.collect_list(F.when(_is("session_ended"), F.col("occurred_at_ms"))).alias("ended_at"),
    )


def facts(kept: DataFrame, done: DataFrame, config: RewardsConfig, now_ms: int) -> DataFrame:
    """Return one row a turn: who, when, how it went, when its window closes, and the next user message."""
    turns = _opened(kept).join(_sampled(done), [*TURN], "left").join(_session_facts(kept), [*SESSION], "left")
    order = Window.partitionBy(*SESSION).orderBy(F.col("opening.turn_index").asc_nulls_last(), "started_at_ms", "turn_id")
    acted = F.coalesce(F.col("last_acted_at_ms"), F.col("started_at_ms"))
    early = F.array_min(F.filter(F.concat("ended_at", "feedback_at"), lambda at: at >= F.col("acted_at_ms")))
    zero = [
        F.coalesce(F.col(name), F.lit(0)).cast("bigint").alias(name)
        for name in ("completions", "prompt_tokens", "response_tokens", "without_ids", "broken", "truncated")
    ]
    return (
        turns.withColumn("acted_at_ms", acted)
        .withColumn("early_at_ms", early)
        .withColumn("closes_at_ms", F.least(F.col("acted_at_ms") + config.window_s * 1000, F.col("early_at_ms")))
        .withColumn("reply", F.lead("opening").over(order))
        .withColumn("position", F.row_number().over(order) - 1)
        .select(
            *TURN,
            "user_key",
            "origin",
            "opening",
            "reply",
            "started_at_ms",
            _day("started_at_ms").alias(DAY),
            "closes_at_ms",
            "calls",
            "invalid_calls",
            "sampling_ms",
            "interrupted",
            "stopped_by_system",
            *zero,
            F.coalesce("sampled_arm", "arm").alias("arm"),
            F.coalesce("sampled_version", "opening_version").alias("policy_version"),
            F.coalesce(F.col("opening.turn_index"), F.col("position")).cast("int").alias("turn_index"),
            F.element_at(F.lit(list(CONSENT)), F.col("consent_rank").cast("int")).alias("consent"),
            F.col("start.task_bucket").alias("task_bucket"),
            F.col("start.surface").alias("surface"),
            F.col("opening.language").alias("language"),
            (F.col("early_at_ms").isNotNull() | (F.lit(now_ms) >= F.col("closes_at_ms"))).alias("final"),
            (F.col("provider_results") + F.coalesce("error_finishes", F.lit(0))).alias("provider_errors"),
        )
    )


def judged_edits(kept: DataFrame, turns: DataFrame, window_s: int) -> DataFrame:
    """Return one row an edit, judged by what was seen inside the window of the turn that proposed it."""
    severity = F.array_position(F.lit(list(SEVERITY)), _p("decision")).cast("int")
    proposal = F.struct("turn_id", _p("chars_added").alias("chars_added"), _p("path_hash").alias("path_hash"), "policy_version")
    is_proposal, at = _is("edit_proposed"), F.col("occurred_at_ms").alias("at")
    decided = F.when(_is("edit_decided"), F.struct(at, severity.alias("severity")))
    survived = F.when(
        _is("edit_survival"),
        F.struct(
            _p("horizon_s").alias("horizon_s"),
            (-_p("survival_no_revert")).alias("lost"),
            at,
            F.coalesce(_p("branch_changed"), F.lit(False)).alias("branch"),
        ),
    )
    grouped = (
        kept.where(_is("edit_proposed", "edit_decided", "edit_survival"))
        .groupBy(*SESSION, _p("edit_id").alias("edit_id"))
        .agg(
            F.min_by(F.when(is_proposal, proposal), F.when(is_proposal, _moment())).alias("proposal"),
            F.collect_list(decided).alias("decided"),
            F.collect_list(survived).alias("survived"),
            F.min("occurred_at_ms").alias("first_at_ms"),
        )
        .withColumn("turn_id", F.col("proposal.turn_id"))
    )
    joined = grouped.join(turns.select(*TURN, "closes_at_ms", F.col(DAY).alias("_day")), [*TURN], "left")
    closes, known = F.col("closes_at_ms"), F.col("closes_at_ms").isNotNull()
    inside = joined.withColumns(
        {
            "_decided": F.filter("decided", lambda d: d["at"] <= closes),
            "_measured": F.filter("survived", lambda s: (s["at"] <= closes) & (s["horizon_s"] <= window_s)),
        }
    )
    inside = inside.withColumns(
        {
            "_best": F.array_max(F.filter("_measured", lambda s: ~s["branch"])),
            # The size is checked because element_at of a null index gives the last element here, not null.
            "decision": F.when(known & (F.size("_decided") > 0), F.element_at(F.lit(list(SEVERITY)), F.array_max("_decided")["severity"])),
            "late": F.when(known, F.size("decided") + F.size("survived") - F.size("_decided") - F.size("_measured")).otherwise(F.lit(0)),
        }
    )
    inside = inside.withColumns(
        {"horizon_s": F.when(known, F.col("_best.horizon_s")), "survival_no_revert": F.when(known, -F.col("_best.lost"))}
    )
    share = (
        F.when(F.col("decision").isin("rejected", "undone"), F.lit(0.0))
        .when(F.col("survival_no_revert").isNotNull(), F.col("survival_no_revert"))
        .when(F.col("decision") == "accepted", F.lit(1.0))
        .when(F.col("decision") == "partly", F.lit(PARTLY_KEPT))
    )
    chars = F.coalesce(F.col("proposal.chars_added"), F.lit(0))
    return inside.select(
        *TURN,
        "edit_id",
        F.col("proposal.policy_version").alias("policy_version"),
        F.col("proposal.path_hash").alias("path_hash"),
        chars.alias("chars_added"),
        "decision",
        "horizon_s",
        "survival_no_revert",
        share.alias("kept"),
        F.sqrt(F.greatest(chars, F.lit(1)).cast("double")).alias("weight"),
        F.coalesce("_day", _day("first_at_ms")).alias(DAY),
        "late",
    )


def _edit_evidence(edits: DataFrame) -> DataFrame:
    """Sum a turn's edits in the order of their ids, so that floating-point sums do not depend on arrival."""
    judged = F.array_sort(F.collect_list(F.when(F.col("kept").isNotNull(), F.struct("edit_id", "weight", "kept"))))
    total = F.aggregate("judged", F.lit(0.0), lambda a, e: a + e["weight"])
    stood = F.aggregate("judged", F.lit(0.0), lambda a, e: a + e["weight"] * e["kept"])
    return (
        edits.where(F.col("turn_id").isNotNull())
        .groupBy(*TURN)
        .agg(F.count("*").alias("edits"), judged.alias("judged"), F.sum("late").alias("late_edits"))
        .select(
            *TURN,
            "edits",
            F.size("judged").cast("bigint").alias("edits_judged"),
            "late_edits",
            F.when(F.size("judged") > 0, 2.0 * (stood / total) - 1.0).alias("edits_kept"),
        )
    )


def _as(frame: DataFrame, table: Table, **columns: Column) -> DataFrame:
    """Select a table's columns in order, taking those named here as given."""
    return frame.select(*[columns[name].alias(name) if name in columns else F.col(name) for name in table.schema.names])


def _samples(done: DataFrame, turns: DataFrame, version: str) -> DataFrame:
    order = Window.partitionBy(*TURN).orderBy("payload.step", *MOMENT)
    calls = turns.select(
        *TURN,
        DAY,
        "user_key",
        "origin",
        "consent",
        "task_bucket",
        "language",
        "turn_index",
        "outcome",
        "outcome_reason",
        "matured_at",
        F.when(F.col("outcome") == Outcome.SCORED.value, F.col("reward")).alias("reward"),
        *COMPONENTS,
    )
    own = ("user_key", "origin", "consent")
    rows = done.where(F.col("turn_id").isNotNull()).withColumn("attempt", (F.row_number().over(order) - 1).cast("int")).drop(*own, DAY)
    joined = rows.join(calls, [*TURN], "inner")
    present = F.map_filter(F.map_from_arrays(F.lit(list(COMPONENTS)), F.array(*COMPONENTS)), lambda _, value: value.isNotNull())
    binary = {name: F.try_to_binary(_p(name), F.lit("base64")) for name in ARRAYS}
    same = ("completion_id", "tokenizer_sha", "template_sha", "temperature", "top_p", "finish_reason")
    return _as(
        joined,
        SAMPLES_TABLE,
        **binary,
        **{name: _p(name) for name in same},
        top_k=_p("top_k").cast("int"),
        components=present,
        served_at=_instant("occurred_at_ms"),
        reward_version=F.lit(version),
    )


def _call_validity(kept: DataFrame) -> DataFrame:
    """Return for each completion that made tool calls whether all of them were valid."""
    per_call = (
        kept.where(_is("tool_call", "tool_result"))
        .groupBy(*SESSION, _p("tool_call_id").alias("tool_call_id"))
        .agg(
            F.min_by(F.when(_is("tool_call"), _p("completion_id")), F.when(_is("tool_call"), _moment())).alias("completion_id"),
            (_count((_is("tool_call") & ~_p("arguments_valid")) | _p("result_class").isin(*INVALID)) == 0).alias("valid"),
        )
    )
    grouped = per_call.where(F.col("completion_id").isNotNull()).groupBy(*SESSION, "completion_id")
    return grouped.agg(F.bool_and("valid").alias("tool_calls_valid"))


def distilled(events: DataFrame, config: RewardsConfig, *, now_ms: int, tombstoned: frozenset[int], partitions: int) -> Distilled:
    """Distil whole sessions.

    Args:
        events: Accepted events of complete sessions, with `session_bucket`.
        config: Window and weights.
        now_ms: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.
        partitions: Spark partitions to spread the buckets over.

    Each stage is materialised and its lineage cut (`localCheckpoint`): with lineage, Spark analyses the whole plan again at every step,
    which cost more than the computation (measured by stack samples on small batches).
    """
    marked = deduplicated(events.repartition(partitions, BUCKET)).localCheckpoint()
    kept = marked.where("_kept")
    done = completions(kept)
    turns = facts(kept, done, config, now_ms).localCheckpoint()
    edits = judged_edits(kept, turns, config.window_s).localCheckpoint()
    full = turns.join(_edit_evidence(edits), [*TURN], "left")
    full = with_outcome(with_components(full, config), tombstoned)
    version = reward_version(config)
    full = full.withColumns({"matured_at": F.when(F.col("final"), _instant("closes_at_ms")), "reward_version": F.lit(version)})
    full = full.localCheckpoint()
    sampled = _with_validity(done, _call_validity(kept))
    zero = {name: F.coalesce(F.col(name), F.lit(0)).cast("bigint") for name in ("edits", "edits_judged", "late")}
    return Distilled(
        turns=_as(full, TURNS, started_at=_instant("started_at_ms"), closes_at=_instant("closes_at_ms"), **zero),
        edits=_as(edits, EDITS),
        rewards=_as(full, REWARDS),
        samples=_samples(sampled, full, version),
        conflicts=_as(marked.where("_conflict"), CONFLICTS, **{DAY: _day("occurred_at_ms")}),
    )


def _with_validity(done: DataFrame, validity: DataFrame) -> DataFrame:
    keyed = done.withColumn("completion_id", _p("completion_id"))
    return keyed.join(validity, [*SESSION, "completion_id"], "left").drop("completion_id")
