"""Keeping the lake small: merging files, deleting what is old, dropping old table versions. All without Spark, beside a running stream.

Compaction rewrites days that are over, sorted by session, and says so in the log (no data changed), so that nothing downstream sees it.
Deleting is written down in `removals` before it happens and counts once its commit carries the removal's id, so that the offset ledger
adds up wherever a run is killed. A commit that loses a race against the stream is tried again.

Takes: the lake, settings, `now`. Gives: what was done, or would be. Leaves out: one user's data (`forget.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from math import ceil
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties

from pipelines.errors import ConfigError
from pipelines.events import new_id
from pipelines.storage import Home
from signals import lake
from signals.config import LakeConfig, SignalsConfig
from signals.tables import DAY, TABLES

BY_ARRIVAL: Final = ("events", "quarantine")
"""Tables that grow by small appends into the day of arrival."""
BY_START: Final = ("turns", "edits", "rewards", "samples", "conflicts")
"""Tables that grow by a distil's rows into the days its turns started on."""
LOGS: Final = ("offset_ledger", "distilled", "gaps", "removals")
"""Tables that get a few rows a commit."""
FILES_BEFORE_MERGE: Final = 8
"""A log is merged when it has more files than this, a day of distilled rows when it has so many more than it needs (what comes late for a
day adds a few): fewer cost a reader nothing."""
FILES_BEFORE_JOBS_MERGE: Final = 64
"""The jobs read these tables each time, so they merge them themselves when there are more files than this: about once an hour."""
ROWS_A_GROUP: Final = 20_000
"""Rows of one row group of a merged file: what is decoded for one session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of one partition of a table."""

    table: str
    day: date | None
    """None for a table without partitions."""
    number: int
    size_bytes: int

    def wanted(self, target_bytes: int) -> int:
        """Return how many files of the target size would hold the same."""
        return max(1, ceil(self.size_bytes / target_bytes))


def files(home: Home, name: str) -> list[Files]:
    """Return the files of a table by partition."""
    actions = pa.table(lake.open_table(home, name).get_add_actions(flatten=True))
    found: dict[date | None, list[int]] = {}
    for row in actions.to_pylist():
        found.setdefault(row.get(f"partition.{DAY}"), []).append(row["size_bytes"])
    return [
        Files(table=name, day=day, number=len(sizes), size_bytes=sum(sizes))
        for day, sizes in sorted(found.items(), key=lambda item: str(item[0]))
    ]


def to_merge(home: Home, config: LakeConfig, *, now: datetime) -> list[Files]:
    """Return the partitions that are over and lie in more files than they need."""
    target, today = config.target_file_mb * 2**20, now.astimezone(UTC).date()
    spare: dict[str, int] = {**dict.fromkeys(BY_ARRIVAL, 0), **dict.fromkeys(BY_START, FILES_BEFORE_MERGE)}
    days = [own for name in spare if lake.exists(home, name) for own in files(home, name)]
    logs = [own for name in LOGS if lake.exists(home, name) for own in files(home, name)]
    return [own for own in days if own.day and own.day < today and own.number > own.wanted(target) + spare[own.table]] + [
        own for own in logs if own.number > max(own.wanted(target), FILES_BEFORE_MERGE)
    ]


def compact(
    home: Home, config: LakeConfig, *, now: datetime, advance: Callable[[int], object] = lambda _files: None
) -> list[dict[str, Any]]:
    """Merge the small files of days that are over; a day in one piece is left alone.

    Args:
        home: The deployment.
        config: Target size.
        now: Its UTC day and later ones are still being written.
        advance: Told how many files were merged, for progress.

    Returns:
        One entry a partition: table, day, files and bytes before and after.

    Raises:
        StorageFull: No space for the new files; the old ones are still the table.
        TransientError: The stream committed first every time.
    """
    done: list[dict[str, Any]] = []
    for own in to_merge(home, config, now=now):
        with lake.boundary(lake.path(home, own.table)):
            lake.committed(f"compacting {own.table}", lambda own=own: _merge(lake.open_table(home, own.table), own, config))
        after = next(item for item in files(home, own.table) if item.day == own.day)
        advance(own.number)
        done.append({
            "table": own.table, "day": own.day, "files_before": own.number, "files_after": after.number, "bytes_before": own.size_bytes,
            "bytes_after": after.size_bytes,
        })  # fmt: skip
    return done


