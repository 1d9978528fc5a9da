"""The steps of a ship: propose, stage, gate, promote, confirm.

Each step looks at the ledger and returns the stored result if it was done; so a shipper that was killed anywhere is run again
and converges on the same answer and at most one promotion. The caller holds the lease `ship`; whoever lost it is refused by the
ledger inside the very transaction. Nothing here retries.

Takes a ledger, a lease, the checkpoints, and functions that measure and that wait for the gateway. Gives the ship's result.
Leaves out: how measurements are made (`deploy/tasks.py`) and how weights reach traffic (the gateway follows the pointer).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from deploy.release import artifact, explain, gates, plan
from deploy.release.config import GateConfig, ReleaseConfig
from deploy.release.evidence import Evidence, ProcessFacts
from deploy.release.leases import SHIP_LEASE
from deploy.release.ledger import Ledger
from deploy.release.records import Lease, Pointer, Ship, process_holder
from deploy.release.states import FINAL, Observation, State
from deploy.release.verdicts import Check, Report, Verdict, overall
from pipelines.config import digest
from pipelines.errors import Refused, StageError
from pipelines.storage import Home

GATE_OBSERVATIONS = {
    Verdict.PASS: Observation.GATE_PASSED,
    Verdict.FAIL: Observation.GATE_FAILED,
    Verdict.INCONCLUSIVE: Observation.GATE_INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipper:
    """What every step needs."""

    ledger: Ledger
    home: Home
    gate: GateConfig
    release: ReleaseConfig
    epoch: int
    """Epoch of the lease `ship` that this process holds."""


@contextmanager
def holding(ledger: Ledger, name: str, config: ReleaseConfig) -> Iterator[Lease]:
    """Hold a lease for the life of the block, renewed by a thread.

    Losing it is not an error here: the next write is refused by its epoch.

    Raises:
        Busy: Someone else holds it.
    """
    lease = ledger.lease(name, process_holder(), config.lease_ttl_s)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(config.lease_renew_s):
            try:
                ledger.renew(lease, config.lease_ttl_s)
            except Refused:
                return  # fenced off; the holder's next write says so
            except StageError:
                continue  # a locked or full disk may recover before the lease runs out

    thread = threading.Thread(target=renew, name=f"lease-{name}", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        thread.join()
        ledger.release(lease)


def propose(shipper: Shipper, parent: str, candidate: str) -> Ship:
    """Open the ship of `candidate` over `parent`, or return it as it stands.

    Raises:
        Refused: Fenced off, tombstoned, or `parent` does not serve and this ship never moved the pointer.
    """
    ship = shipper.ledger.propose(parent, candidate, gate_digest=digest(shipper.gate), epoch=shipper.epoch)
    _parent_serves(shipper, ship)
    return shipper.ledger.ship(ship.ship_id)


def _parent_serves(shipper: Shipper, ship: Ship) -> None:
    pointer = shipper.ledger.serving()
    if ship.state in (State.PROPOSED, State.STAGED, State.OFFLINE) and (pointer is None or pointer.checkpoint != ship.parent):
        reason = f"its parent {ship.parent[:12]} does not serve"
        shipper.ledger.observe(ship.ship_id, Observation.PARENT_GONE, epoch=shipper.epoch, reason=reason)
        raise Refused(f"{ship.candidate[:12]} is not shipped: {reason}; train again from what serves")


def stage(shipper: Shipper, ship: Ship) -> Report:
    """Check the candidate's files (gate group A) before anything loads them."""

    def act() -> dict[str, Any]:
        facts = artifact.inspect(shipper.home, serving=ship.parent, candidate=ship.candidate)
        pointer = shipper.ledger.serving()
        evidence = Evidence(
            serving=ship.parent, candidate=ship.candidate, anchor=pointer.anchor if pointer else ship.parent, artifact=facts
        )
        return _stored(gates.decide(evidence, shipper.gate, names=gates.ARTIFACT_CHECKS))

    def observe(result: Mapping[str, Any]) -> Observation:
        return Observation.BYTES_VERIFIED if result["verdict"] == Verdict.PASS else Observation.BYTES_BAD

    return explain.from_dict(shipper.ledger.step(ship.ship_id, "stage", act, epoch=shipper.epoch, observe=observe))


def gate(shipper: Shipper, ship: Ship, measure: Callable[[], Evidence], *, now: datetime) -> Report:
    """Measure the candidate and decide; a ship that was decided keeps its answer.

    Args:
        shipper: Ledger, margins, epoch.
        ship: Staged.
        measure: Runs benchmark and scores; called only when there is no stored answer.
        now: For the limit of ships a day.

    Raises:
        Refused: Frozen, too many ships today, tombstoned, or the parent no longer serves. Nothing is stored: it can go on later.
    """

    def act() -> dict[str, Any]:
        _refuse_early(shipper, ship, now=now)
        evidence = measure()
        _refuse_early(shipper, ship, now=now)
        evidence = replace(evidence, process=process_facts(shipper, ship, now=now))
        names = [name for name in gates.CHECKS if name not in gates.ARTIFACT_CHECKS]
        staged = explain.from_dict(shipper.ledger.steps(ship.ship_id)["stage"]).checks
        checks: tuple[Check, ...] = staged + gates.decide(evidence, shipper.gate, names=names).checks
        report = Report(verdict=overall(checks, required=gates.CHECKS), checks=checks)
        size = plan.size_of(evidence)
        return _stored(report) | {"weakness": plan.plan(shipper.gate, size).sentence if size else ""}

    def observe(result: Mapping[str, Any]) -> Observation:
        return GATE_OBSERVATIONS[Verdict(result["verdict"])]

    return explain.from_dict(shipper.ledger.step(ship.ship_id, "gate", act, epoch=shipper.epoch, observe=observe))


