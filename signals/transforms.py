"""The rules of distilling as Spark columns: native SQL expressions only, no Python per row, one shuffle.

The plain-Python mirror is `sessions.py`, `rewards.py`, `outcomes.py`, `filters.py`, `followups.py`; property tests hold both equal. Rows of a
session stay together: everything is grouped by (session_bucket, session_id, ...) on data partitioned by session_bucket once.

Takes: accepted events of whole sessions. Gives: the tables turns, edits, rewards, samples and conflicts as data frames.
Leaves out: which sessions to compute, reading and writing (`distil.py`).
"""

from dataclasses import astuple, dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from signals import followups
from signals.config import RewardsConfig
from signals.rewards import ANY_BUCKET, PARTLY_KEPT, SEVERITY, reward_version
from signals.samples import COMPONENTS, Outcome
from signals.sessions import ACTING, CONSENT, INVALID, OPENING
from signals.tables import BUCKET, CONFLICTS, EDITS, REWARDS, SAMPLES_TABLE, TURNS, Table

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
    cached: tuple[DataFrame, ...]
    """Frames to unpersist when the results have been written."""


def with_bucket(events: DataFrame, buckets: int) -> DataFrame:
    """Add the partition that a session's rows are rewritten with."""
    return events.withColumn(BUCKET, F.pmod(F.xxhash64("session_id"), F.lit(buckets)).cast("int"))


def _p(name: str) -> Column:
    return F.col(f"payload.{name}")


def _is(*types: str) -> Column:
    return F.col("type").isin(*types)


def _moment() -> Column:
    return F.struct(*MOMENT)


def _instant(name: str) -> Column:
    return F.timestamp_millis(F.col(name))


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
        F.col("occurred_at_ms").alias("at"), _p("turn_index").alias("turn_index"), _p("message").alias("message"),
        _p("language").alias("language"), F.coalesce(_p("stack_traces"), F.lit(0)).alias("stack_traces"),
        _p("reply_delay_ms").alias("reply_delay_ms"),
    )  # fmt: skip
    first = [F.min_by(F.when(opening, F.col(name)), F.when(opening, _moment())).alias(name) for name in ("user_key", "origin", "arm")]
    grouped = kept.where(F.col("turn_id").isNotNull()).groupBy(*TURN).agg(
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
    )  # fmt: skip
    return grouped.where(F.col("started_at_ms").isNotNull())


def _session_facts(kept: DataFrame) -> DataFrame:
    started = _is("session_started")
    return kept.groupBy(*SESSION).agg(
        F.min_by(F.when(started, F.struct(_p("task_bucket").alias("task_bucket"), _p("surface").alias("surface"))), F.when(started, _moment())).alias("start"),
        F.collect_list(F.when(_is("session_ended"), F.col("occurred_at_ms"))).alias("ended_at"),
    )  # fmt: skip


def facts(kept: DataFrame, done: DataFrame, config: RewardsConfig, now_ms: int) -> DataFrame:
    """Return one row a turn: who, when, how it went, when its window closes, and the next user message."""
    turns = _opened(kept).join(_sampled(done), [*TURN], "left").join(_session_facts(kept), [*SESSION], "left")
    order = Window.partitionBy(*SESSION).orderBy(F.col("opening.turn_index").asc_nulls_last(), "started_at_ms", "turn_id")
    acted = F.coalesce(F.col("last_acted_at_ms"), F.col("started_at_ms"))
    early = F.array_min(F.filter(F.concat("ended_at", "feedback_at"), lambda at: at >= F.col("acted_at_ms")))
    zero = [F.coalesce(F.col(name), F.lit(0)).cast("bigint").alias(name) for name in
            ("completions", "prompt_tokens", "response_tokens", "without_ids", "broken", "truncated")]  # fmt: skip
    return (
        turns.withColumn("acted_at_ms", acted)
        .withColumn("early_at_ms", early)
        .withColumn("closes_at_ms", F.least(F.col("acted_at_ms") + config.window_s * 1000, F.col("early_at_ms")))
        .withColumn("reply", F.lead("opening").over(order))
        .withColumn("position", F.row_number().over(order) - 1)
        .select(
            *TURN, "user_key", "origin", "opening", "reply", "started_at_ms", "closes_at_ms", "calls", "invalid_calls", "sampling_ms",
            "interrupted", "stopped_by_system", *zero,
            F.coalesce("sampled_arm", "arm").alias("arm"),
            F.coalesce("sampled_version", "opening_version").alias("policy_version"),
            F.coalesce(F.col("opening.turn_index"), F.col("position")).cast("int").alias("turn_index"),
            F.element_at(F.lit(list(CONSENT)), F.col("consent_rank").cast("int")).alias("consent"),
            F.col("start.task_bucket").alias("task_bucket"), F.col("start.surface").alias("surface"), F.col("opening.language").alias("language"),
            (F.col("early_at_ms").isNotNull() | (F.lit(now_ms) >= F.col("closes_at_ms"))).alias("final"),
            (F.col("provider_results") + F.coalesce("error_finishes", F.lit(0))).alias("provider_errors"),
        )
    )  # fmt: skip


