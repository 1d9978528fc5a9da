"""Whether every Kafka offset that was read is in the lake exactly once, and every turn: the invariants of the ledgers.

    rows of a batch            kept + quarantined = end - start
    batches of a partition     each begins where the one before ended, or a row of `gaps` says what lies between
    offsets of a partition     events + quarantine + removed = sum(end - start), all of them distinct
    turns                      each there once, with one outcome, and counted

Takes: the lake (and the broker's offsets, where it answers). Gives: problems, each with what to do; nothing is changed.
Leaves out: whether a stream may start (`offsets.py`, asked here too).
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import BrokerUnavailable, ContractViolation
from pipelines.storage import Home
from signals import counts, lake, offsets
from signals.config import SignalsConfig

RESUME: Final = "tidegate signals run --once --resume-from-ledger"
RESTORE: Final = "restore the lake from a copy, or start a new one in another home: tidegate signals run --once"
REPLAY: Final = "tidegate signals quarantine replay (finishes what was interrupted)"
RATE_OVER: Final = timedelta(hours=24)
"""The quarantine's share is taken over this long."""

Part = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An invariant that does not hold."""

    check: str
    found: str
    do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one partition's offsets became."""

    topic: str
    partition: int
    booked: int
    """Offsets that the ledger accounts for: sum(end - start)."""
    events: int
    """Rows of `events` below the ledger's end."""
    quarantined: int
    """Rows of `quarantine` below the ledger's end."""
    removed: int
    """Rows that retention or a deletion request took out."""
    distinct: int
    """Distinct offsets among events and quarantine below the ledger's end."""
    lost: int
    """Offsets that Kafka deleted unread and a person accepted as lost."""
    unfinished: int
    """Rows at or beyond the ledger's end: of a batch that was interrupted; the next run completes it."""


def booked(home: Home) -> Iterator[Problem]:
    """Yield what is wrong with the ledger by itself: uneven batches, holes that no gap explains, offsets booked twice.

    Asked after every batch of the continuous job, so it looks at columns: only rows at fault become Python.
    """
    ledger = lake.read(home, "offset_ledger")
    gaps = {(row["topic"], row["partition"], row["start"], row["end"]) for row in lake.read(home, "gaps").to_pylist()}
    yield from uneven(ledger)
    yield from joined(ledger, gaps=gaps)


def uneven(ledger: pa.Table) -> Iterator[Problem]:
    """Yield batches of the ledger that hold more or fewer rows than offsets."""
    rows, span = pc.add(ledger["kept"], ledger["quarantined"]), pc.subtract(ledger["end"], ledger["start"])
    for row in ledger.filter(pc.not_equal(rows, span)).to_pylist():
        number = row["kept"] + row["quarantined"]
        yield Problem(check="batch", found=f"{_name(row)}: {number} rows for offsets {row['start']} to {row['end']}", do=RESTORE)


def joined(ledger: pa.Table, *, gaps: Set[tuple[str, int, int, int]]) -> Iterator[Problem]:
    """Yield where the batches of a partition do not follow each other.

    Args:
        ledger: Rows of `offset_ledger`.
        gaps: Accepted losses: topic, partition, start, end.
    """
    ordered = ledger.sort_by([(name, "ascending") for name in ("topic", "partition", "start", "end")])
    one, two = ordered.slice(0, max(0, ordered.num_rows - 1)), ordered.slice(1)
    same = pc.and_(pc.equal(one["topic"], two["topic"]), pc.equal(one["partition"], two["partition"]))
    apart = pc.and_(same, pc.not_equal(one["end"], two["start"]))
    for before, after in zip(one.filter(apart).to_pylist(), two.filter(apart).to_pylist(), strict=True):
        topic, partition, end, start = before["topic"], before["partition"], before["end"], after["start"]
        if start < end:
            yield Problem(check="overlap", found=f"{_name(after)} begins at {start}, but {_name(before)} went up to {end}", do=RESTORE)
        elif (topic, partition, end, start) not in gaps:
            yield Problem(check="gap", found=f"{topic}-{partition}: offsets {end} to {start} are in no batch and in no gap", do=RESUME)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['topic']}-{row['partition']}, batch {row['batch']}"


