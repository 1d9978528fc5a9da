"""What monitors measure, each metric once: what it is a property of, which direction does harm, its numerator and denominator.

A mean has denominators 1 where it is known; a rate has its own. A turn that says nothing about a metric has denominator 0.

Takes: turns with facts (`monitors_facts.Facts.turns`). Gives: metrics, traffic inputs, strata. Leaves out: statistics and verdicts.
"""

from dataclasses import dataclass
from typing import Final, Literal

import polars as pl

from signals.drift import Floats
from signals.samples import COMPONENTS, Outcome

About = Literal["reward", "policy", "coverage", "truth", "traffic"]

OUTSIDE: Final = ("no_consent", "quarantined_release")
"""Reasons of not_trainable that the policy has no hand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of a policy."""

    name: str
    about: About
    harm: Literal[-1, 0, 1]
    """1: a rise does harm; -1: a fall does; 0: both may."""
    doc: str
    top: pl.Expr
    """Numerator by turn."""
    bottom: pl.Expr
    """Denominator by turn; 0 or null where the turn says nothing."""
    share: bool = False
    """Whether it is a share, shown in per cent."""
    outside: bool = False
    """Whether a change is never the policy's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One property of the traffic, of a session's first turn: later ones depend on the policy."""

    name: str
    column: str
    numeric: bool
    doc: str


_ONE: Final = pl.lit(1.0)
_ANSWERED: Final = pl.col("completions") > 0
_QUIET: Final = ~pl.col("question").fill_null(value=False)
_AT_STAKE: Final = (
    pl.col("final") & (pl.col("outcome") != Outcome.INFRA_ERROR.value) & ~pl.col("outcome_reason").is_in(OUTSIDE).fill_null(value=False)
)
"""Closed turns that a policy could have had scored: without our own failures, missing consent and rolled-back releases."""


def _mean(name: str, doc: str) -> Metric:
    return Metric(name=name, about="reward", harm=-1, doc=doc, top=pl.col(name), bottom=pl.col(name).is_not_null())


def _covers(name: str, outcome: Outcome, *, harm: Literal[-1, 1], doc: str) -> Metric:
    return Metric(name=name, about="coverage", harm=harm, doc=doc, share=True, top=pl.col("outcome") == outcome.value, bottom=_AT_STAKE)


def _rate(name: str, top: pl.Expr, *, of: pl.Expr, doc: str, harm: Literal[-1, 1] = 1) -> Metric:
    return Metric(name=name, about="policy", harm=harm, doc=doc, share=True, top=top, bottom=of)


def _size(name: str, top: pl.Expr, *, of: pl.Expr, doc: str) -> Metric:
    return Metric(name=name, about="policy", harm=0, doc=doc, top=top, bottom=of)


