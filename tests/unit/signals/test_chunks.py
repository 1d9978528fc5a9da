"""How sessions become tasks: each in one, with every file that holds events of it, none larger than a process can hold."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.storage import Home
from signals import chunks, lake
from tests.support.lakes import NOW, event_row


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Six files over three days: sessions that live in one, in two, and in files of an earlier day."""
    made = Home(tmp_path)
    lake.create_missing(made)
    batches = [("a", "b"), ("b", "c"), ("c", "d"), ("e",), ("a", "f"), ("f", "f", "g")]
    for number, names in enumerate(batches):
        rows = [event_row(10 * number + place, session=name, days_ago=2 - number // 2) for place, name in enumerate(names)]
        lake.append(made, "events", rows)
    return made


def files_of(home: Home, session: str, days: int) -> set[str]:
    """Return the files that hold events of a session, by reading all of them."""
    table = lake.dataset(home, "events")
    since = NOW.date() - timedelta(days=days)
    return {
        str(lake.path(home, "events").absolute() / fragment.path)
        for fragment in table.get_fragments()
        for row in fragment.to_table(columns=["session_id", "date"], schema=table.schema).to_pylist()
        if row["session_id"] == session and row["date"] >= since
    }


@pytest.mark.parametrize("days", [0, 1, 5])
@pytest.mark.parametrize("most", [None, 1, 2])
def test_every_session_with_events_is_in_one_task_with_all_its_files(home: Home, days: int, most: int | None) -> None:
    wanted = ["a", "c", "f", "none", "zz"]
    found = chunks.cut(home, wanted, since=NOW.date() - timedelta(days=days), most=most)
    known = {name: files_of(home, name, days) for name in wanted}
    assert sorted(name for own in found for name in own.sessions) == [name for name in wanted if known[name]]
    for own in found:
        assert set(own.files) == set.union(*[known[name] for name in own.sessions])
        assert own.sessions == sorted(own.sessions)
        assert [f"date={day}" for day in own.days] == [Path(file).parent.name for file in own.files]
        assert most is None or len(own.sessions) <= most


def test_sessions_that_begin_in_the_same_file_come_to_the_same_task(home: Home) -> None:
    found = chunks.cut(home, ["a", "b", "c", "d", "e", "f", "g"], since=NOW.date() - timedelta(days=9), most=2)
    assert [own.sessions for own in found] == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]


def test_no_sessions_or_no_table_are_no_tasks(home: Home, tmp_path: Path) -> None:
    assert chunks.cut(home, [], since=NOW.date()) == []
    assert chunks.cut(Home(tmp_path / "other"), ["a"], since=NOW.date()) == []


@given(st.lists(st.floats(0.0001, 0.3), min_size=1, max_size=200), st.integers(1, 8), st.sampled_from([None, 1, 3, 50]))
def test_tasks_are_of_about_the_same_load_and_none_is_empty(shares: list[float], slots: int, most: int | None) -> None:
    load = np.array(shares)
    numbers = chunks._numbered(load, slots, most)
    loads = np.bincount(numbers, load)
    assert sorted(set(numbers.tolist())) == list(range(len(loads))), "numbered through"
    assert np.all(np.diff(numbers) >= 0), "in order"
    assert loads.max() <= 1 + load.max()
    if most is None:
        assert len(loads) <= max(np.ceil(load.sum()), min(slots, round(load.sum() / chunks.WORTH_A_TASK)), 1)
    else:
        assert np.bincount(numbers).max() <= most


def test_little_to_do_is_one_task_and_enough_to_do_is_one_for_every_slot() -> None:
    assert chunks._numbered(np.full(10, 0.001), 16, None).max() == 0
    assert chunks._numbered(np.full(100, 0.008), 4, None).max() == 3
    assert chunks._numbered(np.full(1000, 0.01), 4, None).max() == 9
