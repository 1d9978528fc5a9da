"""Credit: every piece of evidence once, and what was said of a session shared out whole."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signals import facts, sessions
from signals.config import RewardsConfig
from signals.credit import Window, shares
from tests.support.spark import T0, as_row, completion_payload, event, made_up_session

CONFIG = RewardsConfig()
LATER = T0 + 10**9


def window(number: int, started: int, closes: int) -> Window:
    return Window(turn_id=f"t{number}", started_at_ms=started, closes_at_ms=closes)


def test_the_turn_just_before_gets_most_of_what_is_said_of_the_session() -> None:
    three = [window(0, 0, 100), window(1, 10, 100), window(2, 20, 100)]
    whole = 1 + 0.5 + 0.25
    assert shares(three, 50, discount=0.5) == pytest.approx({"t0": 0.25 / whole, "t1": 0.5 / whole, "t2": 1 / whole})
    assert shares(three, 15, discount=0.5) == pytest.approx({"t0": 0.5 / 1.5, "t1": 1 / 1.5})


def test_a_turn_whose_reward_is_final_gets_nothing_of_what_is_said_later() -> None:
    assert shares([window(0, 0, 40), window(1, 10, 100)], 50, discount=0.9) == {"t1": 1.0}
    assert shares([window(0, 0, 40)], 50, discount=0.9) == {}


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=8), st.integers(0, 200), st.floats(0.05, 1))
def test_shares_are_positive_and_sum_to_one(spans: list[tuple[int, int]], at: int, discount: float) -> None:
    found = shares([window(number, start, start + length) for number, (start, length) in enumerate(spans)], at, discount=discount)
    assert all(0.0 < share <= 1.0 for share in found.values())
    assert not found or math.isclose(sum(found.values()), 1.0, abs_tol=1e-12)


def test_a_thumb_for_the_session_reaches_its_turns_discounted() -> None:
    events = [
        event("turn_started", 1, 0, {"turn_index": 0, "message": None, "message_chars": 1}, turn_id="a"),
        event("completion", 2, 10, completion_payload("c1"), turn_id="a"),
        event("turn_started", 3, 20, {"turn_index": 1, "message": None, "message_chars": 1}, turn_id="b"),
        event("completion", 4, 30, completion_payload("c2"), turn_id="b"),
        event("feedback", 5, 40, {"source": "thumb", "score": -1.0}, turn_id=None),
    ]
    first, second = sessions.distil(map(as_row, events), CONFIG, now_ms=LATER)
    assert first.components["explicit"] == second.components["explicit"] == -1.0
    assert (first.explicit_mass, second.explicit_mass) == pytest.approx((0.9 / 1.9, 1.0 / 1.9))
    assert first.explicit_mass + second.explicit_mass == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_the_credit_of_a_sessions_turns_is_the_credit_of_all_its_evidence(seed: int) -> None:
    """Computed the other way round: piece by piece from what was said, not turn by turn."""
    rows = [as_row(item) for item in made_up_session(random.Random(seed), "s")]
    turns = sessions.distil(rows, CONFIG, now_ms=LATER)
    counted = [turn for turn in turns if turn.capture.consent != "none"]
    credited = sum(mass * value for turn in counted for name, (mass, value) in turn.pieces.items() if name == "explicit")
    own = sum(CONFIG.weights["explicit"] * turn.evidence.said for turn in counted if turn.evidence.said is not None)
    shared = 0.0
    for row in {row["event_id"]: row for row in rows if row["type"] in sessions.SAID and row["turn_id"] is None}.values():
        score = facts.score(row)
        windows = [window(at, turn.started_at_ms, turn.closes_at_ms) for at, turn in enumerate(turns)]
        if score is not None and (found := shares(windows, row["occurred_at_ms"], discount=CONFIG.session_discount)):
            assert math.isclose(sum(found.values()), 1.0, abs_tol=1e-12)
            shared += sum(CONFIG.weights["explicit"] * share * score for name, share in found.items() if turns[int(name[1:])] in counted)
    assert credited == pytest.approx(own + shared, abs=1e-9)
    for turn in counted:
        if turn.reward is not None:
            earned, mass = (sum(part) for part in zip(*[(m * v, m) for m, v in turn.pieces.values()], strict=True))
            assert turn.reward == pytest.approx(earned / mass, abs=1e-12)
