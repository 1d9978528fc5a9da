"""Rates over many turns that stay right when outcomes are late, missing, misread, or all from one user (pure).

The reward of a turn needs none of this. What is said about a policy does: a mean over the outcomes that happen to be there already
rewards a policy that puts off risky work (in simulation deferring risky prompts raised the mean over observed labels from .55 to .91
while edits fell from 1.0 to .2).

Takes: arrays, one entry a turn. Gives: estimates, weights, intervals. Leaves out: where the arrays come from (`estimate_rows.py`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

PROPENSITY_FLOOR: Final = 0.05
"""No outcome stands for more than twenty turns, however seldom its like is observed."""
RESAMPLES: Final = 1000


@dataclass(frozen=True, slots=True)
class DelayCdf:
    """The share F of outcomes that have come by a given age, from delays of turns old enough for all to have come."""

    delays_ms: tuple[int, ...]
    """Sorted."""

    def at(self, age_ms: float) -> float:
        """Return F(age), in [0, 1]; 1 where no delay is known: then nothing is corrected."""
        if not self.delays_ms:
            return 1.0
        return int(np.searchsorted(np.asarray(self.delays_ms), age_ms, side="right")) / len(self.delays_ms)

    def reaching(self, share: float) -> int | None:
        """Return the smallest age at which F reaches a share, ms; None where no delay is known."""
        if not self.delays_ms:
            return None
        return self.delays_ms[min(len(self.delays_ms), max(1, math.ceil(share * len(self.delays_ms)))) - 1]


def delay_cdf(delays_ms: Sequence[int]) -> DelayCdf:
    """Return the distribution of the delays of outcomes that came."""
    return DelayCdf(tuple(sorted(delays_ms)))


def still_coming(p: float, elapsed_share: float) -> float:
    """Return P(an outcome will come | none has come yet), p (1 - F) / (1 - p F), in [0, 1].

    Args:
        p: P(an outcome comes at all).
        elapsed_share: F(age) of the turn.

    Source: Chapelle, "Modeling Delayed Feedback in Display Advertising", KDD 2014, section 3 (by Bayes' rule).
    """
    left = 1.0 - p * elapsed_share
    return p * (1.0 - elapsed_share) / left if left > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """A rate of outcomes before all of them have come."""

    seen: float
    """Outcomes seen per turn: too low while turns are young."""
    expected: float
    """Outcomes seen, and the probability that one is still coming for each turn that has none, per turn."""
    weighted: float
    """Outcomes seen, each weighed by 1 / F(age) of its turn, per turn: unbiased, but noisy for young turns."""
    turns: int


def delayed_rate(came: Sequence[bool], ages_ms: Sequence[float], cdf: DelayCdf, *, least: float = PROPENSITY_FLOOR) -> Delayed:
    """Estimate how many turns get an outcome in the end.

    `expected` solves p = mean(came or still_coming(p, F(age))) by iteration, the EM algorithm of a delayed Bernoulli.

    Args:
        came: Whether each turn has its outcome.
        ages_ms: How long ago each turn ended.
        cdf: F.
        least: F is not taken for smaller than this in 1 / F.

    Raises:
        ValueError: The two have different lengths.
    """
    if len(came) != len(ages_ms):
        raise ValueError(f"{len(came)} outcomes for {len(ages_ms)} ages")
    if not came:
        return Delayed(seen=math.nan, expected=math.nan, weighted=math.nan, turns=0)
    elapsed = [cdf.at(age) for age in ages_ms]
    seen = sum(came) / len(came)
    p = seen
    for _ in range(200):
        after = sum(1.0 if got else still_coming(p, share) for got, share in zip(came, elapsed, strict=True)) / len(came)
        if abs(after - p) < 1e-9:
            break
        p = after
    weighted = sum(1.0 / max(share, least) for got, share in zip(came, elapsed, strict=True) if got) / len(came)
    return Delayed(seen=seen, expected=p, weighted=min(1.0, weighted), turns=len(came))


@dataclass(frozen=True, slots=True, kw_only=True)
class Imputed:
    """A mean over all turns although only some outcomes were observed."""

    mean: float
    """Of m + O / max(e, floor) (R - m)."""
    naive: float
    """Mean over the observed alone; NaN without any."""
    observed_share: float
    clipped_share: float
    """Turns whose propensity was below the floor: there the estimate leans on m."""
    turns: int


def imputed_values(
    rewards: Sequence[float | None], expected: Sequence[float], propensity: Sequence[float], *, floor: float = PROPENSITY_FLOOR
) -> np.ndarray:  # fmt: skip
    """Return m + O / max(e, floor) (R - m) for each turn, [turns]: right when either m or e is.

    Args:
        rewards: R; None where nothing was observed (O = 0).
        expected: m, what a turn like this is expected to get.
        propensity: e, P(observed) of a turn like this, in [0, 1].
        floor: e is not taken for smaller.

    Source: Robins, Rotnitzky, Zhao, "Estimation of regression coefficients when some regressors are not always observed", JASA 1994.
    """
    values = np.asarray(expected, dtype=float).copy()
    for at, reward in enumerate(rewards):
        if reward is not None:
            values[at] += (reward - values[at]) / max(propensity[at], floor)
    return values


def impute(
    rewards: Sequence[float | None], expected: Sequence[float], propensity: Sequence[float], *, floor: float = PROPENSITY_FLOOR
) -> Imputed:  # fmt: skip
    """Return the mean of `imputed_values`, beside the naive one."""
    values = imputed_values(rewards, expected, propensity, floor=floor)
    seen = [reward for reward in rewards if reward is not None]
    number = len(rewards)
    return Imputed(
        mean=float(values.mean()) if number else math.nan,
        naive=sum(seen) / len(seen) if seen else math.nan,
        observed_share=len(seen) / number if number else math.nan,
        clipped_share=sum(e < floor for e in propensity) / number if number else math.nan,
        turns=number,
    )


def corrected_rate(q: float, *, tpr: float, fpr: float) -> float:
    """Return the true rate behind a classifier's share of yes, (q - fpr) / (tpr - fpr), in [0, 1].

    Args:
        q: Share of yes.
        tpr: Share of yes among true cases.
        fpr: Share of yes among others.

    Returns:
        NaN where the classifier says no more than chance (tpr <= fpr).

    Source: Rogan, Gladen, "Estimating prevalence from the results of a screening test", Am J Epidemiol 107, 1978.
    """
    return min(1.0, max(0.0, (q - fpr) / (tpr - fpr))) if tpr > fpr else math.nan


def user_weights(users: Sequence[str], *, cap: float) -> np.ndarray:
    """Return min(1, cap / n_user) for each turn, [turns]: no user counts for more than `cap` turns."""
    counts = Counter(users)
    return np.asarray([min(1.0, cap / counts[user]) for user in users], dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and where it would lie if other users had come."""

    mean: float
    low: float
    high: float
    n: int
    users: int


def by_user(
    values: Sequence[float], users: Sequence[str], *, weights: Sequence[float] | None = None, rng: np.random.Generator, level: float = 0.95
) -> Interval:  # fmt: skip
    """Return the weighted mean with a bootstrap interval over users, not turns: turns of one user are not independent.

    Args:
        values: One a turn.
        users: Whose turn.
        weights: From `user_weights`; None: all 1.
        rng: Draws; the same state gives the same interval.
        level: Coverage.

    Returns:
        NaN for everything where there is no value; the interval is the mean itself for a single user, and says nothing.
    """
    if not len(values):
        return Interval(mean=math.nan, low=math.nan, high=math.nan, n=0, users=0)
    weighed = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=float)
    names, place = np.unique(np.asarray(users), return_inverse=True)
    total = np.bincount(place, weights=weighed * np.asarray(values, dtype=float), minlength=len(names))
    mass = np.bincount(place, weights=weighed, minlength=len(names))
    drawn = rng.multinomial(len(names), np.full(len(names), 1.0 / len(names)), size=RESAMPLES)
    means = (drawn @ total) / np.maximum(drawn @ mass, 1e-12)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(total.sum() / mass.sum()), low=float(low), high=float(high), n=len(values), users=len(names))
