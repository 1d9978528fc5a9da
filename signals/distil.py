"""The distil job: from `events` to `turns`, `edits`, `rewards`, `samples` and `ledger_counts`, for the sessions that changed.

A session is touched when events of it arrived since the last distil, when a window of it has closed meanwhile, or when a policy version it
used was tombstoned or restored. Touched sessions are recomputed whole, from the events of a bounded look-back; untouched ones on the same
days are carried over; then those days are replaced in one commit a table, so that the cost does not grow with the lake. Nothing depends on
how far an earlier run came: the table `distilled` is written last, and until it names a frontier the same sessions are recomputed to the
same rows.

Takes: the lake, settings, `now`. Gives: rewritten days and a summary. Leaves out: the rules (`transforms.py`).
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import lake, transforms
from signals.config import SignalsConfig
from signals.maintenance import recount
from signals.norm_table import in_force
from signals.rewards import reward_version
from signals.tables import DAY, TABLES

LOG: Final = logging.getLogger(__name__)
SESSIONS_A_PASS: Final = 20_000
"""About a million events: what is held between the steps of a pass stays within the driver's memory, however much is recomputed at once.
Ids that sort by time make the days of one pass few, so that hardly a row is written twice."""
WRITTEN: Final = ("edits", "rewards", "samples", "turns")
"""Tables written by Spark; `turns` last, so that a turn that is seen has its reward and samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """What has to be recomputed."""

    sessions: frozenset[str]
    since: date
    """Events of these sessions that arrived before this day are not looked at."""
    frontier: dict[str, int]
    """What the lake held when this was decided."""
    news: bool = True
    """Whether there is anything to write down: sessions, offsets or roll-backs that the last distil does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one distil did."""

    sessions: int
    turns: int
    """Turns of the sessions recomputed."""
    outcomes: dict[str, int]
    """All turns of the lake by outcome."""
    conflicts: int
    """Events of the recomputed sessions whose id had other content before."""


def touched(home: Home, config: SignalsConfig, *, now: datetime, tombstoned: frozenset[int], everything: bool = False) -> Touched:
    """Find the sessions to recompute, without Spark.

    Args:
        home: The deployment.
        config: Settings.
        now: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.
        everything: Whether to take all sessions, as after a change of reward settings.
    """
    frontier = lake.frontier(home)
    newest = lake.last_distil(home)
    before = None if everything else newest
    known = dict(before["frontier"]) if before else {}
    sessions: set[str] = set()
    days: set[date] = set()
    for batch in _new_events(home, known, frontier):
        sessions.update(batch.column("session_id").unique().to_pylist())
        days.update(batch.column("date").unique().to_pylist())
    changed = tombstoned ^ frozenset(before["tombstoned"] if before else ())
    due = ~ds.field("final") & (ds.field("closes_at") <= pa.scalar(now, pa.timestamp("us", tz="UTC")))
    moved = ds.field("policy_version").isin(pa.array(sorted(changed), pa.int64()))
    again = lake.scan(home, "turns", ["session_id", "started_at"], due | moved if changed else due)
    sessions.update(again["session_id"].to_pylist())
    if (first := pc.min(again["started_at"]).as_py()) is not None:
        days.add(first.date())
    since = min(days, default=now.date()) - timedelta(days=config.signals.lookback_days)
    same = newest is not None and dict(newest["frontier"]) == frontier and set(newest["tombstoned"]) == tombstoned
    return Touched(sessions=frozenset(sessions), since=since, frontier=frontier, news=bool(sessions) or not same)


def _new_events(home: Home, known: dict[str, int], frontier: dict[str, int]) -> Iterable[pa.RecordBatch]:
    """Yield session ids and days of events between two frontiers, in batches of bounded size."""
    condition: lake.Condition = None
    for key, end in sorted(frontier.items()):
        topic, _, partition = key.rpartition("-")
        if end > (start := known.get(key, 0)):
            own = lake.offsets_between(topic, int(partition), start=start, end=end)
            condition = own if condition is None else condition | own
    if condition is not None:
        scanner = lake.dataset(home, "events").scanner(columns=["session_id", "date"], filter=condition, batch_size=65_536)
        yield from scanner.to_batches()


def distil(
    spark: SparkSession,
    home: Home,
    config: SignalsConfig,
    what: Touched,
    *,
    now: datetime,
    tombstoned: frozenset[int] = frozenset(),
    after: Callable[[str], None] = lambda _step: None,
) -> Summary:
    """Recompute sessions and replace their days.

    Args:
        spark: The session.
        home: The deployment.
        config: Settings.
        what: From `touched`.
        now: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.
        after: Told the name of each table once it is written.

    Raises:
        ContractViolation: A turn has no outcome, or two; nothing is recorded as done then.
    """
    turns = conflicts = 0
    days: set[date] = set()
    norms = in_force(home, config.rewards)
    ordered = sorted(what.sessions)
    for begin in range(0, len(ordered), SESSIONS_A_PASS):
        names = pa.array(ordered[begin : begin + SESSIONS_A_PASS], pa.string())
        wanted = F.broadcast(spark.createDataFrame(pa.table({"session_id": names})))
        found = transforms.distilled(
            events_of(spark, home, names, wanted=wanted, since=what.since),
            config.rewards,
            now_ms=int(now.timestamp() * 1000),
            tombstoned=tombstoned,
            partitions=config.spark.shuffle_partitions,
            norms=norms,
        )
        own = _days(found.turns.select(DAY).union(found.edits.select(DAY))) | _days_before(home, ("turns", "edits"), names)
        turns += _write(spark, home, found, wanted, sorted(own), after)
        conflicts += _write_conflicts(spark, home, found.conflicts, wanted, names)
        lake.replace_days(home, "ledger_counts", recount(home, sorted(own)), sorted(own))
        after("ledger_counts")
        days |= own
    outcomes = check_outcomes(home, sorted(days))
    lake.append(
        home,
        "distilled",
        [
            {
                "distilled_at": now,
                "frontier": what.frontier,
                "tombstoned": sorted(tombstoned),
                "reward_version": reward_version(config.rewards, norms),
                "sessions": len(what.sessions),
                "turns": turns,
                "versions": lake.versions(home),
            }
        ],
    )
    after("distilled")
    return Summary(sessions=len(what.sessions), turns=turns, outcomes=outcomes, conflicts=conflicts)


