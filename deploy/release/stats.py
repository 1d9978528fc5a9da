"""The statistics the gate decides with. Pure, standard library only.

Takes per-unit counts and differences, gives estimates with intervals. The unit is the user, never the request: requests of one
user resemble each other, and a binomial interval over requests raises false alarms twice as often as it says. Intervals are
one-sided 95 % on each side (a two-sided 90 % interval), because each check asks one question in one direction.
Leaves out: margins and verdicts (`gates.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95
"""One-sided confidence of each bound."""

SMALL_COUNT: Final = 30
"""Below this many events (or non-events) the normal interval is off; Newcombe's is used."""

SMALL_UNITS: Final = 200
"""Below this many units their variance is itself too uncertain to be an interval's width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its one-sided 95 % bounds."""

    value: float
    low: float
    high: float
    n: int
    """Independent units it rests on."""
    design_effect: float = 1.0
    """Variance over that of independent requests; 1 when it does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of sums over units, for example invalid calls over calls."""

    value: float
    standard_error: float
    numerator: float
    denominator: float
    units: int
    design_effect: float


def normal_quantile(p: float) -> float:
    """Return z with P(Z <= z) = p, 0 < p < 1."""
    return NormalDist().inv_cdf(p)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function (Lentz). Source: Numerical Recipes, 6.4."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            result *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return result


