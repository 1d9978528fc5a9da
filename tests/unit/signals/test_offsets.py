"""When a stream may start: its state and the lake must end at the same offsets."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import ConfigError, ContractViolation
from pipelines.storage import Home
from signals import checks, job, lake, offsets

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ledger(home: Home, batch: int, ends: dict[int, int], start: int = 0, stream: str = "u1") -> None:
    """Write a batch as the append job does: events first, then the ledger, both under the stream's own transaction."""
    at = NOW + timedelta(seconds=batch)
    rows = [
        {"stream": stream, "batch": batch, "topic": "t", "partition": p,
         "start": start, "end": end, "kept": end - start, "quarantined": 0, "committed_at": at}
        for p, end in ends.items()
    ]  # fmt: skip
    events = [
        {"topic": "t", "partition": p, "offset": offset, "date": at.date(), "session_id": f"s{offset}"}
        for p, end in ends.items()
        for offset in range(start, end)
    ]
    lake.append(home, "events", events, transaction=(f"append:{stream}", batch))
    lake.append(home, "offset_ledger", rows, transaction=(f"append:{stream}", batch))


def state(home: Home, planned: list[dict[int, int]], *, finished: int) -> Path:
    """Write a stream state as Spark does: `planned` batches, of which the first `finished` were committed."""
    folder = offsets.checkpoint(home)
    for name in ("offsets", "commits", "sources/0"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text('{"id":"u1"}')
    (folder / "sources" / "0" / "0").write_text('\0v1\n{"t":{"0":0,"1":0}}')
    for number, ends in enumerate(planned):
        (folder / "offsets" / str(number)).write_text("v1\n{}\n" + json.dumps({"t": {str(p): o for p, o in ends.items()}}))
        if number < finished:
            (folder / "commits" / str(number)).write_text("v1\n{}")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    return made


def test_a_fresh_home_may_start(home: Home) -> None:
    offsets.verify(home, "t")
    assert offsets.starting_offsets(home, "t", {0: 5}) == "earliest"


def test_state_and_lake_that_end_together_may_start(home: Home) -> None:
    folder = state(home, [{0: 5, 1: 2}], finished=1)
    ledger(home, 0, {0: 5, 1: 2})
    offsets.verify(home, "t")
    assert offsets.planned_starts(folder, 0, "t") == {0: 0, 1: 0}
    assert offsets.stream_id(folder) == "u1"


def test_a_kill_between_ledger_and_commit_is_no_mismatch(home: Home) -> None:
    folder = state(home, [{0: 5}, {0: 9}], finished=1)
    ledger(home, 0, {0: 5})
    offsets.verify(home, "t")
    ledger(home, 1, {0: 9}, start=5)
    offsets.verify(home, "t")
    assert offsets.planned_starts(folder, 1, "t") == {0: 5}, "the batch that is done again begins where it began"


def test_a_lost_state_is_refused_with_the_way_out(home: Home) -> None:
    ledger(home, 0, {0: 5})
    with pytest.raises(ContractViolation, match="--resume-from-ledger"):
        offsets.verify(home, "t")


def test_a_lost_lake_is_refused(home: Home) -> None:
    state(home, [{0: 5}], finished=1)
    with pytest.raises(ContractViolation, match="the stream state is ahead"):
        offsets.verify(home, "t")


def test_a_state_restored_from_an_older_copy_is_refused(home: Home) -> None:
    state(home, [{0: 5}], finished=1)
    ledger(home, 0, {0: 5})
    ledger(home, 1, {0: 9}, start=5)
    with pytest.raises(ContractViolation, match="the lake is ahead"):
        offsets.verify(home, "t")


def test_a_restart_begins_where_the_lake_ends_and_keeps_the_old_state_aside(home: Home) -> None:
    state(home, [{0: 5}], finished=1)
    ledger(home, 0, {0: 5})
    ledger(home, 1, {0: 9}, start=5)
    assert offsets.restart(home, "t", number=1) == {0: 9}
    assert (home.streams / "append.replaced-1" / "metadata").exists()
    offsets.verify(home, "t")
    assert json.loads(offsets.starting_offsets(home, "t", {0: 20, 1: 3})) == {"t": {"0": 9, "1": -2}}


def test_what_the_broker_deleted_unread_is_a_gap_and_an_accepted_one_moves_the_position(home: Home) -> None:
    ledger(home, 0, {0: 5, 1: 7})
    gaps = offsets.find_gaps(offsets.ledger_position(home, "t"), {0: 8, 1: 0}, {0: 20, 1: 7})
    assert gaps == [offsets.Gap(partition=0, start=5, end=8)]
    lake.append(home, "gaps", [{"topic": "t", "partition": 0, "start": 5, "end": 8, "accepted_at": NOW}])
    assert offsets.ledger_position(home, "t") == {0: 8, 1: 7}


def test_a_topic_that_was_made_anew_is_refused(home: Home) -> None:
    with pytest.raises(ContractViolation, match="made anew"):
        offsets.find_gaps({0: 50}, {0: 0}, {0: 3})


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 100)), st.dictionaries(st.integers(0, 3), st.integers(0, 100)))
def test_gaps_lie_exactly_between_what_was_read_and_what_is_left(position: dict[int, int], begin: dict[int, int]) -> None:
    gaps = offsets.find_gaps(position, begin, dict.fromkeys(range(4), 1000))
    lost = {(gap.partition, offset) for gap in gaps for offset in range(gap.start, gap.end)}
    assert lost == {(p, o) for p, next_ in position.items() for o in range(next_, begin.get(p, 0))}


