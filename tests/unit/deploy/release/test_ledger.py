"""The ledger: leases, fencing, compare-and-swap, stored steps, append-only history, freezes."""

import os
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deploy.release.ledger import Ledger
from deploy.release.records import Ship, process_holder, ship_id
from deploy.release.states import Observation, State
from pipelines.errors import Busy, ContractViolation, Refused, TerminalError
from pipelines.storage import Home

A, B, C = "a" * 64, "b" * 64, "c" * 64


def take(ledger: Ledger, holder: str = "test") -> int:
    return ledger.lease("ship", holder, 60).epoch


def to_offline(ledger: Ledger, epoch: int, *, parent: str = A, candidate: str = B) -> Ship:
    ship = ledger.propose(parent, candidate, gate_digest="g", epoch=epoch)
    ledger.step(ship.ship_id, "stage", dict, epoch=epoch, observe=lambda _: Observation.BYTES_VERIFIED)
    ledger.step(ship.ship_id, "gate", dict, epoch=epoch, observe=lambda _: Observation.GATE_PASSED)
    return ship


def promoted(ledger: Ledger, *, parent: str = A, candidate: str = B) -> Ship:
    epoch = take(ledger)
    ship = to_offline(ledger, epoch, parent=parent, candidate=candidate)
    ledger.promote(ship.ship_id, candidate, parent, epoch=epoch)
    return ship


def test_a_fresh_deployment_serves_nothing_and_the_first_checkpoint_becomes_policy_one_and_anchor(ledger, clock):
    assert ledger.serving() is None
    pointer = ledger.install(A)
    assert (pointer.checkpoint, pointer.policy_version, pointer.previous, pointer.anchor) == (A, 1, None, A)
    assert pointer.changed_at == datetime.fromtimestamp(clock.seconds, tz=UTC)
    assert ledger.install(A) == pointer
    with pytest.raises(Refused, match="is installed"):
        ledger.install(B)


def test_the_ship_id_is_the_sha256_of_parent_candidate_and_gate():
    assert ship_id("p", "c", gate_digest="g") == "42c319e847383ae45deb169b1c8507229f28a6071516c8d88283fa0eae75a8fb"  # sha256 of "p>c>g"
    assert ship_id("p", "c", gate_digest="g") != ship_id("p", "c", gate_digest="h")


def test_policy_versions_grow_and_a_checkpoint_keeps_its_own(ledger):
    ledger.install(A)
    assert [ledger.register(B, A), ledger.register(C, B), ledger.register(B, A)] == [2, 3, 2]
    assert ledger.policies() == {1: A, 2: B, 3: C}


def test_a_promotion_moves_the_pointer_and_remembers_what_served(ledger):
    ledger.install(A)
    promoted(ledger)
    pointer = ledger.serving()
    assert (pointer.checkpoint, pointer.policy_version, pointer.previous, pointer.epoch) == (B, 2, A, 1)


def test_a_second_promote_of_the_same_ship_changes_nothing(ledger):
    ledger.install(A)
    ship = promoted(ledger)
    before = ledger.serving()
    assert ledger.promote(ship.ship_id, B, A, epoch=1) == before
    assert [event.kind for event in ledger.history(100)].count("promoted") == 1


def test_a_candidate_whose_parent_no_longer_serves_is_refused(ledger):
    ledger.install(A)
    epoch = take(ledger)
    first, second = to_offline(ledger, epoch), to_offline(ledger, epoch, candidate=C)
    ledger.promote(first.ship_id, B, A, epoch=epoch)
    with pytest.raises(Refused, match="train again"):
        ledger.promote(second.ship_id, C, A, epoch=epoch)
    assert ledger.serving().checkpoint == B


def test_a_ship_whose_gate_has_not_passed_is_not_promoted(ledger):
    ledger.install(A)
    epoch = take(ledger)
    ship = ledger.propose(A, B, gate_digest="g", epoch=epoch)
    with pytest.raises(Refused, match="proposed"):
        ledger.promote(ship.ship_id, B, A, epoch=epoch)
    assert ledger.serving().checkpoint == A


def test_a_lease_is_exclusive_until_it_runs_out(ledger, clock):
    lease = ledger.lease("ship", "elsewhere:1:1", 60)
    with pytest.raises(Busy, match="60 s more"):
        ledger.lease("ship", "other", 60)
    clock.seconds += 59
    ledger.renew(lease, 60)
    clock.seconds += 59
    with pytest.raises(Busy):
        ledger.lease("ship", "other", 60)
    clock.seconds += 2
    assert ledger.lease("ship", "other", 60).epoch == lease.epoch + 1