def totals(home: Home) -> dict[Part, dict[str, int]]:
    """Return booked, removed and lost offsets by partition."""
    found: dict[Part, dict[str, int]] = {}

    def part(row: Mapping[str, Any]) -> dict[str, int]:
        return found.setdefault((row["topic"], row["partition"]), {"booked": 0, "removed": 0, "lost": 0})

    ledger = lake.read(home, "offset_ledger", columns=["topic", "partition", "start", "end"])
    spans = ledger.append_column("booked", pc.subtract(ledger["end"], ledger["start"]))
    for row in spans.group_by(["topic", "partition"]).aggregate([("booked", "sum")]).to_pylist():
        part(row)["booked"] = row["booked_sum"]
    for row in lake.removals(home):
        part(row)["removed"] += row["rows"]
    for row in lake.read(home, "gaps").to_pylist():
        part(row)["lost"] += row["end"] - row["start"]
    return found


def figures(home: Home) -> list[Figures]:
    """Count offsets by partition; memory grows with the partitions, not with the events."""
    import duckdb

    events = lake.dataset(home, "events")
    quarantine = lake.dataset(home, "quarantine")
    with duckdb.connect() as session:
        session.register("events", events)
        session.register("quarantine", quarantine)
        session.register("ends", _ends(home))
        counted = session.sql(
            'WITH r AS (SELECT topic, "partition" AS part, "offset" AS o, 1 AS e FROM events '
            'UNION ALL SELECT topic, "partition", "offset", 0 FROM quarantine) '
            "SELECT topic, part, count(*) FILTER (o < coalesce(top, 0) AND e = 1), count(*) FILTER (o < coalesce(top, 0) AND e = 0), "
            "count(DISTINCT o) FILTER (o < coalesce(top, 0)), count(*) FILTER (o >= coalesce(top, 0)) "
            "FROM r LEFT JOIN ends USING (topic, part) GROUP BY topic, part"
        ).fetchall()
    rows = {(topic, part): numbers for topic, part, *numbers in counted}
    known = totals(home)
    return [
        Figures(
            topic=key[0], partition=key[1], booked=own["booked"], removed=own["removed"], lost=own["lost"],
            events=rows.get(key, [0] * 4)[0], quarantined=rows.get(key, [0] * 4)[1], distinct=rows.get(key, [0] * 4)[2],
            unfinished=rows.get(key, [0] * 4)[3],
        )
        for key in sorted({*known, *rows})
        for own in [known.get(key, {"booked": 0, "removed": 0, "lost": 0})]
    ]  # fmt: skip


def _ends(home: Home) -> Any:
    ledger = lake.read(home, "offset_ledger", columns=["topic", "partition", "end"])
    return ledger.group_by(["topic", "partition"]).aggregate([("end", "max")]).rename_columns(["topic", "part", "top"])


def counted(partitions: list[Figures]) -> Iterator[Problem]:
    """Yield partitions whose rows are not as many as their offsets, or not distinct."""
    for own in partitions:
        where, rows = f"{own.topic}-{own.partition}", own.events + own.quarantined
        if own.distinct < rows:
            found = f"{where}: {rows - own.distinct} of {rows} rows have an offset that another row has too"
            yield Problem(check="duplicates", found=found, do=f"{REPLAY}; if that does not help, {RESTORE}")
        if own.distinct + own.removed != own.booked:
            found = f"{where}: {own.distinct} distinct offsets in the lake and {own.removed} removed, but the ledger has {own.booked}"
            yield Problem(check="rows", found=found, do=f"{RESUME}; if that does not help, {RESTORE}")


def judged(home: Home) -> Iterator[Problem]:
    """Yield what is wrong with the turns: one twice, one without an outcome, or counts that are not theirs."""
    rows, turns, without = counts.not_one(home)
    if without or rows != turns:
        found = f"{rows} turn rows for {turns} turns, {without} without an outcome"
        yield Problem(check="turns", found=found, do="tidegate signals run --once --everything")
    try:
        counts.outcomes(home)
    except ContractViolation as error:
        yield Problem(check="turns", found=str(error), do="tidegate signals run --once --everything")