def judged_edits(kept: DataFrame, turns: DataFrame, window_s: int) -> DataFrame:
    """Return one row an edit, judged by what was seen inside the window of the turn that proposed it."""
    severity = F.array_position(F.lit(list(SEVERITY)), _p("decision")).cast("int")
    proposal = F.struct("turn_id", _p("chars_added").alias("chars_added"), _p("path_hash").alias("path_hash"), "policy_version")
    is_proposal, at = _is("edit_proposed"), F.col("occurred_at_ms").alias("at")
    decided = F.when(_is("edit_decided"), F.struct(at, severity.alias("severity")))
    survived = F.when(
        _is("edit_survival"),
        F.struct(_p("horizon_s").alias("horizon_s"), (-_p("survival_no_revert")).alias("lost"), at, F.coalesce(_p("branch_changed"), F.lit(False)).alias("branch")),
    )  # fmt: skip
    grouped = (
        kept.where(_is("edit_proposed", "edit_decided", "edit_survival"))
        .groupBy(*SESSION, _p("edit_id").alias("edit_id"))
        .agg(
            F.min_by(F.when(is_proposal, proposal), F.when(is_proposal, _moment())).alias("proposal"),
            F.collect_list(decided).alias("decided"),
            F.collect_list(survived).alias("survived"),
        )
        .withColumn("turn_id", F.col("proposal.turn_id"))
    )
    joined = grouped.join(turns.select(*TURN, "closes_at_ms"), [*TURN], "left")
    closes, known = F.col("closes_at_ms"), F.col("closes_at_ms").isNotNull()
    inside = joined.withColumns({
        "_decided": F.filter("decided", lambda d: d["at"] <= closes),
        "_measured": F.filter("survived", lambda s: (s["at"] <= closes) & (s["horizon_s"] <= window_s)),
    })
    inside = inside.withColumns({
        "_best": F.array_max(F.filter("_measured", lambda s: ~s["branch"])),
        "decision": F.when(known, F.element_at(F.lit(list(SEVERITY)), F.array_max("_decided")["severity"])),
        "late": F.when(known, F.size("decided") + F.size("survived") - F.size("_decided") - F.size("_measured")).otherwise(F.lit(0)),
    })
    inside = inside.withColumns({"horizon_s": F.when(known, F.col("_best.horizon_s")), "survival_no_revert": F.when(known, -F.col("_best.lost"))})
    share = (
        F.when(F.col("decision").isin("rejected", "undone"), F.lit(0.0))
        .when(F.col("survival_no_revert").isNotNull(), F.col("survival_no_revert"))
        .when(F.col("decision") == "accepted", F.lit(1.0))
        .when(F.col("decision") == "partly", F.lit(PARTLY_KEPT))
    )
    chars = F.coalesce(F.col("proposal.chars_added"), F.lit(0))
    return inside.select(
        *TURN, "edit_id", F.col("proposal.policy_version").alias("policy_version"), F.col("proposal.path_hash").alias("path_hash"),
        chars.alias("chars_added"), "decision", "horizon_s", "survival_no_revert", share.alias("kept"),
        F.sqrt(F.greatest(chars, F.lit(1)).cast("double")).alias("weight"), "late",
    )  # fmt: skip


