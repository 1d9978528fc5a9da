"""Statistics against frozen numbers, an independent library, and simulated error rates."""

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from deploy.release import stats


@pytest.mark.parametrize("df", [1, 2, 5, 9, 30, 200])
@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9, 0.95, 0.975, 0.999])
def test_t_quantiles_agree_with_an_independent_library(df, p):
    assert stats.t_quantile(p, df) == pytest.approx(float(scipy_stats.t.ppf(p, df)), rel=1e-7, abs=1e-9)


def test_the_delta_method_ratio_equals_the_hand_worked_case():
    # users (1 of 2), (0 of 2), (2 of 4): R = 3/8; residuals .25, -.75, .5; sum of squares .875; var = .4375 / (3 * (8/3)^2)
    found = stats.ratio([1, 0, 2], [2, 2, 4])
    assert found.value == 0.375
    assert found.standard_error == pytest.approx(math.sqrt(0.4375 / (3 * (8 / 3) ** 2)))
    # binomial variance .375 * .625 / 8 = .029296875; design effect .0205078125 / .029296875 = .7, and never below 1
    assert found.design_effect == 1.0


def test_requests_of_one_user_that_are_all_alike_have_a_design_effect_of_their_number():
    found = stats.ratio([10, 0, 10, 0, 10, 0, 10, 0], [10] * 8)
    # var = (8 * 25 / 7) / (8 * 100); binomial .25 / 80
    assert found.design_effect == pytest.approx((200 / 7 / 800) / (0.25 / 80))


def test_without_any_denominator_or_second_user_there_is_no_ratio():
    assert stats.ratio([0, 0], [0, 0]) is None
    assert stats.ratio([1], [2]) is None
    assert stats.ratio([], []) is None


def test_wilson_and_newcombe_give_the_published_figures():
    # Newcombe 1998, table I: 81/263, 95 % two-sided: .2553 to .3662; table II (a): 56/70 - 48/80: .0524 to .3339
    low, high = stats.wilson(81, 263, confidence=0.975)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = stats.newcombe((56, 70), (48, 80), confidence=0.975)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_the_paired_interval_equals_the_hand_worked_case():
    # differences 1, 0, 0, -1: mean 0, sd sqrt(2/3), t(.95, 3) = 2.353363, half = 2.353363 * .8164966 / 2
    found = stats.paired_mean([1, 0, 0, -1])
    assert found.value == 0
    assert found.high == pytest.approx(0.960757, abs=1e-6)
    assert found.low == -found.high


def test_equal_differences_are_not_taken_for_certainty():
    assert stats.paired_mean([0.0] * 4, sd_floor=0.2).high == pytest.approx(2.353363 * 0.2 / 2, abs=1e-6)


def test_the_upper_bound_of_a_mean_over_users_is_weighted_by_their_tokens():
    # .01 on 100 tokens, .03 on 300: mean .025; residuals -1.5, 1.5; se = sqrt(4.5 / (2 * 200^2)) = .0075; t(.95, 1) = 6.313752
    found = stats.weighted_mean([0.01, 0.03], [100, 300])
    assert found.value == pytest.approx(0.025)
    assert found.high == pytest.approx(0.025 + 6.313752 * 0.0075, abs=1e-6)


def test_fisher_agrees_with_an_independent_library():
    for first, second in (((3, 10), (8, 10)), ((0, 20), (5, 20)), ((1, 5), (1, 5)), ((0, 3), (0, 9))):
        table = [[first[0], first[1] - first[0]], [second[0], second[1] - second[0]]]
        assert stats.fisher_exact(first, second) == pytest.approx(scipy_stats.fisher_exact(table)[1])


def test_the_confidence_sequence_equals_the_hand_worked_case():
    # values 0, 1, 0, 1: mean .5, variance .25; t rho^2 + 1 = 5 for rho = 1; h = sqrt(.25 * 10 / 16 * ln(sqrt(5) / .05))
    found = stats.confidence_sequence([0, 1, 0, 1], alpha=0.05, rho=1.0)
    assert found.high - found.value == pytest.approx(math.sqrt(0.15625 * math.log(math.sqrt(5) / 0.05)))


