"""Compare a policy's mean with another's: by user, for the same mix of traffic, valid at every look.

A mean moves when the policy changes and when the traffic does. So besides the plain difference there is one against what the
reference would have done with this traffic: every observation is held against the reference's mean of its own stratum (task,
language, message length, origin), the residuals are averaged, and only what is left is the policy's.

Takes: `Observations` of both. Gives: a `Comparison`. Leaves out: which metrics, and what is harmful (`monitors.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from signals.drift import Floats, Ints, normal_half_width, sequence_half_width, sequence_rho

MIN_STRATUM: Final = 5
"""A stratum with fewer observations of the reference is taken at the reference's overall mean and not counted as shared."""
SMALLEST_P: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """A ratio of sums, observation by observation: a mean has denominators 1, a rate its own."""

    numerator: Floats
    """[N]"""
    denominator: Floats
    """[N], >= 0; rows of 0 add nothing and are not counted."""
    unit: Ints
    """[N] code of the independent unit: the user."""
    stratum: Ints
    """[N] code of the kind of traffic; the same codes on both sides of a comparison."""

    def counted(self) -> "Observations":
        """Leave out rows with denominator 0."""
        keep = self.denominator > 0
        return Observations(
            numerator=self.numerator[keep], denominator=self.denominator[keep], unit=self.unit[keep], stratum=self.stratum[keep]
        )

    def __len__(self) -> int:
        return len(self.numerator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a policy's figure differs from a reference's."""

    value: float
    reference: float
    expected: float
    """The reference's figure on this policy's mix of traffic."""
    sd: float
    """Standard deviation of one observation of the reference, of this policy where the reference never varies; 0 where neither does."""
    p: float
    """Of value = expected; valid at every look."""
    p_plain: float
    """Of value = reference; valid at every look."""
    shared: float
    """Share of this policy's traffic whose stratum the reference knows."""
    n: int
    m: int
    units: int


def ratio(seen: Observations) -> float:
    """Return sum(numerator) / sum(denominator)."""
    return float(seen.numerator.sum() / seen.denominator.sum())


def variance_of_mean(influence: Floats, unit: Ints) -> float:
    """Return the variance of a sum of influences, the larger of by-unit and independent.

    By unit: G/(G-1) sum_g (sum_{i in g} e_i)^2. Observations of one user resemble each other; taking them as independent alarms
    twice as often as it says. The larger one is taken because few units know their own variance badly.

    Args:
        influence: [N] e_i, each observation's part of the estimate, summing to 0.
        unit: [N] codes.

    Source: Liang, Zeger, "Longitudinal data analysis using generalized linear models" (1986); Deng et al. (arXiv 1803.06336) for ratios.
    """
    n = len(influence)
    _, codes = np.unique(unit, return_inverse=True)
    sums = np.bincount(codes, weights=influence)
    clustered = len(sums) / (len(sums) - 1) * float(sums @ sums) if len(sums) > 1 else 0.0
    independent = n / (n - 1) * float(influence @ influence) if n > 1 else 0.0
    return max(clustered, independent)


def design_effect(values: Floats, unit: Ints) -> float:
    """Return how many times larger the variance of the mean is than for independent observations, at least 1.

    Args:
        values: [N], for example ranks.
        unit: [N] codes.

    Source: Kish, "Survey Sampling" (1965), 8.2.
    """
    off = (values - values.mean()) / len(values)
    independent = len(values) / max(len(values) - 1, 1) * float(off @ off)
    return variance_of_mean(off, unit) / independent if independent > 0 else 1.0


def stratum_means(reference: Observations, size: int) -> tuple[Floats, Floats]:
    """Return the reference's figure in each stratum [S], its overall one where it has too few, and whether it has enough [S]."""
    denominators = np.bincount(reference.stratum, weights=reference.denominator, minlength=size)
    numerators = np.bincount(reference.stratum, weights=reference.numerator, minlength=size)
    enough = np.bincount(reference.stratum, minlength=size) >= MIN_STRATUM
    safe = np.where(enough & (denominators > 0), denominators, 1.0)
    return np.where(enough, numerators / safe, ratio(reference)), enough.astype(np.float64)


def _reference_variance(reference: Observations, weight: Floats, means: Floats, known: Floats) -> float:
    """Return the variance of the reference's figure on the other side's traffic.

    Args:
        reference: Its observations.
        weight: [S] share of the other side's denominators in each stratum.
        means: [S] from `stratum_means`.
        known: [S] from `stratum_means`.
    """
    denominators = np.bincount(reference.stratum, weights=reference.denominator, minlength=len(weight))
    own = (weight * known)[reference.stratum] / np.maximum(denominators[reference.stratum], 1e-300)
    influence = own * (reference.numerator - means[reference.stratum] * reference.denominator)
    rest = float(weight @ (1 - known))
    influence = influence + rest * (reference.numerator - ratio(reference) * reference.denominator) / reference.denominator.sum()
    return variance_of_mean(influence, reference.unit)


def compare(current: Observations, reference: Observations, *, alpha: float, tight_at: float, reference_over: bool = True) -> Comparison:
    """Compare two policies' figures.

    D = sum_i (num_i - R_{s(i)} den_i) / sum den, R_s the reference's figure in stratum s. A confidence sequence of the growing side (any
    number of looks) and a normal interval of the reference (one look, it is over), each at half of alpha, are joined as
    sqrt(a^2 + b^2); p is the alpha at which that is |D|. Measured on 20,000 runs of 99 looks with references of 60 to 50,000: joined at
    full alpha they err up to 1.9 alpha, at half of it at most alpha; added up, a tenth of alpha. The deviation of one observation is
    never taken smaller than the reference's: a policy that did something 0 times in 30 has not shown that it never does.

    Args:
        current: This policy's observations so far.
        reference: The other's.
        alpha: Level the sequence is shaped for.
        tight_at: Observations at which it is tightest.
        reference_over: Whether the reference gets no more observations; while it does, as beside a canary, it too gets a sequence.
    """
    now, then = current.counted(), reference.counted()
    size = int(max(now.stratum.max(), then.stratum.max())) + 1
    means, known = stratum_means(then, size)
    value, before, total = ratio(now), ratio(then), float(now.denominator.sum())
    expected = float(means[now.stratum] @ now.denominator) / total
    weight = np.bincount(now.stratum, weights=now.denominator, minlength=size) / total
    off = (now.numerator - means[now.stratum] * now.denominator) / total
    flat_then = (then.numerator - before * then.denominator) / then.denominator.sum()
    n, m = len(now), len(then)
    flat = math.sqrt(variance_of_mean(flat_then, then.unit) * m)
    sigma = max(flat, math.sqrt(variance_of_mean(off - (value - expected) * now.denominator / total, now.unit) * n))
    rho = sequence_rho(tight_at, alpha=alpha / 2)
    aside = math.sqrt(_reference_variance(then, weight, means, known))
    plain_sigma = max(flat, math.sqrt(variance_of_mean((now.numerator - value * now.denominator) / total, now.unit) * n))

    def p(own: float, usual: float, *, spread: float, error: float) -> float:
        joint = _half_width(n, sigma=spread, rho=rho, standard_error=error, growing=None if reference_over else m)
        return _p(_exact(own, usual), joint)

    return Comparison(
        value=value,
        reference=before,
        expected=expected,
        sd=_sd(then) or _sd(now),
        p=p(value, expected, spread=sigma, error=aside),
        p_plain=p(value, before, spread=plain_sigma, error=flat / math.sqrt(m)),
        shared=float(weight @ known),
        n=n,
        m=m,
        units=len(np.unique(now.unit)),
    )


def _sd(seen: Observations) -> float:
    """Return the standard deviation of one observation, without what users add."""
    scale = seen.denominator.sum() / len(seen)
    residual = (seen.numerator - ratio(seen) * seen.denominator) / scale
    return float(np.sqrt(residual @ residual / max(len(seen) - 1, 1)))


def _exact(first: float, second: float) -> float:
    """Return the difference of two sums of the same kind, 0 where it is rounding: where nothing varies, rounding would be certain."""
    return 0.0 if math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12) else first - second


def _half_width(n: int, *, sigma: float, rho: float, standard_error: float, growing: int | None) -> Callable[[float], float]:
    """Return the joint half width as a function of alpha; `growing` is the reference's number when it still grows."""

    def width(alpha: float) -> float:
        own = sequence_half_width(n, sigma=sigma, rho=rho, alpha=alpha / 2)
        if growing is None:
            return math.hypot(own, normal_half_width(standard_error, alpha=alpha / 2))
        return math.hypot(own, sequence_half_width(growing, sigma=standard_error * math.sqrt(growing), rho=rho, alpha=alpha / 2))

    return width


def _p(difference: float, width: Callable[[float], float]) -> float:
    """Return the alpha at which the half width is the difference, by bisection on its logarithm."""
    if abs(difference) <= width(1.0):
        return 1.0
    if abs(difference) > width(SMALLEST_P):
        return SMALLEST_P
    low, high = math.log(SMALLEST_P), 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if width(math.exp(middle)) > abs(difference) else (low, middle)
    return math.exp(high)