def test_a_batch_is_written_to_the_ledger_once(home: Home) -> None:
    ledger(home, 0, {0: 5})
    ledger(home, 0, {0: 5})
    assert lake.read(home, "offset_ledger").num_rows == 1


def test_the_list_of_rolled_back_policies_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "tombstoned.json"
    path.write_text("[3, 7]")
    assert job.read_tombstoned(path) == {3, 7}
    assert job.read_tombstoned(None) == frozenset()
    path.write_text('["3"]')
    with pytest.raises(ConfigError, match="JSON list of policy versions"):
        job.read_tombstoned(path)


def test_a_state_that_never_wrote_this_lake_is_refused_although_the_offsets_agree(home: Home) -> None:
    state(home, [{0: 5}], finished=1)
    ledger(home, 0, {0: 5}, stream="another")
    with pytest.raises(ContractViolation, match="its id u1 is in no table; the last writer was another"):
        offsets.verify(home, "t")


def test_an_old_state_that_was_put_back_is_refused_although_the_offsets_agree(home: Home) -> None:
    ledger(home, 0, {0: 5})
    ledger(home, 1, {0: 9}, start=5, stream="newer")
    state(home, [{0: 5}, {0: 9}], finished=2)
    with pytest.raises(ContractViolation, match="newer wrote last"):
        offsets.verify(home, "t")


def test_events_restored_alone_are_refused_and_their_batches_read_again(home: Home) -> None:
    state(home, [{0: 5}, {0: 9}], finished=2)
    ledger(home, 0, {0: 5})
    shutil.copytree(lake.path(home, "events"), home.root / "copy")
    ledger(home, 1, {0: 9}, start=5)
    shutil.rmtree(lake.path(home, "events"))
    (home.root / "copy").rename(lake.path(home, "events"))
    with pytest.raises(ContractViolation, match="events ends at batch 0, but offset_ledger names batch 1"):
        offsets.verify(home, "t")
    assert offsets.restart(home, "t", number=1) == {0: 5}
    offsets.verify(home, "t")
    checks.quick(home)


def test_a_new_state_that_has_read_nothing_yet_may_start_where_the_lake_ends(home: Home) -> None:
    ledger(home, 0, {0: 5})
    state(home, [{0: 5}], finished=1)
    offsets.restart(home, "t", number=1)
    folder = offsets.checkpoint(home)
    (folder / "metadata").write_text('{"id":"u2"}')
    offsets.verify(home, "t")
    assert json.loads(offsets.starting_offsets(home, "t", {0: 9})) == {"t": {"0": 5}}
    assert sorted(lake.events(home)["offset"].to_pylist()) == [0, 1, 2, 3, 4], "what the ledger names stays"
    ledger(home, 0, {0: 9}, start=5, stream="another")
    with pytest.raises(ContractViolation, match="the lake is ahead"):
        offsets.verify(home, "t")
