"""Compaction changes no row, retention deletes what is old and nothing else, and the offset ledger adds up throughout."""

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import checks, lake, maintenance
from signals.config import LakeConfig, SignalsConfig
from signals.maintenance import Removal
from tests.support.lakes import NOW, book, event_row, refused_row

CONFIG = SignalsConfig(lake=LakeConfig(keep_events_days=40))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A lake with ten small files on a day that is over, two on the present one, and a table of logs."""
    made = Home(tmp_path)
    lake.create_missing(made)
    for offset in range(10):
        lake.append(made, "events", [event_row(offset, session=f"s{(7 * offset) % 10}", days_ago=1)])
    for offset in (10, 11):
        lake.append(made, "events", [event_row(offset, session="s1")])
    book(made)
    return made


def test_days_that_are_over_are_merged_sorted_by_session_and_the_present_one_is_left(home: Home) -> None:
    before = sorted(lake.events(home).to_pylist(), key=lambda row: row["offset"])
    done = maintenance.compact(home, LakeConfig(), now=NOW)
    assert [(item["table"], item["day"], item["files_before"], item["files_after"]) for item in done] == [
        ("events", (NOW - timedelta(days=1)).date(), 10, 1)
    ]
    assert sorted(lake.events(home).to_pylist(), key=lambda row: row["offset"]) == before
    yesterday = lake.scan(home, "events", ["session_id"], lake.ds.field("date") < NOW.date())["session_id"].to_pylist()
    assert yesterday == sorted(yesterday)
    assert [own.number for own in maintenance.files(home, "events")] == [1, 2]
    assert maintenance.compact(home, LakeConfig(), now=NOW) == [], "a day in one piece is left alone"
    checks.quick(home)


def test_the_log_says_that_compaction_changed_no_data(home: Home) -> None:
    maintenance.compact(home, LakeConfig(), now=NOW)
    newest = max((lake.path(home, "events") / "_delta_log").glob("*.json"))
    text = newest.read_text()
    assert text.count('"dataChange":false') == text.count('"dataChange"') == 11


def test_logs_of_small_commits_are_merged_once_there_are_many(home: Home) -> None:
    for number in range(1, 12):
        lake.append(home, "gaps", [{"topic": "x", "partition": 0, "start": number, "end": number, "accepted_at": NOW}])
    done = maintenance.compact(home, LakeConfig(), now=NOW)
    assert {(item["table"], item["files_before"], item["files_after"]) for item in done if item["table"] == "gaps"} == {("gaps", 11, 1)}


@pytest.fixture
def aged(tmp_path: Path) -> Home:
    """Events of 50 days ago: a session that ended then, and one that went on until yesterday; an old and a new quarantined record."""
    made = Home(tmp_path)
    lake.create_missing(made)
    rows = [
        event_row(0, session="ended", days_ago=50), event_row(1, session="long", days_ago=50), event_row(2, session="long", days_ago=1),
        event_row(0, session="other", days_ago=50, partition=1), event_row(1, session="other", days_ago=39, partition=1),
    ]  # fmt: skip
    lake.append(made, "events", rows)
    lake.append(made, "quarantine", [refused_row(3, b"old", days_ago=50), refused_row(4, b"new", days_ago=1)])
    book(made)
    return made


def test_a_dry_run_says_what_would_go_and_changes_nothing(aged: Home) -> None:
    before = lake.versions(aged)
    plan = maintenance.retain(aged, CONFIG, now=NOW, apply=False)
    assert (plan["applied"], plan["rows"]) == (False, {"events": 1, "quarantine": 1})
    assert lake.versions(aged) == before


def test_old_events_go_unless_their_session_went_on_and_the_ledger_still_adds_up(aged: Home) -> None:
    done = maintenance.retain(aged, CONFIG, now=NOW, apply=True)
    assert done["rows"] == {"events": 1, "quarantine": 1}
    assert sorted(lake.events(aged)["session_id"].to_pylist()) == ["long", "long", "other", "other"]
    assert lake.read(aged, "quarantine")["raw"].to_pylist() == [b"new"]
    checks.quick(aged)
    found = {(own.partition, own.removed, own.distinct) for own in checks.figures(aged)}
    assert found == {(0, 2, 3), (1, 0, 2)}
    assert maintenance.retain(aged, CONFIG, now=NOW, apply=True)["rows"] == {"events": 0, "quarantine": 0}


def test_a_removal_that_was_announced_and_never_happened_counts_for_nothing_and_is_taken_back(aged: Home) -> None:
    row = {"removal_id": "killed", "kind": "retain", "table": "events", "topic": "t", "partition": 0, "rows": 2, "removed_at": NOW}
    lake.append(aged, "removals", [row])
    checks.quick(aged)
    maintenance.settle(aged)
    assert lake.read(aged, "removals").num_rows == 0


def test_rows_that_arrive_while_a_removal_is_planned_are_counted_again(aged: Home) -> None:
    """The plan is made at one version; a commit in between makes the delete fail, and the second plan sees it."""
    seen: list[int] = []

    def plan(version: int) -> Removal:
        if not seen:
            lake.append(aged, "events", [event_row(5, session="ended", days_ago=50)])
        seen.append(version)
        return maintenance.aged(aged, "events", NOW.date() - timedelta(days=40), as_of=version)

    assert maintenance.remove(aged, "events", plan, kind="retain", now=NOW) == 2
    assert len(seen) == 2
    assert sum(row["rows"] for row in lake.removals(aged)) == 2


def test_versions_are_kept_a_week_at_least_and_events_longer_than_a_distil_looks_back(aged: Home) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 168"):
        LakeConfig(keep_versions_hours=24)
    with pytest.raises(ConfigError, match="half of their events"):
        maintenance.retain(aged, SignalsConfig(lake=LakeConfig(keep_events_days=30)), now=NOW, apply=False)


def test_files_of_versions_younger_than_a_week_stay_readable(home: Home) -> None:
    version = lake.versions(home)["events"]
    maintenance.compact(home, LakeConfig(), now=NOW)
    done = maintenance.retain(home, SignalsConfig(), now=NOW, apply=True)
    assert done["files"] == {}
    assert lake.events(home, as_of=version).num_rows == 12
