"""Whether the stream's state and the lake agree on which offsets were read, and how to go on when they do not.

Spark keeps its position in a checkpoint folder; the lake keeps the same in `offset_ledger`. Losing or restoring one of them alone
would skip or repeat events without an error (Delta skips a batch whose number it has seen), so both are compared before a start.

Takes: the checkpoint folder, the ledger, the broker's offsets. Gives: a position to start from, or a refusal that names the way out.
Leaves out: Spark (`stream.py`).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.compute as pc

from pipelines.errors import ContractViolation
from pipelines.storage import Home, write_atomic
from signals import lake

START: Final = "tidegate.json"
"""Inside the checkpoint folder: the offsets it began with."""
WAY_OUT: Final = "to start a new stream state where the lake ends, add --resume-from-ledger"

Position = dict[int, int]
"""Kafka partition -> next offset to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Offsets of one partition that the broker no longer has."""

    partition: int
    start: int
    end: int


def checkpoint(home: Home) -> Path:
    """Return the folder of the append stream's state."""
    return home.streams / "append"


def stream_id(folder: Path) -> str | None:
    """Return the id that Spark gave a checkpoint; None before its first start."""
    path = folder / "metadata"
    return str(json.loads(path.read_text(encoding="utf-8"))["id"]) if path.exists() else None


def _parse(text: str, topic: str) -> Position:
    """Read the last line of one of Spark's offset files: {"topic": {"0": 5}}."""
    found = json.loads(text.replace("\x00", "").strip().splitlines()[-1])
    return {int(partition): int(offset) for partition, offset in found.get(topic, {}).items()}


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


def planned_ends(folder: Path, batch: int, topic: str) -> Position:
    """Return where a batch ends, as Spark planned it before running it."""
    return _parse((folder / "offsets" / str(batch)).read_text(encoding="utf-8"), topic)


def planned_starts(folder: Path, batch: int, topic: str) -> Position:
    """Return where a batch starts; a partition that is new in it starts at 0."""
    if batch > 0:
        return planned_ends(folder, batch - 1, topic)
    return _parse((folder / "sources" / "0" / "0").read_text(encoding="utf-8"), topic)


def ledger_position(home: Home, topic: str) -> Position:
    """Return where the lake ends: partition -> offset after the last one accounted for, lost and accepted ones included."""
    position: Position = {}
    for name in ("offset_ledger", "gaps"):
        table = lake.read(home, name, columns=["topic", "partition", "end"])
        for row in table.filter(pc.equal(table["topic"], topic)).group_by("partition").aggregate([("end", "max")]).to_pylist():
            position[row["partition"]] = max(position.get(row["partition"], 0), row["end_max"])
    return position


