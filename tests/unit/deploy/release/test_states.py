"""The state machine is a table; these tests say what the table must hold."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from deploy.release.states import FINAL, TRANSITIONS, Observation, State, advance

OPEN = (State.PROPOSED, State.STAGED, State.OFFLINE, State.PROMOTED)


def test_the_straight_road_leads_from_proposed_to_confirmed():
    state = State.PROPOSED
    for seen in (Observation.BYTES_VERIFIED, Observation.GATE_PASSED, Observation.POINTER_MOVED, Observation.GATEWAY_SWAPPED):
        state = advance(state, seen)
    assert state is State.CONFIRMED


def test_every_open_state_and_confirmed_can_be_rolled_back():
    assert {advance(state, Observation.ROLLED_BACK) for state in (*OPEN, State.CONFIRMED)} == {State.ROLLED_BACK}


def test_an_inconclusive_gate_expires_and_a_failed_one_rejects():
    assert advance(State.STAGED, Observation.GATE_INCONCLUSIVE) is State.EXPIRED
    assert advance(State.STAGED, Observation.GATE_FAILED) is State.REJECTED


def test_only_a_gate_that_passed_leads_to_promotion():
    before_promotion = {state for (state, seen), to in TRANSITIONS.items() if to is State.PROMOTED}
    assert before_promotion == {State.OFFLINE}
    assert [seen for (_, seen), to in TRANSITIONS.items() if to is State.OFFLINE] == [Observation.GATE_PASSED]


def test_what_is_rejected_expired_or_rolled_back_stays_so():
    for state, seen in product((State.REJECTED, State.EXPIRED, State.ROLLED_BACK), Observation):
        assert advance(state, seen) is None


@given(st.lists(st.sampled_from(list(Observation)), max_size=12))
def test_no_sequence_of_observations_promotes_without_verified_bytes_and_a_passed_gate(seen):
    state, passed = State.PROPOSED, set()
    for observation in seen:
        to = advance(state, observation)
        if to is not None:
            state = to
            passed.add(observation)
    if state in (State.PROMOTED, State.CONFIRMED):
        assert {Observation.BYTES_VERIFIED, Observation.GATE_PASSED, Observation.POINTER_MOVED} <= passed
    assert state in FINAL or state in OPEN
