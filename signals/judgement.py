"""Rewards, maturity and outcomes as Spark columns, row by row on turns.

Mirrors of `rewards.py`, `maturity.py`, `outcomes.py` and `filters.py`, held equal by property tests. Takes: turns with their components.
Gives: the same rows with credit, reward, maturity and outcome. Leaves out: the components (`component_columns.py`).
"""

from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals.config import RewardsConfig
from signals.maturity import Maturity
from signals.norms import CLIP, NORMALISED, Norms
from signals.rewards import COSTS, IN_PLACE_OF_EDITS, OUTCOMES, TELLING_COSTS
from signals.samples import COMPONENTS, Outcome


def _normalised(name: str, config: RewardsConfig, norms: Norms) -> Column:
    """Mirror of `rewards.normalised`."""
    value = F.col(name)
    if not norms.version or name not in (*NORMALISED, "deferral"):
        return value
    scale = "edits_kept" if name == "deferral" else name
    mean, sd = F.col(f"_mean_{scale}"), F.col(f"_sd_{scale}")
    clipped = F.greatest(F.lit(-CLIP), F.least(F.lit(CLIP), (value - mean) / (sd + F.lit(config.norm_eps)))) / F.lit(CLIP)
    return F.when(mean.isNull(), value).otherwise(clipped)


def _piece(name: str, config: RewardsConfig, norms: Norms) -> tuple[Column, Column]:
    """Return mass and value of a present component. Mirror of `rewards.pieces` where an outcome is present."""
    weight = F.lit(config.weights.get(name, 0.0))
    if name in COSTS:
        return weight * -F.col(name), F.lit(-1.0)
    value = _normalised(name, config, norms)
    if name in IN_PLACE_OF_EDITS:
        deferred = F.col("deferral").isNotNull()
        against = weight * -F.least(value, F.lit(0.0))
        return F.when(deferred, against).otherwise(weight), F.when(deferred, F.lit(-1.0)).otherwise(value)
    return (weight * F.col("explicit_mass") if name == "explicit" else weight), value


def _only_costs(config: RewardsConfig) -> tuple[Column, Column]:
    """Return mass and value where nothing but costs is present: the worst of them."""
    weighed = [(name, config.weights[name]) for name in TELLING_COSTS if config.weights.get(name, 0.0) > 0]
    if not weighed:
        return F.lit(0.0), F.lit(0.0)
    costs = [F.coalesce(F.col(name), F.lit(0.0)) for name, _ in weighed]
    worst = F.least(*costs) if len(costs) > 1 else costs[0]
    mass = F.coalesce(*[F.when(cost == worst, F.lit(weight)) for cost, (_, weight) in zip(costs, weighed, strict=True)])
    return F.when(worst < 0, mass).otherwise(F.lit(0.0)), worst


def with_reward(turns: DataFrame, config: RewardsConfig, norms: Norms) -> DataFrame:
    """Add `evident`, `credit`, `mass` and `reward`. Mirror of `rewards.is_evidence`, `credit` and `scalar`."""
    weighed = [F.col(name).isNotNull() for name in OUTCOMES if config.weights.get(name, 0.0) > 0]
    masses: dict[str, Column] = {}
    values: dict[str, Column] = {}
    for name in COMPONENTS:
        mass, value = _piece(name, config, norms)
        masses[f"_mass_{name}"] = F.when(F.col(name).isNotNull(), mass).otherwise(F.lit(0.0))
        values[f"_value_{name}"] = value
    earned = mass = F.lit(0.0)
    for name in COMPONENTS:
        own = F.col(f"_mass_{name}")
        earned = earned + F.when(own > 0, own * F.col(f"_value_{name}")).otherwise(0.0)
        mass = mass + own
    cost_mass, cost = _only_costs(config)
    told = reduce(or_, [F.col(name).isNotNull() for name in OUTCOMES])
    costly = reduce(or_, [F.coalesce(F.col(name) < 0, F.lit(False)) for name in TELLING_COSTS])
    sums = turns.withColumns(masses | values).withColumns(
        {
            "_outcome": reduce(or_, weighed) if weighed else F.lit(False),
            "_earned": earned,
            "_mass": mass,
            "_cost": cost,
            "_cost_mass": cost_mass,
        }
    )
    final = F.col("final")
    summed = sums.withColumns(
        {
            "evident": told | costly,
            "credit": F.when(final, F.when(F.col("_outcome"), F.col("_earned")).otherwise(F.col("_cost_mass") * F.col("_cost"))),
            "mass": F.when(final, F.when(F.col("_outcome"), F.col("_mass")).otherwise(F.col("_cost_mass"))),
        }
    )
    mean = F.greatest(F.lit(-1.0), F.least(F.lit(1.0), F.col("credit") / F.col("mass")))
    reward = F.when(final & F.col("evident") & (F.col("mass") > 0), mean)
    return summed.withColumn("reward", reward).drop(*masses, *values, "_outcome", "_earned", "_mass", "_cost", "_cost_mass")


def maturity() -> Column:
    """Return the state of each component that a turn can have, as a map. Mirror of `maturity.states`."""
    answered, edited = F.col("completions") > 0, F.col("edits") > 0
    can_have = {
        "edits_kept": edited,
        "follow_up": answered,
        "conventions": edited,
        "explicit": answered,
        "deferral": answered & ~edited & F.col("eligible"),
    }
    unseen = F.when(F.col("closed_early"), Maturity.CENSORED.value).otherwise(Maturity.DEFAULTED.value)
    states: list[Column] = []
    for name in COMPONENTS:
        present = F.col(name).isNotNull()
        seen = F.lit(Maturity.OBSERVED.value)
        if name == "deferral":
            seen = F.when(F.col("followed_up"), seen).otherwise(Maturity.DEFAULTED.value)
        state = F.when(~F.col("final"), Maturity.PENDING.value).when(present, seen).otherwise(unseen)
        states.append(F.when(F.col("consent") != "none", F.when(present | can_have.get(name, F.lit(False)), state)))
    named = F.map_from_arrays(F.lit(list(COMPONENTS)), F.array(*states))
    return F.map_filter(named, lambda _, state: state.isNotNull())


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