METRICS: Final[tuple[Metric, ...]] = (
    _mean("reward", "mean reward of closed turns"),
    *[_mean(name, f"mean of the component {name}") for name in COMPONENTS],
    Metric(
        name="kept_a_day", about="truth", harm=-1, share=True, doc="share of a turn's edits that stood a day later",
        top=pl.col("truth_24h"), bottom=pl.col("truth_24h").is_not_null(),
    ),
    _covers("scored", Outcome.SCORED, harm=-1, doc="closed turns with evidence, of those that the policy could have had scored"),
    _covers("no_evidence", Outcome.NO_EVIDENCE, harm=1, doc="closed turns of which nothing was observed"),
    _covers("not_captured", Outcome.NOT_TRAINABLE, harm=1, doc="closed turns that cannot be trained on because of their capture"),
    Metric(
        name="infra_errors", about="coverage", harm=1, share=True, outside=True, doc="closed turns that our own machinery failed",
        top=pl.col("outcome") == Outcome.INFRA_ERROR.value, bottom=pl.col("final"),
    ),
    _rate("invalid_calls", pl.col("invalid_calls"), of=pl.col("calls"), doc="tool calls with an unknown name or invalid arguments"),
    _rate(
        "asks", ~_QUIET & (pl.col("edits") == 0), of=pl.col("question").is_not_null(),
        doc="turns that end in a question without an edit, of those that end in text",
    ),
    _rate("deferred", pl.col("deferred"), of=pl.col("eligible"), doc="turns without an edit, of those where the prompt asks for one"),
    _rate("edit_turns", pl.col("edits") > 0, of=_ANSWERED, harm=-1, doc="answered turns with an edit"),
    _rate(
        "no_op", (pl.col("calls") == 0) & (pl.col("edits") == 0) & _QUIET, of=_ANSWERED,
        doc="answered turns without a tool call, edit or question",
    ),
    _rate(
        "repeats", pl.col("repeated_calls"), of=pl.col("hashed_calls"), doc="calls that repeat one of the turn with nothing changed since"
    ),
    _rate(
        "tests_removed", pl.col("tests_removed"), of=pl.col("tests_removed").is_not_null(),
        doc="turns after whose edits fewer tests ran than before",
    ),
    _rate(
        "refusals", pl.col("refused"), of=pl.col("refused").is_not_null(),
        doc="turns that end by declining what was asked, of those that end in text",
    ),
    _rate(
        "destructive_commands", pl.col("destructive"), of=pl.col("commands"),
        doc="commands that delete in bulk, throw work away or drop data, of those that were run through a tool",
    ),
    _rate("interrupted", pl.col("interrupted"), of=_ONE, doc="turns that the user stopped"),
    _size("response_tokens", pl.col("response_tokens"), of=pl.col("completions"), doc="tokens sampled a completion"),
    _size("completions", pl.col("completions"), of=_ANSWERED, doc="completions an answered turn"),
    _size("session_turns", pl.len().over("session_id"), of=pl.col("opens"), doc="turns a session, counted at its first"),
    _size("entropy", pl.col("nats"), of=pl.col("nat_tokens"), doc="mean -log p of sampled tokens, nats: estimates the entropy a token"),
)  # fmt: skip
"""Every metric but the correlation `proxy_truth`, which is no ratio of sums."""

INPUTS: Final[tuple[Input, ...]] = (
    Input(name="prompt_tokens", column="first_prompt_tokens", numeric=True, doc="tokens of a session's first prompt"),
    Input(name="message_chars", column="message_chars", numeric=True, doc="length of a session's first message, characters"),
    Input(name="language", column="language", numeric=False, doc="language of a session's first message"),
    Input(name="task_bucket", column="task_bucket", numeric=False, doc="kind of task"),
    Input(name="origin", column="origin", numeric=False, doc="live or simulated"),
    Input(name="hour_band", column="hour_band", numeric=False, doc="quarter of the UTC day"),
)
NAMES: Final = (*[metric.name for metric in METRICS], "proxy_truth", *[item.name for item in INPUTS])
"""Every value that the column and the label `metric` can have."""


def prepared(turns: pl.DataFrame) -> pl.DataFrame:
    """Add what a turn's session says: whether the turn opens it, how long and in which language it began, the quarter of the day."""
    order = pl.struct("turn_index", "started_at", "turn_id")
    opens = order.rank("ordinal").over("session_id") == 1
    at = pl.col("started_at").dt.hour() // 6 * 6
    first = {"session_chars": "message_chars", "session_language": "language"}
    return turns.with_columns(
        opens.alias("opens"),
        pl.format("{}h", at).alias("hour_band"),
        *[pl.col(column).sort_by(order).first().over("session_id").alias(name) for name, column in first.items()],
    )


def parts(metric: Metric, turns: pl.DataFrame) -> tuple[Floats, Floats]:
    """Return a metric's numerators and denominators by turn; where the turn says nothing both are 0."""
    sides = {"top": metric.top.cast(pl.Float64), "bottom": metric.bottom.cast(pl.Float64)}
    found = turns.select("turn_id", **sides)
    known = pl.col("top").is_not_null() & (pl.col("bottom") > 0).fill_null(value=False)
    top, bottom = (found.select(pl.when(known).then(name).otherwise(0.0)).to_series().to_numpy() for name in sides)
    return top, bottom


def strata(turns: pl.DataFrame, *, long_from: float) -> pl.Series:
    """Name the kind of traffic of each turn: origin, task, language and whether the session began with a long message.

    None of these is the policy's doing, so the reference's figure in a stratum says what it would have done with this traffic.

    Args:
        turns: From `prepared`.
        long_from: Characters from which a first message is long.
    """
    named = [pl.col(name).fill_null("unknown") for name in ("origin", "task_bucket", "session_language")]
    long = pl.when(pl.col("session_chars") >= long_from).then(pl.lit("long")).otherwise(pl.lit("short"))
    return turns.select(pl.concat_str([*named, long], separator="|").alias("stratum")).to_series()