def _edit_evidence(edits: DataFrame) -> DataFrame:
    """Sum a turn's edits in the order of their ids, so that floating-point sums do not depend on arrival."""
    judged = F.array_sort(F.collect_list(F.when(F.col("kept").isNotNull(), F.struct("edit_id", "weight", "kept"))))
    total = F.aggregate("judged", F.lit(0.0), lambda a, e: a + e["weight"])
    stood = F.aggregate("judged", F.lit(0.0), lambda a, e: a + e["weight"] * e["kept"])
    return (
        edits.where(F.col("turn_id").isNotNull())
        .groupBy(*TURN)
        .agg(F.count("*").alias("edits"), judged.alias("judged"), F.sum("late").alias("late_edits"))
        .select(*TURN, "edits", F.size("judged").cast("bigint").alias("edits_judged"), "late_edits",
                F.when(F.size("judged") > 0, 2.0 * (stood / total) - 1.0).alias("edits_kept"))
    )  # fmt: skip


def normalised(text: Column) -> Column:
    """Mirror of `followups.normalise`."""
    plain = F.regexp_replace(F.lower(F.substring(text, 1, followups.MAX_CHARS)), followups.APOSTROPHES, "")
    return F.concat(F.lit(" "), F.trim(F.regexp_replace(plain, followups.SEPARATORS, " ")), F.lit(" "))


def _trigrams(text: Column) -> Column:
    """Return the distinct trigrams of the start of a normalised text column."""
    size = F.least(F.length(text), F.lit(followups.TRIGRAM_CHARS))
    starts = F.when(size >= 3, F.sequence(F.lit(1), size - 2)).otherwise(F.array().cast("array<int>"))
    return F.array_distinct(F.transform(starts, lambda i: F.substring(text, i, F.lit(3))))


def with_dissatisfied(
    frame: DataFrame, message: Column, previous: Column, *, stack_traces: Column, reply_delay_ms: Column, interrupted: Column
) -> DataFrame:
    """Add `dissatisfied`; null where there is no message. Mirror of `followups.features` and `followups.dissatisfied`.

    Step by step through helper columns: written as one expression, the text would be normalised a dozen times over.
    """
    text, before, after = F.col("_text"), F.col("_before"), F.col("_after")

    def has(phrases: tuple[str, ...]) -> Column:
        return text.rlike(followups.pattern(phrases)).cast("double")

    cap = F.lit(followups.DELAY_CAP_LOG)
    seconds = F.greatest(reply_delay_ms, F.lit(0)) / F.lit(1000.0)
    union = F.size(F.array_union(before, after))
    columns = {
        "missed": has(followups.MISSED),
        "redo": has(followups.REDO),
        "praise": has(followups.PRAISE),
        "onward": has(followups.ONWARD),
        "failure": F.when(stack_traces > 0, F.lit(1.0)).otherwise(has(followups.FAILURE)),
        "repeat": F.when(before.isNull() | (union == 0), F.lit(0.0)).otherwise(F.size(F.array_intersect(before, after)) / union),
        "interrupted": interrupted.cast("double"),
        "delay": F.when(reply_delay_ms.isNull(), F.lit(0.5)).otherwise(F.least(F.log1p(seconds), cap) / cap),
    }
    score = F.lit(followups.INTERCEPT)
    for name, weight in zip(followups.Features.__dataclass_fields__, astuple(followups.COEFFICIENTS), strict=True):
        score = score + F.lit(weight) * columns[name]
    helpers = frame.withColumns({"_text": normalised(message), "_was": normalised(previous)})
    helpers = helpers.withColumns({"_after": _trigrams(text), "_before": _trigrams(F.col("_was"))}).withColumn("_score", score)
    probability = F.when(text.isNotNull(), F.lit(1.0) / (F.lit(1.0) + F.exp(-F.col("_score"))))
    return helpers.withColumn("dissatisfied", probability).drop("_text", "_was", "_after", "_before", "_score")


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
        turns, F.when(in_time & allowed, F.col("reply.message")), F.col("opening.message"), stack_traces=F.col("reply.stack_traces"),
        reply_delay_ms=F.col("reply.reply_delay_ms"), interrupted=F.col("interrupted"),
    )  # fmt: skip
    scored = judged.withColumns({
        "followed_up": F.coalesce(in_time, F.lit(False)),
        "late": F.coalesce("late_edits", F.lit(0)) + F.when(F.col("reply.at") > F.col("closes_at_ms"), 1).otherwise(0),
        "edits_kept": F.when(allowed, F.col("edits_kept")),
        "follow_up": 1.0 - 2.0 * F.col("dissatisfied"),
        "latency": F.when(allowed, latency),
        "tool_calls": F.when(allowed, calls),
    })
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
    return (
        turns.withColumns({"_infra": infra, "_untrainable": untrainable})
        .withColumns({"outcome": name, "outcome_reason": F.coalesce("_infra", "_untrainable")})
    )


