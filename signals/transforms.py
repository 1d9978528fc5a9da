"""The rules of distilling as columns: whole sessions in, the rows of five tables out, by Polars, no Python per row.

The plain-Python mirror is `sessions.py`; property tests hold both equal. Facts of turns are in `turn_columns.py`, of edits in
`edit_columns.py`; components, reward and outcome in `component_columns.py` and `judgement.py`. The result is a function of the set of
events: every output is sorted by its key, and every sum is of whole numbers or in an order of its own.

Takes: accepted events of whole sessions as Arrow. Gives: rows of the tables turns, edits, rewards, samples and conflicts as Arrow.
Leaves out: which sessions to compute, how they are spread over processes, reading and writing (`distil.py`).
"""

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from signals.component_columns import with_components
from signals.config import RewardsConfig
from signals.edit_columns import edit_evidence, judged_edits
from signals.facts import ARRAYS
from signals.judge import NOT_JUDGED, Judged
from signals.judgement import maturity, with_outcome, with_reward
from signals.norm_columns import with_norms
from signals.norms import NO_NORMS, Norms
from signals.rewards import reward_version
from signals.samples import COMPONENTS, Outcome
from signals.tables import CONFLICTS, DAY, EDITS, REWARDS, SAMPLES_TABLE, TURNS, Table
from signals.turn_columns import LARGEST_INT32, MOMENT, SESSION, TURN, day, facts, first_of, instant, is_type, score, shared, tool_calls
from signals.wire import envelope_columns, payload_columns

ENVELOPE: Final = (
    "event_id", "type", "session_id", "turn_id", "occurred_at_ms", "recorded_at_ms", "origin", "policy_version", "arm", "user_key",
    "consent", "fingerprint", "topic", "partition", "offset",
)  # fmt: skip
"""Columns of the table `events` that rules read."""
PAYLOAD: Final = (
    "surface", "task_bucket", "edits_observed", "turn_index", "message", "language", "stack_traces", "reply_delay_ms", "edit_expected",
    "completion_id", "step", "prompt_ids", "response_ids", "behaviour_logprobs", "temperature", "top_p", "top_k", "tokenizer_sha",
    "template_sha", "finish_reason", "duration_ms", "prompt_tokens", "response_tokens", "capture_error", "ends_in_question", "claims",
    "claims_unread", "tool_call_id", "name", "arguments_valid", "arguments_hash", "changes_before", "independent", "result_class",
    "path_hash", "edit_id", "chars_added", "decision", "horizon_s", "survival_no_revert", "branch_changed", "milestone", "score", "by",
    "issues_before", "issues_after", "rules_checked", "rules_broken", "passed_before", "failed_before", "passed_after", "failed_after",
    "score_value", "score_label",
)  # fmt: skip
"""Fields of its payload that rules read."""
KINDS: Final = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
LARGEST: Final = 2**40
"""Any number that a client sends is read as at most that, so that sums and products of whole numbers cannot overflow: no count, duration
or size is meant to be larger, but an event with such a number is an event."""
RECORD: Final = {"fingerprint": pl.String, "topic": pl.String, "partition": pl.Int32, "offset": pl.Int64}
"""What the stream adds to an event."""
PREFIX: Final = "payload."
LEAVES: Final = (*ENVELOPE, *[PREFIX + name for name in PAYLOAD])
"""The same as columns of a Parquet file."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """The rows of one distil; each table has its columns in order, all nullable, and is sorted by its key."""

    turns: pa.Table
    edits: pa.Table
    rewards: pa.Table
    samples: pa.Table
    conflicts: pa.Table


def flat(events: pa.Table) -> pa.Table:
    """Return of stored events what the rules read: each field of the payload as a column of its own name.

    No name is both in the envelope and in the payload. A column that the lake of an earlier release lacks is left out, and reads as null.

    Args:
        events: Rows of the table `events`, `payload` a struct; with these columns or more.
    """
    found = events.flatten().replace_schema_metadata()
    wanted = [name for name in LEAVES if name in found.column_names]
    return found.select(wanted).rename_columns([name.removeprefix(PREFIX) for name in wanted])


def _columns(events: pa.Table) -> pl.DataFrame:
    """Return events as Polars columns of fixed types."""
    own = envelope_columns() | payload_columns()
    kinds = {name: KINDS[own[name]] if name in own else RECORD[name] for name in (*ENVELOPE, *PAYLOAD)}
    frame = pl.DataFrame(pl.from_arrow(events))
    read = [pl.col(name).cast(kind) if name in frame.columns else pl.lit(None, kind).alias(name) for name, kind in kinds.items()]
    numbers = [name for name in PAYLOAD if own[name] in (int, float)]
    return frame.select(read).with_columns(pl.col(numbers).clip(-LARGEST, LARGEST))


def deduplicated(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Keep one row an event id: the one recorded first, ties by content.

    Returns:
        Rows kept, in the order of their moments, and rows whose id was seen with other content.
    """
    keys = events.select(*SESSION, *MOMENT, "recorded_at_ms", "fingerprint").with_row_index("row")
    first = first_of(keys.sort("recorded_at_ms", "fingerprint"), [*SESSION, "event_id"]).sort(MOMENT)
    others = keys.join(first, on="row", how="anti").join(
        first.select(*SESSION, "event_id", pl.col("fingerprint").alias("first")), on=[*SESSION, "event_id"]
    )
    conflicting = others.filter(pl.col("fingerprint") != pl.col("first"))
    return events[first["row"]], events[conflicting["row"]]


