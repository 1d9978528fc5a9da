"""The distil job: from `events` to `turns`, `edits`, `rewards`, `samples` and `ledger_counts`, for the sessions that changed.

A session is touched when events of it arrived since the last distil, when a window of it has closed meanwhile, or when a policy version it
used was tombstoned or restored. Touched sessions are recomputed whole, from the events of a bounded look-back, by Spark's tasks; each table
then takes their new rows and gives up their old ones in one commit, so that the cost grows neither with the day nor with the lake. Nothing
depends on how far an earlier run came: the table `distilled` is written last, and until it names a frontier the same sessions are
recomputed to the same rows.

Takes: the lake, settings, `now`. Gives: rows and a summary. Leaves out: the rules (`transforms.py`), what a task does (`distil_task.py`)
and how files become rows (`parts.py`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import counts, distil_task, lake, maintenance, parts, verdict_store
from signals.chunks import Chunk, cut
from signals.config import SignalsConfig
from signals.norm_table import in_force
from signals.rewards import reward_version
from signals.tables import DAY

WRITTEN: Final = ("edits", "rewards", "samples", "turns", "conflicts")
"""Tables in the order of their commits: a turn that is seen has its reward and samples."""


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
    sessions: set[str] = set()
    days: set[date] = set()
    for batch in _new_events(home, dict(before["frontier"]) if before else {}, frontier):
        sessions.update(batch.column("session_id").unique().to_pylist())
        days.update(batch.column(DAY).unique().to_pylist())
    again = _closed(home, now, newest["distilled_at"] if newest else None)
    if changed := tombstoned ^ frozenset(before["tombstoned"] if before else ()):
        moved = lake.scan(home, "turns", again.column_names, ds.field("policy_version").isin(pa.array(sorted(changed), pa.int64())))
        again = pa.concat_tables([again, moved])
    sessions.update(again["session_id"].to_pylist())
    if (first := pc.min(again["started_at"]).as_py()) is not None:
        days.add(first.date())
    since = min(days, default=now.date()) - timedelta(days=config.signals.lookback_days)
    same = newest is not None and dict(newest["frontier"]) == frontier and set(newest["tombstoned"]) == tombstoned
    return Touched(sessions=frozenset(sessions), since=since, frontier=frontier, news=bool(sessions) or not same)


def _new_events(home: Home, known: Mapping[str, int], frontier: Mapping[str, int]) -> Iterable[pa.RecordBatch]:
    """Yield session ids and days of events between two frontiers, in batches of bounded size."""
    condition: lake.Condition = None
    files: list[str] = []
    for key, end in sorted(frontier.items()):
        topic, _, partition = key.rpartition("-")
        if end > (start := known.get(key, 0)):
            own = lake.offsets_between(topic, int(partition), start=start, end=end)
            condition = own if condition is None else condition | own
            files.append(f'("partition" = {partition} AND "offset" >= {start} AND "offset" < {end})')
    if condition is not None:
        source = lake.dataset(home, "events", files=" OR ".join(files))
        yield from source.scanner(columns=["session_id", DAY], filter=condition, batch_size=65_536).to_batches()


def _closed(home: Home, now: datetime, before: datetime | None) -> pa.Table:
    """Return session and start of turns that were open at their last distil and are not any more.

    A turn that was left open closes after the instant it was judged at, which is not before the last finished distil: what closed earlier
    need not be looked at.
    """
    closed = ds.field("closes_at") <= pa.scalar(now, pa.timestamp("us", tz="UTC"))
    files = f"closes_at <= '{now.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}Z'"
    if before is not None:
        closed &= ds.field("closes_at") > pa.scalar(before, pa.timestamp("us", tz="UTC"))
        files += f" AND closes_at > '{before.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}Z'"
    source = lake.dataset(home, "turns", files=files)
    return source.to_table(columns=["session_id", "started_at"], filter=~ds.field("final") & closed)


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
    """Recompute sessions and replace their rows.

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
        StorageFull: No space left; the same command again goes on.
    """
    norms, judged = in_force(home, config.rewards), verdict_store.in_force(home)
    work = distil_task.Work(
        lake=home.lake.absolute(), tables=WRITTEN, rewards=config.rewards, now_ms=int(now.timestamp() * 1000), tombstoned=tombstoned,
        norms=norms, judged=judged, since=what.since,
    )  # fmt: skip
    slots = spark.sparkContext.defaultParallelism
    done = compute(spark, work, cut(home, sorted(what.sessions), since=what.since, slots=slots))
    _write(home, done, after)
    turns = sum(own.turns for own in done)
    outcomes = counts.outcomes(home)
    lake.append(
        home,
        "distilled",
        [
            {
                "distilled_at": now,
                "frontier": what.frontier,
                "tombstoned": sorted(tombstoned),
                "reward_version": reward_version(config.rewards, norms, judged=judged.version),
                "sessions": len(what.sessions),
                "turns": turns,
                "versions": lake.versions(home),
            }
        ],
    )
    after("distilled")
    maintenance.merge_logs(home, config.lake)
    return Summary(sessions=len(what.sessions), turns=turns, outcomes=outcomes, conflicts=sum(own.conflicts for own in done))


def compute(spark: SparkSession, work: distil_task.Work, chunks: Sequence[Chunk]) -> list[distil_task.Done]:
    """Compute chunks in Spark's tasks, one each; their files are written then, and no part of a table yet.

    Raises:
        ContractViolation: A turn has no outcome, or two.
    """
    if not chunks:
        return []
    tasks = spark.sparkContext.parallelize(chunks, len(chunks)).map(functools.partial(distil_task.compute, work))
    done = [distil_task.loaded(text) for text in tasks.collect()]
    if fault := next((own.fault for own in done if own.fault), None):
        raise ContractViolation(f"the rules contradict themselves ({fault}); nothing was written, and the last version still can be read")
    return done


def _write(home: Home, done: Sequence[distil_task.Done], after: Callable[[str], None]) -> None:
    """Commit what the tasks wrote, one commit a table, and bring the counts up to date."""
    gone = _gone(home, done)
    before = counts.version(home)
    taken: list[pa.Table] = []
    for name in WRITTEN:
        fresh = [part for own in done for part in own.parts[name]]
        parts.replace(home, name, fresh, gone=gone, told=taken.append if name == "turns" else None)
        after(name)
    counts.update(home, before, added=[row for own in done for row in own.counts], taken=taken[0] if taken else None)
    after(counts.TABLE)


def _gone(home: Home, done: Sequence[distil_task.Done]) -> dict[date, list[str]]:
    """Return by day the sessions whose rows are replaced.

    A row lies on the day of an event it was made from; so the days of a session's events are all that can hold rows of it, those before the
    look-back excepted. They stay: what they were made from is not looked at any more. Only a turn that began before the look-back and went
    on in it would be there twice, so the rows of its session on the day it began go.
    """
    gone: dict[date, set[str]] = {}
    for own in done:
        for day, sessions in own.sessions.items():
            gone.setdefault(day, set()).update(sessions)
    straddling = {(session, turn) for own in done for session, turns in own.straddling.items() for turn in turns}
    if straddling:
        first = min(gone)
        chosen = ds.field("session_id").isin(sorted({session for session, _ in straddling})) & (ds.field(DAY) < first)
        for row in lake.scan(home, "turns", ["session_id", "turn_id", DAY], chosen).to_pylist():
            if (row["session_id"], row["turn_id"]) in straddling:
                gone.setdefault(row[DAY], set()).add(row["session_id"])
    return {day: sorted(sessions) for day, sessions in gone.items()}


def utc_now() -> datetime:
    """Return the present instant, for commands."""
    return datetime.now(UTC)
