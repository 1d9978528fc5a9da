"""What a task of the distil writes is what the rules say of all events of its sessions, whichever files those lie in."""

import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.events import EVENT, Event
from pipelines.storage import Home
from signals import chunks, counts, distil_task, lake, parts, transforms
from signals.config import RewardsConfig
from signals.judge import NOT_JUDGED
from signals.norms import NO_NORMS
from signals.tables import EVENTS, INSTANT, TABLES
from tests.support.lakes import arrive
from tests.support.spark import T0, completion_payload, event, made_up_session

CONFIG = RewardsConfig(latency_medians_ms={"*": 900.0})
NOW_MS = T0 + 5_000_000
DAY = datetime.fromtimestamp(T0 / 1000, UTC)
WRITTEN = ("edits", "rewards", "samples", "turns", "conflicts")


def work(home: Home, **more: Any) -> distil_task.Work:
    base: dict[str, Any] = {
        "lake": home.lake, "tables": WRITTEN, "rewards": CONFIG, "now_ms": NOW_MS, "tombstoned": frozenset({3}), "norms": NO_NORMS,
        "judged": NOT_JUDGED, "since": date(2026, 1, 1),
    }  # fmt: skip
    return distil_task.Work(**base | more)


def world() -> list[Event]:
    """Twelve sessions; of some an event came again on another day, and with other content."""
    rng = random.Random(5)
    events = [item for index in range(12) for item in made_up_session(rng, f"w-{index:02}")]
    again = [item.model_copy(update={"occurred_at_ms": item.occurred_at_ms - 86_400_000 * 2}) for item in rng.choices(events, k=8)]
    return [*events, *rng.choices(events, k=30), *again]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("lake"))
    lake.create_missing(home)
    events = world()
    random.Random(6).shuffle(events)
    for number in range(0, len(events), 60):
        arrive(home, events[number : number + 60], at=DAY + timedelta(hours=8 * number // 60))
    return home


def computed(home: Home, **more: Any) -> list[distil_task.Done]:
    own = work(home, **more)
    sessions = sorted(set(lake.events(home)["session_id"].to_pylist()))
    return [distil_task.loaded(distil_task.compute(own, chunk)) for chunk in chunks.cut(home, sessions, since=own.since, most=5)]


def rows_of(home: Home, name: str, own: parts.Part) -> list[dict[str, Any]]:
    found = pq.ParquetFile(lake.path(home, name) / own.path).read().to_pylist()
    assert own.rows == len(found)
    return [row | {"date": date.fromisoformat(own.values["date"])} for row in found]


def test_files_hold_what_the_rules_say_of_all_events(made: Home) -> None:
    expected = transforms.distilled(transforms.flat(lake.events(made)), CONFIG, now_ms=NOW_MS, tombstoned=frozenset({3}))
    done = computed(made)
    assert len(done) == 3
    for name in WRITTEN:
        found = [row for own in done for part in own.parts[name] for row in rows_of(made, name, part)]
        wanted = getattr(expected, name).to_pylist()
        assert len(wanted) > (3 if name == "conflicts" else 15), name
        order = sorted(TABLES[name].schema.names)
        assert sorted(repr([row[key] for key in order]) for row in found) == sorted(repr([row[key] for key in order]) for row in wanted)
    assert sum(own.turns for own in done) == expected.turns.num_rows
    assert sum(own.conflicts for own in done) == expected.conflicts.num_rows
    added = [row for own in done for row in own.counts]
    assert sum(row["turns"] for row in added) == expected.turns.num_rows
    assert {tuple(row) for row in added} == {(*counts.KEYS, "turns")}
    assert [own.fault for own in done] == [""] * 3


def test_a_row_lies_on_the_day_of_an_event_of_its_session(made: Home) -> None:
    """So the days of a session's events are all that can hold rows of it, whichever of its events were there when they were made."""
    done = computed(made)
    days = {(day, session) for own in done for day, sessions in own.sessions.items() for session in sessions}
    assert len({day for day, _ in days}) > 1
    for name in WRITTEN:
        rows = [row for own in done for part in own.parts[name] for row in rows_of(made, name, part)]
        assert {(row["date"], row["session_id"]) for row in rows} <= days, name
    occurred = {
        (datetime.fromtimestamp(row["occurred_at_ms"] / 1000, UTC).date(), row["session_id"]) for row in lake.events(made).to_pylist()
    }
    assert days == occurred


def test_a_span_and_other_columns_are_those_of_the_other_table(made: Home) -> None:
    day = DAY.date()
    more = {"into": {"rewards": "rewards_backfill"}, "more": {"computed_at": pa.scalar(DAY, INSTANT)}, "values": {"backfill": "x"}}
    done = computed(made, tables=("rewards",), span=(day, day + timedelta(days=1)), **more)
    written = [part for own in done for part in own.parts["rewards"]]
    assert {tuple(sorted(part.values.items())) for part in written} == {(("backfill", "x"), ("date", str(day)))}
    assert all((lake.path(made, "rewards_backfill") / part.path).exists() for part in written)
    assert {row["computed_at"] for part in written for row in rows_of(made, "rewards_backfill", part)} == {DAY}


def test_turns_at_the_edge_of_the_look_back_are_named(made: Home) -> None:
    assert [own.straddling for own in computed(made)] == [{}] * 3
    done = computed(made, since=DAY.date())
    first = {row["session_id"] for row in lake.events(made).to_pylist() if row["date"] == DAY.date()}
    named = {session for own in done for session in own.straddling}
    assert named
    assert named <= first
    assert {turn for own in done for turns in own.straddling.values() for turn in turns} <= set(
        lake.events(made, columns=["turn_id"])["turn_id"].to_pylist()
    )


def test_events_of_an_earlier_release_lack_fields_and_are_read(tmp_path: Path) -> None:
    """Their files lack a field of the payload and one of the envelope; those count as null."""
    home = Home(tmp_path)
    lake.create_missing(home)
    call = event("tool_call", 2, 20, {"tool_call_id": "k", "completion_id": "c", "name": "x", "arguments_valid": False})
    first, second = event("completion", 1, 10, completion_payload("c")), EVENT.validate_python(call.model_dump())
    arrive(home, [first], at=DAY)
    arrive(home, [second], at=DAY)
    old = min(lake.path(home, "events").rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    table = pq.ParquetFile(old).read()
    payload = table["payload"].combine_chunks()
    kept = [field for field in payload.type if field.name not in ("capture_error", "edit_expected")]
    fewer = pa.StructArray.from_arrays([payload.field(field.name) for field in kept], fields=kept)
    table = table.set_column(table.column_names.index("payload"), "payload", fewer).drop_columns(["arm"])
    pq.write_table(table, old)
    (chunk,) = chunks.cut(home, ["s1"], since=date(2026, 1, 1))
    events, _ = distil_task.read(chunk, date(2026, 1, 1))
    assert events.num_rows == 2
    assert set(events.column_names) <= {*transforms.ENVELOPE, *transforms.PAYLOAD}
    assert {"arm", "capture_error"} <= set(events.column_names), "the newer file has them"
    found = transforms.distilled(events, CONFIG, now_ms=NOW_MS, tombstoned=frozenset())
    assert found.turns.num_rows == 1
    assert EVENTS.schema.field("arm") is not None


def test_a_task_that_fails_leaves_no_file_behind(made: Home, tmp_path: Path) -> None:
    other = Home(tmp_path)
    (other.lake / "turns").mkdir(parents=True)
    (other.lake / "turns" / f"date={DAY.date()}").write_bytes(b"in the way")
    chunk = chunks.cut(made, ["w-00", "w-01", "w-02"], since=date(2026, 1, 1))[0]
    with pytest.raises(OSError, match="date="):
        distil_task.compute(work(other), chunk)
    assert list(other.lake.rglob("*.parquet")) == []


def test_turns_without_one_outcome_each_are_a_fault() -> None:
    def fault(*rows: tuple[str, str | None]) -> str:
        outcomes = pa.array([outcome for _, outcome in rows], pa.string())
        return distil_task._fault(pa.table({"session_id": ["s"] * len(rows), "turn_id": [turn for turn, _ in rows], "outcome": outcomes}))

    assert fault(("a", "scored"), ("b", "pending")) == ""
    assert fault(("a", "scored"), ("a", "scored")) == "2 rows for 1 turns, 0 without an outcome"
    assert fault(("a", None)) == "1 rows for 1 turns, 1 without an outcome"