def test_a_shipper_that_stalled_past_its_lease_is_fenced_in_every_write(ledger, clock):
    ledger.install(A)
    old = take(ledger, "stalled")
    ship = to_offline(ledger, old)
    clock.seconds += 61
    stale = ledger.leases()
    assert stale == []
    take(ledger, "next")
    writes = [
        lambda: ledger.propose(A, C, gate_digest="g", epoch=old),
        lambda: ledger.step(ship.ship_id, "extra", dict, epoch=old, observe=lambda _: None),
        lambda: ledger.observe(ship.ship_id, Observation.PARENT_GONE, epoch=old),
        lambda: ledger.promote(ship.ship_id, B, A, epoch=old),
    ]
    for write in writes:
        with pytest.raises(Refused, match="fenced"):
            write()
    assert ledger.serving().checkpoint == A


def test_a_shipper_fenced_while_it_worked_does_not_store_its_result(ledger, clock):
    ledger.install(A)
    epoch = take(ledger, "slow")
    ship = ledger.propose(A, B, gate_digest="g", epoch=epoch)

    def stall() -> dict[str, str]:
        clock.seconds += 61
        take(ledger, "next")
        return {"by": "slow"}

    with pytest.raises(Refused, match="fenced"):
        ledger.step(ship.ship_id, "stage", stall, epoch=epoch, observe=lambda _: Observation.BYTES_VERIFIED)
    assert ledger.steps(ship.ship_id) == {}
    assert ledger.ship(ship.ship_id).state is State.PROPOSED


def test_a_clock_that_jumps_back_never_lets_two_epochs_write(ledger, clock):
    ledger.install(A)
    first = take(ledger, "first")
    clock.seconds += 3600
    second = take(ledger, "second")
    clock.seconds -= 7200
    with pytest.raises(Refused):
        ledger.propose(A, B, gate_digest="g", epoch=first)
    assert ledger.propose(A, B, gate_digest="g", epoch=second).state is State.PROPOSED


def test_a_dead_process_of_this_host_loses_its_lease_at_once(ledger):
    script = "import sys; from deploy.release.records import process_holder; print(process_holder())"
    holder = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    ledger.lease("ship", holder, 3600)
    assert ledger.lease("ship", "next", 60).epoch == 2
    with pytest.raises(Busy):
        Ledger(ledger.path, clock=lambda: 1_800_000_000.0).lease("ship", "third", 60)


def test_the_holder_of_a_living_process_is_not_taken_for_dead(ledger):
    ledger.lease("ship", process_holder(), 3600)
    with pytest.raises(Busy):
        ledger.lease("ship", "other", 60)


def test_a_step_runs_once_and_then_returns_what_it_stored(ledger):
    ledger.install(A)
    epoch = take(ledger)
    ship = ledger.propose(A, B, gate_digest="g", epoch=epoch)
    runs: list[int] = []

    def act() -> dict[str, int]:
        runs.append(1)
        return {"run": len(runs)}

    results = [ledger.step(ship.ship_id, "stage", act, epoch=epoch, observe=lambda _: Observation.BYTES_VERIFIED) for _ in range(3)]
    assert results == [{"run": 1}] * 3
    assert runs == [1]


def test_a_step_that_fails_stores_nothing_and_may_be_tried_again(ledger):
    ledger.install(A)
    epoch = take(ledger)
    ship = ledger.propose(A, B, gate_digest="g", epoch=epoch)

    def fail() -> dict[str, str]:
        raise ValueError("the engine fell over")

    with pytest.raises(ValueError, match="fell over"):
        ledger.step(ship.ship_id, "stage", fail, epoch=epoch, observe=lambda _: None)
    assert ledger.step(ship.ship_id, "stage", lambda: {"ok": 1}, epoch=epoch, observe=lambda _: None) == {"ok": 1}


def test_history_can_be_neither_changed_nor_deleted(ledger):
    ledger.install(A)
    with sqlite3.connect(ledger.path) as db:
        for statement in ("UPDATE event SET kind = 'other'", "DELETE FROM event"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)
    db.close()


