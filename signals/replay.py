"""`signals quarantine replay`: judge quarantined records again, as after an upgrade that understands them.

A record that is an event now moves to `events` with its own topic, partition and offset, and its session is computed again. Three steps,
each harmless to repeat: append what is not there yet, distil the sessions, take the records out of quarantine. Killed anywhere, the same
command finishes.

Takes: Spark, the lake, settings. Gives: how many moved, and why the others did not. Leaves out: what an event is (`intake.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import claims, distil, intake, lake
from signals.config import SignalsConfig
from signals.maintenance import sql_places

RECORD: Final = ("topic", "partition", "offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What one replay did."""

    looked_at: int
    accepted: int
    """Records that are events now."""
    sessions: int
    """Sessions computed again."""
    reasons: dict[str, int]
    """Why the others still are none."""


def waiting(home: Home, *, reason: str | None) -> pa.Table:
    """Return the coordinates of quarantined records.

    Raises:
        ConfigError: No record was refused for that reason; those that were are named.
    """
    known = lake.read(home, "quarantine", columns=[*RECORD, "reason", "date"])
    if reason is None:
        return known
    chosen = known.filter(pc.equal(known["reason"], reason))
    if not chosen.num_rows:
        reasons = ", ".join(sorted(set(known["reason"].to_pylist()))) or "none"
        raise ConfigError(f"--reason {reason}: no record in quarantine was refused for it; reasons there: {reasons}")
    return chosen


def _records(spark: SparkSession, home: Home, reason: str | None) -> DataFrame:
    rows = spark.read.format("delta").load(str(lake.path(home, "quarantine")))
    rows = rows if reason is None else rows.where(F.col("reason") == reason)
    return rows.select("key", F.col("raw").alias("value"), *RECORD, F.col("arrived_at").alias("timestamp"))


def _judged(spark: SparkSession, home: Home, config: SignalsConfig, reason: str | None) -> DataFrame:
    """Judge the records again; those that are claims are looked up again."""
    return claims.redeemed(intake.judged(_records(spark, home, reason), intake.limits(config)), config, home)


def replay(
    spark: SparkSession,
    home: Home,
    config: SignalsConfig,
    *,
    reason: str | None,
    now: datetime,
    after: Callable[[str], None] = lambda _step: None,
) -> Replayed:
    """Judge quarantined records again and move those that are events now; the caller holds the signals job's lock.

    Args:
        spark: The session.
        home: The deployment.
        config: Settings.
        reason: Only records refused for this; None means all.
        now: The instant that windows are closed against.
        after: Told the name of each step once it is done.

    Raises:
        ConfigError: See `waiting`.
        StorageFull, ContractViolation: As `distil.distil`.
    """
    looked_at = waiting(home, reason=reason).num_rows
    if not looked_at:
        return Replayed(looked_at=0, accepted=0, sessions=0, reasons={})
    judged = _judged(spark, home, config, reason).persist()
    try:
        reasons = {row["reason"]: row["count"] for row in judged.where("reason IS NOT NULL").groupBy("reason").count().collect()}
        events = intake.accepted(judged)
        moved = events.select(*RECORD, "session_id", "date").toArrow()
        if moved.num_rows:
            _append(spark, home, events, moved)
            after("events")
            _distil(spark, home, config, moved, now=now)
            after("distil")
            _take_out(home, moved)
            after("quarantine")
    finally:
        judged.unpersist()
    sessions = len(moved["session_id"].unique())
    return Replayed(looked_at=looked_at, accepted=moved.num_rows, sessions=sessions, reasons=dict(sorted(reasons.items())))


def _append(spark: SparkSession, home: Home, events: DataFrame, moved: pa.Table) -> None:
    """Step 1: append the events that an interrupted replay has not appended already."""
    days = moved["date"].unique().to_pylist()
    there = spark.read.format("delta").load(str(lake.path(home, "events"))).where(F.col("date").isin(days)).select(*RECORD)
    fresh = events.join(there, [*RECORD], "left_anti").select(*events.columns)
    fresh.write.format("delta").mode("append").option("mergeSchema", "true").save(str(lake.path(home, "events")))


def _distil(spark: SparkSession, home: Home, config: SignalsConfig, moved: pa.Table, *, now: datetime) -> None:
    """Step 2: compute the sessions again, and those that are due. Their offsets lie before the frontier, so no later run would."""
    before = lake.last_distil(home)
    tombstoned = frozenset(before["tombstoned"]) if before else frozenset()
    due = distil.touched(home, config, now=now, tombstoned=tombstoned)
    first: date = min(moved["date"].to_pylist())
    since = min(due.since, first - timedelta(days=config.signals.lookback_days))
    sessions = due.sessions | frozenset(moved["session_id"].to_pylist())
    what = distil.Touched(sessions=sessions, since=since, frontier=due.frontier)
    distil.distil(spark, home, config, what, now=now, tombstoned=tombstoned)


def _take_out(home: Home, moved: pa.Table) -> None:
    """Step 3: take the records out of quarantine."""
    with lake.boundary(lake.path(home, "quarantine")):
        lake.committed("quarantine", lambda: lake.open_table(home, "quarantine").delete(sql_places(moved)))
