"""Frozen norms beside each turn, as columns: small tables joined; nothing is joined where nothing was frozen.

Mirror of the look-ups of `norms.Norms`. Takes: turns and norms. Gives: the same rows with `HELPERS`, null where nothing was frozen.
Leaves out: what they are used for (`component_columns.py`, `judgement.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import polars as pl

from signals.config import RewardsConfig
from signals.norms import ANY, NORMALISED, Norms
from signals.turn_columns import ratio

SCALE: Final = tuple(f"{part}_{name}" for name in NORMALISED for part in ("mean", "sd"))
"""Mean and deviation of each component that is normalised."""
HELPERS: Final = ("low", "median_ms", "expected_kept", *SCALE)


def _median(config: RewardsConfig, norms: Norms) -> pl.Expr:
    medians = norms.medians_ms or config.latency_medians_ms
    named = {bucket: median for bucket, median in medians.items() if bucket not in (ANY, "")}
    fallback = pl.lit(medians.get(ANY), pl.Float64)
    if not named:
        return fallback
    return pl.col("task_bucket").replace_strict(list(named), list(named.values()), default=fallback, return_dtype=pl.Float64)


def _table(rows: Sequence[tuple[Any, ...]], keys: Sequence[str], figures: Mapping[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=dict.fromkeys(keys, pl.String) | dict(figures), orient="row")


def with_norms(turns: pl.DataFrame, config: RewardsConfig, norms: Norms) -> pl.DataFrame:
    """Add what was usual for each turn; null where nothing was frozen."""
    median = _median(config, norms).alias("median_ms")
    if not norms.version:
        return turns.with_columns(median, *[pl.lit(None, pl.Float64).alias(name) for name in HELPERS if name != "median_ms"])
    return _with_kept(_with_scale(turns, norms), norms).with_columns(median)


def _with_scale(turns: pl.DataFrame, norms: Norms) -> pl.DataFrame:
    """Add mean and deviation of a turn's stratum, and its tenth percentile; those of all turns where it has none."""
    figures = ("low", *SCALE)

    def of(stratum: tuple[str, str, str]) -> tuple[float | None, ...]:
        scale = norms.scale.get(stratum, {})
        return norms.low.get(stratum), *[figure for name in NORMALISED for figure in scale.get(name, (None, None))]

    keys = ("_surface", "_language", "_task_bucket")
    strata = sorted(key for key in {*norms.scale, *norms.low} if key[0] != ANY)
    table = _table([(*key, *of(key)) for key in strata], keys, dict.fromkeys(figures, pl.Float64))
    keyed = turns.with_columns(pl.col(key[1:]).fill_null("").alias(key) for key in keys)
    whole = dict(zip(figures, of((ANY, ANY, ANY)), strict=True))
    fallen = [pl.col(name).fill_null(pl.lit(value, pl.Float64)) for name, value in whole.items()]
    return keyed.join(table, on=keys, how="left").with_columns(fallen).drop(keys)


def _with_kept(turns: pl.DataFrame, norms: Norms) -> pl.DataFrame:
    """Add the mean kept share of the bucket's turns by other users. Mirror of `Norms.expected_kept`."""
    buckets = [(bucket, *sums) for bucket, sums in norms.kept.items() if bucket != ANY]
    own = [(bucket, user, *sums) for (bucket, user), sums in norms.kept_by_user.items() if bucket != ANY]
    anywhere = [(user, *sums) for (bucket, user), sums in norms.kept_by_user.items() if bucket == ANY]
    whole_total, whole_turns = norms.kept.get(ANY, (0.0, 0))

    def joined(frame: pl.DataFrame, rows: Sequence[tuple[Any, ...]], keys: Sequence[str], name: str) -> pl.DataFrame:
        table = _table(rows, keys, {f"{name}_total": pl.Float64, f"{name}_turns": pl.Int64})
        return frame.join(table, on=keys, how="left").with_columns(
            pl.col(f"{name}_total").fill_null(0.0), pl.col(f"{name}_turns").fill_null(0)
        )

    def mean(total: pl.Expr, number: pl.Expr) -> pl.Expr:
        return pl.when(number >= norms.min_turns).then(ratio(total, number).clip(0.0, 1.0))

    found = turns.with_columns(pl.col("task_bucket").fill_null("").alias("_bucket"))
    found = joined(found, buckets, ["_bucket"], "_all")
    found = joined(found, own, ["_bucket", "user_key"], "_own")
    found = joined(found, anywhere, ["user_key"], "_any")
    col = pl.col
    kept = pl.coalesce(
        mean(col("_all_total") - col("_own_total"), col("_all_turns") - col("_own_turns")),
        mean(whole_total - col("_any_total"), whole_turns - col("_any_turns")),
    )
    helpers = ("_bucket", *[f"_{of}_{what}" for of in ("all", "own", "any") for what in ("total", "turns")])
    return found.with_columns(kept.alias("expected_kept")).drop(helpers)
