"""The rules of distilling as Spark columns: native SQL expressions only, no Python per row, one shuffle.

The plain-Python mirror is `sessions.py`; property tests hold both equal. Facts of turns are in `turn_columns.py`, of edits in
`edit_columns.py`; components, reward and outcome in `component_columns.py` and `judgement.py`. Rows of a session stay together: everything
is grouped by (session_id, ...) on data partitioned by session_id once.

Takes: accepted events of whole sessions. Gives: the tables turns, edits, rewards, samples and conflicts as data frames.
Leaves out: which sessions to compute, reading and writing (`distil.py`).
"""

from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from signals.component_columns import with_components
from signals.config import RewardsConfig
from signals.edit_columns import edit_evidence, judged_edits
from signals.facts import ARRAYS
from signals.judgement import maturity, with_outcome, with_reward
from signals.norm_columns import with_norms
from signals.norms import NO_NORMS, Norms
from signals.rewards import reward_version
from signals.samples import COMPONENTS, Outcome
from signals.tables import CONFLICTS, DAY, EDITS, EVENTS, REWARDS, SAMPLES_TABLE, TURNS, Table
from signals.turn_columns import MOMENT, SESSION, TURN, day, facts, instant, is_type, p, tool_calls

PLACE: Final = ("topic", "partition", "offset")
"""Names a record of Kafka."""
UNREAD: Final = ("sketch", "explanation")
"""Long texts of events that no rule reads."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """The results of one distil, lazily."""

    turns: DataFrame
    edits: DataFrame
    rewards: DataFrame
    samples: DataFrame
    conflicts: DataFrame


def deduplicated(events: DataFrame) -> DataFrame:
    """Mark for every row whether it is the one kept of its event id (`_kept`) and whether it contradicts that one (`_conflict`)."""
    window = Window.partitionBy(*SESSION, "event_id").orderBy("recorded_at_ms", "fingerprint")
    return (
        events.withColumn("_kept", F.row_number().over(window) == 1)
        .withColumn("_conflict", F.col("fingerprint") != F.first("fingerprint").over(window))
        .where("_kept OR _conflict")
    )


def without_arrays(events: DataFrame) -> DataFrame:
    """Leave the packed arrays behind, which are most of an event's bytes, and keep what is asked of them: `_with_ids`, `_fit`.

    The arrays are read a second time where samples are made; carried along, they went through every shuffle, sort and checkpoint. Lengths
    are told from the text: what is no base64 never becomes an event (`intake.py`).
    """
    sizes = {name: _packed_bytes(p(name)) for name in ARRAYS}
    present = p(ARRAYS[0]).isNotNull() & p(ARRAYS[1]).isNotNull() & p(ARRAYS[2]).isNotNull()
    whole = (sizes[ARRAYS[0]] % 4 == 0) & (sizes[ARRAYS[1]] % 4 == 0) & (sizes[ARRAYS[2]] % 4 == 0)
    fields = [field.name for field in EVENTS.schema.field("payload").type if field.name not in (*ARRAYS, *UNREAD)]
    return events.withColumns(
        {
            "_with_ids": present,
            "_fit": present & F.coalesce(whole & (sizes["response_ids"] == sizes["behaviour_logprobs"]), F.lit(False)),
            "payload": F.struct(*[p(name).alias(name) for name in fields]),
        }
    ).drop("client", "arrived_at", "original")


def _packed_bytes(text: Column) -> Column:
    """Return how many bytes a base64 text stands for; null where its length is none of base64."""
    padding = F.when(F.endswith(text, F.lit("==")), 2).when(F.endswith(text, F.lit("=")), 1).otherwise(0)
    return F.when(F.octet_length(text) % 4 == 0, F.octet_length(text) / 4 * 3 - padding)


def completions(kept: DataFrame) -> DataFrame:
    """Return one row a completion id, with what its capture lacks."""
    window = Window.partitionBy(*SESSION, "payload.completion_id").orderBy(*MOMENT)
    rows = kept.where(is_type("completion")).withColumn("_nth", F.row_number().over(window)).where("_nth = 1")
    return (
        rows.withColumn("without_ids", ~F.col("_with_ids"))
        .withColumn("broken", p("capture_error").isNotNull() | (F.col("_with_ids") & ~F.col("_fit")))
        .withColumn("truncated", F.coalesce(p("top_p") < 1, F.lit(False)) | (F.coalesce(p("top_k"), F.lit(0)) > 0))
    )


def _arrays(events: DataFrame) -> DataFrame:
    """Return the packed arrays of completions, decoded, by the place of their record."""
    decoded = [F.try_to_binary(p(name), F.lit("base64")).alias(name) for name in ARRAYS]
    return events.where(is_type("completion")).select(*PLACE, *decoded)


def _as(frame: DataFrame, table: Table, **columns: Column) -> DataFrame:
    """Select a table's columns in order, taking those named here as given."""
    return frame.select(*[columns[name].alias(name) if name in columns else F.col(name) for name in table.schema.names])


