"""`signals forget`: one user's data out of every table, the spool, the quarantines and the files of old table versions.

A table's history is part of the data: the log keeps ranges of ids and the conditions of deletes, and old files keep rows. So after the
delete every table that can hold a user is vacuumed at once and its log is cut to a fresh checkpoint. Time travel to earlier versions ends
there; that is the price, and the result says so.

Takes: the deployment, the user's key. Gives: what was removed and what remains elsewhere. Leaves out: model weights, and the topic, which
deletes by age only; `delete_records` gives up all records that the lake has read.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import write_deltalake

from pipelines import kafka
from pipelines.erase import Erased, erase, pattern
from pipelines.errors import BrokerUnavailable, ContractViolation
from pipelines.storage import Home, exclusive
from signals import counts, lake, offsets
from signals.config import SignalsConfig
from signals.maintenance import Removal, by_partition, remove, settle, sql_places, sql_text
from signals.tables import DAY, TABLES

COUNTED: Final = ("events", "quarantine")
"""Tables that the offset ledger is held against."""
LOG_FILE: Final = re.compile(r"(\d{20})\.(json|checkpoint\.parquet|crc|checkpoint\.\d+\.\d+\.parquet|.*\.compacted\.json)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Whose data goes."""

    key: str
    """The keyed hash in every event."""
    sessions: tuple[str, ...]
    raw: str | None
    """The name the hash was made of, when it is known; quarantined bytes are searched for it too."""

    @property
    def needles(self) -> tuple[str, ...]:
        """Texts that give the person away in raw bytes."""
        return (self.key, *self.sessions, *((self.raw,) if self.raw else ()))


def find(home: Home, key: str, *, raw: str | None) -> Person:
    """Find the sessions of a user in every table that names both."""
    sessions: set[str] = set()
    for name, table in TABLES.items():
        if {"session_id", "user_key"} <= set(table.schema.names):
            sessions.update(lake.scan(home, name, ["session_id"], ds.field("user_key") == key)["session_id"].unique().to_pylist())
    return Person(key=key, sessions=tuple(sorted(session for session in sessions if session)), raw=raw)


def _condition(name: str, person: Person) -> tuple[str, ds.Expression] | None:
    """Return what selects a person's rows in a table, as SQL and as an expression; None when the table names no one."""
    names = TABLES[name].schema.names
    parts: list[tuple[str, ds.Expression]] = []
    if "user_key" in names:
        parts.append((f"user_key = {sql_text(person.key)}", ds.field("user_key") == person.key))
    if "session_id" in names and person.sessions:
        listed = ", ".join(map(sql_text, person.sessions))
        parts.append((f"session_id IN ({listed})", ds.field("session_id").isin(list(person.sessions))))
    if not parts:
        return None
    sql, expression = parts[0]
    for more, also in parts[1:]:
        sql, expression = f"{sql} OR {more}", expression | also
    return sql, expression


def _events(home: Home, person: Person, version: int) -> Removal:
    chosen = _condition("events", person)
    assert chosen is not None, "events name the user"
    return Removal(predicate=chosen[0], rows=by_partition(lake.scan(home, "events", ["topic", "partition"], chosen[1], as_of=version)))


def _quarantine(home: Home, person: Person, version: int) -> Removal:
    """Find quarantined records whose bytes give the person away."""
    found = pattern(person.needles)
    rows = lake.scan(home, "quarantine", ["topic", "partition", "offset", "key", "raw"], as_of=version)
    hits = [bool(found.search(row["raw"] or b"") or found.search(row["key"] or b"")) for row in rows.select(["key", "raw"]).to_pylist()]
    own = rows.filter(pa.array(hits, pa.bool_()))
    return Removal(predicate=sql_places(own), rows=by_partition(own))


def _distilled(home: Home, person: Person) -> dict[str, int]:
    """Delete a person's rows from every table that names sessions or users, and count the turns of those days again."""
    gone: dict[str, int] = {}
    days: set[date] = set()
    for name, table in TABLES.items():
        chosen = None if name in COUNTED or not lake.exists(home, name) else _condition(name, person)
        if chosen is None:
            continue
        sql, expression = chosen
        columns = [DAY] if DAY in table.schema.names else [table.schema.names[0]]
        found = lake.scan(home, name, columns, expression)
        if not found.num_rows:
            continue
        if name == "turns":
            days.update(found[DAY].unique().to_pylist())
        with lake.boundary(lake.path(home, name)):
            lake.committed(f"deleting from {name}", lambda name=name, sql=sql: lake.open_table(home, name).delete(sql))
        gone[name] = found.num_rows
    lake.replace_days(home, counts.TABLE, counts.recount(home, sorted(days)), sorted(days))
    return gone