def test_a_rise_without_variance_is_certain_and_no_rise_is_none():
    nothing, everything = stats.ratio([0, 0], [1, 1]), stats.ratio([1, 1], [1, 1])
    assert stats.p_increase(everything, nothing) == 0.0
    assert stats.p_increase(nothing, nothing) == 1.0


def clustered(rng: random.Random, users: int, *, rate: float, requests: int, stickiness: float) -> stats.Ratio:
    """Users with their own rates (beta), so that requests of one user resemble each other."""
    a, b = rate * (1 / stickiness - 1), (1 - rate) * (1 / stickiness - 1)
    rates = [rng.betavariate(a, b) for _ in range(users)]
    return stats.ratio([sum(rng.random() < p for _ in range(requests)) for p in rates], [requests] * users)


def test_false_alarms_of_the_delta_method_on_clustered_requests_stay_at_their_level():
    rng, rounds = random.Random(1), 400
    wrong = naive = 0
    for _ in range(rounds):
        c, s = (clustered(rng, 300, rate=0.3, requests=6, stickiness=0.3) for _ in range(2))
        wrong += stats.difference(c, s).low > 0
        se = math.sqrt(c.value * (1 - c.value) / 1800 + s.value * (1 - s.value) / 1800)
        naive += (c.value - s.value) / se > 1.645
    assert wrong / rounds <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds)
    assert naive / rounds > 0.10, "a binomial test on requests raises false alarms; that is why it is not used"


def test_small_samples_cover_the_truth_at_least_as_often_as_they_say():
    rng, rounds = random.Random(2), 1500
    missed = 0
    for _ in range(rounds):
        c, s = (clustered(rng, 24, rate=0.1, requests=3, stickiness=0.2) for _ in range(2))
        missed += stats.difference(c, s).low > 0
    assert missed / rounds <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds)


def test_thirty_looks_at_a_confidence_sequence_keep_its_error_and_at_a_z_test_do_not():
    rng, rounds, alpha = random.Random(3), 300, 0.05
    sequence = peeking = 0
    for _ in range(rounds):
        values = [rng.gauss(0, 1) for _ in range(600)]
        looks = [values[:n] for n in range(20, 601, 20)]
        found = [stats.confidence_sequence(seen, alpha=alpha, rho=0.2) for seen in looks]
        sequence += any(item.low > 0 for item in found)
        peeking += any(sum(seen) / math.sqrt(len(seen)) > NormalDist().inv_cdf(1 - alpha) for seen in looks)
    assert sequence / rounds <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / rounds)
    assert peeking / rounds > 0.15


def test_pass_probability_and_needed_margin_are_each_others_inverse():
    margin = stats.needed_margin(0.1, df=11, power=0.9)
    assert stats.pass_probability(0.0, margin=margin, standard_error=0.1, df=11) == pytest.approx(0.9)
    worse = stats.caught_effect(margin=margin, standard_error=0.1, df=11, power=0.8)
    assert stats.pass_probability(worse, margin=margin, standard_error=0.1, df=11) == pytest.approx(0.2)


counts = st.integers(2, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n - 1), st.just(n)))


@given(counts)
def test_one_more_bad_unit_never_lowers_the_upper_bound_of_a_difference(case):
    serving, candidate, n = case
    before = stats.newcombe((candidate, n), (serving, n))
    after = stats.newcombe((candidate + 1, n), (serving, n))
    assert after[1] >= before[1] - 1e-12
    assert after[0] >= before[0] - 1e-12


@given(st.integers(2, 60), st.floats(0.01, 0.99))
def test_an_interval_shrinks_when_the_same_rate_is_seen_more_often(n, rate):
    small, large = stats.wilson(rate * n, n), stats.wilson(rate * n * 4, n * 4)
    assert large[1] - large[0] < small[1] - small[0]
