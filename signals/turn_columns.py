"""What happened in a turn, as columns: one row a turn, before it is judged.

Mirror of `facts.py` and the first half of `sessions.py`. Rows come in the order of their moments, so that the first and the last of a
group are the first and the last that happened. One aggregate by turn, by tool call, by session for each kind of event.

Takes: de-duplicated events of whole sessions, in order, and their completions. Gives: turns with their facts, window and next user message.
Leaves out: edits (`edit_columns.py`), components (`component_columns.py`).
"""

from collections.abc import Sequence
from typing import Final

import polars as pl

from signals.components import FAILED, PASSED
from signals.config import RewardsConfig
from signals.facts import CONSENT, INVALID
from signals.sessions import ACTING, CHECKED, OPENING, SAID
from signals.tables import DAY

SESSION: Final = ("session_id",)
TURN: Final = (*SESSION, "turn_id")
MOMENT: Final = ("occurred_at_ms", "event_id")
"""What orders a session's events."""
LARGEST_INT32: Final = 2**31 - 1
LINTED: Final = ("issues_before", "issues_after", "rules_checked", "rules_broken")
TESTED: Final = ("passed_before", "failed_before", "passed_after", "failed_after")
OPENED: Final = ("turn_index", "message", "language", "stack_traces", "reply_delay_ms", "edit_expected")
"""What the user message that opens a turn says."""
REPLY: Final = {
    "message_at_ms": "reply_at_ms", "message": "reply", "stack_traces": "reply_stack_traces", "reply_delay_ms": "reply_after_ms",
}  # fmt: skip
"""Column of a turn's own message -> of the message that opens the next turn."""


def is_type(*types: str) -> pl.Expr:
    """Return whether an event is of one of these types."""
    return pl.col("type").is_in(types)


def instant(name: str) -> pl.Expr:
    """Return epoch milliseconds as an instant."""
    return (pl.col(name) * 1000).cast(pl.Datetime("us", "UTC"))


def day(name: str) -> pl.Expr:
    """Return the UTC day of epoch milliseconds."""
    return instant(name).dt.date()


def count_if(condition: pl.Expr) -> pl.Expr:
    """Count rows for which a condition holds; null is no."""
    return condition.fill_null(value=False).cast(pl.Int64).sum()


def rows() -> pl.Expr:
    """Count rows."""
    return pl.len().cast(pl.Int64)


def ratio(value: pl.Expr, by: pl.Expr | float) -> pl.Expr:
    """Return value / by, correctly rounded.

    Polars divides by a single number by multiplying with its reciprocal, but not where a frame has one row: the last bit would depend on
    how many turns are computed together. So the divisor is made a column.
    """
    return value / (value * 0.0 + by)