def merge_logs(home: Home, config: LakeConfig) -> None:
    """Merge the files of tables that get a row a commit, once they are many; for the end of a distil.

    Raises:
        StorageFull, TransientError: As `compact`.
    """
    for name in LOGS:
        if lake.exists(home, name):
            with lake.boundary(lake.path(home, name)):
                table = lake.open_table(home, name)
                if len(table.file_uris()) > FILES_BEFORE_JOBS_MERGE:
                    own = Files(table=name, day=None, number=0, size_bytes=0)
                    lake.committed(f"compacting {name}", lambda own=own: _merge(lake.open_table(home, own.table), own, config))


def _merge(table: DeltaTable, own: Files, config: LakeConfig) -> None:
    options: dict[str, Any] = {"target_size": config.target_file_mb * 2**20, "max_concurrent_tasks": 1}
    chosen = [(DAY, "=", str(own.day))] if own.day else None
    if own.table == "events" or own.table in BY_START:
        # Sorted by session, files and their row groups hold ranges of ids, and a distil passes over those without its sessions.
        groups = WriterProperties(max_row_group_size=ROWS_A_GROUP)
        spill = config.spill_mb * 2**20
        table.optimize.z_order(["session_id"], partition_filters=chosen, max_spill_size=spill, writer_properties=groups, **options)
    else:
        table.optimize.compact(partition_filters=chosen, max_spill_size=config.spill_mb * 2**20, **options)


def settle(home: Home) -> None:
    """Take back removals that were announced and never happened, because the run was killed in between."""
    announced = {row["removal_id"] for row in lake.read(home, "removals", columns=["removal_id"]).to_pylist()}
    known = {row["removal_id"] for row in lake.removals(home)}
    if pending := sorted(announced - known):
        names = ", ".join(sql_text(own) for own in pending)
        with lake.boundary(lake.path(home, "removals")):
            lake.committed("removals", lambda: lake.open_table(home, "removals").delete(f"removal_id IN ({names})"))


