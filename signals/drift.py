"""The statistics that monitors decide with: one function each, with its formula and source.

Two rules run through all of them. An effect has to be large enough **and** certain enough: with enough data everything is
certain, with little everything is large. And whoever looks every hour needs statistics that are valid at every look.

Takes: arrays, limits, a random generator. Gives: numbers. Leaves out: means compared by user and traffic (`drift_compare.py`),
what is measured and when (`monitors.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
DECILES: Final = tuple(tenth / 10 for tenth in range(1, 10))
PSI_FLOOR: Final = 0.02
"""A smaller PSI is no drift, however certain: with 10^5 rows a shift nobody can see is significant."""
KS_FLOOR: Final = 0.05
WASSERSTEIN_FLOOR: Final = 0.1
PH_DELTA: Final = 0.005
"""Allowed drift of the mean, in standard deviations an observation."""
PH_LAMBDA: Final = 50.0
"""Least threshold, in standard deviations."""
CUSUM_K: Final = 0.5
"""Half the shift to be found, in standard errors of an hour."""
CUSUM_H: Final = 8.0
"""With k = .5 one false alarm in about 9,600 hours, 13 months, both sides together (Siegmund's approximation). The customary 5 gives
one in three weeks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a change detector saw in one series."""

    up: float
    """Largest value of the statistic for a rise."""
    down: float
    """Largest value of the statistic for a fall."""
    rose_at: int | None
    """Index of the observation at which the rise crossed the threshold; None when it did not."""
    fell_at: int | None
    """The same for a fall."""


def quantiles(values: Floats, at: Sequence[float] = QUANTILES) -> Floats:
    """Return quantiles by linear interpolation between order statistics.

    Args:
        values: [N], N >= 1.
        at: Probabilities.

    Source: Hyndman, Fan, "Sample quantiles in statistical packages" (1996), definition 7.
    """
    return np.quantile(values, at)


def page_hinkley(values: Floats, *, sigma: float, delta: float = PH_DELTA, threshold: float = PH_LAMBDA) -> Change:
    """Find a change of the mean inside one series, against its own running mean.

    Rise: M_t = sum_i (x_i - mean_i - delta sigma), statistic M_t - min_{s<=t} M_s; fall: mirrored. In units of sigma.

    Args:
        values: [N], in time order.
        sigma: Standard deviation of one observation, > 0.
        delta: Drift that is let pass, in sigma.
        threshold: In sigma.

    Source: Page, "Continuous inspection schemes" (1954); Hinkley, "Inference about the change-point from cumulative sum tests" (1971).
    """
    if not len(values):
        return Change(up=0.0, down=0.0, rose_at=None, fell_at=None)
    running = np.cumsum(values) / np.arange(1, len(values) + 1)
    off = (values - running) / sigma
    rise, fall = np.cumsum(off - delta), np.cumsum(-off - delta)
    up = rise - np.minimum.accumulate(np.minimum(rise, 0.0))
    down = fall - np.minimum.accumulate(np.minimum(fall, 0.0))
    return Change(up=float(up.max()), down=float(down.max()), rose_at=_first(up > threshold), fell_at=_first(down > threshold))


def _first(crossed: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(crossed)) if crossed.any() else None


def page_hinkley_threshold(n: int, *, alpha: float, delta: float = PH_DELTA, least: float = PH_LAMBDA) -> float:
    """Return the threshold that n observations without a change cross with probability at most about alpha, both sides together.

    With the customary lambda of 50 the mean time to a false alarm of one side is (e^x - 1 - x) / (2 delta^2) = 2,974 observations,
    x = 2 delta lambda (a reflected Brownian motion with drift -delta): 32 % of series of 1,000 and all of 10,000 alarm. So lambda grows
    with n, to the smaller of two bounds: that mean time set to 2 n / alpha; and sqrt(n) z_{1-alpha/8}, which holds without the drift
    (the reflected motion has the law of |B|, and P(sup |B| > x) <= 4 P(B_n > x)).

    Source: Siegmund, "Sequential Analysis" (1985), on the cumulative sum test; Levy's identity and the reflection principle.
    """
    wanted = 4 * delta * delta * n / alpha
    low, high = 0.0, 1.0
    while math.expm1(high) - high < wanted:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.expm1(middle) - middle < wanted else (low, middle)
    return max(least, min(high / (2 * delta), math.sqrt(n) * NormalDist().inv_cdf(1 - alpha / 8)))


def cusum(scores: Floats, *, slack: Floats | float = CUSUM_K, threshold: float = CUSUM_H) -> Change:
    """Find a lasting change of standardised scores: C+ = max(0, C+ + z - k), C- = max(0, C- - z - k).

    Args:
        scores: [N] (x - reference mean) / standard error, in time order.
        slack: k, one for all or one a score [N].
        threshold: h.

    Source: Page (1954); Montgomery, "Introduction to Statistical Quality Control", the tabular CUSUM.
    """
    up = down = most_up = most_down = 0.0
    rose = fell = None
    for index, (score, k) in enumerate(zip(scores, np.broadcast_to(slack, scores.shape), strict=True)):
        up, down = max(0.0, up + float(score) - float(k)), max(0.0, down - float(score) - float(k))
        most_up, most_down = max(most_up, up), max(most_down, down)
        rose = index if rose is None and up > threshold else rose
        fell = index if fell is None and down > threshold else fell
    return Change(up=most_up, down=most_down, rose_at=rose, fell_at=fell)


def decile_counts(reference: Floats, current: Floats) -> tuple[Ints, Ints]:
    """Count both samples in the ten bins between the reference's deciles; equal deciles (ties) fall together into fewer bins.

    Returns:
        Reference counts and current counts, [B] each, B <= 10.
    """
    edges = np.unique(np.quantile(reference, DECILES))
    size = len(edges) + 1
    counted = [np.bincount(np.searchsorted(edges, values, side="left"), minlength=size) for values in (reference, current)]
    seen = (counted[0] + counted[1]) > 0
    return counted[0][seen].astype(np.int64), counted[1][seen].astype(np.int64)


def category_counts(reference: Sequence[str], current: Sequence[str]) -> tuple[Ints, Ints]:
    """Count both samples by category, over the categories that either has: [B] each."""
    names = sorted(set(reference) | set(current))
    place = {name: index for index, name in enumerate(names)}
    first, second = (np.bincount([place[name] for name in values], minlength=len(names)) for values in (reference, current))
    return first.astype(np.int64), second.astype(np.int64)


def psi(reference: Ints, current: Ints) -> float:
    """Return the population stability index: sum_b (q_b - p_b) ln(q_b / p_b).

    Half an observation is added to every bin, so that an empty one is large and not infinite.

    Args:
        reference: [B] counts.
        current: [B] counts.

    Source: Yurdakul, Naranjo, "Statistical properties of the population stability index" (2020).
    """
    p = (reference + 0.5) / (reference.sum() + 0.5 * len(reference))
    q = (current + 0.5) / (current.sum() + 0.5 * len(current))
    return float(np.sum((q - p) * np.log(q / p)))


def psi_cut(n: float, m: float, *, bins: int, alpha: float) -> float:
    """Return the PSI that two samples of one distribution exceed with probability alpha: (1/n + 1/m) chi2_{bins-1, 1-alpha}.

    The customary fixed 0.1 is exceeded by chance 85 % of the time with n = m = 100 in ten bins.

    Source: Yurdakul, Naranjo (2020).
    """
    return (1 / n + 1 / m) * chi2_quantile(1 - alpha, bins - 1) if bins > 1 else math.inf


def psi_p(value: float, n: float, m: float, *, bins: int) -> float:
    """Return the p-value of a PSI, by the same distribution as `psi_cut`."""
    return 1 - chi2_cdf(value / (1 / n + 1 / m), bins - 1) if bins > 1 else 1.0


def chi2_cdf(x: float, df: int) -> float:
    """Return P(X <= x) for chi-squared with `df` degrees of freedom: the regularised incomplete gamma function P(df/2, x/2).

    Source: Abramowitz, Stegun, 6.5.29 (series) and 6.5.31 (continued fraction).
    """
    a, half = df / 2, x / 2
    if half <= 0:
        return 0.0
    front = math.exp(a * math.log(half) - half - math.lgamma(a))
    if half < a + 1:
        term = total = 1 / a
        for k in range(1, 1000):
            term *= half / (a + k)
            total += term
            if term < total * 1e-15:
                break
        return front * total
    b = half + 1 - a
    c, d = 1e300, 1 / b
    fraction = d
    for k in range(1, 1000):
        numerator = -k * (k - a)
        b += 2
        d = 1 / (numerator * d + b)
        c = b + numerator / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 - front * fraction


def chi2_quantile(p: float, df: int) -> float:
    """Return x with P(X <= x) = p, 0 < p < 1, by bisection."""
    low, high = 0.0, float(df)
    while chi2_cdf(high, df) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chi2_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def ks(reference: Floats, current: Floats) -> float:
    """Return the largest distance between two empirical distribution functions, in [0, 1]."""
    points = np.concatenate([reference, current])
    return float(np.max(np.abs(_steps(reference, points) - _steps(current, points))))


def _steps(sample: Floats, points: Floats) -> Floats:
    return np.searchsorted(np.sort(sample), points, side="right") / len(sample)


def ks_cut(n: float, m: float, *, alpha: float) -> float:
    """Return the distance that two samples of one distribution exceed with probability alpha: sqrt(-ln(alpha/2)/2) sqrt((n+m)/nm).

    Source: Smirnov, "Table for estimating the goodness of fit of empirical distributions" (1948), first term of the series.
    """
    return math.sqrt(-math.log(alpha / 2) / 2) * math.sqrt((n + m) / (n * m))


def ks_p(distance: float, n: float, m: float) -> float:
    """Return the p-value of a distance by the same term as `ks_cut`, at most 1: 2 exp(-2 D^2 nm/(n+m))."""
    return min(1.0, 2 * math.exp(-2 * distance * distance * n * m / (n + m)))


def wasserstein(reference: Floats, current: Floats) -> float:
    """Return the distance that probability mass has to move: the integral of |F - G|, in the unit of the values.

    Source: Vallender, "Calculation of the Wasserstein distance between probability distributions on the line" (1973).
    """
    points = np.sort(np.concatenate([reference, current]))
    gaps = np.diff(points)
    return float(np.sum(np.abs(_steps(reference, points[:-1]) - _steps(current, points[:-1])) * gaps))


def wasserstein_by_iqr(reference: Floats, current: Floats) -> float:
    """Return the Wasserstein distance over the reference's interquartile range; inf when that is 0 and the distance is not."""
    low, high = np.quantile(reference, (0.25, 0.75))
    distance = wasserstein(reference, current)
    return distance / float(high - low) if high > low else (math.inf if distance > 0 else 0.0)


def sequence_half_width(t: float, *, sigma: float, rho: float, alpha: float) -> float:
    """Return the half width of an interval for a mean that holds at every t at once.

    sigma sqrt(2 (t rho^2 + 1) / (t^2 rho^2) ln(sqrt(t rho^2 + 1) / alpha)).

    Args:
        t: Observations so far, > 0.
        sigma: Standard deviation of one observation.
        rho: Width parameter, see `sequence_rho`.
        alpha: Chance that the interval ever misses the mean.

    Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences"
    (arXiv 2103.06476), theorem 2.2.
    """
    scale = t * rho * rho + 1
    return sigma * math.sqrt(2 * scale / (t * rho) ** 2 * math.log(math.sqrt(scale) / alpha))


def sequence_rho(tight_at: float, *, alpha: float) -> float:
    """Return the width parameter whose sequence is tightest near `tight_at` observations.

    rho = sqrt((-2 ln alpha + ln(1 - 2 ln alpha)) / t). Source: arXiv 2103.06476.
    """
    level = -2 * math.log(alpha)
    return math.sqrt((level + math.log1p(level)) / tight_at)


def normal_half_width(standard_error: float, *, alpha: float) -> float:
    """Return the half width of the two-sided normal interval, valid for one look."""
    return standard_error * NormalDist().inv_cdf(1 - alpha / 2)


def fisher_z_p(first: float, n: float, *, second: float, m: float) -> float:
    """Return the two-sided p-value that two correlations are equal: z = (atanh r - atanh s) / sqrt(1/(n-3) + 1/(m-3)).

    Source: Fisher, "On the probable error of a coefficient of correlation deduced from a small sample" (1921).
    """
    if min(n, m) <= 3:
        return 1.0
    bounded = [math.atanh(max(-0.999999, min(0.999999, r))) for r in (first, second)]
    z = abs(bounded[0] - bounded[1]) / math.sqrt(1 / (n - 3) + 1 / (m - 3))
    return 2 * (1 - NormalDist().cdf(z))


def correlation(first: Floats, second: Floats) -> float | None:
    """Return Spearman's rank correlation; None with fewer than three pairs or without any variation.

    Source: Spearman, "The proof and measurement of association between two things" (1904). Ties get their mean rank.
    """
    if len(first) < 3:
        return None
    a, b = ranks(first), ranks(second)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def ranks(values: Floats) -> Floats:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def bootstrap_by_user(
    totals: Floats, statistic: Callable[[Floats], Floats], *, rng: np.random.Generator, draws: int, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile interval of a statistic when whole users are drawn with replacement.

    Args:
        totals: [U, K] one row a user: the sums that the statistic is made of.
        statistic: [D, K] sums of each draw -> [D] values; nan where a draw has none.
        rng: Source of the draws.
        draws: D.
        level: Share of the draws inside.

    Source: Efron, Tibshirani, "An Introduction to the Bootstrap" (1993), 13.3; users resampled whole, as in Davison, Hinkley (1997), 3.8.
    """
    users = len(totals)
    weights = rng.multinomial(users, np.full(users, 1 / users), size=draws).astype(np.float64)
    found = statistic(weights @ totals)
    found = found[~np.isnan(found)]
    if not len(found):
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