def _packed_bytes(name: str) -> pl.Expr:
    """Return how many bytes a base64 text stands for; null where its length is none of base64."""
    text = pl.col(name)
    padding = pl.when(text.str.ends_with("==")).then(2).when(text.str.ends_with("=")).then(1).otherwise(0)
    return pl.when(text.str.len_bytes() % 4 == 0).then(text.str.len_bytes() // 4 * 3 - padding)


def completions(kept: pl.DataFrame) -> pl.DataFrame:
    """Return one row a completion id, in the order of their moments, with what its capture lacks."""
    sizes = {name: _packed_bytes(name) for name in ARRAYS}
    present = pl.all_horizontal(pl.col(name).is_not_null() for name in ARRAYS)
    whole = pl.all_horizontal(size % 4 == 0 for size in sizes.values())
    fit = (whole & (sizes["response_ids"] == sizes["behaviour_logprobs"])).fill_null(value=False)
    return first_of(kept.filter(is_type("completion")), [*SESSION, "completion_id"]).with_columns(
        (~present).alias("without_ids"),
        (pl.col("capture_error").is_not_null() | (present & ~fit)).alias("broken"),
        ((pl.col("top_p") < 1).fill_null(value=False) | (pl.col("top_k").fill_null(0) > 0)).alias("truncated"),
    )


def _unpacked(texts: pl.Series) -> pl.Series:
    """Return base64 texts as bytes; null where there is none.

    Polars reads canonical base64 alone. The stream also takes what has line breaks or unused bits at its end; such texts are rare, and read
    one by one.
    """
    found = texts.str.decode("base64", strict=False)
    odd = (found.is_null() & texts.is_not_null()).arg_true()
    return found.scatter(odd, [_lenient(text) for text in texts.gather(odd)]) if len(odd) else found


def _lenient(text: str) -> bytes | None:
    try:
        return binascii.a2b_base64(text)
    except binascii.Error:
        return None


def _samples(done: pl.DataFrame, calls: pl.DataFrame, turns: pl.DataFrame) -> pl.DataFrame:
    """Return one row a completion of a turn, with the turn's reward and its arrays as bytes."""
    of_turn = turns.select(
        *TURN, DAY, "user_key", "origin", "consent", "task_bucket", "language", "turn_index", "outcome", "outcome_reason", "matured_at",
        "reward_version", *COMPONENTS, pl.when(pl.col("outcome") == Outcome.SCORED.value).then(pl.col("reward")).alias("reward"),
    )  # fmt: skip
    own = (
        *TURN, *MOMENT, "completion_id", "step", "arm", "policy_version", "tokenizer_sha", "template_sha", *ARRAYS, "temperature", "top_p",
        "top_k", "finish_reason",
    )  # fmt: skip
    validity = (
        calls.filter(pl.col("completion_id").is_not_null())
        .group_by(*SESSION, "completion_id")
        .agg((~pl.col("bad").any()).alias("tool_calls_valid"))
    )
    joined = done.select(own).join(of_turn, on=TURN).join(validity, on=[*SESSION, "completion_id"], how="left")
    joined = joined.sort(*TURN, "step", *MOMENT)
    return joined.with_columns(
        pl.int_range(pl.len(), dtype=pl.Int32).over(TURN).alias("attempt"),
        instant("occurred_at_ms").alias("served_at"),
        pl.col("top_k").clip(upper_bound=LARGEST_INT32),
        *[_unpacked(joined[name]) for name in ARRAYS],
    )


def _table(frame: pl.DataFrame, table: Table, **columns: pa.Array) -> pa.Table:
    """Return a table's columns in order and of its types, taking those named here as given."""
    schema = pa.schema([field.with_nullable(True) for field in table.schema])
    found = frame.select(name for name in schema.names if name not in columns).to_arrow()
    return pa.table(
        [columns[field.name] if field.name in columns else found[field.name].cast(field.type) for field in schema], schema=schema
    )


def _map(frame: pl.DataFrame, values: Sequence[pl.Expr]) -> pa.Array:
    """Return for each row a map from the components that have a value to their values."""
    flat = frame.select(pl.concat_list(values).alias("all"))["all"].explode()
    present = flat.is_not_null().to_numpy().reshape(frame.height, len(COMPONENTS))
    ends = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32)
    names = pa.array(COMPONENTS, pa.string()).take(pa.array(np.nonzero(present)[1]))
    items = flat.drop_nulls().to_arrow()
    return pa.MapArray.from_arrays(pa.array(ends), names, items.cast(pa.string()) if flat.dtype == pl.String else items)