def sql_text(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def sql_places(records: pa.Table) -> str:
    """Return the SQL condition that names records by `topic`, `partition` and `offset`."""
    places: dict[tuple[str, int], list[int]] = {}
    for row in records.select(["topic", "partition", "offset"]).to_pylist():
        places.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
    return (
        " OR ".join(
            f'(topic = {sql_text(topic)} AND "partition" = {part} AND "offset" IN ({", ".join(map(str, sorted(numbers)))}))'
            for (topic, part), numbers in sorted(places.items())
        )
        or "FALSE"
    )


def remove(home: Home, name: str, plan: Callable[[int], "Removal"], *, kind: str, now: datetime) -> int:
    """Delete rows of `events` or `quarantine`, so that the offset ledger still adds up; returns how many.

    Rows are counted and deleted at one version of the table: rows that the stream adds in between make the commit fail and the count is
    taken again.

    Args:
        home: The deployment.
        name: The table.
        plan: Says for a version of the table what is to go.
        kind: retain or forget.
        now: When.

    Raises:
        StorageFull: No space to rewrite the files; nothing is deleted.
        TransientError: The stream committed first every time.
    """

    def act() -> int:
        table = lake.open_table(home, name)
        chosen = plan(table.version())
        if not chosen.rows:
            return 0
        removal = new_id()
        own = {"removal_id": removal, "kind": kind, "table": name, "removed_at": now}
        rows = [own | {"topic": topic, "partition": part, "rows": number} for (topic, part), number in sorted(chosen.rows.items())]
        lake.append(home, "removals", rows)
        table.delete(
            chosen.predicate, commit_properties=CommitProperties(app_transactions=[Transaction(lake.removal_transaction(removal), 1)])
        )
        return chosen.total

    with lake.boundary(lake.path(home, name)):
        return lake.committed(f"deleting from {name}", act)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Rows of one table that are to go."""

    predicate: str
    """SQL condition that holds for exactly these rows."""
    rows: Mapping[tuple[str, int], int]
    """Their number by Kafka topic and partition."""

    @property
    def total(self) -> int:
        """Their number."""
        return sum(self.rows.values())


def by_partition(rows: pa.Table) -> dict[tuple[str, int], int]:
    """Count rows by Kafka topic and partition."""
    grouped = rows.select(["topic", "partition"]).group_by(["topic", "partition"]).aggregate([([], "count_all")])
    return {(row["topic"], row["partition"]): row["count_all"] for row in grouped.to_pylist()}


def cut(config: SignalsConfig, *, now: datetime) -> date:
    """Return the day before which events and quarantined records are beyond their age.

    Raises:
        ConfigError: They would be kept shorter than a distil looks back.
    """
    keep, back = config.lake.keep_events_days, config.signals.lookback_days
    if keep <= back:
        raise ConfigError(
            f"lake.keep_events_days is {keep}, but a distil looks back signals.lookback_days = {back}: sessions would be recomputed from "
            "half of their events; keep more days, or look back less"
        )
    return now.astimezone(UTC).date() - timedelta(days=keep)


def aged(home: Home, name: str, before: date, *, as_of: int | None = None) -> Removal:
    """Find the rows of `events` or `quarantine` that arrived before a day; a session that went on later keeps its older events."""
    condition = ds.field(DAY) < before
    predicate = f"{DAY} < '{before}'"
    if name != "events":
        return Removal(predicate=predicate, rows=by_partition(lake.scan(home, name, ["topic", "partition"], condition, as_of=as_of)))
    found = lake.scan(home, name, ["topic", "partition", "session_id"], condition, as_of=as_of)
    living = lake.scan(home, name, ["session_id"], ~condition, as_of=as_of)["session_id"].unique()
    split = pc.is_in(found["session_id"], value_set=living)
    if names := found.filter(split)["session_id"].unique().to_pylist():
        predicate += f" AND session_id NOT IN ({', '.join(map(sql_text, sorted(names)))})"
    return Removal(predicate=predicate, rows=by_partition(found.filter(pc.invert(split))))


def stale(home: Home, config: LakeConfig) -> dict[str, list[str]]:
    """Return the files of table versions beyond their age, and those that a killed run left and no version names, by table."""
    found: dict[str, list[str]] = {}
    for name in TABLES:
        if lake.exists(home, name):
            with lake.boundary(lake.path(home, name)):
                found[name] = lake.open_table(home, name).vacuum(retention_hours=config.keep_versions_hours, dry_run=True, full=True)
    return {name: paths for name, paths in found.items() if paths}


def _size(home: Home, name: str, paths: Iterable[str]) -> int:
    root = lake.path(home, name)
    return sum((root / path).stat().st_size for path in paths if (root / path).exists())


def retain(home: Home, config: SignalsConfig, *, now: datetime, apply: bool) -> dict[str, Any]:
    """Delete old events and quarantined records, and the files of old table versions; or only say what would go.

    Args:
        home: The deployment.
        config: How long what is kept.
        now: The present.
        apply: Whether to do it.

    Returns:
        `applied`, `before` (day), `rows` by table, `files` and `bytes` of old versions by table.

    Raises:
        ConfigError: See `cut`.
        StorageFull, TransientError: See `remove`.
    """
    before = cut(config, now=now)
    rows: dict[str, int] = {}
    if apply:
        settle(home)
    for name in BY_ARRIVAL:
        if not lake.exists(home, name):
            continue
        if apply:
            rows[name] = remove(home, name, lambda version, name=name: aged(home, name, before, as_of=version), kind="retain", now=now)
        else:
            rows[name] = aged(home, name, before).total
    files_gone = stale(home, config.lake)
    sizes = {name: _size(home, name, paths) for name, paths in files_gone.items()}
    if apply:
        for name in TABLES:
            if lake.exists(home, name):
                with lake.boundary(lake.path(home, name)):
                    table = lake.open_table(home, name)
                    table.vacuum(retention_hours=config.lake.keep_versions_hours, dry_run=False, full=True)
                    table.cleanup_metadata()
    return {
        "applied": apply, "before": before, "rows": rows,
        "files": {name: len(paths) for name, paths in files_gone.items()}, "bytes": sizes,
    }  # fmt: skip