def events_of(spark: SparkSession, home: Home, names: pa.Array, *, wanted: DataFrame, since: date) -> DataFrame:
    """Return the events of some sessions that arrived since a day.

    Args:
        spark: The session.
        home: The deployment.
        names: Ids of the sessions, sorted.
        wanted: The same as a data frame.
        since: The day.
    """
    events = spark.read.format("delta").load(str(lake.path(home, "events")))
    # Ids that sort by time lie in few files of a compacted day; the range lets Spark pass over the others.
    near = (F.col("date") >= F.lit(since)) & F.col("session_id").between(names[0].as_py(), names[-1].as_py())
    return events.where(near).join(wanted, "session_id", "left_semi")


def _days(frame: DataFrame) -> set[date]:
    return {row[DAY] for row in frame.distinct().collect()}


def _days_before(home: Home, tables: Iterable[str], sessions: pa.Array) -> set[date]:
    """Return the days that hold rows of these sessions now: an event that came late can have moved a turn's start to another day."""
    condition = ds.field("session_id").isin(sessions)
    return {day for name in tables for day in lake.scan(home, name, [DAY], condition)[DAY].unique().to_pylist()}


def _carried(spark: SparkSession, home: Home, name: str, wanted: DataFrame, days: list[date]) -> DataFrame | None:
    """Return the rows of untouched sessions on days that are to be replaced; None when the table holds nothing yet."""
    if not lake.holds_rows(home, name):
        return None
    rows = spark.read.format("delta").load(str(lake.path(home, name))).where(F.col(DAY).isin(days))
    return rows.join(wanted, "session_id", "left_anti").select(*TABLES[name].schema.names)


def _replace(frame: DataFrame, home: Home, name: str, days: list[date]) -> None:
    predicate = lake.day_predicate(days)
    frame.write.format("delta").mode("overwrite").option("replaceWhere", predicate).save(str(lake.path(home, name)))


def _write(
    spark: SparkSession, home: Home, found: transforms.Distilled, wanted: DataFrame, days: list[date], after: Callable[[str], None]
) -> int:
    """Replace the days of the tables; returns the number of turns recomputed."""
    fresh = {"edits": found.edits, "rewards": found.rewards, "samples": found.samples, "turns": found.turns}

    def write(name: str) -> None:
        carried = _carried(spark, home, name, wanted, days)
        _replace(fresh[name] if carried is None else fresh[name].unionByName(carried), home, name, days)
        after(name)

    turns = found.turns.count()
    if days:
        # Each commit waits for files more than for cores, so they go side by side; `turns` is last and alone.
        with ThreadPoolExecutor(max_workers=len(WRITTEN) - 1) as pool:
            list(pool.map(write, WRITTEN[:-1]))
        write(WRITTEN[-1])
    return turns


def _write_conflicts(spark: SparkSession, home: Home, conflicts: DataFrame, wanted: DataFrame, sessions: pa.Array) -> int:
    number = conflicts.count()
    days = sorted(_days_before(home, ("conflicts",), sessions) | (_days(conflicts.select(DAY)) if number else set()))
    if days:
        carried = _carried(spark, home, "conflicts", wanted, days)
        _replace(conflicts if carried is None else conflicts.unionByName(carried), home, "conflicts", days)
    return number


def check_outcomes(home: Home, days: Iterable[date] | None = None) -> dict[str, int]:
    """Return all turns of the lake by outcome, once it is certain that every turn has exactly one.

    Args:
        home: The deployment.
        days: Days whose turns are looked at; None means all.

    Raises:
        ContractViolation: A turn appears twice or without an outcome, or the counts do not add up to the turns.
    """
    chosen = None if days is None else ds.field(DAY).isin(list(days))
    turns = lake.scan(home, "turns", ["session_id", "turn_id", "outcome"], chosen)
    distinct = turns.group_by(["session_id", "turn_id"]).aggregate([]).num_rows
    counted = pc.sum(lake.scan(home, "ledger_counts", ["turns"], chosen)["turns"]).as_py() or 0
    if not turns.num_rows == distinct == counted or turns["outcome"].null_count:
        raise ContractViolation(
            f"the lake at {home.lake} holds {turns.num_rows} turn rows for {distinct} turns and counts {counted} outcomes; "
            "run: tidegate signals run --once --everything"
        )
    outcomes: dict[str, int] = {}
    for row in lake.counts(home):
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + row["turns"]
    return dict(sorted(outcomes.items()))


def utc_now() -> datetime:
    """Return the present instant, for commands."""
    return datetime.now(UTC)