def distilled(
    events: pa.Table,
    config: RewardsConfig,
    *,
    now_ms: int,
    tombstoned: frozenset[int],
    norms: Norms = NO_NORMS,
    judged: Judged = NOT_JUDGED,
) -> Distilled:
    """Distil whole sessions.

    Args:
        events: All events of the sessions as `flat` gives them, in any order, duplicates included; strings plain or large.
        config: Window and weights.
        now_ms: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.
        norms: What was usual.
        judged: The judge's verdicts in force.
    """
    kept, conflicts = deduplicated(_columns(events))
    kept = kept.with_columns(score().alias("score"))
    done, calls = completions(kept), tool_calls(kept)
    turns = facts(kept, done, calls, config=config, now_ms=now_ms)
    edits = judged_edits(kept, turns, config.window_s)
    full = with_norms(turns.join(edit_evidence(edits), on=TURN, how="left"), config, norms)
    full = with_components(full, shared(kept, turns, config.session_discount), config, judged)
    full = with_outcome(with_reward(full, config, norms), tombstoned).sort(TURN)
    full = full.with_columns(
        *[instant(f"{name}_ms").alias(name) for name in ("started_at", "acted_at", "closes_at")],
        pl.when(pl.col("final")).then(instant("closes_at_ms")).alias("matured_at"),
        pl.col("stopped_by_user").alias("interrupted"),
        pl.lit(reward_version(config, norms, judged=judged.version)).alias("reward_version"),
        pl.lit(norms.version or None, pl.String).alias("norms_version"),
    )
    samples = _samples(done, calls, full)
    conflicts = conflicts.with_columns(day("occurred_at_ms").alias(DAY)).unique(CONFLICTS.schema.names).sort(CONFLICTS.schema.names)
    return Distilled(
        turns=_table(full, TURNS),
        edits=_table(edits.sort(*SESSION, "edit_id"), EDITS),
        rewards=_table(full, REWARDS, maturity=_map(full, maturity())),
        samples=_table(samples, SAMPLES_TABLE, components=_map(samples, [pl.col(name) for name in COMPONENTS])),
        conflicts=_table(conflicts, CONFLICTS),
    )
