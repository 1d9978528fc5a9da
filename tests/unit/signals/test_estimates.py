"""Estimates against truths that are known because the data are made."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signals.estimate_rows import Reader, rates
from signals.estimates import by_user, corrected_rate, delay_cdf, delayed_rate, impute, still_coming, user_weights


def test_the_delay_distribution_counts_and_says_when_a_share_is_reached() -> None:
    cdf = delay_cdf([400, 100, 200, 300])
    assert [cdf.at(age) for age in (50, 100, 250, 400)] == [0.0, 0.25, 0.5, 1.0]
    assert (cdf.reaching(0.5), cdf.reaching(0.95)) == (200, 400)
    assert delay_cdf([]).at(5) == 1.0
    assert delay_cdf([]).reaching(0.95) is None


def test_an_unseen_outcome_grows_less_likely_with_age() -> None:
    # p = .6, half of the delays have passed: .6 * .5 / (1 - .3).
    assert still_coming(0.6, 0.5) == pytest.approx(0.3 / 0.7)
    assert still_coming(0.6, 0.0) == 0.6
    assert still_coming(0.6, 1.0) == 0.0
    assert still_coming(1.0, 1.0) == 0.0


def test_a_rate_of_young_turns_is_corrected_for_what_has_not_come_yet() -> None:
    rng = np.random.default_rng(3)
    delays = rng.exponential(60_000, 40_000)
    ages = rng.uniform(1_000, 180_000, 40_000)
    comes = rng.random(40_000) < 0.4
    found = delayed_rate(list(comes & (delays <= ages)), list(ages), delay_cdf(list(map(int, delays[:5_000]))))
    assert found.seen < 0.28
    assert found.expected == pytest.approx(0.4, abs=0.02)
    assert found.weighted == pytest.approx(0.4, abs=0.02)


def test_deferring_what_is_risky_does_not_raise_the_imputed_mean() -> None:
    """The design's own case: over observed labels the mean rises from .55 to .9 and more while most edits are gone."""
    quality = np.linspace(0.1, 1.0, 200)
    rewards = [float(value) if value > 0.8 else None for value in quality]
    expected = [0.55] * 200
    share = sum(value is not None for value in rewards) / 200
    found = impute(rewards, expected, [share] * 200)
    assert found.naive > 0.89
    exact = impute(rewards, list(map(float, quality)), [share] * 200)
    assert exact.mean == pytest.approx(0.55)
    assert found.clipped_share == 0.0
    assert impute(rewards, expected, [0.01] * 200).clipped_share == 1.0


def test_imputation_is_right_when_either_the_guess_or_the_propensity_is() -> None:
    rng = np.random.default_rng(5)
    truth = rng.random(20_000)
    propensity = 0.2 + 0.6 * truth
    seen = rng.random(20_000) < propensity
    rewards = [float(value) if got else None for value, got in zip(truth, seen, strict=True)]
    wrong_guess = impute(rewards, [0.9] * 20_000, list(propensity))
    wrong_propensity = impute(rewards, list(truth), [0.5] * 20_000)
    assert wrong_guess.naive > 0.55
    assert wrong_guess.mean == pytest.approx(float(truth.mean()), abs=0.02)
    assert wrong_propensity.mean == pytest.approx(float(truth.mean()), abs=1e-9)


@given(st.floats(0, 1), st.floats(0.5, 1), st.floats(0, 0.4))
def test_a_classifiers_errors_are_taken_out_of_a_rate(rate: float, tpr: float, fpr: float) -> None:
    q = rate * tpr + (1 - rate) * fpr
    assert corrected_rate(q, tpr=tpr, fpr=fpr) == pytest.approx(rate, abs=1e-9)


def test_a_classifier_that_knows_nothing_corrects_nothing() -> None:
    assert math.isnan(corrected_rate(0.3, tpr=0.2, fpr=0.2))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.floats(1, 20))
def test_no_user_counts_for_more_than_the_cap(users: list[str], cap: float) -> None:
    weights = user_weights(users, cap=cap)
    for user in set(users):
        total = sum(weight for weight, own in zip(weights, users, strict=True) if own == user)
        assert total == pytest.approx(min(users.count(user), cap))


def test_intervals_are_drawn_by_user_not_by_turn() -> None:
    users = [f"u{at % 10}" for at in range(1000)]
    values = [float(at % 10 >= 5) for at in range(1000)]
    found = by_user(values, users, rng=np.random.default_rng(1))
    assert (found.mean, found.n, found.users) == (0.5, 1000, 10)
    assert found.high - found.low > 0.4, "ten users of one kind each say little, however many turns they have"
    assert by_user([], [], rng=np.random.default_rng(1)).n == 0


def test_a_policy_is_described_with_what_is_missing_and_who_asked() -> None:
    def row(at: int, **facts: object) -> dict[str, object]:
        base = {"session_id": "s", "turn_id": f"{at:03}", "policy_version": 7, "user_key": f"u{at % 4}", "task_bucket": "edit",
                "final": True, "ended_at_ms": 0, "reward": 0.5, "edits": 1, "edits_kept": 1.0, "dissatisfied": 0.1, "followed_up": True,
                "replied_after_ms": 1_000, "asked": False, "eligible": True, "deferred": False}  # fmt: skip
        return base | facts

    asking = {"edits": 0, "edits_kept": None, "deferred": True, "asked": True, "reward": -0.5}
    rows = [row(at) for at in range(8)] + [row(at + 8, **asking) for at in range(8)]
    (found,) = rates(rows, Reader(threshold=0.5, tpr=0.8, fpr=0.0), window_s=1800, now_ms=10**9)
    assert (found.turns, found.users, found.scored_share) == (16, 4, 1.0)
    assert found.asked == found.deferred == 0.5
    assert found.kept.mean == pytest.approx(0.5), "an eligible turn without an edit kept nothing"
    assert found.reward.mean == pytest.approx(0.0)
    assert (found.dissatisfied, found.dissatisfied_corrected, found.follow_ups) == (0.0, 0.0, 16)
