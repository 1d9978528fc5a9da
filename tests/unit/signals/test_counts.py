"""Counts of outcomes: added to by what changed where they belong to the turns at hand, made anew where they do not."""

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import counts, lake, parts
from signals.tables import TABLES

DAYS = (date(2026, 5, 30), date(2026, 5, 31))
SCHEMA = lake.nullable(TABLES["turns"].schema)


def turn(session: str, outcome: str = "scored", day: date = DAYS[0], **more: Any) -> dict[str, Any]:
    base = {"session_id": session, "turn_id": f"{session}-0", "outcome": outcome, "policy_version": 1, "arm": "serving", "date": day}
    return base | {"origin": "live"} | more


def step(home: Home, rows: list[dict[str, Any]], *, count: bool = True) -> None:
    """Replace the turns of some sessions as a distil does."""
    before = counts.version(home)
    fresh = pa.Table.from_pylist(rows, schema=SCHEMA)
    gone = {day: sorted({row["session_id"] for row in rows}) for day in DAYS}
    taken: list[pa.Table] = []
    parts.replace(home, "turns", parts.write(lake.path(home, "turns"), fresh), gone=gone, told=taken.append)
    if count:
        counts.update(home, before, added=counts.counted(fresh).to_pylist(), taken=taken[0] if taken else None)


def held(home: Home) -> list[str]:
    return sorted(map(repr, lake.read(home, "ledger_counts").select([*counts.KEYS, "turns"]).to_pylist()))


def anew(home: Home) -> list[str]:
    return sorted(map(repr, counts.recount(home, DAYS)))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    return made


ROW = st.tuples(st.sampled_from("abcdef"), st.sampled_from(["scored", "pending"]), st.sampled_from(DAYS), st.sampled_from([1, 2, None]))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.lists(ROW, min_size=1, max_size=4, unique_by=lambda row: row[0]), st.booleans()), min_size=1, max_size=5))
def test_whatever_changed_and_wherever_a_run_was_killed_the_counts_are_those_of_the_turns(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[list[tuple[str, str, date, int | None]], bool]]
) -> None:
    home = Home(tmp_path_factory.mktemp("lake"))
    lake.create_missing(home)
    for rows, survived in steps:
        step(home, [turn(name, outcome, day, policy_version=policy) for name, outcome, day, policy in rows], count=survived)
        if survived:
            assert held(home) == anew(home)
    step(home, [turn("z")])
    assert held(home) == anew(home)
    assert sum(counts.outcomes(home).values()) == lake.count(home, "turns")


def test_counts_are_not_made_anew_where_they_belong_to_the_turns(home: Home) -> None:
    """Shown by a mistake of ours in them, which a distil keeps and a count anew removes."""
    step(home, [turn("a"), turn("b")])
    before = counts.version(home)
    wrong = {**turn("a"), "turns": 40}
    row = {key: value for key, value in wrong.items() if key in (*counts.KEYS, "turns")}
    lake.replace_days(home, counts.TABLE, [row], [DAYS[0]], transaction=(counts.BELONGS_TO, before))
    step(home, [turn("c")])
    assert lake.read(home, counts.TABLE)["turns"].to_pylist() == [41]
    with pytest.raises(ContractViolation, match=r"holds 3 turn rows and counts 41 outcomes.*--everything"):
        counts.outcomes(home)
    lake.open_table(home, "turns").optimize.z_order(["session_id"])
    step(home, [turn("d")])
    assert counts.outcomes(home) == {"scored": 4}


def test_a_turn_that_appears_twice_is_found_by_looking_at_all(home: Home) -> None:
    step(home, [turn("a"), turn("b", outcome="pending")])
    assert counts.not_one(home) == (2, 2, 0)
    lake.append(home, "turns", [turn("a"), turn("c") | {"outcome": None}])
    assert counts.not_one(home) == (4, 3, 1)
