"""The states of a ship and what moves it from one to the next, as data.

Takes a state and an observation, gives the next state. Pure; standard library only, because rollback depends on it.
Leaves out: who observes (`ship.py`, `rollback.py`) and where the state is kept (`ledger.py`).

    PROPOSED -> STAGED -> OFFLINE -> PROMOTED -> CONFIRMED
        |          |         |          |            |
        +----------+---------+--> REJECTED (bad bytes, gate said no, parent no longer serves)
                   +------------> EXPIRED  (gate could not tell: the serving checkpoint stays)
        any of the above -------> ROLLED_BACK (a person said so; wins over a pending promotion)

SHADOW, CANARY, SOAK and PAUSED (traffic before and after promotion) have their names reserved and no transitions yet.
"""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where a ship is."""

    PROPOSED = "proposed"
    """A candidate exists and its parent serves."""
    STAGED = "staged"
    """The candidate's bytes are in the store and agree with its manifest."""
    OFFLINE = "offline"
    """The offline gate passed."""
    SHADOW = "shadow"
    CANARY = "canary"
    PAUSED = "paused"
    PROMOTED = "promoted"
    """The serving pointer names the candidate."""
    SOAK = "soak"
    CONFIRMED = "confirmed"
    """The gateway answers from the candidate."""
    REJECTED = "rejected"
    EXPIRED = "expired"
    ROLLED_BACK = "rolled_back"


class Observation(StrEnum):
    """What was seen about a ship."""

    BYTES_VERIFIED = "bytes_verified"
    BYTES_BAD = "bytes_bad"
    GATE_PASSED = "gate_passed"
    GATE_FAILED = "gate_failed"
    GATE_INCONCLUSIVE = "gate_inconclusive"
    POINTER_MOVED = "pointer_moved"
    PARENT_GONE = "parent_gone"
    """The checkpoint it was trained from no longer serves."""
    GATEWAY_SWAPPED = "gateway_swapped"
    ROLLED_BACK = "rolled_back"


TRANSITIONS: Final[dict[tuple[State, Observation], State]] = {
    (State.PROPOSED, Observation.BYTES_VERIFIED): State.STAGED,
    (State.PROPOSED, Observation.BYTES_BAD): State.REJECTED,
    (State.PROPOSED, Observation.PARENT_GONE): State.REJECTED,
    (State.PROPOSED, Observation.ROLLED_BACK): State.ROLLED_BACK,
    (State.STAGED, Observation.GATE_PASSED): State.OFFLINE,
    (State.STAGED, Observation.GATE_FAILED): State.REJECTED,
    (State.STAGED, Observation.GATE_INCONCLUSIVE): State.EXPIRED,
    (State.STAGED, Observation.PARENT_GONE): State.REJECTED,
    (State.STAGED, Observation.ROLLED_BACK): State.ROLLED_BACK,
    (State.OFFLINE, Observation.POINTER_MOVED): State.PROMOTED,
    (State.OFFLINE, Observation.PARENT_GONE): State.REJECTED,
    (State.OFFLINE, Observation.ROLLED_BACK): State.ROLLED_BACK,
    (State.PROMOTED, Observation.GATEWAY_SWAPPED): State.CONFIRMED,
    (State.PROMOTED, Observation.ROLLED_BACK): State.ROLLED_BACK,
    (State.CONFIRMED, Observation.ROLLED_BACK): State.ROLLED_BACK,
}
"""Every move there is; a pair that is not here does not move."""

FINAL: Final = frozenset({State.CONFIRMED, State.REJECTED, State.EXPIRED, State.ROLLED_BACK})
"""States in which no shipper has anything left to do."""

SERVES: Final = frozenset({State.PROMOTED, State.CONFIRMED})
"""States a ship is in while the serving pointer names its candidate (or a later ship's)."""


def advance(state: State, observation: Observation) -> State | None:
    """Return the next state, or None when `observation` moves nothing in `state`."""
    return TRANSITIONS.get((state, observation))
