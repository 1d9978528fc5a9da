"""What became of edits, as columns: one row an edit, and their sums by turn.

Mirror of `facts.judged`, `maturity.truth_of` and `components.edits_kept`. Takes: de-duplicated events, in order, and turns with their
windows. Gives: edits, and kept share and truth by turn. Leaves out: other components (`component_columns.py`).
"""

from typing import Final

import polars as pl

from signals.components import PARTLY_KEPT, SEVERITY
from signals.maturity import DAY_S, WEEK_S
from signals.tables import DAY
from signals.turn_columns import SESSION, TURN, count_if, day, first_of, is_type, rows

EDIT: Final = (*SESSION, "edit_id")
TRUTH: Final = {"survival_commit": "truth_commit", "survival_24h": "truth_24h", "survival_7d": "truth_7d"}
"""Column of an edit -> its mean over a turn's edits."""
GONE: Final = ("rejected", "undone")


def _proposed(kept: pl.DataFrame, turns: pl.DataFrame) -> pl.DataFrame:
    """Return one row an edit of which anything was seen: who proposed it, and the window of that turn; null where nobody did."""
    seen = kept.filter(is_type("edit_proposed", "edit_decided", "edit_survival"))
    edits = seen.group_by(EDIT).agg(pl.col("occurred_at_ms").min().alias("first_at_ms"))
    proposals = first_of(seen.filter(is_type("edit_proposed")), EDIT)
    proposals = proposals.select(*EDIT, "turn_id", "policy_version", "path_hash", "chars_added")
    windows = turns.select(*TURN, "closes_at_ms", pl.col(DAY).alias("turn_day"))
    return edits.join(proposals, on=EDIT, how="left").join(windows, on=TURN, how="left")


def _decided(kept: pl.DataFrame, edits: pl.DataFrame) -> pl.DataFrame:
    """Return the last decision about each edit, inside the window and however late; of two at one instant the worse."""
    severity = pl.col("decision").replace_strict(SEVERITY, range(len(SEVERITY)), return_dtype=pl.Int64).alias("severity")
    decided = kept.filter(is_type("edit_decided")).select(*EDIT, "occurred_at_ms", "decision", severity)
    joined = decided.sort("occurred_at_ms", "severity").join(edits.select(*EDIT, "closes_at_ms"), on=EDIT, maintain_order="left")
    in_time = pl.col("occurred_at_ms") <= pl.col("closes_at_ms")
    return joined.group_by(EDIT).agg(
        pl.col("decision").filter(in_time).last(),
        pl.col("decision").last().alias("last_decision"),
        count_if(~in_time).alias("late_decided"),
    )


def _survived(kept: pl.DataFrame, edits: pl.DataFrame) -> pl.DataFrame:
    """Return what was measured of each edit, on the branch it was made on or not."""
    columns = ("occurred_at_ms", "horizon_s", "survival_no_revert", "milestone")
    stood = ~pl.col("branch_changed").fill_null(value=False)
    measured = kept.filter(is_type("edit_survival")).select(*EDIT, *columns, stood.alias("stood"))
    return measured.join(edits.select(*EDIT, "closes_at_ms"), on=EDIT)


def _measured(survived: pl.DataFrame, window_s: int) -> pl.DataFrame:
    """Return the last measurement of each edit inside its window, of two at the same horizon the worse."""
    in_time = (pl.col("occurred_at_ms") <= pl.col("closes_at_ms")) & (pl.col("horizon_s") <= window_s)
    worst_last = survived.sort("horizon_s", "survival_no_revert", descending=[False, True])
    return worst_last.group_by(EDIT).agg(
        pl.col("horizon_s", "survival_no_revert").filter(in_time & pl.col("stood")).last(), count_if(~in_time).alias("late_measured")
    )


def _later(survived: pl.DataFrame) -> pl.DataFrame:
    """Return what was measured of each edit after days and at commits. Mirror of `maturity.truth_of`."""
    horizon, survival, at_commit = (
        pl.col("horizon_s"),
        pl.col("survival_no_revert"),
        (pl.col("milestone") == "commit").fill_null(value=False),
    )
    worst_first = survived.filter(pl.col("stood") & ((horizon >= DAY_S) | at_commit)).sort("horizon_s", "survival_no_revert")
    return worst_first.group_by(EDIT).agg(
        survival.filter(at_commit & (horizon == horizon.filter(at_commit).max())).first().alias("survival_commit"),
        survival.filter((horizon >= DAY_S) & (horizon < WEEK_S)).first().alias("survival_24h"),
        survival.filter(horizon >= WEEK_S).first().alias("survival_7d"),
    )


def judged_edits(kept: pl.DataFrame, turns: pl.DataFrame, window_s: int) -> pl.DataFrame:
    """Return one row an edit, judged by what was seen inside the window of the turn that proposed it."""
    edits = _proposed(kept, turns)
    survived = _survived(kept, edits)
    for seen in (_decided(kept, edits), _measured(survived, window_s), _later(survived)):
        edits = edits.join(seen, on=EDIT, how="left")
    decision, survival = pl.col("decision"), pl.col("survival_no_revert")
    kept_share = (
        pl.when(decision.is_in(GONE))
        .then(0.0)
        .when(survival.is_not_null())
        .then(survival)
        .when(decision == "accepted")
        .then(1.0)
        .when(decision == "partly")
        .then(PARTLY_KEPT)
    )
    chars = pl.col("chars_added").fill_null(0)
    gone = pl.when(pl.col("last_decision").is_in(GONE)).then(0.0)
    return edits.with_columns(
        chars.alias("chars_added"),
        kept_share.alias("kept"),
        chars.clip(lower_bound=1).cast(pl.Float64).sqrt().alias("weight"),
        *[pl.coalesce(name, gone).alias(name) for name in TRUTH],
        pl.coalesce("turn_day", day("first_at_ms")).alias(DAY),
        (pl.col("late_decided").fill_null(0) + pl.col("late_measured").fill_null(0)).alias("late"),
    )


def exact(value: pl.Expr) -> pl.Expr:
    """Mirror of `components.exact`."""
    return (value * 1e9 + 0.5).floor().cast(pl.Int64)


def edit_evidence(edits: pl.DataFrame) -> pl.DataFrame:
    """Sum a turn's edits in whole billionths, so that the sums do not depend on arrival."""
    weight = pl.col("weight")

    def mean(name: str) -> pl.Expr:
        known = pl.col(name).is_not_null()
        return pl.when(known.any()).then(exact(weight * pl.col(name)).sum() / exact(weight).filter(known).sum())

    return (
        edits.filter(pl.col("turn_id").is_not_null())
        .group_by(TURN)
        .agg(
            rows().alias("edits"),
            pl.col("kept").count().cast(pl.Int64).alias("edits_judged"),
            pl.col("late").sum().alias("late_edits"),
            (2.0 * mean("kept") - 1.0).alias("edits_kept"),
            *[mean(name).alias(target) for name, target in TRUTH.items()],
        )
    )
