"""The spool: order, bounds, damage, and what a crash may leave."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.spool import Spool
from pipelines.storage import Home


def drain(spool: Spool) -> list[bytes]:
    found = []
    for segment in list(spool.segments):
        for index, line in segment.read(0, len(segment.starts)):
            segment.acknowledge(index)
            found.append(line)
    return found


def test_events_come_back_in_order_across_segments_and_their_files_go_when_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    spool = Spool(home, max_bytes=10_000, segment_bytes=50)
    lines = [f"event {i:03d}".encode() for i in range(40)]
    assert all(spool.append(line) for line in lines)
    assert len(spool.segments) == 8
    assert spool.waiting == 40
    assert drain(spool) == lines
    spool.close()
    assert not list(home.spool.rglob("*"))


def test_a_new_process_takes_over_what_a_dead_one_left_and_leaves_a_live_one_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    first = Spool(home, max_bytes=1_000)
    first.append(b"one")
    first.append(b"two")
    beside = Spool(home, max_bytes=1_000)
    assert (beside.recovered, beside.waiting) == (0, 0)
    beside.close()
    first.segments[0].acknowledge(0)
    first.close()
    (path,) = home.spool.rglob("*.jsonl")
    with path.open("ab") as file:
        file.write(b"cut off")
    heir = Spool(home, max_bytes=1_000)
    assert heir.recovered == 2, "acknowledgements are not kept on disk: a repeat has the same event id"
    assert drain(heir) == [b"one", b"two"]
    heir.prune()
    heir.close()
    assert not list(home.spool.rglob("*.jsonl"))


def test_the_bound_refuses_what_would_pass_it_and_room_comes_back(tmp_path: Path) -> None:
    spool = Spool(Home(tmp_path), max_bytes=20)
    assert [spool.append(b"1234567") for _ in range(3)] == [True, True, False]
    drain(spool)
    spool.roll()
    spool.prune()
    assert spool.append(b"1234567")
    spool.close()


@given(
    st.lists(st.binary(min_size=1, max_size=20).map(lambda b: b.replace(b"\n", b" ")), max_size=30),
    st.sets(st.integers(0, 29)),
    st.integers(1, 7),
)
def test_reading_in_pieces_gives_each_unacknowledged_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], done: set[int], step: int
) -> None:
    spool = Spool(Home(tmp_path_factory.mktemp("spool")), max_bytes=100_000)
    for line in lines:
        spool.append(line)
    for segment in spool.segments:
        for index in done:
            if index < len(lines):
                segment.acknowledge(index)
        found = [pair for start in range(0, len(lines), step) for pair in segment.read(start, step)]
        assert found == [(i, line) for i, line in enumerate(lines) if i not in done]
        assert segment.waiting == len(found)
    spool.close()
