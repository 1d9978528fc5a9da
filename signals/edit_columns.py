"""What became of edits, as Spark columns: one row an edit, and their sums by turn.

Mirror of `facts.judged`, `maturity.truth_of` and `components.edits_kept`. Takes: de-duplicated events and turns with their windows.
Gives: edits, and kept share and truth by turn. Leaves out: other components (`component_columns.py`).
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals.components import PARTLY_KEPT, SEVERITY
from signals.maturity import DAY_S, WEEK_S
from signals.tables import DAY
from signals.turn_columns import SESSION, TURN, day, is_type, moment, p

TRUTH: Final = {"survival_commit": "truth_commit", "survival_24h": "truth_24h", "survival_7d": "truth_7d"}
"""Column of an edit -> its mean over a turn's edits."""


def _grouped(kept: DataFrame) -> DataFrame:
    """Collect what was seen of each edit."""
    severity = F.array_position(F.lit(list(SEVERITY)), p("decision")).cast("int")
    proposal = F.struct("turn_id", p("chars_added").alias("chars_added"), p("path_hash").alias("path_hash"), "policy_version")
    is_proposal, at = is_type("edit_proposed"), F.col("occurred_at_ms").alias("at")
    decided = F.when(is_type("edit_decided"), F.struct(at, severity.alias("severity")))
    commit = F.coalesce(p("milestone") == "commit", F.lit(False))
    survived = F.when(
        is_type("edit_survival"),
        F.struct(
            p("horizon_s").alias("horizon_s"),
            (-p("survival_no_revert")).alias("lost"),
            at,
            F.coalesce(p("branch_changed"), F.lit(False)).alias("branch"),
            commit.alias("commit"),
        ),
    )
    return (
        kept.where(is_type("edit_proposed", "edit_decided", "edit_survival"))
        .groupBy(*SESSION, p("edit_id").alias("edit_id"))
        .agg(
            F.min_by(F.when(is_proposal, proposal), F.when(is_proposal, moment())).alias("proposal"),
            F.collect_list(decided).alias("decided"),
            F.collect_list(survived).alias("survived"),
            F.min("occurred_at_ms").alias("first_at_ms"),
            F.coalesce(F.max((p("horizon_s") >= DAY_S) | commit), F.lit(False)).alias("_later"),
        )
        .withColumn("turn_id", F.col("proposal.turn_id"))
    )


def _decision(latest: Column) -> Column:
    return F.element_at(F.lit(list(SEVERITY)), latest["severity"])


def _truth() -> dict[str, Column]:
    """Return what later became of an edit. Mirror of `maturity.truth_of`; looked into only where something was measured later."""
    gone = F.when(F.array_max("decided")["severity"] >= SEVERITY.index("rejected") + 1, F.lit(0.0))
    stood = F.filter("survived", lambda s: ~s["branch"])
    worst_first = F.transform(stood, lambda s: F.struct(s["horizon_s"].alias("horizon_s"), (-s["lost"]).alias("survival")))
    days = F.array_min(F.filter(worst_first, lambda s: (s["horizon_s"] >= DAY_S) & (s["horizon_s"] < WEEK_S)))
    weeks = F.array_min(F.filter(worst_first, lambda s: s["horizon_s"] >= WEEK_S))
    commits = F.array_max(F.filter(stood, lambda s: s["commit"]))
    found = {"survival_commit": -commits["lost"], "survival_24h": days["survival"], "survival_7d": weeks["survival"]}
    return {name: F.coalesce(F.when(F.col("_later"), value), gone) for name, value in found.items()}


def judged_edits(kept: DataFrame, turns: DataFrame, window_s: int) -> DataFrame:
    """Return one row an edit, judged by what was seen inside the window of the turn that proposed it."""
    joined = _grouped(kept).join(turns.select(*TURN, "closes_at_ms", F.col(DAY).alias("_day")), [*TURN], "left")
    closes, known = F.col("closes_at_ms"), F.col("closes_at_ms").isNotNull()
    inside = joined.withColumns(
        {
            "_decided": F.filter("decided", lambda d: d["at"] <= closes),
            "_measured": F.filter("survived", lambda s: (s["at"] <= closes) & (s["horizon_s"] <= window_s)),
        }
    )
    inside = inside.withColumns(
        {
            "_best": F.array_max(F.filter("_measured", lambda s: ~s["branch"])),
            # The size is checked because element_at of a null index gives the last element here, not null.
            "decision": F.when(known & (F.size("_decided") > 0), _decision(F.array_max("_decided"))),
            "late": F.when(known, F.size("decided") + F.size("survived") - F.size("_decided") - F.size("_measured")).otherwise(F.lit(0)),
        }
    )
    inside = inside.withColumns(
        {"horizon_s": F.when(known, F.col("_best.horizon_s")), "survival_no_revert": F.when(known, -F.col("_best.lost"))}
    )
    share = (
        F.when(F.col("decision").isin("rejected", "undone"), F.lit(0.0))
        .when(F.col("survival_no_revert").isNotNull(), F.col("survival_no_revert"))
        .when(F.col("decision") == "accepted", F.lit(1.0))
        .when(F.col("decision") == "partly", F.lit(PARTLY_KEPT))
    )
    chars = F.coalesce(F.col("proposal.chars_added"), F.lit(0))
    return inside.select(
        *TURN,
        "edit_id",
        F.col("proposal.policy_version").alias("policy_version"),
        F.col("proposal.path_hash").alias("path_hash"),
        chars.alias("chars_added"),
        "decision",
        "horizon_s",
        "survival_no_revert",
        share.alias("kept"),
        F.sqrt(F.greatest(chars, F.lit(1)).cast("double")).alias("weight"),
        *[value.alias(name) for name, value in _truth().items()],
        F.coalesce("_day", day("first_at_ms")).alias(DAY),
        "late",
    )


def exact(value: Column) -> Column:
    """Mirror of `components.exact`."""
    return F.floor(value * 1e9 + F.lit(0.5))


def edit_evidence(edits: DataFrame) -> DataFrame:
    """Sum a turn's edits in whole billionths, so that the sums do not depend on arrival."""
    weight = F.col("weight")

    def mean(name: str) -> Column:
        known = F.col(name).isNotNull()
        return F.sum(F.when(known, exact(weight * F.col(name)))) / F.sum(F.when(known, exact(weight)))

    return (
        edits.where(F.col("turn_id").isNotNull())
        .groupBy(*TURN)
        .agg(
            F.count("*").alias("edits"),
            F.count("kept").alias("edits_judged"),
            F.sum("late").alias("late_edits"),
            (2.0 * mean("kept") - 1.0).alias("edits_kept"),
            *[mean(name).alias(target) for name, target in TRUTH.items()],
        )
    )