def unread(home: Home, config: SignalsConfig) -> Iterator[Problem]:
    """Yield what Kafka deleted before it was read, as far as the broker can be asked, and a stream state that does not fit the lake."""
    from pipelines import kafka

    try:
        offsets.verify(home, config.kafka.topic)
    except ContractViolation as error:
        yield Problem(check="stream", found=str(error), do=RESUME)
    try:
        begin, end = kafka.begin_offsets(config, home), kafka.end_offsets(config, home)
        gaps = offsets.find_gaps(offsets.ledger_position(home, config.kafka.topic), begin, end)
    except BrokerUnavailable:
        return
    except ContractViolation as error:
        yield Problem(check="topic", found=str(error), do="give the new topic another name: --set kafka.topic=NAME")
        return
    for gap in gaps:
        found = f"Kafka deleted offsets {gap.start} to {gap.end} of partition {gap.partition} before they were read"
        yield Problem(check="gap", found=found, do="tidegate signals run --once --accept-gap (writes the loss to the table gaps)")


def quarantine_share(home: Home, *, now: datetime) -> float:
    """Return the share of records that were no valid events, of those read in the last day; 0 when none were."""
    ledger = lake.read(home, "offset_ledger", columns=["kept", "quarantined", "committed_at"])
    recent = ledger.filter(pc.greater_equal(ledger["committed_at"], now - RATE_OVER))
    kept, refused = (pc.sum(recent[name]).as_py() or 0 for name in ("kept", "quarantined"))
    return refused / (kept + refused) if kept + refused else 0.0


def quick(home: Home) -> None:
    """Hold the ledger against the tables' row counts, which costs no scan; for the end of every run.

    Raises:
        ContractViolation: They do not agree.
    """
    problems = list(booked(home))
    rows, wanted = rows_and_wanted(home)
    if rows != wanted:
        found = f"events and quarantine hold {rows} rows, the ledger says {wanted}"
        problems.append(Problem(check="rows", found=found, do="tidegate signals check"))
    if problems:
        raise ContractViolation(f"the lake at {home.lake} does not add up: {problems[0].found}; {problems[0].do}")


def rows_and_wanted(home: Home) -> tuple[int, int]:
    """Return how many rows events and quarantine hold, and how many the ledger says they hold."""
    rows = lake.count(home, "events") + lake.count(home, "quarantine")
    return rows, sum(own["booked"] - own["removed"] for own in totals(home).values())


def not_fewer(home: Home) -> None:
    """Refuse to go on with tables that hold less than the ledger says; more is an interrupted batch, which the next run completes.

    Raises:
        ContractViolation: Rows are missing, as after restoring a table to an earlier version.
    """
    rows, wanted = rows_and_wanted(home)
    if rows < wanted:
        raise ContractViolation(
            f"events and quarantine in {home.lake} hold {rows} rows, but the ledger says {wanted}, as after restoring a table to an "
            f"earlier version; see which: tidegate signals check; {RESTORE}"
        )


def check(home: Home, config: SignalsConfig, *, now: datetime) -> dict[str, Any]:
    """Check everything.

    Returns:
        `ok`, `problems` (check, found, do), `partitions` (see `Figures`), `gaps` (accepted ones), `quarantine_share`,
        `alerts` (sentences that are no problem of the lake).
    """
    partitions = figures(home)
    problems = [*booked(home), *counted(partitions), *judged(home), *unread(home, config)]
    share = quarantine_share(home, now=now)
    alerts: list[str] = []
    if share > config.signals.quarantine_alert_share:
        alerts.append(f"{share:.1%} of the last day's records are no valid events; look at: tidegate signals quarantine show")
    if unfinished := sum(own.unfinished for own in partitions):
        alerts.append(f"{unfinished} rows belong to a batch that was interrupted; the next run completes it")
    return {
        "ok": not problems, "problems": [asdict(problem) for problem in problems], "partitions": [asdict(own) for own in partitions],
        "gaps": lake.read(home, "gaps").to_pylist(), "quarantine_share": share, "alerts": alerts,
    }  # fmt: skip