def _same(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    return all(one.get(partition, 0) == other.get(partition, 0) for partition in {*one, *other})


def verify(home: Home, topic: str) -> None:
    """Refuse to start a stream whose state and lake do not agree.

    They agree when the ledger ends where the checkpoint's last finished batch ends, or one batch later (killed between the two), or, before
    the first batch, where the checkpoint began.

    Raises:
        ContractViolation: They do not; the message says which is ahead and what to do.
    """
    folder, ledger = checkpoint(home), ledger_position(home, topic)
    if stream_id(folder) is None:
        start = json.loads((folder / START).read_text(encoding="utf-8")) if (folder / START).exists() else {}
        began = {int(partition): offset for partition, offset in start.items()}
        if not _same(began, ledger):
            raise ContractViolation(f"{folder} holds no stream state, but the lake already has events of {topic!r}; {WAY_OUT}")
        if not ledger and lake.holds_rows(home, "events") and not (folder / START).exists():
            raise ContractViolation(f"{folder} holds no stream state, but the lake has events that no ledger row names; {WAY_OUT}")
        return
    _same_identity(home, folder, topic)
    finished = _numbers(folder / "commits")
    planned = _numbers(folder / "offsets")
    if finished:
        position = planned_ends(folder, finished[-1], topic)
    elif (folder / START).exists():
        position = {int(partition): offset for partition, offset in json.loads((folder / START).read_text(encoding="utf-8")).items()}
    else:
        position = {}
    if _same(position, ledger):
        return
    if planned and (not finished or planned[-1] > finished[-1]) and _same(planned_ends(folder, planned[-1], topic), ledger):
        return
    ahead = "the lake" if sum(ledger.values()) > sum(position.values()) else "the stream state"
    raise ContractViolation(
        f"the stream state in {folder} and the lake's offset_ledger disagree ({ahead} is ahead), as after restoring or removing one of "
        f"them; {WAY_OUT}"
    )


def _same_identity(home: Home, folder: Path, topic: str) -> None:
    """Compare the checkpoint's uuid with the transactions that the tables carry.

    Raises:
        ContractViolation: The lake was last written by another stream state, or `events` lacks batches that the ledger names.
    """
    identity = transaction_id(stream_id(folder))
    done = {name: lake.open_table(home, name).transaction_version(identity) for name in ("events", "offset_ledger")}
    ledger = lake.read(home, "offset_ledger", columns=["stream", "topic", "committed_at"])
    newest = lake.last(ledger.filter(pc.equal(ledger["topic"], topic)), "committed_at")
    if newest and done["offset_ledger"] is None and _moved(folder, topic):
        raise ContractViolation(
            f"the stream state in {folder} is not the one that wrote the lake (its id {stream_id(folder)} is in no table; "
            f"the last writer was {newest['stream']}); {WAY_OUT}"
        )
    if newest and done["offset_ledger"] is not None and newest["stream"] != stream_id(folder):
        raise ContractViolation(
            f"the stream state in {folder} wrote to this lake once, but {newest['stream']} wrote last, as after restoring an old state; "
            f"{WAY_OUT}"
        )
    if done["offset_ledger"] is not None and (done["events"] is None or done["events"] < done["offset_ledger"]):
        raise ContractViolation(
            f"the table events ends at batch {done['events']}, but offset_ledger names batch {done['offset_ledger']}, as after restoring "
            "events alone; to read the missing batches again from Kafka, add --resume-from-ledger"
        )


def _moved(folder: Path, topic: str) -> bool:
    """Return whether a stream state finished a batch that held anything."""
    finished = _numbers(folder / "commits")
    return bool(finished) and not _same(planned_ends(folder, finished[-1], topic), planned_starts(folder, 0, topic))


def transaction_id(stream: str | None) -> str:
    """Return the Delta application id under which a stream state writes: its name and its checkpoint's own uuid."""
    return f"append:{stream}"


def _cut_ledger(home: Home) -> None:
    """Take back what the ledger says of batches that `events` does not hold, as after restoring it to an earlier version."""
    events = lake.open_table(home, "events")
    streams = lake.read(home, "offset_ledger", columns=["stream"])["stream"].unique().to_pylist()
    ahead = [(stream, events.transaction_version(transaction_id(stream))) for stream in streams]
    beyond = [f"(stream = '{stream}' AND batch > {-1 if done is None else done})" for stream, done in ahead]
    if beyond:
        with lake.boundary(lake.path(home, "offset_ledger")):
            lake.open_table(home, "offset_ledger").delete(" OR ".join(beyond))


def find_gaps(position: Mapping[int, int], begin: Mapping[int, int], end: Mapping[int, int]) -> list[Gap]:
    """Return what the broker deleted before it was read.

    Args:
        position: Next offset to read by partition.
        begin: Oldest offset the broker has.
        end: The broker's next offset.

    Raises:
        ContractViolation: The lake is ahead of the broker: the topic was made anew, and its offsets no longer name the same events.
    """
    for partition, offset in sorted(position.items()):
        if offset > end.get(partition, 0):
            raise ContractViolation(
                f"the lake has read partition {partition} up to offset {offset}, but the broker ends at {end.get(partition, 0)}: "
                "the topic was made anew; "
                "give it another name (kafka.topic), or restore the broker's data"
            )
    return [
        Gap(partition=partition, start=offset, end=begin[partition])
        for partition, offset in sorted(position.items())
        if begin.get(partition, 0) > offset
    ]


def restart(home: Home, topic: str, *, number: int) -> Position:
    """Put the stream's state aside and prepare a new one that starts where the lake ends.

    A batch that was killed between its tables may have left rows beyond the ledger; they are removed, for the new stream reads them again.

    Args:
        home: The deployment.
        topic: The topic.
        number: Makes the name of the folder that the old state is moved to.

    Returns:
        Where the new stream starts.
    """
    _cut_ledger(home)
    folder, position = checkpoint(home), ledger_position(home, topic)
    for name in ("events", "quarantine"):
        table = lake.open_table(home, name)
        beyond = [f'("partition" = {partition} AND "offset" >= {offset})' for partition, offset in sorted(position.items())]
        known = ", ".join(str(partition) for partition in sorted(position))
        beyond.append(f'"partition" NOT IN ({known})' if known else "TRUE")
        with lake.boundary(lake.path(home, name)):
            table.delete(f"topic = '{topic}' AND ({' OR '.join(beyond)})")
    if folder.exists():
        shutil.move(str(folder), str(folder.with_name(f"{folder.name}.replaced-{number}")))
    write_atomic(folder / START, json.dumps({str(partition): offset for partition, offset in position.items()}).encode())
    return position


def starting_offsets(home: Home, topic: str, partitions: Mapping[int, int]) -> str:
    """Return Spark's `startingOffsets` for a new stream state: the oldest, or where `restart` said.

    Args:
        home: The deployment.
        topic: The topic.
        partitions: The broker's partitions (any values); one the lake has never seen starts at its oldest record (-2).
    """
    path = checkpoint(home) / START
    if not path.exists():
        return "earliest"
    begun = json.loads(path.read_text(encoding="utf-8"))
    if not begun:
        return "earliest"
    return json.dumps({topic: {str(partition): begun.get(str(partition), -2) for partition in sorted(partitions)}})