def first_of(frame: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Return the first row of each key, in order."""
    return frame.unique(keys, keep="first", maintain_order=True)


def score() -> pl.Expr:
    """Return what a feedback or evaluation says, in [-1, 1]; null when it cannot be read. Mirror of `facts.score`."""
    label, value = pl.col("score_label").fill_null("").str.strip_chars(" ").str.to_lowercase(), pl.col("score_value")
    read = (
        pl.when(label.is_in(PASSED))
        .then(1.0)
        .when(label.is_in(FAILED))
        .then(-1.0)
        .when((value >= 0.0) & (value <= 1.0))
        .then(2.0 * value - 1.0)
    )
    return pl.when(is_type("feedback")).then(pl.col("score")).when(is_type("evaluation")).then(read)


def _sampled(done: pl.DataFrame) -> pl.DataFrame:
    """Aggregate a turn's completions."""
    microseconds = (pl.col("duration_ms") * 1000.0 + 0.5).floor().cast(pl.Int64)
    return done.group_by(TURN).agg(
        rows().alias("completions"),
        pl.col("policy_version").max().alias("sampled_version"),
        pl.col("arm").first().alias("sampled_arm"),
        pl.col("prompt_tokens", "response_tokens", "claims", "claims_unread").sum(),
        pl.when(pl.col("duration_ms").count() > 0).then(microseconds.sum()).alias("sampling_us"),
        pl.col("ends_in_question").last().alias("asked"),
        *[count_if(pl.col(name)).alias(name) for name in ("without_ids", "broken", "truncated")],
        count_if(pl.col("finish_reason") == "error").alias("error_finishes"),
    )


def tool_calls(kept: pl.DataFrame) -> pl.DataFrame:
    """Return one row a tool call of a turn: its completion, what it asked for, whether it was invalid. Mirror of `facts.calls`."""
    is_call, refused = is_type("tool_call"), pl.col("result_class").is_in(INVALID).fill_null(value=False)
    bad = (is_call & ~pl.col("arguments_valid")).fill_null(value=False) | refused
    seen = kept.filter(pl.col("turn_id").is_not_null() & (is_call | (is_type("tool_result") & refused)))
    said = ("completion_id", "name", "arguments_hash", "changes_before", "independent")
    return seen.group_by(*TURN, "tool_call_id").agg(bad.any().alias("bad"), *[pl.col(name).filter(is_call).first() for name in said])


def _called(calls: pl.DataFrame) -> pl.DataFrame:
    """Aggregate a turn's tool calls."""
    same = ("name", "arguments_hash", "changes_before")
    known = ~pl.col("bad") & pl.col("arguments_hash").is_not_null() & pl.col("changes_before").is_not_null()
    distinct = calls.filter(known).select(*TURN, *same).unique().group_by(TURN).agg(rows().alias("distinct"))
    grouped = calls.group_by(TURN).agg(
        rows().alias("calls"),
        count_if(pl.col("bad")).alias("invalid_calls"),
        count_if(known).alias("known"),
        count_if(pl.col("independent") & ~pl.col("bad")).alias("serial_calls"),
    )
    joined = grouped.join(distinct, on=TURN, how="left")
    return joined.with_columns((pl.col("known") - pl.col("distinct").fill_null(0)).alias("repeats")).drop("known", "distinct")


def _opened(kept: pl.DataFrame) -> pl.DataFrame:
    """Aggregate a turn's own events; only turns that something opened."""
    own = kept.filter(is_type(*OPENING) & pl.col("turn_id").is_not_null())
    at, rank = pl.col("occurred_at_ms"), pl.col("consent").replace_strict(CONSENT, range(len(CONSENT)), return_dtype=pl.Int64)
    turns = own.group_by(TURN).agg(
        pl.col("user_key", "origin", "arm").first(),
        at.min().alias("started_at_ms"),
        at.filter(is_type(*ACTING)).max().alias("last_acted_at_ms"),
        pl.col("policy_version").max().alias("opening_version"),
        rank.min().alias("consent_rank"),
        count_if(pl.col("result_class") == "provider_error").alias("provider_results"),
        *[(is_type("interrupted") & (pl.col("by") == who)).any().alias(f"stopped_by_{who}") for who in ("user", "system")],
    )  # fmt: skip
    messages = first_of(own.filter(is_type("turn_started")), TURN).select(*TURN, at.alias("message_at_ms"), *OPENED)
    return turns.join(messages, on=TURN, how="left")


def _session_facts(kept: pl.DataFrame) -> pl.DataFrame:
    start = first_of(kept.filter(is_type("session_started")), SESSION)
    return start.select(*SESSION, "task_bucket", "surface", "edits_observed")


def _placed(turns: pl.DataFrame) -> pl.DataFrame:
    """Put each session's turns in order: adds their place and the user message that opens the next one."""
    order = ("session_id", "turn_index", "started_at_ms", "turn_id")
    return turns.sort(order, nulls_last=True).with_columns(
        pl.int_range(pl.len(), dtype=pl.Int64).over(SESSION).alias("position"),
        *[pl.col(name).shift(-1).over(SESSION).alias(new) for name, new in REPLY.items()],
    )


def _closing(turns: pl.DataFrame, kept: pl.DataFrame, window_ms: int) -> pl.DataFrame:
    """Say when each turn closes: after its time, or early when the session ends or the user scores it."""
    at = pl.col("occurred_at_ms")
    ended = kept.filter(is_type("session_ended")).select(*SESSION, at)
    scored = kept.filter(is_type("feedback") & pl.col("score").is_not_null()).select(*TURN, at)
    acted = turns.select(*TURN, "acted_at_ms")
    ends = pl.concat([acted.join(ended, on=SESSION), acted.join(scored, on=TURN)]).filter(at >= pl.col("acted_at_ms"))
    early = ends.group_by(TURN).agg(at.min().alias("early_at_ms"))
    closes = pl.min_horizontal(pl.col("acted_at_ms") + window_ms, "early_at_ms")
    return turns.join(early, on=TURN, how="left").with_columns(closes.alias("closes_at_ms"))


def _stated(turns: pl.DataFrame, kept: pl.DataFrame) -> pl.DataFrame:
    """Say what lint, tests, people and evaluators last said of each turn inside its window, and how much came late."""
    said = is_type(*CHECKED) | (is_type(*SAID) & pl.col("score").is_not_null())
    seen = kept.filter(said & pl.col("turn_id").is_not_null()).join(turns.select(*TURN, "closes_at_ms"), on=TURN, maintain_order="left")
    in_time = pl.col("occurred_at_ms") <= pl.col("closes_at_ms")

    def last(name: str, kind: str) -> pl.Expr:
        return pl.col(name).filter(is_type(kind) & in_time).last()

    stated = seen.group_by(TURN).agg(
        *[last(name, "lint_delta") for name in LINTED],
        *[last(name, "test_run") for name in TESTED],
        *[last("score", kind).alias(kind) for kind in SAID],
        pl.col("score").filter(is_type("evaluation")).last().alias("truth_evaluation"),
        count_if(~in_time).alias("late_stated"),
    )
    return turns.join(stated, on=TURN, how="left").with_columns(pl.col("late_stated").fill_null(0))


def shared(kept: pl.DataFrame, turns: pl.DataFrame, discount: float) -> pl.DataFrame:
    """Share what was said about whole sessions among their turns. Mirror of `credit.shares`.

    Args:
        kept: De-duplicated events, in order, with their `score`.
        turns: From `facts`.
        discount: How much less each earlier turn gets.

    Returns:
        One row a turn and thing said: `share` and `score`, in the order in which it was said.
    """
    said = kept.filter(is_type(*SAID) & pl.col("turn_id").is_null() & pl.col("score").is_not_null()).select(*SESSION, *MOMENT, "score")
    windows = turns.select(*TURN, "position", "started_at_ms", "closes_at_ms")
    open_then = pl.col("occurred_at_ms").is_between("started_at_ms", "closes_at_ms")
    given = said.join(windows, on=SESSION).filter(open_then).sort(*SESSION, *MOMENT, "position")
    one = (*SESSION, *MOMENT)
    last = pl.col("position").max().over(one)
    weighed = given.with_columns(pl.lit(discount).pow((last - pl.col("position")).cast(pl.Float64)).alias("weight"))
    # A running sum adds in order, as the plain rules do; `sum` adds in blocks.
    whole = pl.col("weight").cum_sum().last().over(one)
    return weighed.select(*TURN, ratio(pl.col("weight"), whole).alias("share"), "score")


def facts(kept: pl.DataFrame, done: pl.DataFrame, calls: pl.DataFrame, *, config: RewardsConfig, now_ms: int) -> pl.DataFrame:
    """Return one row a turn: who, when, how it went, when its window closes, what was said of it, and the next user message.

    Args:
        kept: De-duplicated events, in order, with their `score`.
        done: Its completions, one row each.
        calls: From `tool_calls`.
        config: Window and discount.
        now_ms: The instant that windows are closed against.
    """
    turns = _opened(kept).join(_sampled(done), on=TURN, how="left").join(_called(calls), on=TURN, how="left")
    turns = turns.join(_session_facts(kept), on=SESSION, how="left")
    turns = turns.with_columns(pl.coalesce("last_acted_at_ms", "started_at_ms").alias("acted_at_ms"))
    turns = _stated(_placed(_closing(turns, kept, config.window_s * 1000)), kept)
    return turns.with_columns(_described(now_ms))


def _described(now_ms: int) -> list[pl.Expr]:
    """Return a turn's facts by name, where they are not columns already."""
    zero = (
        "completions", "prompt_tokens", "response_tokens", "without_ids", "broken", "truncated", "calls", "invalid_calls", "repeats",
        "serial_calls", "claims", "claims_unread",
    )  # fmt: skip
    closed_early = pl.col("early_at_ms").is_not_null()
    return [
        pl.col(zero).fill_null(0),
        day("started_at_ms").alias(DAY),
        ratio(pl.col("sampling_us"), 1000.0).alias("sampling_ms"),
        pl.col("asked", "edits_observed").fill_null(value=False),
        pl.coalesce("sampled_arm", "arm").alias("arm"),
        pl.coalesce("sampled_version", "opening_version").alias("policy_version"),
        pl.coalesce("turn_index", "position").clip(upper_bound=LARGEST_INT32).cast(pl.Int32).alias("turn_index"),
        pl.col("consent_rank").replace_strict(range(len(CONSENT)), CONSENT, return_dtype=pl.String).alias("consent"),
        closed_early.alias("closed_early"),
        (closed_early | (pl.col("closes_at_ms") <= now_ms)).alias("final"),
        (pl.col("provider_results") + pl.col("error_finishes").fill_null(0)).alias("provider_errors"),
    ]
