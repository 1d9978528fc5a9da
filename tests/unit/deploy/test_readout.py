"""What the demo's report reads out of a lake."""

from pathlib import Path
from typing import Any

import pytest

from deploy import readout
from pipelines.storage import Home
from signals import lake
from tests.support.lakes import NOW, event_row, fitted, refused_row, turn_row


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Two policies: the first of two users with four turns, the second of one user with one; a live turn that does not count."""
    made = Home(tmp_path)
    lake.create_missing(made)
    turns = [
        turn_row("a1", user="ann", calls=2, invalid_calls=1, sampling_ms=1_000.0, edits_kept=1.0, dissatisfied=0.9, reward=0.5),
        turn_row("a2", user="ann", calls=2, invalid_calls=0, sampling_ms=3_000.0, edits_kept=None, dissatisfied=0.1, reward=-0.5),
        turn_row("b1", user="ben", calls=4, invalid_calls=0, sampling_ms=5_000.0, edits_kept=-1.0, dissatisfied=None, reward=None),
        turn_row("b2", user="ben", calls=0, invalid_calls=0, sampling_ms=None, edits_kept=None, dissatisfied=None, reward=None),
        turn_row(
            "c1", user="ann", policy=2, calls=1, invalid_calls=0, sampling_ms=2_000.0, edits_kept=None, dissatisfied=None, reward=0.25
        ),
    ]
    turns = [row | {"origin": "simulated"} for row in turns] + [turn_row("live", user="eve", calls=9, invalid_calls=9)]
    for name in ("turns", "rewards"):
        lake.append(made, name, fitted(name, turns))
    edits = [("a1", 1.0), ("b1", 0.0), ("b1", 0.5), ("live", 0.0)]
    rows = [
        {"session_id": session, "turn_id": f"{session}-t", "edit_id": f"d{at}", "kept": kept, "policy_version": 1, "date": NOW.date()}
        for at, (session, kept) in enumerate(edits)
    ]
    lake.append(made, "edits", rows)
    return made


def shown(policy: dict[str, Any]) -> dict[str, Any]:
    return {name: (figure.estimate, figure.n) for name, figure in policy["figures"].items()}


def test_figures_of_each_policy_are_those_of_its_simulated_turns(home: Home) -> None:
    first, second = readout.policies(home)
    assert (first["version"], second["version"]) == (1, 2)
    assert shown(first) == {
        "kept_edits": (pytest.approx(0.5), 3), "dissatisfied": (pytest.approx(0.5), 2), "latency_s": (pytest.approx(3.0), 3),
        "invalid_calls": (pytest.approx(1 / 8), 8),
    }  # fmt: skip


def test_a_component_that_nobody_showed_has_no_mean(home: Home) -> None:
    first, second = (policy["reward"] for policy in readout.policies(home))
    assert (first["reward"], second["reward"]) == ({"mean": 0.0, "n": 2}, {"mean": 0.25, "n": 1})
    assert (first["edits_kept"], second["edits_kept"]) == ({"mean": 0.0, "n": 2}, {"mean": None, "n": 0})


def test_records_are_counted_where_they_lie(home: Home) -> None:
    events = [event_row(0, session="a1"), event_row(1, session="a1", event_id="e0-0"), event_row(2, session="b1")]
    lake.append(home, "events", events)
    lake.append(home, "quarantine", [refused_row(3, b"{")])
    assert readout.event_counts(home, produced=5) == {"produced": 5, "in_lake": 3, "quarantined": 1, "duplicates": 1}
    rows = {row["name"]: row["rows"] for row in readout.tables(home)}
    assert (rows["events"], rows["turns"], rows["edits"]) == (3, 6, 4)