def test_the_file_is_written_ahead_and_synced_in_full(ledger):
    with ledger.reading() as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert db.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_a_freeze_stops_promotions_until_thaw_and_keeps_its_first_reason(ledger):
    ledger.install(A)
    epoch = take(ledger)
    ship = to_offline(ledger, epoch)
    ledger.freeze("incident 12")
    ledger.freeze("another")
    with pytest.raises(Refused, match="incident 12"):
        ledger.promote(ship.ship_id, B, A, epoch=epoch)
    ledger.thaw("resolved")
    assert ledger.promote(ship.ship_id, B, A, epoch=epoch).checkpoint == B
    assert ledger.frozen() is None


def test_rollback_restores_tombstones_and_quarantines(ledger):
    ledger.install(A)
    ship = promoted(ledger)
    result = ledger.rollback("edits reverted", holder="me")
    assert result == {"restored": A, "removed": [B], "ended": [ship.ship_id], "frozen": None}
    assert ledger.serving().checkpoint == A
    assert ledger.tombstones() == {B: "edits reverted"}
    assert ledger.quarantined() == [2]
    assert ledger.ship(ship.ship_id).state is State.ROLLED_BACK
    assert ledger.ship(ship.ship_id).reason == "edits reverted"
    with pytest.raises(Refused, match="tombstoned"):
        ledger.propose(A, B, gate_digest="other", epoch=take(ledger))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_rollback_works_from_every_state_and_fences_the_shipper(ledger, steps):
    ledger.install(A)
    epoch = take(ledger)
    ship = ledger.propose(A, B, gate_digest="g", epoch=epoch)
    road = [
        lambda: ledger.step(ship.ship_id, "stage", dict, epoch=epoch, observe=lambda _: Observation.BYTES_VERIFIED),
        lambda: ledger.step(ship.ship_id, "gate", dict, epoch=epoch, observe=lambda _: Observation.GATE_PASSED),
        lambda: ledger.promote(ship.ship_id, B, A, epoch=epoch),
        lambda: ledger.observe(ship.ship_id, Observation.GATEWAY_SWAPPED, epoch=epoch),
    ]
    for go in road[:steps]:
        go()
    result = ledger.rollback("stop", holder="me")
    assert (result["restored"], result["removed"]) == (A, [B])
    assert ledger.ship(ship.ship_id).state is State.ROLLED_BACK
    with pytest.raises(Refused):
        ledger.promote(ship.ship_id, B, A, epoch=epoch)
    assert ledger.serving().checkpoint == A


def test_rollback_takes_away_the_serving_checkpoint_and_a_candidate_in_flight_together(ledger):
    ledger.install(A)
    promoted(ledger)
    epoch = take(ledger)
    to_offline(ledger, epoch, parent=B, candidate=C)
    assert ledger.rollback("both", holder="me")["removed"] == [B, C]
    assert ledger.serving().checkpoint == A


def test_with_nothing_to_roll_back_it_says_so(ledger):
    ledger.install(A)
    with pytest.raises(Refused, match="nothing to roll back"):
        ledger.rollback("why not", holder="me")


def test_two_rollbacks_in_a_day_freeze_shipping_and_a_day_apart_they_do_not(ledger, clock):
    ledger.install(A)
    promoted(ledger)
    ledger.rollback("one", holder="me")
    clock.seconds += 25 * 3600
    promoted(ledger, candidate=C)
    assert ledger.rollback("two", holder="me")["frozen"] is None
    promoted(ledger, candidate="d" * 64)
    assert "2 rollbacks" in ledger.rollback("three", holder="me")["frozen"]
    assert "2 rollbacks" in ledger.frozen()


def test_two_rollbacks_in_a_row_walk_back_along_the_lineage(ledger):
    ledger.install(A)
    promoted(ledger)
    promoted(ledger, parent=B, candidate=C)
    assert ledger.rollback("c is bad", holder="me")["restored"] == B
    assert ledger.serving().previous == A
    assert ledger.rollback("b too", holder="me")["restored"] == A
    assert ledger.serving().previous is None


def test_an_anchor_is_a_registered_checkpoint_that_is_not_tombstoned(ledger):
    ledger.install(A)
    promoted(ledger)
    ledger.set_anchor(B, "a month without trouble")
    assert ledger.serving().anchor == B
    with pytest.raises(Refused, match="never registered"):
        ledger.set_anchor(C, "why not")


def test_what_serves_is_not_tombstoned_by_hand(ledger):
    ledger.install(A)
    with pytest.raises(Refused, match="rollback"):
        ledger.tombstone(A, "bad")


