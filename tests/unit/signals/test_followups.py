"""The follow-up model: what it looks at, what it says, and that its coefficients are those of the committed labels."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signals import fitting, followups

NEUTRAL = {"previous": None, "stack_traces": 0, "reply_delay_ms": None, "interrupted": False}


def probability(message: str, **changes: object) -> float:
    return followups.dissatisfied(followups.features(message, **(NEUTRAL | changes)))  # type: ignore[arg-type]


def test_the_committed_coefficients_are_those_of_the_committed_labels() -> None:
    found = fitting.fit(fitting.labelled())
    assert (found.intercept, found.coefficients) == (followups.INTERCEPT, followups.COEFFICIENTS)
    assert found.rows == 128
    assert found.brier < 0.08
    assert found.accuracy > 0.9
    assert found.calibration_error < 0.15


def test_the_probability_is_the_logistic_of_the_weighted_features() -> None:
    x = followups.features("That is wrong", previous=None, stack_traces=0, reply_delay_ms=0, interrupted=False)
    assert (x.missed, x.redo, x.praise, x.failure, x.repeat, x.delay) == (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert followups.dissatisfied(x) == pytest.approx(1 / (1 + math.exp(-(0.61 + 2.84))))


@pytest.mark.parametrize(
    "message", ["still didnt work", "Undo that and try again", "Das geht nicht", "no funciona", "не работает", "まだ動きません", "不对"]
)
def test_a_correction_in_any_language_reads_as_dissatisfied(message: str) -> None:
    assert probability(message) > 0.6


@pytest.mark.parametrize(
    "message",
    [
        "Thanks! Now add a test",
        "lgtm",
        "Danke, passt",
        "gracias, ahora escribe una prueba",
        "谢谢，现在添加测试",
        "kill the process, then fix the error in the README",
    ],
)
def test_moving_on_reads_as_satisfied_also_with_harsh_words(message: str) -> None:
    assert probability(message, reply_delay_ms=60_000) < 0.5


def test_saying_the_same_again_reads_worse_than_saying_something_else() -> None:
    again = probability("Sort the imports in main.py", previous="Sort the imports in main.py")
    other = probability("Sort the imports in main.py", previous="What does parse return?")
    assert again > other + 0.1


def test_text_is_normalised_for_matching() -> None:
    assert followups.normalise("It DOESN'T   work!\n(at all)") == " it doesnt work at all "
    assert followups.normalise("") == "  "


@given(st.text(alphabet="abc xyzäßéя中。", max_size=40), st.text(alphabet="abc xyzäßéя中。", max_size=40))
def test_similarity_is_symmetric_and_within_zero_and_one(one: str, other: str) -> None:
    first, second = followups.normalise(one), followups.normalise(other)
    assert followups.similarity(first, second) == followups.similarity(second, first)
    assert 0.0 <= followups.similarity(first, second) <= 1.0
    assert followups.similarity(first, first) in (0.0, 1.0)


@given(st.text(max_size=60), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 10**9)), st.booleans())
def test_a_probability_is_strictly_between_zero_and_one(message: str, traces: int, delay: int | None, interrupted: bool) -> None:
    p = probability(message, stack_traces=traces, reply_delay_ms=delay, interrupted=interrupted)
    assert 0.0 < p < 1.0
