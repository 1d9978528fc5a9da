"""The nine reward components as columns, row by row on turns.

Mirror of `components.py`, held equal by property tests. Takes: turns with their facts, edit sums and norms, and what was said about their
sessions. Gives: the same rows with components and counts. Leaves out: the reward (`judgement.py`).
"""

import polars as pl

from signals.config import RewardsConfig
from signals.followup_columns import with_dissatisfied
from signals.judge import Judged
from signals.samples import COMPONENTS
from signals.turn_columns import TURN, ratio


def _tool_calls(config: RewardsConfig) -> pl.Expr:
    cost = pl.col("invalid_calls") + config.repeat_cost * pl.col("repeats") + config.serial_cost * pl.col("serial_calls")
    return pl.when(pl.col("calls") > 0).then(0.0 - cost.clip(upper_bound=1.0))


def _effort(config: RewardsConfig) -> pl.Expr:
    x = config.effort_per_1k_tokens * ratio(pl.col("response_tokens"), 1000.0)
    x = x + config.effort_per_call * pl.col("calls") + config.effort_per_completion * pl.col("completions")
    return pl.when(pl.col("completions") > 0).then((1.0 + config.effort_k * x).pow(1.0 - config.effort_q) - 1.0)


def _latency() -> pl.Expr:
    return pl.when(pl.col("sampling_ms") > 0).then(-ratio(pl.col("sampling_ms"), pl.col("median_ms")).log().tanh())


def _mean_of(*parts: pl.Expr) -> pl.Expr:
    """Return the mean of those parts that are known, added in order; null where none is."""
    total, number = pl.lit(0.0), pl.lit(0)
    for part in parts:
        total = total + part.fill_null(0.0)
        number = number + part.is_not_null().cast(pl.Int64)
    return pl.when(number > 0).then(ratio(total, number))


def _conventions(config: RewardsConfig) -> pl.Expr:
    """Return the mean of lint, tests and rules, each null where it was not checked."""
    lint = -ratio(pl.col("issues_after") - pl.col("issues_before"), config.lint_scale).tanh()
    before = pl.col("passed_before").fill_null(0) + pl.col("failed_before").fill_null(0)
    after = pl.col("passed_after") + pl.col("failed_after")
    total = pl.max_horizontal(before, after)
    tests = pl.when(after.is_not_null() & (total > 0)).then(1.0 - 2.0 * ratio(total - pl.col("passed_after"), total))
    broken = pl.min_horizontal(pl.col("rules_broken").fill_null(0), "rules_checked")
    rules = pl.when(pl.col("rules_checked") > 0).then(1.0 - 2.0 * ratio(broken, pl.col("rules_checked")))
    return _mean_of(lint, tests, rules)


def _evidence() -> pl.Expr:
    unread = pl.min_horizontal("claims_unread", "claims")
    return pl.when(pl.col("claims") > 0).then(0.0 - ratio(unread, pl.col("claims")))


def _with_explicit(turns: pl.DataFrame, shared: pl.DataFrame) -> pl.DataFrame:
    """Add `explicit_mass` and its sum: what was said of the turn counts 1, and first. Mirror of `components.explicit`."""
    own = turns.select(*TURN, pl.lit(1.0).alias("share"), _mean_of(pl.col("feedback"), pl.col("evaluation")).alias("score"))
    said = pl.concat([own.filter(pl.col("score").is_not_null()), shared])
    # Running sums add in order, as the plain rules do; `sum` adds in blocks.
    sums = said.group_by(TURN).agg(
        pl.col("share").cum_sum().last().alias("explicit_mass"),
        (pl.col("share") * pl.col("score")).cum_sum().last().alias("explicit_sum"),
    )
    return turns.join(sums, on=TURN, how="left").with_columns(pl.col("explicit_mass").fill_null(0.0))


def _explicit() -> pl.Expr:
    mass = pl.col("explicit_mass")
    return pl.when(mass > 0).then(ratio(pl.col("explicit_sum"), mass).clip(-1.0, 1.0))


def _deferral(config: RewardsConfig) -> pl.Expr:
    """Return the charge of a deferred turn. Mirror of `components.deferral`."""
    charge = 0.0 - pl.col("expected_kept").fill_null(config.expected_kept).clip(lower_bound=config.defer_cost)
    alone = pl.min_horizontal(charge, pl.col("low").fill_null(config.abandoned))
    followed_up = pl.col("followed_up")
    return pl.when(pl.col("deferred") & followed_up).then(charge).when(pl.col("deferred") & pl.col("final")).then(alone)


def with_components(turns: pl.DataFrame, shared: pl.DataFrame, config: RewardsConfig, judged: Judged) -> pl.DataFrame:
    """Add components, P(dissatisfied), what was late, and whether an edit was deferred. Mirror of `components.components`.

    Args:
        turns: Turns with facts, edit sums and norms.
        shared: From `turn_columns.shared`.
        config: Costs and scales.
        judged: The judge's verdicts in force.
    """
    allowed = pl.col("consent") != "none"
    followed_up = (pl.col("reply_at_ms") <= pl.col("closes_at_ms")).fill_null(value=False)
    eligible = pl.col("edits_observed") & (pl.col("edit_expected") >= config.edit_expected_from).fill_null(value=False)
    came_late = (pl.col("reply_at_ms") > pl.col("closes_at_ms")).fill_null(value=False)
    seen = _with_explicit(turns, shared).with_columns(
        pl.col("edits", "edits_judged", "late_edits").fill_null(0),
        followed_up.alias("followed_up"),
        eligible.alias("eligible"),
        (pl.col("reply_at_ms") - pl.col("acted_at_ms")).alias("replied_after_ms"),
    )
    seen = seen.with_columns(
        (pl.col("eligible") & (pl.col("edits") == 0) & (pl.col("completions") > 0)).alias("deferred"),
        (pl.col("late_edits") + pl.col("late_stated") + came_late.cast(pl.Int64)).alias("late"),
    )
    told = {
        "message": pl.when(pl.col("followed_up") & allowed).then(pl.col("reply")),
        "previous": pl.col("message"),
        "stack_traces": pl.col("reply_stack_traces"),
        "reply_delay_ms": pl.col("reply_after_ms"),
        "interrupted": pl.col("stopped_by_user"),
    }
    seen = with_dissatisfied(seen, told, judged)
    values = {
        "edits_kept": pl.col("edits_kept"),
        "follow_up": 1.0 - 2.0 * pl.col("dissatisfied"),
        "latency": _latency(),
        "tool_calls": _tool_calls(config),
        "effort": _effort(config),
        "conventions": _conventions(config),
        "evidence": _evidence(),
        "explicit": _explicit(),
        "deferral": _deferral(config),
    }
    return seen.with_columns(pl.when(allowed).then(values[name]).alias(name) for name in COMPONENTS)
