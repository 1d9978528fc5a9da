"""Distilling one session in plain Python: hand-worked sessions and what must not matter."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.events import Event
from signals.config import RewardsConfig
from signals.credit import by_proposal, by_reply
from signals.samples import Outcome
from signals.sessions import TurnResult, deduplicate, distil
from tests.support.spark import T0, as_row, completion_payload, event, made_up_session

CONFIG = RewardsConfig(latency_medians_ms={"*": 900.0})
LATER = T0 + 10**9


def of(events: list[Event], now_ms: int = LATER) -> list[TurnResult]:
    return distil(map(as_row, events), CONFIG, now_ms=now_ms)


def started(number: int, at: int, turn: str, index: int, message: str) -> Event:
    return event("turn_started", number, at, {"turn_index": index, "message": message, "message_chars": len(message)}, turn_id=turn)


def two_turns() -> list[Event]:
    """The first turn's edit is accepted, then undone after the next message; the user complains."""
    return [
        event("session_started", 1, 0, {"surface": "cli", "task_bucket": "edit"}, turn_id=None),
        started(2, 10, "t1", 0, "Rename total"),
        event("completion", 3, 900, completion_payload("c1")),
        event("tool_call", 4, 910, {"tool_call_id": "k1", "completion_id": "c1", "name": "edit_file", "arguments_valid": True}),
        event("edit_proposed", 5, 920, {"edit_id": "d1", "path_hash": "p", "chars_added": 16}),
        event("edit_decided", 6, 1_000, {"edit_id": "d1", "decision": "accepted"}),
        started(7, 5_000, "t2", 1, "That is wrong"),
        event("edit_decided", 8, 5_100, {"edit_id": "d1", "decision": "undone"}, turn_id="t2"),
        event("completion", 9, 6_000, completion_payload("c2"), turn_id="t2"),
    ]


def test_evidence_goes_to_the_turn_that_earned_it() -> None:
    first, second = of(two_turns())
    assert first.components["edits_kept"] == -1.0
    assert first.components["follow_up"] < -0.5
    assert first.outcome is Outcome.SCORED
    assert second.components.keys() == {"latency", "effort"}
    assert (second.outcome, second.reward) == (Outcome.NO_EVIDENCE, None)


def test_a_turn_is_pending_until_its_window_closes() -> None:
    inside = of(two_turns(), now_ms=T0 + 60_000)
    assert [turn.outcome for turn in inside] == [Outcome.PENDING, Outcome.PENDING]
    assert [turn.reward for turn in inside] == [None, None]
    assert inside[0].closes_at_ms == T0 + 920 + 1_800_000


def test_the_end_of_the_session_closes_all_windows() -> None:
    ended = [*two_turns(), event("session_ended", 10, 7_000, {"reason": "done"}, turn_id=None)]
    turns = of(ended, now_ms=T0 + 8_000)
    assert [turn.closes_at_ms for turn in turns] == [T0 + 7_000, T0 + 7_000]
    assert turns[0].outcome is Outcome.SCORED


def test_evidence_after_the_window_is_counted_as_late_and_not_used() -> None:
    late = event("edit_survival", 11, 1_900_000, {"edit_id": "d1", "horizon_s": 900, "survival_four_gram": 1, "survival_no_revert": 1})
    assert of([*two_turns(), late])[0].late == 1
    assert of([*two_turns(), late])[0].reward == of(two_turns())[0].reward


def test_a_branch_switch_is_no_revert() -> None:
    events = two_turns()[:5]
    stood = event("edit_survival", 20, 2_000, {"edit_id": "d1", "horizon_s": 5, "survival_four_gram": 1, "survival_no_revert": 0.75})
    switched = event(
        "edit_survival",
        21,
        3_000,
        {"edit_id": "d1", "horizon_s": 30, "survival_four_gram": 0, "survival_no_revert": 0, "branch_changed": True},
    )
    (turn,) = of([*events, stood, switched])
    assert turn.components["edits_kept"] == 0.5


def test_a_call_that_the_tool_found_invalid_counts_once_with_its_own_event() -> None:
    bad = event("tool_call", 30, 950, {"tool_call_id": "k2", "completion_id": "c1", "name": "", "arguments_valid": False})
    answer = event("tool_result", 31, 960, {"tool_call_id": "k2", "result_class": "unknown_tool"})
    first = of([*two_turns(), bad, answer])[0]
    assert (first.evidence.calls, first.evidence.invalid_calls) == (2, 1)
    assert first.components["tool_calls"] == -1.0


def test_without_consent_to_measure_no_component_is_computed() -> None:
    silent = [item.model_copy(update={"consent": "none"}) for item in two_turns()]
    assert [(turn.components, turn.outcome_reason) for turn in of(silent)] == [({}, "no_consent")] * 2


def test_the_same_id_with_other_content_is_set_aside_and_the_first_recorded_is_kept() -> None:
    original = two_turns()[5]
    forged = event("edit_decided", 6, 1_000, {"edit_id": "d1", "decision": "rejected"}, recorded_at_ms=original.recorded_at_ms + 1)
    kept, conflicts = deduplicate(map(as_row, [forged, original, original]))
    assert [row["payload"]["decision"] for row in kept] == ["accepted"]
    assert [row["payload"]["decision"] for row in conflicts] == ["rejected"]


def test_every_edit_fact_is_credited_once_and_every_message_judges_the_turn_before_it() -> None:
    credited, orphans = by_proposal({"d1": "t1", "d2": None}, {"d1": ["a", "b"], "d2": ["c"], "d3": ["d", "e"]})
    assert credited == {"t1": {"d1": ["a", "b"]}}
    assert orphans == 3
    assert by_reply(["t1", "t2", "t3"], {"t1": 1, "t2": 2}) == {"t1": 2}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_order_and_duplicates_cannot_change_a_session(seed: int, rng: random.Random) -> None:
    events = made_up_session(random.Random(seed), "s")
    mixed = events + rng.choices(events, k=len(events) // 2)
    rng.shuffle(mixed)
    assert of(mixed) == of(events)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 6_000_000))
def test_once_final_a_turn_never_changes_as_time_goes_on(seed: int, age_ms: int) -> None:
    events = made_up_session(random.Random(seed), "s")
    early, late = of(events, now_ms=T0 + age_ms), of(events, now_ms=LATER)
    assert [a for a in early if a.course.final] == [b for a, b in zip(early, late, strict=True) if a.course.final]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_the_credit_of_a_sessions_turns_adds_up_to_its_evidence(seed: int) -> None:
    rows = [as_row(item) for item in made_up_session(random.Random(seed), "s")]
    turns = distil(rows, CONFIG, now_ms=LATER)
    proposed = {row["payload"]["edit_id"] for row in rows if row["type"] == "edit_proposed"}
    credited = [edit.edit_id for turn in turns for edit in turn.evidence.edits]
    assert sorted(credited) == sorted(proposed)
    calls = {row["payload"]["tool_call_id"] for row in rows if row["type"] == "tool_call"}
    assert sum(turn.evidence.calls for turn in turns) == len(calls)
    assert len({turn.turn_id for turn in turns}) == len(turns)
