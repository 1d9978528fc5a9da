"""Rewards, maturity and outcomes as columns, row by row on turns.

Mirrors of `rewards.py`, `maturity.py`, `outcomes.py` and `filters.py`, held equal by property tests. Takes: turns with their components.
Gives: the same rows with credit, reward, maturity and outcome. Leaves out: the components (`component_columns.py`).
"""

import polars as pl

from signals.config import RewardsConfig
from signals.maturity import Maturity
from signals.norms import CLIP, NORMALISED, Norms
from signals.rewards import COSTS, IN_PLACE_OF_EDITS, OUTCOMES, TELLING_COSTS
from signals.samples import COMPONENTS, Outcome
from signals.turn_columns import ratio


def _normalised(name: str, config: RewardsConfig, norms: Norms) -> pl.Expr:
    """Mirror of `rewards.normalised`."""
    value = pl.col(name)
    if not norms.version or name not in (*NORMALISED, "deferral"):
        return value
    scale = "edits_kept" if name == "deferral" else name
    mean, sd = pl.col(f"mean_{scale}"), pl.col(f"sd_{scale}")
    clipped = ratio(ratio(value - mean, sd + config.norm_eps).clip(-CLIP, CLIP), CLIP)
    return pl.when(mean.is_null()).then(value).otherwise(clipped)


def _piece(name: str, config: RewardsConfig, norms: Norms) -> tuple[pl.Expr, pl.Expr]:
    """Return mass and value of a present component. Mirror of `rewards.pieces` where an outcome is present."""
    weight = pl.lit(config.weights.get(name, 0.0))
    if name in COSTS:
        return weight * -pl.col(name), pl.lit(-1.0)
    value = _normalised(name, config, norms)
    if name in IN_PLACE_OF_EDITS:
        deferred = pl.col("deferral").is_not_null()
        against = weight * -value.clip(upper_bound=0.0)
        return pl.when(deferred).then(against).otherwise(weight), pl.when(deferred).then(-1.0).otherwise(value)
    return (weight * pl.col("explicit_mass") if name == "explicit" else weight), value


def _only_costs(config: RewardsConfig) -> tuple[pl.Expr, pl.Expr]:
    """Return mass and value where nothing but costs is present: the worst of them."""
    weighed = [(pl.col(name).fill_null(0.0), config.weights[name]) for name in TELLING_COSTS if config.weights.get(name, 0.0) > 0]
    if not weighed:
        return pl.lit(0.0), pl.lit(0.0)
    worst = pl.min_horizontal(cost for cost, _ in weighed)
    mass = pl.coalesce(pl.when(cost == worst).then(weight) for cost, weight in weighed)
    return pl.when(worst < 0).then(mass).otherwise(0.0), worst


def with_reward(turns: pl.DataFrame, config: RewardsConfig, norms: Norms) -> pl.DataFrame:
    """Add `evident`, `credit`, `mass` and `reward`. Mirror of `rewards.is_evidence`, `credit` and `scalar`."""
    pieces = {name: _piece(name, config, norms) for name in COMPONENTS}
    parts = turns.with_columns(
        *[pl.when(pl.col(name).is_not_null()).then(mass).otherwise(0.0).alias(f"mass_{name}") for name, (mass, _) in pieces.items()],
        *[value.alias(f"value_{name}") for name, (_, value) in pieces.items()],
    )
    earned = mass = pl.lit(0.0)
    for name in COMPONENTS:
        own = pl.col(f"mass_{name}")
        earned = earned + pl.when(own > 0).then(own * pl.col(f"value_{name}")).otherwise(0.0)
        mass = mass + own
    weighed = pl.any_horizontal(
        pl.lit(value=False), *[pl.col(name).is_not_null() for name in OUTCOMES if config.weights.get(name, 0.0) > 0]
    )
    told = pl.any_horizontal(pl.col(name).is_not_null() for name in OUTCOMES)
    costly = pl.any_horizontal((pl.col(name) < 0).fill_null(value=False) for name in TELLING_COSTS)
    cost_mass, cost = _only_costs(config)
    final = pl.col("final")
    summed = parts.with_columns(
        (told | costly).alias("evident"),
        pl.when(final & weighed).then(earned).when(final).then(cost_mass * cost).alias("credit"),
        pl.when(final & weighed).then(mass).when(final).then(cost_mass).alias("mass"),
    )
    mean = ratio(pl.col("credit"), pl.col("mass")).clip(-1.0, 1.0)
    return summed.with_columns(pl.when(final & pl.col("evident") & (pl.col("mass") > 0)).then(mean).alias("reward"))


def maturity() -> list[pl.Expr]:
    """Return the state of each component, in order; null where a turn cannot have it. Mirror of `maturity.states`."""
    answered, edited = pl.col("completions") > 0, pl.col("edits") > 0
    can_have = {
        "edits_kept": edited,
        "follow_up": answered,
        "conventions": edited,
        "explicit": answered,
        "deferral": answered & ~edited & pl.col("eligible"),
    }
    pending, observed, defaulted, censored = (pl.lit(state.value) for state in Maturity)
    unseen = pl.when(pl.col("closed_early")).then(censored).otherwise(defaulted)
    states: list[pl.Expr] = []
    for name in COMPONENTS:
        present = pl.col(name).is_not_null()
        seen = pl.when(pl.col("followed_up")).then(observed).otherwise(defaulted) if name == "deferral" else observed
        state = pl.when(~pl.col("final")).then(pending).when(present).then(seen).otherwise(unseen)
        listed = (pl.col("consent") != "none") & (present | can_have.get(name, pl.lit(value=False)))
        states.append(pl.when(listed).then(state).alias(name))
    return states


def with_outcome(turns: pl.DataFrame, tombstoned: frozenset[int]) -> pl.DataFrame:
    """Add the one outcome and its reason. Mirror of `outcomes.outcome` and `filters.not_trainable`."""
    none = pl.col("completions") == 0
    infra = (
        pl.when(pl.col("provider_errors") > 0)
        .then(pl.lit("provider_error"))
        .when(pl.col("stopped_by_system"))
        .then(pl.lit("stopped_by_system"))
        .when(none & pl.col("final") & ~pl.col("stopped_by_user"))
        .then(pl.lit("no_completion"))
    )
    untrainable = (
        pl.when(pl.col("consent") != "train")
        .then(pl.lit("no_consent"))
        .when(pl.col("policy_version").is_in(sorted(tombstoned)))
        .then(pl.lit("quarantined_release"))
        .when(pl.col("broken") > 0)
        .then(pl.lit("capture_error"))
        .when(pl.col("without_ids") > 0)
        .then(pl.lit("no_token_ids"))
        .when(pl.col("truncated") > 0)
        .then(pl.lit("truncated_sampling"))
    )
    name = (
        pl.when(infra.is_not_null())
        .then(pl.lit(Outcome.INFRA_ERROR.value))
        .when(untrainable.is_not_null())
        .then(pl.lit(Outcome.NOT_TRAINABLE.value))
        .when(~pl.col("final"))
        .then(pl.lit(Outcome.PENDING.value))
        .when(pl.col("evident"))
        .then(pl.lit(Outcome.SCORED.value))
        .otherwise(pl.lit(Outcome.NO_EVIDENCE.value))
    )
    return turns.with_columns(name.alias("outcome"), pl.coalesce(infra, untrainable).alias("outcome_reason"))
