"""The ledger's invariants: what breaks each is found, named and given a way out."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import KafkaConfig
from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import checks, lake
from signals.config import SignalsConfig

NOW = datetime(2026, 1, 2, tzinfo=UTC)
AWAY = SignalsConfig(kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1", topic="t"))
"""A broker that does not answer: what can only be asked there is left out."""


def batch(number: int, start: int, end: int, **changes: Any) -> dict[str, Any]:
    row = {
        "stream": "u", "batch": number, "topic": "t", "partition": 0, "start": start, "end": end, "kept": end - start, "quarantined": 0,
        "committed_at": NOW,
    }  # fmt: skip
    return row | changes


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows[::-1], schema=lake.nullable(lake.TABLES["offset_ledger"].schema))


def record(offset: int, partition: int = 0) -> dict[str, Any]:
    return {"topic": "t", "partition": partition, "offset": offset, "date": NOW.date(), "session_id": f"s{offset}"}


def refused(offset: int) -> dict[str, Any]:
    return {"topic": "t", "partition": 0, "offset": offset, "date": NOW.date(), "arrived_at": NOW, "reason": "malformed_json", "raw": b"x"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    lake.append(made, "offset_ledger", [batch(0, 0, 3, kept=2, quarantined=1), batch(1, 3, 5)])
    lake.append(made, "events", [record(0), record(2), record(3), record(4)])
    lake.append(made, "quarantine", [refused(1)])
    return made


def look(home: Home) -> dict[str, Any]:
    return checks.check(home, AWAY, now=NOW)


def problems(home: Home) -> list[tuple[str, str]]:
    return [(item["check"], item["found"]) for item in look(home)["problems"] if item["check"] != "stream"]


def test_a_lake_that_adds_up_has_no_problem(home: Home) -> None:
    checks.quick(home)
    assert problems(home) == []
    (own,) = look(home)["partitions"]
    assert own == {
        "topic": "t", "partition": 0, "booked": 5, "events": 4, "quarantined": 1, "removed": 0, "distinct": 5, "lost": 0, "unfinished": 0,
    }  # fmt: skip


def test_a_lost_row_is_found_with_the_way_out(home: Home) -> None:
    lake.open_table(home, "events").delete('"offset" = 3')
    (problem,) = [item for item in look(home)["problems"] if item["check"] == "rows"]
    assert problem["found"] == "t-0: 4 distinct offsets in the lake and 0 removed, but the ledger has 5"
    assert "--resume-from-ledger" in problem["do"]
    with pytest.raises(ContractViolation, match="hold 4 rows, the ledger says 5; tidegate signals check"):
        checks.quick(home)


def test_a_row_that_came_twice_is_found(home: Home) -> None:
    lake.append(home, "events", [record(1)])
    assert problems(home) == [("duplicates", "t-0: 1 of 6 rows have an offset that another row has too")]


def test_a_removed_row_is_no_loss_once_its_delete_carries_the_removal(home: Home) -> None:
    row = {"removal_id": "r", "kind": "forget", "table": "events", "topic": "t", "partition": 0, "rows": 1, "removed_at": NOW}
    lake.append(home, "removals", [row])
    assert problems(home) == [], "announced, not done"
    properties = CommitProperties(app_transactions=[Transaction(lake.removal_transaction("r"), 1)])
    lake.open_table(home, "events").delete('"offset" = 3', commit_properties=properties)
    assert problems(home) == []
    checks.quick(home)
    assert look(home)["partitions"][0]["removed"] == 1


def test_a_hole_in_the_ledger_is_a_problem_until_it_is_accepted(home: Home) -> None:
    lake.append(home, "offset_ledger", [batch(2, 9, 10)])
    lake.append(home, "events", [record(9)])
    assert problems(home) == [("gap", "t-0: offsets 5 to 9 are in no batch and in no gap")]
    lake.append(home, "gaps", [{"topic": "t", "partition": 0, "start": 5, "end": 9, "accepted_at": NOW}])
    assert problems(home) == []
    assert look(home)["partitions"][0]["lost"] == 4


def test_offsets_that_two_batches_claim_are_found(home: Home) -> None:
    lake.append(home, "offset_ledger", [batch(2, 4, 6)])
    assert ("overlap", "t-0, batch 2 begins at 4, but t-0, batch 1 went up to 5") in problems(home)


def test_a_batch_whose_rows_are_not_its_offsets_is_found(home: Home) -> None:
    lake.append(home, "offset_ledger", [batch(2, 5, 8, kept=2)])
    assert ("batch", "t-0, batch 2: 2 rows for offsets 5 to 8") in problems(home)


def test_rows_of_an_interrupted_batch_are_said_and_are_no_problem(home: Home) -> None:
    lake.append(home, "events", [record(5), record(0, partition=1)])
    assert problems(home) == []
    assert look(home)["alerts"] == ["20.0% of the last day's records are no valid events; look at: tidegate signals quarantine show",
                                    "2 rows belong to a batch that was interrupted; the next run completes it"]  # fmt: skip


def test_the_share_of_refused_records_is_that_of_the_last_day(home: Home) -> None:
    assert checks.quarantine_share(home, now=NOW) == pytest.approx(0.2)
    assert checks.quarantine_share(home, now=NOW + timedelta(days=2)) == 0.0


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6), dropped=st.integers(0, 23))
def test_every_cut_into_batches_adds_up_and_a_missing_batch_never_does(cuts: list[int], dropped: int) -> None:
    spans = [(sum(cuts[:index]), sum(cuts[: index + 1])) for index in range(len(cuts))]
    rows = [batch(number, *span) for number, span in enumerate(spans)]
    assert list(checks.uneven(table(rows))) == list(checks.joined(table(rows), gaps=set())) == []
    inner = dropped % len(rows)
    left = rows[:inner] + rows[inner + 1 :]
    missing = [] if inner in (0, len(rows) - 1) else ["gap"]
    assert [problem.check for problem in checks.joined(table(left), gaps=set())] == missing
    assert list(checks.joined(table(left), gaps={("t", 0, *spans[inner])})) == []
