"""Small lakes made without Spark, and a look at every byte of one."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.events import Event
from pipelines.storage import Home
from signals import lake
from signals.sessions import fingerprint

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def event_row(offset: int, *, session: str, user: str = "u1", days_ago: int = 0, partition: int = 0, **more: Any) -> dict[str, Any]:
    """Return a row of `events`."""
    at = NOW - timedelta(days=days_ago)
    base = {
        "type": "turn_started", "event_id": f"e{partition}-{offset}", "session_id": session, "turn_id": f"{session}-t", "user_key": user,
        "topic": "t", "partition": partition, "offset": offset, "arrived_at": at, "date": at.date(), "policy_version": 1,
    }  # fmt: skip
    return base | more


def refused_row(offset: int, raw: bytes, *, days_ago: int = 0, partition: int = 0, **more: Any) -> dict[str, Any]:
    """Return a row of `quarantine`."""
    at = NOW - timedelta(days=days_ago)
    row = {
        "topic": "t",
        "partition": partition,
        "offset": offset,
        "arrived_at": at,
        "date": at.date(),
        "reason": "malformed_json",
        "raw": raw,
    }
    return row | more


def turn_row(session: str, *, user: str = "u1", days_ago: int = 0, policy: int = 1, outcome: str = "scored", **more: Any) -> dict[str, Any]:
    """Return a row of `turns` or `rewards` (columns that a table does not have are left out by `fitted`)."""
    at = NOW - timedelta(days=days_ago)
    base = {
        "session_id": session, "turn_id": f"{session}-t", "turn_index": 0, "user_key": user, "origin": "live", "arm": "serving",
        "policy_version": policy, "outcome": outcome, "started_at": at, "closes_at": at, "final": True, "reward": 0.5,
        "date": at.date(),
    }  # fmt: skip
    return base | more


def fitted(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what a table has no column for."""
    names = set(lake.TABLES[name].schema.names)
    return [{key: value for key, value in row.items() if key in names} for row in rows]


def book(home: Home, *, batch: int = 0) -> None:
    """Write the ledger that fits what events and quarantine hold now, one batch a partition."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for name in ("events", "quarantine"):
        for row in lake.read(home, name, columns=["partition", "offset"]).to_pylist():
            parts.setdefault(row["partition"], []).append((row["offset"], int(name == "events")))
    rows = [
        {"stream": "s", "batch": batch, "topic": "t", "partition": part, "start": 0, "end": len(found),
         "kept": sum(kept for _, kept in found), "quarantined": sum(1 - kept for _, kept in found), "committed_at": NOW}
        for part, found in parts.items()
    ]  # fmt: skip
    lake.append(home, "offset_ledger", rows)


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield every file under a folder as bytes; of a Parquet file also its decoded values, since pages are compressed."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes()
            if path.name.endswith(".parquet"):
                yield path, repr(pq.ParquetFile(path).read().to_pylist()).encode()


def naming(folder: Path, *needles: str) -> list[str]:
    """Return the files under a folder that hold one of the texts, referenced by a table or not."""
    return sorted({path.name for path, data in contents(folder) if any(needle.encode() in data for needle in needles)})


def arrive(home: Home, events: Sequence[Event], *, at: datetime, topic: str = "t") -> None:
    """Append events as a batch of the stream would, one Kafka partition, and book them."""
    begin = sum(lake.frontier(home).values())
    rows = [
        {
            **item.model_dump(mode="json"), "fingerprint": fingerprint(item.model_dump(mode="json")), "topic": topic, "partition": 0,
            "offset": begin + place, "arrived_at": at, "date": at.date(),
        }
        for place, item in enumerate(events)
    ]  # fmt: skip
    lake.append(home, "events", rows)
    end = begin + len(rows)
    booked = {"stream": "s", "batch": begin, "topic": topic, "partition": 0, "start": begin, "end": end, "kept": len(rows)}
    lake.append(home, "offset_ledger", [booked | {"quarantined": 0, "committed_at": at}])
