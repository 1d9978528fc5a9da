"""Frozen norms beside each turn, as Spark columns: small tables joined by broadcast; nothing is joined where nothing was frozen.

Mirror of the look-ups of `norms.Norms`. Takes: turns and norms. Gives: the same rows with `_mean_*`, `_sd_*`, `_low`, `_median_ms` and
`_kept`.
Leaves out: what they are used for (`component_columns.py`, `judgement.py`).
"""

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals.config import RewardsConfig
from signals.norms import ANY, NORMALISED, Norms

HELPERS: Final = ("_low", "_median_ms", "_kept", *[f"_{part}_{name}" for name in NORMALISED for part in ("mean", "sd")])


def _median(config: RewardsConfig, norms: Norms) -> Column:
    medians = norms.medians_ms or config.latency_medians_ms
    fallback = F.lit(medians.get(ANY)).cast("double")
    named = [F.when(F.col("task_bucket") == bucket, F.lit(median)) for bucket, median in medians.items() if bucket != ANY]
    return F.coalesce(*named, fallback) if named else fallback


def _table(frame: DataFrame, rows: Sequence[tuple[Any, ...]], ddl: str) -> DataFrame:
    return F.broadcast(frame.sparkSession.createDataFrame(list(rows), ddl))


def with_norms(turns: DataFrame, config: RewardsConfig, norms: Norms) -> DataFrame:
    """Add what was usual for each turn; null where nothing was frozen."""
    if not norms.version:
        empty = {name: F.lit(None).cast("double") for name in HELPERS}
        return turns.withColumns(empty | {"_median_ms": _median(config, norms)})
    return _with_kept(_with_scale(turns, norms), norms).withColumn("_median_ms", _median(config, norms))


def _with_scale(turns: DataFrame, norms: Norms) -> DataFrame:
    """Add mean and deviation of a turn's stratum, and its tenth percentile; those of all turns where it has none."""
    names = [f"_{part}_{name}" for name in NORMALISED for part in ("mean", "sd")]
    strata = sorted(key for key in {*norms.scale, *norms.low} if key[0] != ANY)
    rows = [
        (*key, norms.low.get(key), *[figure for name in NORMALISED for figure in norms.scale.get(key, {}).get(name, (None, None))])
        for key in strata
    ]
    ddl = ", ".join(["_surface string", "_language string", "_task string", "_low double", *[f"{name} double" for name in names]])
    keyed = turns.withColumns(
        {
            "_surface": F.coalesce("surface", F.lit("")),
            "_language": F.coalesce("language", F.lit("")),
            "_task": F.coalesce("task_bucket", F.lit("")),
        }
    )
    joined = keyed.join(_table(turns, rows, ddl), ["_surface", "_language", "_task"], "left").drop("_surface", "_language", "_task")
    whole = norms.scale.get((ANY, ANY, ANY), {})
    fallback = {"_low": norms.low.get((ANY, ANY, ANY))} | {
        f"_{part}_{name}": figure for name in NORMALISED for part, figure in zip(("mean", "sd"), whole.get(name, (None, None)), strict=True)
    }
    return joined.withColumns({name: F.coalesce(F.col(name), F.lit(value).cast("double")) for name, value in fallback.items()})


def _with_kept(turns: DataFrame, norms: Norms) -> DataFrame:
    """Add the mean kept share of the bucket's turns by other users. Mirror of `Norms.expected_kept`."""
    buckets = [(bucket, total, number) for bucket, (total, number) in norms.kept.items() if bucket != ANY]
    own = [(bucket, user, total, number) for (bucket, user), (total, number) in norms.kept_by_user.items() if bucket != ANY]
    anywhere = [(user, total, number) for (bucket, user), (total, number) in norms.kept_by_user.items() if bucket == ANY]
    whole_total, whole_turns = norms.kept.get(ANY, (0.0, 0))
    joined = (
        turns.withColumn("_bucket", F.coalesce("task_bucket", F.lit("")))
        .join(_table(turns, buckets, "_bucket string, _total double, _turns bigint"), "_bucket", "left")
        .join(_table(turns, own, "_bucket string, user_key string, _own_total double, _own_turns bigint"), ["_bucket", "user_key"], "left")
        .join(_table(turns, anywhere, "user_key string, _any_total double, _any_turns bigint"), "user_key", "left")
    )

    def zero(name: str) -> Column:
        return F.coalesce(F.col(name), F.lit(0))

    def mean(total: Column, number: Column) -> Column:
        return F.when(number >= norms.min_turns, F.least(F.lit(1.0), F.greatest(F.lit(0.0), total / number)))

    kept = F.coalesce(
        mean(zero("_total") - zero("_own_total"), zero("_turns") - zero("_own_turns")),
        mean(F.lit(whole_total) - zero("_any_total"), F.lit(whole_turns) - zero("_any_turns")),
    )
    return joined.withColumn("_kept", kept).drop(
        "_bucket", "_total", "_turns", "_own_total", "_own_turns", "_any_total", "_any_turns"
    )  # fmt: skip
