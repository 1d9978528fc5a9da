"""Comparing means by user and for the same traffic: by hand, and how often it errs over many looks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signals import drift_compare
from signals.drift import normal_half_width, sequence_half_width, sequence_rho
from signals.drift_compare import Observations, compare


def observed(
    values: list[float], *, weights: list[float] | None = None, units: list[int] | None = None, strata: list[int] | None = None
) -> Observations:
    n = len(values)
    return Observations(
        numerator=np.array(values, dtype=float), denominator=np.array(weights or [1.0] * n, dtype=float),
        unit=np.array(units or range(n)), stratum=np.array(strata or [0] * n),
    )  # fmt: skip


def test_the_variance_of_a_mean_by_hand() -> None:
    # Mean of 0 0 2 2 is 1; influences -.25 -.25 .25 .25. Independent: 4/3 * .25. Two users of a kind each: 2/1 * (.25 + .25).
    influence = np.array([-0.25, -0.25, 0.25, 0.25])
    assert drift_compare.variance_of_mean(influence, np.arange(4)) == pytest.approx(1 / 3)
    assert drift_compare.variance_of_mean(influence, np.array([0, 0, 1, 1])) == pytest.approx(1.0)
    # Users who balance themselves would make it 0; the independent one is kept.
    assert drift_compare.variance_of_mean(influence, np.array([0, 1, 0, 1])) == pytest.approx(1 / 3)
    assert drift_compare.design_effect(np.array([0.0, 0.0, 2.0, 2.0]), np.array([0, 0, 1, 1])) == pytest.approx(3.0)
    assert drift_compare.design_effect(np.ones(4), np.arange(4)) == 1.0


def test_a_policy_is_held_against_what_the_reference_does_with_its_traffic() -> None:
    # The reference: .2 on hard tasks, .8 on easy ones, half and half. The policy does the same, but four of five tasks are hard.
    reference = observed([0.2] * 10 + [0.8] * 10, strata=[0] * 10 + [1] * 10)
    current = observed([0.2] * 8 + [0.8] * 2, strata=[0] * 8 + [1] * 2)
    found = compare(current, reference, alpha=0.01, tight_at=500)
    assert (found.value, found.reference, found.expected) == pytest.approx((0.32, 0.5, 0.32))
    assert (found.p, found.n, found.m, found.units, found.shared) == (1.0, 10, 20, 10, 1.0)


def test_traffic_that_the_reference_never_saw_is_taken_at_its_overall_mean_and_not_called_shared() -> None:
    reference = observed([0.2] * 10 + [0.8] * 10, strata=[0] * 10 + [1] * 10)
    found = compare(observed([0.2] * 5 + [0.9] * 5, strata=[0] * 5 + [2] * 5), reference, alpha=0.01, tight_at=500)
    assert found.expected == pytest.approx(0.5 * 0.2 + 0.5 * 0.5)
    assert found.shared == 0.5


def test_a_rate_weighs_turns_by_their_calls_and_leaves_out_those_without() -> None:
    current = observed([1.0, 0.0, 5.0], weights=[4.0, 1.0, 0.0])
    found = compare(current, observed([1.0, 1.0], weights=[2.0, 2.0]), alpha=0.01, tight_at=500)
    assert (found.value, found.reference, found.n) == (0.2, 0.5, 2)


def test_p_is_the_level_at_which_the_joint_half_width_is_the_difference() -> None:
    rng = np.random.default_rng(1)
    reference, current = observed(rng.normal(size=200).tolist()), observed((rng.normal(size=100) + 0.7).tolist())
    found = compare(current, reference, alpha=0.01, tight_at=500)
    sd = float(np.std(reference.numerator, ddof=1))
    off = max(sd, float(np.std(current.numerator, ddof=1)))
    rho = sequence_rho(500, alpha=0.005)
    growing = sequence_half_width(100, sigma=off, rho=rho, alpha=found.p / 2)
    width = math.hypot(growing, normal_half_width(sd / math.sqrt(200), alpha=found.p / 2))
    assert 1e-12 < found.p < 0.01
    assert width == pytest.approx(found.value - found.expected, rel=0.01)
    assert found.sd == pytest.approx(sd)


def test_a_reference_that_still_grows_is_held_to_every_look_too() -> None:
    rng = np.random.default_rng(1)
    reference, current = observed(rng.normal(size=200).tolist()), observed((rng.normal(size=100) + 0.7).tolist())
    over, growing = (compare(current, reference, alpha=0.01, tight_at=500, reference_over=flag) for flag in (True, False))
    assert (over.value, over.expected, over.sd) == (growing.value, growing.expected, growing.sd)
    assert over.p < growing.p < 0.05


def test_what_never_varies_is_certain_either_way() -> None:
    assert compare(observed([1.0] * 40), observed([0.0] * 40), alpha=0.01, tight_at=500).p == drift_compare.SMALLEST_P
    same = compare(observed([1.0] * 40), observed([1.0] * 40), alpha=0.01, tight_at=500)
    assert (same.p, same.sd) == (1.0, 0.0)
    assert compare(observed([0.1] * 37), observed([0.1] * 53), alpha=0.01, tight_at=500).p == 1.0


def test_never_in_thirty_turns_is_no_proof_of_never() -> None:
    found = compare(observed([0.0] * 30), observed([1.0] * 2 + [0.0] * 98), alpha=0.01, tight_at=500)
    assert found.value == 0.0
    assert found.p == 1.0


@given(st.integers(0, 2**32), st.integers(30, 60), st.floats(0.1, 2.0))
def test_more_of_a_change_is_never_less_certain(seed: int, n: int, step: float) -> None:
    values = np.random.default_rng(seed).normal(size=n).tolist()
    reference = observed(values)
    ps = [compare(observed([value + shift for value in values]), reference, alpha=0.01, tight_at=500).p for shift in (0.0, step, 2 * step)]
    assert ps[0] == 1.0
    assert ps[0] >= ps[1] >= ps[2]


def _sample(rng: np.random.Generator, n: int, *, users: int, hard: float) -> Observations:
    unit, stratum = rng.integers(0, users, n), (rng.random(n) < hard).astype(int)
    mood = rng.normal(scale=0.15, size=users)  # users differ, and differ again between policies
    chance = np.clip(0.4 + mood[unit] - 0.2 * stratum, 0, 1)
    return Observations(numerator=(rng.random(n) < chance).astype(float), denominator=np.ones(n), unit=unit, stratum=stratum)


@pytest.mark.parametrize(("users", "m"), [(5, 60), (10, 150), (60, 1_000)])
def test_ninety_nine_looks_at_an_equal_policy_alarm_less_often_than_alpha(users: int, m: int) -> None:
    rng = np.random.default_rng(users)
    alarms = 0
    for _ in range(40):
        reference, all_of_it = _sample(rng, m, users=users, hard=0.5), _sample(rng, 99 * 20, users=users, hard=0.3)
        for end in range(20, 99 * 20 + 1, 20):
            seen = Observations(**{name: getattr(all_of_it, name)[:end] for name in ("numerator", "denominator", "unit", "stratum")})
            if compare(seen, reference, alpha=0.025, tight_at=500).p <= 0.05:
                alarms += 1
                break
    assert alarms / 40 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 40)


def test_a_fall_by_half_is_found_within_a_thousand_turns_of_unlike_users() -> None:
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(20):
        current = _sample(rng, 1_000, users=200, hard=0.5)
        worse = Observations(
            numerator=current.numerator * (rng.random(1_000) < 0.5),
            denominator=current.denominator,
            unit=current.unit,
            stratum=current.stratum,
        )
        found += compare(worse, _sample(rng, 2_000, users=200, hard=0.5), alpha=0.005, tight_at=500).p <= 0.005
    assert found >= 18
