"""The nine reward components as Spark columns, row by row on turns.

Mirror of `components.py`, held equal by property tests. Written step by step through helper columns: as one expression, shared parts
would be planned and computed many times over.

Takes: turns with their facts, edit sums and norms. Gives: the same rows with components and counts.
Leaves out: the reward (`judgement.py`).
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals.config import RewardsConfig
from signals.followup_columns import with_dissatisfied
from signals.turn_columns import CHECKS


def _tool_calls(config: RewardsConfig) -> Column:
    cost = F.col("invalid_calls") + F.lit(config.repeat_cost) * F.col("repeats") + F.lit(config.serial_cost) * F.col("serial_calls")
    return F.when(F.col("calls") > 0, F.lit(0.0) - F.least(F.lit(1.0), cost))


def _effort(config: RewardsConfig) -> Column:
    x = F.lit(config.effort_per_1k_tokens) * (F.col("response_tokens") / F.lit(1000.0))
    x = x + F.lit(config.effort_per_call) * F.col("calls") + F.lit(config.effort_per_completion) * F.col("completions")
    cost = F.pow(F.lit(1.0) + F.lit(config.effort_k) * x, F.lit(1.0 - config.effort_q)) - F.lit(1.0)
    return F.when(F.col("completions") > 0, cost)


def _checks() -> dict[str, Column]:
    """Return the figures of the last lint delta and the last test run inside the window."""
    lint = F.array_max(F.filter("_checked", lambda item: item["lint"]))
    tests = F.array_max(F.filter("_checked", lambda item: ~item["lint"]))
    some = F.size("_checked") > 0
    return {f"_{name}": F.when(some, (lint if at < CHECKS.index("passed_before") else tests)[name]) for at, name in enumerate(CHECKS)}


def _conventions(config: RewardsConfig) -> dict[str, Column]:
    """Return the parts of `conventions`, each null where it was not checked."""
    delta = F.col("_issues_after") - F.col("_issues_before")
    lint = -F.tanh(delta.cast("double") / F.lit(config.lint_scale))
    before = F.coalesce("_passed_before", F.lit(0)) + F.coalesce("_failed_before", F.lit(0))
    total = F.greatest(before, F.col("_passed_after") + F.col("_failed_after"))
    known = F.col("_passed_after").isNotNull() & F.col("_failed_after").isNotNull()
    tests = F.when(known & (total > 0), 1.0 - 2.0 * ((total - F.col("_passed_after")) / total))
    broken = F.least(F.coalesce("_rules_broken", F.lit(0)), F.col("_rules_checked"))
    rules = F.when(F.col("_rules_checked") > 0, 1.0 - 2.0 * (broken / F.col("_rules_checked")))
    return {"_lint": lint, "_tests": tests, "_rules": rules}


def _mean_of(*names: str) -> Column:
    total, number = F.lit(0.0), F.lit(0)
    for name in names:
        total = total + F.coalesce(F.col(name), F.lit(0.0))
        number = number + F.col(name).isNotNull().cast("int")
    return F.when(number > 0, total / number)


def _spoken() -> dict[str, Column]:
    """Return what people and evaluators said of the turn inside the window, and for how much that counts."""
    feedback = F.array_max(F.filter("_said", lambda item: ~item["external"]))["score"]
    evaluation = F.array_max(F.filter("_said", lambda item: item["external"]))["score"]
    some = F.size("_said") > 0
    return {"_feedback": F.when(some, feedback), "_evaluation": F.when(some, evaluation)}


def _explicit() -> dict[str, Column]:
    """Return mass and sum of what was said of the turn and of the session. Mirror of `components.explicit`."""
    own = F.col("_own_said")
    mass = F.when(own.isNotNull(), F.lit(1.0)).otherwise(F.lit(0.0))
    value = F.coalesce(own, F.lit(0.0))
    shared = F.col("shared").isNotNull()
    return {
        "explicit_mass": F.when(shared, F.aggregate("shared", mass, lambda total, item: total + item["share"])).otherwise(mass),
        "_explicit": F.when(shared, F.aggregate("shared", value, lambda total, item: total + item["share"] * item["score"])).otherwise(
            value
        ),
    }


def _deferral(config: RewardsConfig) -> Column:
    """Return the charge of a deferred turn. Mirror of `components.deferral`."""
    charge = F.lit(0.0) - F.greatest(F.coalesce("_kept", F.lit(config.expected_kept)), F.lit(config.defer_cost))
    alone = F.least(charge, F.coalesce("_low", F.lit(config.abandoned)))
    return F.when(F.col("deferred"), F.when(F.col("followed_up"), charge).when(F.col("final"), alone))


def _evidence() -> Column:
    unread = F.least("claims_unread", "claims")
    return F.when(F.col("claims") > 0, F.lit(0.0) - unread / F.col("claims"))


def with_components(turns: DataFrame, config: RewardsConfig) -> DataFrame:
    """Add components, P(dissatisfied), what was late, and whether an edit was deferred. Mirror of `components.components`."""
    closes = F.col("closes_at_ms")
    in_time = F.col("reply.at") <= closes
    allowed = F.col("consent") != "none"
    eligible = F.col("edits_observed") & F.coalesce(F.col("edit_expected") >= config.edit_expected_from, F.lit(False))
    judged = with_dissatisfied(
        turns,
        F.when(in_time & allowed, F.col("reply.message")),
        F.col("opening.message"),
        stack_traces=F.col("reply.stack_traces"),
        reply_delay_ms=F.col("reply.reply_delay_ms"),
        interrupted=F.col("interrupted"),
    )
    seen = judged.withColumns(
        {
            "followed_up": F.coalesce(in_time, F.lit(False)),
            "replied_after_ms": F.col("reply.at") - F.col("acted_at_ms"),
            "eligible": eligible,
            "edits": F.coalesce("edits", F.lit(0)),
            "_said": F.filter("said", lambda item: item["at"] <= closes),
            "_checked": F.filter("checked", lambda item: item["at"] <= closes),
            "truth_evaluation": F.when(F.size("said") > 0, F.array_max(F.filter("said", lambda item: item["external"]))["score"]),
        }
    )
    seen = seen.withColumns(_checks() | _spoken() | {"deferred": F.col("eligible") & (F.col("edits") == 0) & (F.col("completions") > 0)})
    seen = seen.withColumns(_conventions(config) | {"_own_said": _mean_of("_feedback", "_evaluation")}).withColumns(_explicit())
    latency = F.when(F.col("sampling_ms") > 0, -F.tanh(F.log(F.col("sampling_ms") / F.col("_median_ms"))))
    stated = F.size("said") + F.size("checked") - F.size("_said") - F.size("_checked")
    late = F.coalesce("late_edits", F.lit(0)) + stated + F.when(F.col("reply.at") > closes, 1).otherwise(0)
    mean = F.col("_explicit") / F.col("explicit_mass")
    values = {
        "edits_kept": F.col("edits_kept"),
        "follow_up": 1.0 - 2.0 * F.col("dissatisfied"),
        "latency": latency,
        "tool_calls": _tool_calls(config),
        "effort": _effort(config),
        "conventions": _mean_of("_lint", "_tests", "_rules"),
        "evidence": _evidence(),
        "explicit": F.when(F.col("explicit_mass") > 0, F.greatest(F.lit(-1.0), F.least(F.lit(1.0), mean))),
        "deferral": _deferral(config),
    }
    return seen.withColumns({name: F.when(allowed, value) for name, value in values.items()} | {"late": late})