def beta_cdf(a: float, b: float, *, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b


def t_cdf(t: float, df: float) -> float:
    """Return P(T <= t) for Student's t with `df` degrees of freedom."""
    tail = 0.5 * beta_cdf(df / 2, 0.5, x=df / (df + t * t))
    return 1.0 - tail if t > 0 else tail


def t_quantile(p: float, df: float) -> float:
    """Return t with P(T <= t) = p, 0 < p < 1, by bisection."""
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
        if high - low < 1e-12 * high:
            break
    return (low + high) / 2


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio | None:
    """Estimate sum(num) / sum(den) over units by the delta method.

    var R = var_u(num - R den) / (n mean(den)^2), the variance over units with n - 1.
    Source: Deng, Knoblich, Lu, "Applying the Delta Method in Metric Analytics" (arXiv 1803.06336).

    Args:
        numerators: One per unit.
        denominators: One per unit, >= 0.

    Returns:
        None without any denominator or with fewer than two units: there is no data to speak of.
    """
    n = len(numerators)
    total = math.fsum(denominators)
    if n < 2 or total <= 0:
        return None
    events = math.fsum(numerators)
    value = events / total
    residuals = [a - value * b for a, b in zip(numerators, denominators, strict=True)]
    variance = math.fsum(r * r for r in residuals) / (n - 1) / (n * (total / n) ** 2)
    binomial = value * (1.0 - value) / total
    effect = variance / binomial if binomial > 0 else 1.0
    return Ratio(
        value=value, standard_error=math.sqrt(variance), numerator=events, denominator=total, units=n, design_effect=max(1.0, effect)
    )


def wilson(successes: float, n: float, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion, each bound one-sided at `confidence`.

    Source: Newcombe, "Two-sided confidence intervals for the single proportion" (1998), method 3.
    """
    z = normal_quantile(confidence)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(first: tuple[float, float], second: tuple[float, float], *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of p1 - p2 from two Wilson intervals.

    Args:
        first: Events and trials of the first proportion.
        second: Events and trials of the second.
        confidence: One-sided, for each bound.

    Source: Newcombe, "Interval estimation for the difference between independent proportions" (1998), method 10.
    """
    p1, p2 = first[0] / first[1], second[0] / second[1]
    low1, high1 = wilson(*first, confidence=confidence)
    low2, high2 = wilson(*second, confidence=confidence)
    d = p1 - p2
    return d - math.hypot(p1 - low1, high2 - p2), d + math.hypot(high1 - p1, p2 - low2)


def difference(candidate: Ratio, serving: Ratio, *, confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the difference of two ratios over independent units.

    With few units or events: Newcombe's interval as if each unit were one trial. That is wide (it takes requests of one user as
    copies of each other), and it cannot shrink when the evidence gets worse, which an interval from the variance of a few
    units does. Otherwise, and for ratios outside [0, 1]: the normal interval from the delta method with a t quantile.
    """
    value = candidate.value - serving.value
    units = min(candidate.units, serving.units)
    effect = max(candidate.design_effect, serving.design_effect)
    smallest = min(min(r.numerator, r.denominator - r.numerator) for r in (candidate, serving))
    if smallest >= 0.0 and (units < SMALL_UNITS or smallest < SMALL_COUNT):
        counts = [(r.value * r.units, float(r.units)) for r in (candidate, serving)]
        low, high = newcombe(counts[0], counts[1], confidence=confidence)
    else:
        half = t_quantile(confidence, 2 * units - 2) * math.hypot(candidate.standard_error, serving.standard_error)
        low, high = value - half, value + half
    return Estimate(value=value, low=low, high=high, n=units, design_effect=effect)


def paired_mean(differences: Sequence[float], *, confidence: float = CONFIDENCE, sd_floor: float = 0.0) -> Estimate | None:
    """Estimate the mean of paired differences with Student's t: mean -+ t s / sqrt(n).

    Args:
        differences: One per pair (task).
        confidence: One-sided, for each bound.
        sd_floor: Smallest standard deviation believed; equal differences on a handful of tasks are luck, not certainty.

    Returns:
        None with fewer than two pairs.
    """
    n = len(differences)
    if n < 2:
        return None
    mean = math.fsum(differences) / n
    sd = max(sd_floor, math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1)))
    half = t_quantile(confidence, n - 1) * sd / math.sqrt(n)
    return Estimate(value=mean, low=mean - half, high=mean + half, n=n)


def weighted_mean(values: Sequence[float], weights: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate | None:
    """Estimate sum(w v) / sum(w) over units (per-token means of users, weighted by their tokens), with a t interval.

    Returns:
        None with fewer than two units or no weight.
    """
    found = ratio([v * w for v, w in zip(values, weights, strict=True)], weights)
    if found is None:
        return None
    half = t_quantile(confidence, found.units - 1) * found.standard_error
    return Estimate(value=found.value, low=found.value - half, high=found.value + half, n=found.units)


def fisher_exact(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Return the two-sided p-value that two (events, trials) come from one rate (sum of tables no likelier than the seen one)."""
    events, trials = first[0] + second[0], first[1] + second[1]
    total = math.comb(trials, events)

    def likelihood(k: int) -> float:
        return math.comb(first[1], k) * math.comb(second[1], events - k) / total

    seen = likelihood(first[0])
    low, high = max(0, events - second[1]), min(events, first[1])
    return min(1.0, math.fsum(q for k in range(low, high + 1) if (q := likelihood(k)) <= seen * (1 + 1e-9)))


def p_increase(candidate: Ratio, serving: Ratio) -> float:
    """Return the one-sided p-value of "the candidate's ratio is not higher" (normal); 1 without any variance."""
    se = math.hypot(candidate.standard_error, serving.standard_error)
    if se == 0.0:
        return 1.0 if candidate.value <= serving.value else 0.0
    return 1.0 - NormalDist().cdf((candidate.value - serving.value) / se)


def confidence_sequence(values: Sequence[float], *, alpha: float, rho: float) -> Estimate | None:
    """Estimate a mean so that the interval holds at every look at once.

    h = sqrt(S2 * 2 (t rho^2 + 1) / (t rho)^2 * ln(sqrt(t rho^2 + 1) / alpha)), S2 the running variance.
    Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence
    sequences" (arXiv 2103.06476), theorem 2.2; alpha one-sided.

    Args:
        values: Everything seen so far, in order.
        alpha: Error allowed over all looks.
        rho: Width parameter; the sequence is tightest near t = (-2 ln alpha + ln(1 - 2 ln alpha)) / rho^2.
    """
    t = len(values)
    if t < 2:
        return None
    mean = math.fsum(values) / t
    variance = math.fsum((v - mean) ** 2 for v in values) / t
    scale = t * rho * rho + 1
    half = math.sqrt(variance * 2 * scale / (t * rho) ** 2 * math.log(math.sqrt(scale) / alpha))
    return Estimate(value=mean, low=mean - half, high=mean + half, n=t)


def pass_probability(effect: float, *, margin: float, standard_error: float, df: float) -> float:
    """Return the probability that a non-inferiority check passes when the truth is `effect` (normal approximation).

    P(mean - t se >= -margin) = Phi((effect + margin) / se - t).
    """
    if standard_error == 0.0:
        return 1.0 if effect >= -margin else 0.0
    return NormalDist().cdf((effect + margin) / standard_error - t_quantile(CONFIDENCE, df))


def needed_margin(standard_error: float, *, df: float, power: float) -> float:
    """Return the margin at which an equal candidate passes a non-inferiority check with probability `power`."""
    return standard_error * (t_quantile(CONFIDENCE, df) + normal_quantile(power))


def caught_effect(*, margin: float, standard_error: float, df: float, power: float = 0.8) -> float:
    """Return the regression (negative) that keeps a candidate from passing with probability `power`."""
    return -margin + standard_error * (t_quantile(CONFIDENCE, df) - normal_quantile(power))