def test_a_ship_is_found_by_a_prefix_that_names_exactly_one(ledger):
    ledger.install(A)
    ship = ledger.propose(A, B, gate_digest="g", epoch=take(ledger))
    assert ledger.ship(ship.ship_id[:8]) == ship
    with pytest.raises(ContractViolation, match="0 ships"):
        ledger.ship("zz")


def test_a_file_that_is_no_ledger_gives_one_sentence(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"this is no database, but it is long enough to be read as one" * 20)
    with pytest.raises(TerminalError, match="cannot be used"):
        Ledger(path)


class Box:
    """Collects outcomes of threads."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self._lock = threading.Lock()

    def put(self, text: str) -> None:
        with self._lock:
            self.outcomes.append(text)


def _race(path: Path, number: int, epoch: int, results: Box) -> None:
    ledger = Ledger(path)
    candidate = f"{number:064x}"
    try:
        ship = to_offline(ledger, epoch, candidate=candidate)
        ledger.promote(ship.ship_id, candidate, A, epoch=epoch)
        results.put("won")
    except Refused:
        results.put("refused")


def test_of_many_shippers_at_once_exactly_one_promotes(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.install(A)
    epoch = take(ledger)
    box = Box()
    threads = [threading.Thread(target=_race, args=(ledger.path, number, epoch, box)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(box.outcomes) == ["refused"] * 7 + ["won"]
    assert [event.kind for event in ledger.history(1000)].count("promoted") == 1


def test_what_serves_cannot_be_shipped_over_itself(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.install(A)
    epoch = take(ledger)
    with pytest.raises(Refused, match="serves already"):
        to_offline(ledger, epoch, parent=A, candidate=A)
    ship = to_offline(ledger, epoch, parent=A, candidate=B)
    ledger.promote(ship.ship_id, B, A, epoch=epoch)
    with pytest.raises(Refused, match="serves already"):
        to_offline(ledger, take(ledger), parent=B, candidate=B)
    ledger.rollback("why", holder="me")
    assert ledger.serving().checkpoint == A


operations = st.lists(st.sampled_from(["ship_b", "ship_c", "ship_child", "rollback", "freeze", "thaw", "new_lease", "anchor"]), max_size=9)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations)
@example(["ship_b", "ship_b", "rollback"])
def test_the_pointer_always_names_the_first_or_a_promoted_checkpoint_that_is_not_tombstoned(tmp_path_factory, todo):
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")
    ledger.install(A)
    epoch = take(ledger)
    for number, name in enumerate(todo):
        parent = ledger.serving().checkpoint
        candidate = {"ship_b": B, "ship_c": C, "ship_child": f"{number + 1:064x}"}.get(name)
        try:
            if candidate:
                ship = to_offline(ledger, epoch, parent=parent, candidate=candidate)
                ledger.promote(ship.ship_id, candidate, parent, epoch=epoch)
            elif name == "rollback":
                ledger.rollback("why", holder="me")
            elif name == "anchor":
                ledger.set_anchor(parent, "why")
            elif name == "new_lease":
                epoch = take(ledger)
            else:
                getattr(ledger, name)("why")
        except Refused:
            pass
        pointer = ledger.serving()
        shipped = {event.checkpoint for event in ledger.history(10_000) if event.kind == "promoted"}
        assert pointer.checkpoint in shipped | {A}
        assert pointer.checkpoint not in ledger.tombstones()
        assert pointer.previous is None or pointer.previous not in ledger.tombstones()
        assert ledger.policies()[pointer.policy_version] == pointer.checkpoint


def test_the_ledger_lies_where_the_deployment_says(tmp_path):
    from deploy.release.rollback import LEDGER_FILE

    assert Home(tmp_path).ledger == tmp_path / LEDGER_FILE


def test_rollback_imports_nothing_but_the_standard_library_and_the_ledger():
    script = "import sys; before = set(sys.modules); import deploy.release.rollback; print('\\n'.join(set(sys.modules) - before))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment).stdout
    foreign = {name.split(".")[0] for name in output.split()} - set(sys.stdlib_module_names)
    ours = {name for name in output.split() if name.split(".")[0] in ("deploy", "pipelines", "signals", "trainer")}
    assert foreign == {"deploy", "pipelines"}
    parts = {"database", "leases", "ledger", "records", "rollback", "states"}
    assert ours == {"deploy", "deploy.release", "pipelines", "pipelines.errors"} | {f"deploy.release.{part}" for part in parts}