def _samples(done: DataFrame, turns: DataFrame, arrays: DataFrame, version: str) -> DataFrame:
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
    # The arrays' side is streamed past a hash table of the other, whose rows are short: sorting it would move every byte once more.
    joined = arrays.join(rows.join(calls, [*TURN], "inner").hint("shuffle_hash"), [*PLACE], "inner")
    present = F.map_filter(F.map_from_arrays(F.lit(list(COMPONENTS)), F.array(*COMPONENTS)), lambda _, value: value.isNotNull())
    same = ("completion_id", "tokenizer_sha", "template_sha", "temperature", "top_p", "finish_reason")
    return _as(
        joined,
        SAMPLES_TABLE,
        **{name: p(name) for name in same},
        top_k=p("top_k").cast("int"),
        components=present,
        served_at=instant("occurred_at_ms"),
        reward_version=F.lit(version),
    )


def _call_validity(calls: DataFrame) -> DataFrame:
    """Return for each completion that made tool calls whether all of them were valid."""
    grouped = calls.where(F.col("completion_id").isNotNull()).groupBy(*SESSION, "completion_id")
    return grouped.agg((~F.bool_or("bad")).alias("tool_calls_valid"))


def distilled(
    events: DataFrame, config: RewardsConfig, *, now_ms: int, tombstoned: frozenset[int], partitions: int, norms: Norms = NO_NORMS
) -> Distilled:  # fmt: skip
    """Distil whole sessions.

    Args:
        events: Accepted events of complete sessions.
        config: Window and weights.
        now_ms: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.
        partitions: Spark partitions to spread the sessions over.
        norms: What was usual.

    Each stage is materialised and its lineage cut (`localCheckpoint`): with lineage, Spark analyses the whole plan again at every step,
    which cost more than the computation (measured by stack samples on small batches).
    """
    marked = deduplicated(without_arrays(events).repartition(partitions, *SESSION)).localCheckpoint()
    kept = marked.where("_kept")
    done, calls = completions(kept), tool_calls(kept)
    turns = facts(kept, done, calls, config, now_ms).localCheckpoint()
    edits = judged_edits(kept, turns, config.window_s).localCheckpoint()
    full = with_norms(turns.join(edit_evidence(edits), [*TURN], "left"), config, norms)
    full = with_outcome(with_reward(with_components(full, config), config, norms), tombstoned)
    version = reward_version(config, norms)
    full = full.withColumns({"matured_at": F.when(F.col("final"), instant("closes_at_ms")), "reward_version": F.lit(version)})
    full = full.localCheckpoint()
    sampled = _with_validity(done, _call_validity(calls))
    zero = {name: F.coalesce(F.col(name), F.lit(0)).cast("bigint") for name in ("edits", "edits_judged", "late")}
    return Distilled(
        turns=_as(full, TURNS, **{name: instant(f"{name}_ms") for name in ("started_at", "acted_at", "closes_at")}, **zero),
        edits=_as(edits, EDITS),
        rewards=_as(full, REWARDS, maturity=maturity(), norms_version=F.lit(norms.version or None).cast("string")),
        samples=_samples(sampled, full, _arrays(events), version),
        conflicts=_as(marked.where("_conflict"), CONFLICTS, **{DAY: day("occurred_at_ms")}),
    )


def _with_validity(done: DataFrame, validity: DataFrame) -> DataFrame:
    keyed = done.withColumn("completion_id", p("completion_id"))
    return keyed.join(validity, [*SESSION, "completion_id"], "left").drop("completion_id")
