"""Exactly one outcome a turn, in a fixed order of reasons, and none that a worse turn could hide in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from signals import rewards
from signals.components import Checks, Edit, Evidence, components
from signals.config import RewardsConfig
from signals.filters import NEEDS, Capture, not_trainable
from signals.outcomes import Course, outcome
from signals.samples import NOT_TRAINABLE_REASONS, Outcome

GOOD = Capture(consent="train", policy_version=3)
NOBODY: frozenset[int] = frozenset()


def decide(course: Course, capture: Capture = GOOD, *, evident: bool = True, dead: frozenset[int] = NOBODY) -> tuple[Outcome, str | None]:
    return outcome(course, capture, evident=evident, tombstoned=dead)


def test_a_closed_turn_with_evidence_is_scored_and_without_is_no_evidence() -> None:
    closed = Course(final=True, completions=1)
    assert decide(closed) == (Outcome.SCORED, None)
    assert decide(closed, evident=False) == (Outcome.NO_EVIDENCE, None)
    assert decide(Course(final=False, completions=1)) == (Outcome.PENDING, None)


def test_what_a_rolled_back_policy_sampled_is_not_trainable() -> None:
    assert decide(Course(final=True, completions=1), dead=frozenset({3})) == (Outcome.NOT_TRAINABLE, "quarantined_release")
    assert decide(Course(final=True, completions=1), dead=frozenset({4})) == (Outcome.SCORED, None)


def test_our_own_failure_comes_before_everything_else() -> None:
    broken = Capture(consent="none", policy_version=3, broken=1)
    assert decide(Course(final=False, completions=1, provider_errors=1), broken) == (Outcome.INFRA_ERROR, "provider_error")
    assert decide(Course(final=True, completions=0)) == (Outcome.INFRA_ERROR, "no_completion")


def test_a_turn_still_waiting_for_its_answer_is_pending_and_one_the_user_stopped_is_nobodys_failure() -> None:
    assert decide(Course(final=False, completions=0), evident=False) == (Outcome.PENDING, None)
    assert decide(Course(final=True, completions=0, stopped_by_user=True), evident=False) == (Outcome.NO_EVIDENCE, None)


def test_each_reason_against_training_is_given_for_its_own_cause() -> None:
    causes = {
        "no_consent": Capture(consent="measure", policy_version=1),
        "capture_error": Capture(consent="train", policy_version=1, broken=1, without_ids=1),
        "no_token_ids": Capture(consent="train", policy_version=1, without_ids=1, truncated=1),
        "truncated_sampling": Capture(consent="train", policy_version=1, truncated=1),
    }
    assert {reason: not_trainable(capture, NOBODY) for reason, capture in causes.items()} == {reason: reason for reason in causes}
    assert set(NEEDS) <= set(NOT_TRAINABLE_REASONS)


@given(
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "measure", "train"]),
    st.integers(0, 1),
    st.booleans(),
)
def test_every_turn_has_one_outcome_and_a_reason_exactly_where_one_is_needed(
    final: bool, completions: int, errors: int, system: bool, user: bool, consent: str, broken: int, evident: bool
) -> None:
    course = Course(final=final, completions=completions, provider_errors=errors, stopped_by_system=system, stopped_by_user=user)
    found, reason = decide(course, Capture(consent=consent, policy_version=1, broken=broken), evident=evident)
    assert (reason is not None) == (found in (Outcome.INFRA_ERROR, Outcome.NOT_TRAINABLE))
    assert found is not Outcome.SCORED or (final and evident)


CONFIG = RewardsConfig()


def edited(kept: float) -> tuple[Edit, ...]:
    return (Edit(edit_id="e", chars_added=100, decision=None, survival=kept),)


def put_off(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, edits=(), **changes)


WORSE: dict[str, Callable[[Evidence], Evidence]] = {
    "breaks one more call": lambda e: replace(e, calls=e.calls + 1, invalid_calls=e.invalid_calls + 1),
    "breaks the call of its edit": lambda e: put_off(e, invalid_calls=e.invalid_calls + 1),
    "asks, declines or only talks in place of the edit": put_off,
    "does so without a call": lambda e: put_off(e, calls=0, invalid_calls=0, repeats=0),
    "does so and is short": lambda e: put_off(e, response_tokens=0),
    "makes an edit that is taken back": lambda e: replace(e, edits=(replace(e.edits[0], decision="undone"),)),
    "makes an edit that is kept less": lambda e: replace(e, edits=edited((e.edits[0].survival or 0.0) / 2)),
    "speaks of one more file that it has not read": lambda e: replace(e, claims=e.claims + 1, claims_unread=e.claims_unread + 1),
    "repeats a call": lambda e: replace(e, calls=e.calls + 1, repeats=e.repeats + 1),
    "says more": lambda e: replace(e, response_tokens=e.response_tokens + 1000),
    "breaks a test": lambda e: replace(e, checks=Checks(passed_before=3, failed_before=0, passed_after=2, failed_after=1)),
}
"""What a policy can do worse on a turn where it was asked for a change and its edit would be kept as usual or better."""
honest = st.builds(
    Evidence, edits=st.floats(CONFIG.expected_kept, 1).map(edited), edits_observed=st.just(value=True), edit_expected=st.floats(0.5, 1),
    followed_up=st.booleans(), final=st.just(value=True), completions=st.integers(1, 5), response_tokens=st.integers(0, 5000),
    calls=st.integers(1, 5), invalid_calls=st.integers(0, 1), claims=st.integers(1, 3), claims_unread=st.integers(0, 1),
    checks=st.just(Checks(passed_before=3, failed_before=0, passed_after=3, failed_after=0)),
)  # fmt: skip


def lived(evidence: Evidence) -> tuple[Outcome, float | None]:
    present = components(evidence, CONFIG)
    course = Course(final=evidence.final, completions=evidence.completions)
    found, _ = decide(course, evident=rewards.is_evidence(present))
    return found, rewards.scalar(present, CONFIG)


@settings(deadline=None, max_examples=300)
@given(honest, st.sampled_from(sorted(WORSE)))
def test_worse_behaviour_never_raises_a_turns_reward_by_leaving_scored(evidence: Evidence, habit: str) -> None:
    before, reward = lived(evidence)
    after, lower = lived(WORSE[habit](evidence))
    assert (before, after) == (Outcome.SCORED, Outcome.SCORED)
    assert reward is not None
    assert lower is not None
    assert lower <= reward + 1e-12


@settings(deadline=None, max_examples=100)
@given(honest, st.lists(st.sampled_from(["breaks one more call", "speaks of one more file that it has not read", "says more"]), max_size=4))
def test_a_turn_that_is_scored_stays_so_however_much_worse_it_gets_also_where_no_edit_was_asked_for(
    evidence: Evidence, habits: list[str]
) -> None:
    rewarded: list[float] = []
    for asked_for in (0.0, 0.9):
        worse = replace(evidence, edit_expected=asked_for)
        for habit in habits:
            found, reward = lived(worse)
            worse = WORSE[habit](worse)
            after, lower = lived(worse)
            assert (found, after) == (Outcome.SCORED, Outcome.SCORED)
            assert reward is not None
            assert lower is not None
            rewarded.append(lower - reward)
    assert all(change <= 1e-12 for change in rewarded)