def _purge(home: Home, name: str) -> int:
    """Delete the files of all earlier versions of a table and what its log says about them; returns how many table files went."""
    folder = lake.path(home, name)
    with lake.boundary(folder):
        table = lake.open_table(home, name)
        gone = table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
        # An empty commit, so that the newest one, which must stay beside the checkpoint, is not the one that names the person.
        write_deltalake(lake.open_table(home, name), lake.nullable(TABLES[name].schema).empty_table(), mode="append")
        table = lake.open_table(home, name)
        table.create_checkpoint()
        version = table.version()
    for path in (folder / "_delta_log").iterdir():
        found = LOG_FILE.match(path.name)
        if found and int(found[1]) < version:
            path.unlink()
    return len(gone)


def _topic(home: Home, config: SignalsConfig, *, now: datetime, delete: bool) -> dict[str, Any]:
    """Return what the topic still holds, after giving up what the lake has read if asked to."""
    position = offsets.ledger_position(home, config.kafka.topic)
    try:
        begin = kafka.begin_offsets(config, home)
        if delete:
            begin = kafka.delete_records(config, home, {part: offset for part, offset in position.items() if offset > begin.get(part, 0)})
    except BrokerUnavailable:
        until = now + timedelta(hours=config.kafka.retention_hours)
        return {"asked": False, "records": None, "until": until.isoformat()}
    left = sum(max(0, offset - begin.get(part, 0)) for part, offset in position.items())
    until = now + timedelta(hours=config.kafka.retention_hours)
    return {"asked": True, "records": left, "until": until.isoformat() if left else None}


def _behind(home: Home, config: SignalsConfig) -> int:
    """Return how many records of the topic are not in the lake yet; 0 when the broker cannot be asked."""
    position = offsets.ledger_position(home, config.kafka.topic)
    try:
        end = kafka.end_offsets(config, home)
    except BrokerUnavailable:
        return 0
    return sum(max(0, offset - position.get(part, 0)) for part, offset in end.items())


def forget(home: Home, config: SignalsConfig, key: str, *, raw: str | None, now: datetime, delete_records: bool) -> dict[str, Any]:
    """Remove a user everywhere this deployment stores events.

    Args:
        home: The deployment.
        config: Settings.
        key: The user's key (`pipelines.redaction.user_key`).
        raw: The user's name as clients know it, if known.
        now: The present.
        delete_records: Whether to delete all records of the topic that the lake has read.

    Returns:
        `sessions`, `rows` by table, `files` (of old versions), `spool`, `topic`, `remains` (sentences about what is elsewhere).

    Raises:
        Busy: The signals job runs; it would write while we delete.
        ContractViolation: The topic holds records that are not in the lake yet, which could be this user's.
        StorageFull: No space to rewrite files.
    """
    with exclusive(home.run / "signals.lock", what="the signals job (stop it first: tidegate down)"):
        lake.create_missing(home)
        if behind := _behind(home, config):
            raise ContractViolation(
                f"{behind} records on {config.kafka.topic} are not in the lake yet and may hold this user; read them first: "
                "tidegate signals run --once; then forget again"
            )
        settle(home)
        person = find(home, key, raw=raw)
        rows = {
            "events": remove(home, "events", lambda version: _events(home, person, version), kind="forget", now=now),
            "quarantine": remove(home, "quarantine", lambda version: _quarantine(home, person, version), kind="forget", now=now),
        }
        rows |= _distilled(home, person)
        erased = erase(home, person.needles)
        named = [name for name in TABLES if name in COUNTED or _condition(name, person) is not None]
        files = sum(_purge(home, name) for name in named if lake.exists(home, name))
        topic = _topic(home, config, now=now, delete=delete_records)
    return {
        "sessions": len(person.sessions), "rows": {name: number for name, number in rows.items() if number}, "files": files,
        "spool": asdict(erased), "topic": topic, "remains": list(_remains(home, topic, erased, person.needles)),
    }  # fmt: skip


def _remains(home: Home, topic: dict[str, Any], erased: Erased, needles: Iterable[str]) -> Iterable[str]:
    """Yield what this command does not reach, a sentence each."""
    if topic["records"] is None:
        yield f"the broker was not reached: the topic keeps this user's records until retention ends, at the latest {topic['until']}"
    elif topic["records"]:
        yield (
            f"the topic still holds {topic['records']} records that the lake has read, this user's among them, until retention deletes "
            f"them (at the latest {topic['until']}); Kafka cannot delete single ones; --delete-records gives all of them up now"
        )
    if erased.held:
        yield f"a running process holds {erased.held} events of this user in its spool and will send them; forget again once it has"
    found = pattern(needles)
    for path in _others(home):
        if found.search(path.read_bytes()):
            yield f"{path} names this user; it is not ours to rewrite: delete it"
    yield "checkpoints trained on this user's turns keep what they learned; retire them (tidegate rollback) if that matters"
    yield "earlier versions of the tables are gone: training sets pinned before now cannot be read again"


def _others(home: Home) -> Iterable[Path]:
    """Yield files of this deployment that people or other stages wrote and that can quote events."""
    for folder in (home.root / "sessions", home.reports, home.logs, home.root / "cycles"):
        yield from sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()