def _as(frame: DataFrame, table: Table, **columns: Column) -> DataFrame:
    """Select a table's columns in order, taking those named here as given."""
    return frame.select(*[columns[name].alias(name) if name in columns else F.col(name) for name in table.schema.names])


def _samples(done: DataFrame, turns: DataFrame, version: str) -> DataFrame:
    order = Window.partitionBy(*TURN).orderBy("payload.step", *MOMENT)
    calls = turns.select(*TURN, "user_key", "origin", "consent", "task_bucket", "language", "turn_index", "outcome", "outcome_reason", "matured_at",
                         F.when(F.col("outcome") == Outcome.SCORED.value, F.col("reward")).alias("reward"), *COMPONENTS)  # fmt: skip
    own = ("user_key", "origin", "consent")
    rows = done.where(F.col("turn_id").isNotNull()).withColumn("attempt", (F.row_number().over(order) - 1).cast("int")).drop(*own)
    joined = rows.join(calls, [*TURN], "inner")
    present = F.map_filter(F.map_from_arrays(F.lit(list(COMPONENTS)), F.array(*COMPONENTS)), lambda _, value: value.isNotNull())
    binary = {name: F.try_to_binary(_p(name), F.lit("base64")) for name in ARRAYS}
    same = ("completion_id", "tokenizer_sha", "template_sha", "temperature", "top_p", "finish_reason")
    return _as(
        joined, SAMPLES_TABLE, **binary, **{name: _p(name) for name in same}, top_k=_p("top_k").cast("int"), components=present,
        served_at=_instant("occurred_at_ms"), reward_version=F.lit(version),
    )  # fmt: skip


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
    """
    marked = deduplicated(events.repartition(partitions, BUCKET)).persist()
    kept = marked.where("_kept")
    done = completions(kept)
    turns = facts(kept, done, config, now_ms).persist()
    edits = judged_edits(kept, turns, config.window_s).persist()
    full = turns.join(_edit_evidence(edits), [*TURN], "left")
    full = with_outcome(with_components(full, config), tombstoned)
    version = reward_version(config)
    full = full.withColumns({"matured_at": F.when(F.col("final"), _instant("closes_at_ms")), "reward_version": F.lit(version)}).persist()
    sampled = _with_validity(done, _call_validity(kept))
    zero = {name: F.coalesce(F.col(name), F.lit(0)).cast("bigint") for name in ("edits", "edits_judged", "late")}
    return Distilled(
        turns=_as(full, TURNS, started_at=_instant("started_at_ms"), closes_at=_instant("closes_at_ms"), **zero),
        edits=_as(edits, EDITS),
        rewards=_as(full, REWARDS),
        samples=_samples(sampled, full, version),
        conflicts=_as(marked.where("_conflict"), CONFLICTS),
        cached=(marked, turns, edits, full),
    )


def _with_validity(done: DataFrame, validity: DataFrame) -> DataFrame:
    keyed = done.withColumn("completion_id", _p("completion_id"))
    return keyed.join(validity, [*SESSION, "completion_id"], "left").drop("completion_id")

