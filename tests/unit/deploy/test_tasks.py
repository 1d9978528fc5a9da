"""The journal of a cycle: what survives a kill, and what ends it."""

from datetime import UTC, datetime, timedelta

import pytest

from deploy import observe
from deploy.config import Config
from deploy.release.ledger import Ledger
from deploy.tasks import Journal, Parent, Setting, train
from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import lake

NOW = datetime(2026, 1, 1, tzinfo=UTC)
A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def pointer(ledger):
    return ledger.install(A)


def test_a_step_inside_a_step_keeps_its_result_and_its_own_seconds(tmp_path, pointer):
    journal = Journal(Home(tmp_path))
    journal.open(pointer, now=NOW)
    outer = journal.step("ship", lambda: {"inner": journal.step("evaluate", lambda: {"file": "f"})["file"]})
    assert outer == {"inner": "f"}
    found = journal.close("shipped")
    assert (found["steps"], set(found["seconds"])) == ({"evaluate": {"file": "f"}, "ship": {"inner": "f"}}, {"evaluate", "ship"})


def test_an_unfinished_cycle_goes_on_while_its_parent_or_its_candidate_serves(tmp_path, pointer, ledger: Ledger):
    journal = Journal(Home(tmp_path))
    parent = journal.open(pointer, now=NOW)
    journal.step("train", lambda: {"checkpoint": B})
    assert Journal(Home(tmp_path)).open(pointer, now=NOW) == parent
    ledger.register(B, A)
    epoch = ledger.lease("ship", "t", 60).epoch
    ship = ledger.propose(A, B, gate_digest="g", epoch=epoch)
    from deploy.release.states import Observation

    ledger.step(ship.ship_id, "stage", dict, epoch=epoch, observe=lambda _: Observation.BYTES_VERIFIED)
    ledger.step(ship.ship_id, "gate", dict, epoch=epoch, observe=lambda _: Observation.GATE_PASSED)
    moved = ledger.promote(ship.ship_id, B, A, epoch=epoch)
    assert journal.open(moved, now=NOW) == parent, "killed after its promotion: only its end is missing"
    assert journal.step("train", lambda: {"checkpoint": C}) == {"checkpoint": B}


def test_a_step_without_an_open_cycle_is_a_sentence(tmp_path):
    with pytest.raises(ContractViolation, match="start the cycle again"):
        Journal(Home(tmp_path)).step("train", dict)


def test_a_window_with_lost_events_is_not_trained_on_and_the_next_one_is(tmp_path, pointer):
    home = Home(tmp_path)
    journal = Journal(home)
    assert journal.frozen_before() is None
    lake.create_missing(home)
    gap = {"topic": "t", "partition": 0, "start": 5, "end": 9, "accepted_at": NOW - timedelta(hours=1)}
    lake.append(home, "gaps", [gap])
    gaps = observe.accepted_gaps(home, since=journal.frozen_before())
    assert gaps == ["t-0: offsets 5 to 9, accepted 2025-12-31 23:00"]
    setting = Setting(home=home, config=Config())
    parent = Parent(checkpoint=A, policy_version=1, anchor=A)
    result = train(setting, parent, {"lake_version": 3, "gaps": gaps})
    assert result["checkpoint"] is None
    assert "events of this window are lost, so nothing is promoted from it" in result["reason"]
    journal.open(pointer, now=NOW)
    journal.step("freeze", lambda: {"gaps": gaps})
    journal.close("nothing_to_train")
    assert journal.frozen_before() == NOW
    assert observe.accepted_gaps(home, since=journal.frozen_before()) == []
