"""Exactly one outcome a turn, in a fixed order of reasons."""

from hypothesis import given
from hypothesis import strategies as st

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
