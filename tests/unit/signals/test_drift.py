"""Drift statistics: by hand, and how often they are wrong when nothing changed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signals import drift

RNG_SEED = 20261130
values = st.lists(st.floats(-100, 100), min_size=1, max_size=40)


def normal(rng: np.random.Generator, *shape: int) -> drift.Floats:
    return rng.normal(size=shape)


# By hand ------------------------------------------------------------------------------------------------------------------


def test_quantiles_interpolate_between_order_statistics() -> None:
    assert drift.quantiles(np.array([3.0, 1.0, 2.0, 10.0]), (0.0, 0.25, 0.5, 1.0)).tolist() == [1.0, 1.75, 2.5, 10.0]


def test_page_hinkley_follows_its_formula() -> None:
    # Running means 0, 0, 2, 3; deviations 0, 0, 4, 3; without drift the rise is their running sum over its minimum 0.
    series = np.array([0.0, 0.0, 6.0, 6.0])
    assert drift.page_hinkley(series, sigma=1.0, delta=0.0, threshold=3.5) == drift.Change(up=7.0, down=0.0, rose_at=2, fell_at=None)
    # With delta .5 every step loses .5: sums -.5, -1, 2.5, 5; the minimum is -1.
    found = drift.page_hinkley(series, sigma=1.0, delta=0.5, threshold=100.0)
    assert (found.up, found.rose_at) == (6.0, None)
    # Deviations in sigmas: twice the sigma, half the statistic.
    assert drift.page_hinkley(series, sigma=2.0, delta=0.0, threshold=3.5).up == 3.5


def test_page_hinkley_sees_a_fall_as_a_rise_of_the_negative() -> None:
    series = np.array([5.0, 5.0, 1.0, 1.0, 2.0])
    fall, rise = (drift.page_hinkley(sign * series, sigma=1.0, threshold=1.0) for sign in (1, -1))
    assert (fall.down, fall.fell_at, fall.up) == (rise.up, rise.rose_at, rise.down)
    assert fall.fell_at == 2


def test_an_empty_series_has_not_changed() -> None:
    assert drift.page_hinkley(np.zeros(0), sigma=1.0) == drift.Change(up=0.0, down=0.0, rose_at=None, fell_at=None)


def test_the_page_hinkley_threshold_solves_its_equation_and_is_never_below_the_least() -> None:
    assert drift.page_hinkley_threshold(100, alpha=0.01) == 50.0
    # 1,000 observations: the reflection bound sqrt(1000) z_{.99875} = 31.623 * 3.0233 is the smaller one.
    assert drift.page_hinkley_threshold(1000, alpha=0.01) == pytest.approx(95.605, abs=0.01)
    large = drift.page_hinkley_threshold(100_000, alpha=0.01)
    x = 2 * 0.005 * large
    assert (math.exp(x) - 1 - x) / (2 * 0.005**2) == pytest.approx(2 * 100_000 / 0.01, rel=1e-9)


def test_cusum_follows_its_formula() -> None:
    # C+ with k .5: .5, 2, 1, 2.5; C- : 0, 0, 0, 0 until -3: 2.5.
    found = drift.cusum(np.array([1.0, 2.0, -0.5, 2.0, -3.0]), slack=0.5, threshold=2.2)
    assert found == drift.Change(up=2.5, down=2.5, rose_at=3, fell_at=4)
    assert drift.cusum(np.array([1.0, 1.0]), slack=np.array([0.0, 1.0]), threshold=9.0).up == 1.0


def test_psi_of_two_bins_by_hand() -> None:
    # With half a count in each bin: p = 80.5/101, 20.5/101; q = 60.5/101, 40.5/101.
    p, q = (80.5 / 101, 20.5 / 101), (60.5 / 101, 40.5 / 101)
    expected = (q[0] - p[0]) * math.log(q[0] / p[0]) + (q[1] - p[1]) * math.log(q[1] / p[1])
    assert drift.psi(np.array([80, 20]), np.array([60, 40])) == pytest.approx(expected)
    assert drift.psi(np.array([80, 20]), np.array([60, 40])) == pytest.approx(0.19138, abs=1e-5)


def test_deciles_of_the_reference_hold_a_tenth_each_and_ties_fall_together() -> None:
    reference, current = drift.decile_counts(np.arange(100.0), np.full(7, 1000.0))
    assert reference.tolist() == [10] * 10
    assert current.tolist() == [0] * 9 + [7]
    tied, _ = drift.decile_counts(np.array([0.0] * 95 + [1.0] * 5), np.array([0.0]))
    assert tied.tolist() == [95, 5]


def test_categories_are_counted_over_those_of_either_side() -> None:
    before, after = drift.category_counts(["en", "en", "de"], ["fr", "en"])
    assert (before.tolist(), after.tolist()) == ([1, 2, 0], [0, 1, 1])


def test_chi_squared_agrees_with_printed_tables() -> None:
    for p, df, x in ((0.95, 9, 16.919), (0.99, 9, 21.666), (0.95, 1, 3.841), (0.999, 4, 18.467), (0.05, 10, 3.940)):
        assert drift.chi2_quantile(p, df) == pytest.approx(x, abs=5e-4)
        assert drift.chi2_cdf(x, df) == pytest.approx(p, abs=5e-5)
    assert drift.chi2_cdf(0.0, 3) == 0.0


def test_the_psi_cut_is_its_formula_and_agrees_with_the_p_value() -> None:
    cut = drift.psi_cut(100, 300, bins=10, alpha=0.05)
    assert cut == pytest.approx((1 / 100 + 1 / 300) * 16.919, abs=1e-5)
    assert drift.psi_p(cut, 100, 300, bins=10) == pytest.approx(0.05, abs=1e-9)
    assert drift.psi_cut(10, 10, bins=1, alpha=0.05) == math.inf
    assert drift.psi_p(0.0, 10, 10, bins=1) == 1.0


def test_ks_by_hand() -> None:
    assert drift.ks(np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 4.0, 5.0, 6.0])) == 0.5
    assert drift.ks(np.array([1.0]), np.array([2.0])) == 1.0
    cut = drift.ks_cut(100, 400, alpha=0.05)
    assert cut == pytest.approx(1.35810 * math.sqrt(500 / 40_000), abs=1e-5)
    assert drift.ks_p(cut, 100, 400) == pytest.approx(0.05)
    assert drift.ks_p(0.0, 100, 400) == 1.0


def test_wasserstein_by_hand() -> None:
    assert drift.wasserstein(np.array([0.0, 1.0]), np.array([5.0, 6.0])) == 5.0
    assert drift.wasserstein(np.array([0.0, 0.0, 3.0]), np.array([1.0, 1.0])) == pytest.approx(2 / 3 * 1 + 1 / 3 * 2)
    # Quartiles of 0..4 are 1 and 3.
    assert drift.wasserstein_by_iqr(np.arange(5.0), np.arange(5.0) + 1) == 0.5
    assert drift.wasserstein_by_iqr(np.zeros(3), np.ones(3)) == math.inf
    assert drift.wasserstein_by_iqr(np.zeros(3), np.zeros(3)) == 0.0


def test_a_confidence_sequence_is_its_formula() -> None:
    # t 100, rho 1, alpha .05: sqrt(2 * 101 / 10000 * ln(sqrt(101) / .05)).
    assert drift.sequence_half_width(100, sigma=2.0, rho=1.0, alpha=0.05) == pytest.approx(2 * math.sqrt(0.0202 * math.log(200.9975)))
    # alpha .05: -2 ln alpha = 5.99146; ln(1 + 5.99146) = 1.94469.
    assert drift.sequence_rho(100, alpha=0.05) == pytest.approx(math.sqrt(7.93615 / 100), abs=1e-6)
    widths = [drift.sequence_half_width(500, sigma=1.0, rho=drift.sequence_rho(t, alpha=0.05), alpha=0.05) for t in (100, 500, 2500)]
    assert min(widths) == widths[1]


def test_fishers_z_and_the_normal_interval_by_hand() -> None:
    # atanh .5 = .549306, atanh 0 = 0; sqrt(1/100 + 1/100) = .141421; z = 3.8842.
    assert drift.fisher_z_p(0.5, 103, second=0.0, m=103) == pytest.approx(1.0267e-4, rel=1e-3)
    assert drift.fisher_z_p(0.9, 3, second=0.0, m=50) == 1.0
    assert drift.normal_half_width(2.0, alpha=0.05) == pytest.approx(3.91993, abs=1e-5)


def test_rank_correlation_by_hand() -> None:
    assert drift.ranks(np.array([10.0, 20.0, 10.0, 5.0])).tolist() == [2.5, 4.0, 2.5, 1.0]
    assert drift.correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 27.0])) == pytest.approx(1.0)
    # Ranks 1 2 3 against 2 1 3: 1 - 6 * 2 / (3 * 8).
    assert drift.correlation(np.array([1.0, 2.0, 3.0]), np.array([5.0, 4.0, 9.0])) == pytest.approx(0.5)
    assert drift.correlation(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0])) is None
    assert drift.correlation(np.array([1.0, 2.0]), np.array([1.0, 2.0])) is None


def test_the_bootstrap_draws_whole_users() -> None:
    # Two users, all or nothing: the mean of a draw is 0, .5 or 1, so the interval is the whole range however many rows each has.
    totals = np.array([[0.0, 1000.0], [1000.0, 1000.0]])

    def mean(sums: drift.Floats) -> drift.Floats:
        return sums[:, 0] / sums[:, 1]

    assert drift.bootstrap_by_user(totals, mean, rng=np.random.default_rng(0), draws=400) == (0.0, 1.0)
    nothing = drift.bootstrap_by_user(totals, lambda sums: sums[:, 0] * math.nan, rng=np.random.default_rng(0), draws=20)
    assert all(map(math.isnan, nothing))


# Invariants -------------------------------------------------------------------------------------------------------------------


@given(values, values)
def test_distances_are_symmetric_and_nothing_is_far_from_itself(first: list[float], second: list[float]) -> None:
    a, b = np.array(first), np.array(second)
    assert drift.ks(a, b) == drift.ks(b, a)
    assert drift.wasserstein(a, b) == pytest.approx(drift.wasserstein(b, a), abs=1e-9)
    assert drift.ks(a, a) == drift.wasserstein(a, a) == 0.0


@given(values, st.floats(-50, 50))
def test_a_shift_moves_mass_by_exactly_itself(sample: list[float], shift: float) -> None:
    a = np.array(sample)
    assert drift.wasserstein(a, a + shift) == pytest.approx(abs(shift), abs=1e-6)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_psi_is_never_negative_symmetric_and_blind_to_the_order_of_bins(counts: list[int], rng: object) -> None:
    a = np.array(counts)
    b = a[::-1].copy()
    assert drift.psi(a, b) >= 0
    assert drift.psi(a, b) == pytest.approx(drift.psi(b, a))
    assert drift.psi(a, a) == 0


@given(st.floats(1, 1e6), st.floats(1e-6, 0.4))
def test_a_sequence_is_wider_than_the_interval_for_one_look(t: float, alpha: float) -> None:
    width = drift.sequence_half_width(t, sigma=1.0, rho=drift.sequence_rho(500, alpha=alpha), alpha=alpha)
    assert width > drift.normal_half_width(1 / math.sqrt(t), alpha=alpha)


# Error rates under no change ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "runs"), [(100, 400), (1_000, 400), (10_000, 150), (100_000, 15)])
def test_calibrated_cuts_alarm_as_often_as_they_say(n: int, runs: int) -> None:
    rng = np.random.default_rng(RNG_SEED + n)
    alarms = {"psi": 0, "ks": 0, "page_hinkley": 0, "psi_and_floor": 0}
    psi_cut, ks_cut = drift.psi_cut(n, n, bins=10, alpha=0.05), drift.ks_cut(n, n, alpha=0.05)
    threshold = drift.page_hinkley_threshold(n, alpha=0.05)
    for _ in range(runs):
        a, b = normal(rng, n), normal(rng, n)
        stable = drift.psi(*drift.decile_counts(a, b))
        change = drift.page_hinkley(a, sigma=1.0, threshold=threshold)
        alarms["psi"] += stable > psi_cut
        alarms["psi_and_floor"] += stable > max(psi_cut, drift.PSI_FLOOR)
        alarms["ks"] += drift.ks(a, b) > ks_cut
        alarms["page_hinkley"] += change.rose_at is not None or change.fell_at is not None
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert max(alarms.values()) / runs <= most, alarms
    if n <= 1_000:
        assert alarms["psi"] / runs >= 0.05 - 3 * math.sqrt(0.05 * 0.95 / runs)
    if n >= 10_000:
        assert alarms["psi_and_floor"] == 0


def test_the_customary_limits_alarm_without_cause() -> None:
    rng = np.random.default_rng(RNG_SEED)
    pairs = [(normal(rng, 100), normal(rng, 100)) for _ in range(300)]
    assert sum(drift.psi(*drift.decile_counts(a, b)) > 0.1 for a, b in pairs) / 300 > 0.75
    assert sum(drift.wasserstein_by_iqr(a, b) > 0.1 for a, b in pairs) / 300 > 0.6
    series = [normal(rng, 10_000) for _ in range(50)]
    found = [drift.page_hinkley(one, sigma=1.0) for one in series]
    assert sum(change.rose_at is not None or change.fell_at is not None for change in found) == 50


def test_a_shift_nobody_would_see_is_certain_at_a_hundred_thousand_and_still_no_alarm() -> None:
    rng = np.random.default_rng(RNG_SEED)
    a, b = normal(rng, 100_000), normal(rng, 100_000) + 0.03
    assert drift.ks(a, b) > drift.ks_cut(100_000, 100_000, alpha=0.001)
    assert drift.ks(a, b) < drift.KS_FLOOR
    assert drift.psi(*drift.decile_counts(a, b)) < drift.PSI_FLOOR
    assert drift.wasserstein_by_iqr(a, b) < drift.WASSERSTEIN_FLOOR


def test_a_shift_of_half_a_deviation_is_found_by_all_of_them() -> None:
    rng = np.random.default_rng(RNG_SEED)
    a, b = normal(rng, 400), normal(rng, 400) + 0.5
    assert drift.psi(*drift.decile_counts(a, b)) > drift.psi_cut(400, 400, bins=10, alpha=0.001)
    assert drift.ks(a, b) > drift.ks_cut(400, 400, alpha=0.001)
    assert drift.wasserstein_by_iqr(a, b) > drift.WASSERSTEIN_FLOOR
    series = np.concatenate([normal(rng, 500), normal(rng, 500) - 0.5])
    change = drift.page_hinkley(series, sigma=1.0, threshold=drift.page_hinkley_threshold(1000, alpha=0.01))
    assert change.rose_at is None
    assert change.fell_at is not None
    assert change.fell_at > 500


def test_ninety_nine_looks_fool_the_z_test_and_not_the_sequence() -> None:
    rng = np.random.default_rng(RNG_SEED)
    looks = np.arange(100, 10_000, 100)
    sums = rng.normal(scale=10.0, size=(4_000, len(looks))).cumsum(axis=1)  # a hundred standard normals between two looks
    rho = drift.sequence_rho(500, alpha=0.05)
    limits = np.array([drift.sequence_half_width(t, sigma=1.0, rho=rho, alpha=0.05) for t in looks])
    z_test = (np.abs(sums) / np.sqrt(looks) > 1.96).any(axis=1).mean()
    sequence = (np.abs(sums) / looks > limits).any(axis=1).mean()
    assert 0.34 < z_test < 0.42
    assert sequence < 0.03


def test_a_cusum_over_a_year_of_hours_seldom_alarms_and_finds_a_shift_of_two_errors_within_half_a_day() -> None:
    rng = np.random.default_rng(RNG_SEED)
    quiet = [drift.cusum(normal(rng, 2_000)) for _ in range(40)]
    assert sum(change.rose_at is not None or change.fell_at is not None for change in quiet) / 40 < 0.4
    found = [drift.cusum(normal(rng, 12) - 2.0).fell_at for _ in range(40)]
    assert sum(at is not None for at in found) >= 38