def ships_today(ledger: Ledger, *, now: datetime) -> int:
    """Return how many promotions the last 24 hours saw."""
    return ledger.promotions_since(now - timedelta(days=1))


def process_facts(shipper: Shipper, ship: Ship, *, now: datetime) -> ProcessFacts:
    """Read what the ledger says about shipping now."""
    pointer = shipper.ledger.serving()
    return ProcessFacts(
        lease_held=any(lease.name == SHIP_LEASE and lease.epoch == shipper.epoch for lease in shipper.ledger.leases()),
        frozen=shipper.ledger.frozen(),
        ships_today=ships_today(shipper.ledger, now=now),
        tombstoned=ship.candidate in shipper.ledger.tombstones(),
        parent_serves=pointer is not None and pointer.checkpoint == ship.parent,
    )


def _refuse_early(shipper: Shipper, ship: Ship, *, now: datetime) -> None:
    _parent_serves(shipper, ship)
    facts = process_facts(shipper, ship, now=now)
    evidence = Evidence(serving=ship.parent, candidate=ship.candidate, anchor=ship.parent, artifact=None, process=facts)
    check = gates.CHECKS["process"](evidence, shipper.gate)
    if check.verdict is not Verdict.PASS:
        raise Refused(f"{ship.candidate[:12]} is not shipped now: {check.reason}")


def promote(shipper: Shipper, ship: Ship, *, wait_for_gateway: Callable[[Pointer], bool]) -> dict[str, Any]:
    """Move the serving pointer, then wait until the gateway answers from the candidate.

    Args:
        shipper: Ledger, epoch.
        ship: Passed the offline gate (or was promoted before: then nothing moves again).
        wait_for_gateway: Returns whether the gateway swapped in time; if not, the promotion stands and the gateway follows later.

    Raises:
        Refused: Fenced off, frozen, rolled back, or the parent no longer serves.
    """
    _parent_serves(shipper, shipper.ledger.ship(ship.ship_id))
    pointer = shipper.ledger.promote(ship.ship_id, ship.candidate, ship.parent, epoch=shipper.epoch)
    if pointer.checkpoint == ship.candidate and wait_for_gateway(pointer):
        shipper.ledger.observe(
            ship.ship_id, Observation.GATEWAY_SWAPPED, epoch=shipper.epoch, reason=f"policy {pointer.policy_version} answers"
        )
    return {"policy_version": pointer.policy_version, "state": shipper.ledger.ship(ship.ship_id).state.value}


def run(
    shipper: Shipper,
    parent: str,
    candidate: str,
    *,
    measure: Callable[[], Evidence],
    wait_for_gateway: Callable[[Pointer], bool],
    now: datetime,
) -> dict[str, Any]:
    """Take a candidate as far as it goes: every step in order, each at most once.

    Raises:
        Refused: See the steps.
    """
    ship = propose(shipper, parent, candidate)
    if ship.state is State.ROLLED_BACK:
        raise Refused(f"ship {ship.ship_id[:12]} was rolled back ({ship.reason}); train a new candidate")
    if ship.state in (State.REJECTED, State.EXPIRED):
        return result(shipper.ledger, ship.ship_id)
    report = stage(shipper, ship)
    if report.verdict is Verdict.PASS:
        report = gate(shipper, ship, measure, now=now)
    if report.verdict is Verdict.PASS:
        promote(shipper, ship, wait_for_gateway=wait_for_gateway)
    return result(shipper.ledger, ship.ship_id)


def _stored(report: Report) -> dict[str, Any]:
    """Return the report as a step's result; `reason` becomes the ship's."""
    return explain.to_dict(report) | {"reason": "; ".join(report.reasons)}


def result(ledger: Ledger, ship_id: str) -> dict[str, Any]:
    """Return everything about a ship as JSON-able data (`ship show`, the demo's report)."""
    ship = ledger.ship(ship_id)
    steps = ledger.steps(ship.ship_id)
    versions = {checkpoint: number for number, checkpoint in ledger.policies().items()}
    decided = steps.get("gate") or steps.get("stage") or {}
    return {
        "ship_id": ship.ship_id,
        "parent": ship.parent,
        "candidate": ship.candidate,
        "policy_version": versions.get(ship.candidate),
        "state": ship.state.value,
        "final": ship.state in FINAL,
        "reason": ship.reason,
        "verdict": decided.get("verdict"),
        "reasons": decided.get("reasons", []),
        "checks": decided.get("checks", []),
        "weakness": decided.get("weakness", ""),
        "promoted": "promote" in steps,
        "created_at": ship.created_at.isoformat(),
        "updated_at": ship.updated_at.isoformat(),
    }
