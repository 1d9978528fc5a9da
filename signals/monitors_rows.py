"""From two sets of turns to rows of the table `drift`: one function a sort of row.

Takes: a policy's turns and its reference's, settings. Gives: rows. Leaves out: reading, writing, which hours and which reference
(`monitors.py`).
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import polars as pl

from signals import drift
from signals.config import MonitorsConfig
from signals.drift import Floats, Ints
from signals.drift_compare import Comparison, Observations, compare, design_effect, ratio, stratum_means, variance_of_mean
from signals.monitors_facts import TRUTH
from signals.monitors_metrics import INPUTS, METRICS, Input, Metric, parts, strata

Row = Mapping[str, Any]
"""One row of the table `drift`."""

LOOKS_A_DAY: Final = 24
EXPLAINED: Final = 0.5
"""A change is traffic's when the mix explains at least this share of it."""
WHOLE_DAY: Final = timedelta(hours=20)
"""Both sides have to span this much before a different time of day is more than the clock's doing."""
MIN_HOUR: Final = 5
"""Observations below which an hour is no point of a CUSUM."""
CORRELATION_FLOOR: Final = 0.2
"""A smaller fall of the proxy-truth correlation is no alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What one look compares."""

    current: pl.DataFrame
    """Turns of the policy, prepared, in time order; all so far, or the window's when it is compared with its own past."""
    reference: pl.DataFrame
    """Turns of the reference; empty without one."""
    recent: pl.DataFrame
    """The policy's turns of the window, for the traffic's shape."""
    version: int
    reference_version: int | None
    """None without one; the policy's own version when it is compared with its past."""
    hour: datetime
    until: datetime

    @property
    def reference_over(self) -> bool:
        """Whether the reference had no turn in this hour: beside a canary it has."""
        newest = self.reference["started_at"].max()
        return self.reference_version == self.version or not isinstance(newest, datetime) or newest < self.hour

    @property
    def comparable(self) -> bool:
        """Whether both sides' rewards are of one reward version."""
        seen = [set(side["reward_version"].drop_nulls().unique().to_list()) for side in (self.current, self.reference)]
        return len(seen[0] | seen[1]) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coded:
    """Both sides with users and strata as codes that mean the same on both."""

    current: tuple[Ints, Ints]
    """unit, stratum."""
    reference: tuple[Ints, Ints]


def rows_of(pair: Pair, config: MonitorsConfig) -> list[Row]:
    """Return all rows of one look."""
    coded = _codes(pair, config)
    rows: list[Row] = []
    for metric in METRICS:
        sides = _observations(metric, pair, coded)
        rows += _mean_rows(metric, sides, pair, config)
        if metric.about == "reward":
            rows += [*_quantile_rows(metric, sides, pair), *_change_rows(metric, sides, pair, config)]
    rows += _correlation_rows(pair, config)
    for item in INPUTS:
        rows += _input_rows(item, pair, config)
    return rows


def _row(pair: Pair, metric: str, *, about: str, kind: str, **values: Any) -> Row:
    empty = dict.fromkeys(("value", "reference", "expected", "effect", "low", "high", "p", "cause", "reason"))
    fixed = {
        "window_start": pair.hour, "window_end": pair.until, "policy_version": pair.version, "reference_version": pair.reference_version,
        "metric": metric, "about": about, "kind": kind, "n": 0, "m": 0, "users": 0, "alarm": False,
    }  # fmt: skip
    return {**empty, **fixed, **values}


def _codes(pair: Pair, config: MonitorsConfig) -> _Coded:
    """Code users and strata; sessions stand for users where either side has too few of them."""
    n_users = min(side["user_key"].n_unique() for side in (pair.current, pair.reference) if len(side))
    unit = "user_key" if n_users >= config.min_users else "session_id"
    chars = pair.reference["session_chars"].median() if len(pair.reference) else None
    long_from = float(chars) if isinstance(chars, int | float) else math.inf
    named = [(side[unit], strata(side, long_from=long_from)) for side in (pair.current, pair.reference)]
    split = len(pair.current)
    units, kinds = (pl.concat([named[0][i].rename("code"), named[1][i].rename("code")]) for i in (0, 1))
    codes = [series.rank("dense").to_numpy().astype(np.int64) - 1 for series in (units, kinds)]
    return _Coded(current=(codes[0][:split], codes[1][:split]), reference=(codes[0][split:], codes[1][split:]))


def _observations(metric: Metric, pair: Pair, coded: _Coded) -> tuple[Observations, Observations]:
    made: list[Observations] = []
    for turns, (unit, stratum) in ((pair.current, coded.current), (pair.reference, coded.reference)):
        top, bottom = parts(metric, turns)
        made.append(Observations(numerator=top, denominator=bottom, unit=unit, stratum=stratum))
    return made[0], made[1]


def _interval(seen: Observations, pair: Pair, metric: str, draws: int) -> tuple[float | None, float | None]:
    """Return the bootstrap interval by user of a ratio; None with one user."""
    _, codes = np.unique(seen.unit, return_inverse=True)
    sums = np.stack([np.bincount(codes, weights=seen.numerator), np.bincount(codes, weights=seen.denominator)], axis=1)
    if len(sums) < 2:
        return None, None
    rng = np.random.default_rng([int(pair.hour.timestamp()), pair.version, zlib.crc32(metric.encode())])

    def means(drawn: Floats) -> Floats:
        return np.divide(drawn[:, 0], drawn[:, 1], out=np.full(len(drawn), np.nan), where=drawn[:, 1] > 0)

    low, high = drift.bootstrap_by_user(sums.astype(np.float64), means, rng=rng, draws=draws)
    return (None, None) if math.isnan(low) else (low, high)


def _mean_rows(metric: Metric, sides: tuple[Observations, Observations], pair: Pair, config: MonitorsConfig) -> Iterator[Row]:
    current, reference = (side.counted() for side in sides)
    if not len(current):
        return
    low, high = _interval(current, pair, metric.name, config.bootstrap_draws)
    known = {
        "n": len(current), "m": len(reference), "users": len(np.unique(current.unit)), "value": ratio(current), "low": low, "high": high,
        "reference": ratio(reference) if len(reference) else None,
    }  # fmt: skip
    if pair.reference_version is None:
        yield _row(pair, metric.name, about=metric.about, kind="mean", **known, reason="no policy to compare with yet")
    elif metric.about == "reward" and not pair.comparable:
        why = "the reference's rewards are of another reward version; make them alike: tidegate signals run --once --everything"
        yield _row(pair, metric.name, about=metric.about, kind="mean", **known, reason=why)
    elif min(len(current), len(reference)) < config.min_n:
        why = f"too little to compare: n {len(current)}, reference {len(reference)}, needed {config.min_n} each"
        yield _row(pair, metric.name, about=metric.about, kind="mean", **known, reason=why)
    else:
        found = compare(
            current, reference, alpha=config.alpha / 2, tight_at=config.tight_at, reference_over=pair.reference_over
        )  # fmt: skip
        cause, p, reason = judge(metric, found, config, same_policy=pair.reference_version == pair.version)
        effect = (found.value - found.expected) / found.sd if found.sd > 0 else 0.0
        yield _row(
            pair, metric.name, about=metric.about, kind="mean", alarm=cause is not None, cause=cause, p=p, effect=effect,
            **known | {"expected": found.expected}, reason=reason,
        )  # fmt: skip


def judge(metric: Metric, found: Comparison, config: MonitorsConfig, *, same_policy: bool) -> tuple[str | None, float, str]:
    """Decide whether a figure alarms and whose doing it is.

    Half of alpha goes to the comparison on the same traffic and half to the plain one. A change has to be in the harmful direction and
    at least `min_effect_sd` large (`min_neutral_effect_sd` for a metric without one).

    Returns:
        "policy", "traffic" or None; the p-value of the comparison that decided; a sentence.
    """

    def beyond(change: float, p: float) -> bool:
        harmful = metric.harm == 0 or change * metric.harm > 0
        least = config.min_effect_sd if metric.harm else config.min_neutral_effect_sd
        return harmful and p <= config.alpha / 2 and found.sd > 0 and abs(change) / found.sd >= least

    own, plain = found.value - found.expected, found.value - found.reference
    outside = same_policy or metric.outside
    if beyond(own, found.p):
        why = "changed, and the mix of traffic does not explain it"
        around = "the policy is the same, so something around it did" if same_policy else "this is never the policy's doing"
        return ("traffic", found.p, f"{why}; {around}") if outside else ("policy", found.p, why)
    if beyond(plain, found.p_plain):
        explained = found.expected - found.reference
        if explained / plain >= EXPLAINED:
            return "traffic", found.p_plain, f"changed; the mix of traffic explains {min(explained / plain, 1.0):.0%} of it"
        if outside or found.shared < 1 - EXPLAINED:
            return "traffic", found.p_plain, f"changed; the reference knows only {found.shared:.0%} of this kind of traffic"
        return "policy", found.p_plain, "changed; the mix of traffic explains less than half of it"
    return None, found.p, "no harmful change beyond its limits"


def _quantile_rows(metric: Metric, sides: tuple[Observations, Observations], pair: Pair) -> Iterator[Row]:
    current, reference = (side.counted() for side in sides)
    if not len(current):
        return
    own = drift.quantiles(current.numerator)
    other = drift.quantiles(reference.numerator) if len(reference) else np.full(len(own), np.nan)
    spread = float(np.std(reference.numerator)) if len(reference) else 0.0
    for at, value, before in zip(drift.QUANTILES, own.tolist(), other.tolist(), strict=True):
        known = not math.isnan(before)
        yield _row(
            pair, metric.name, about=metric.about, kind=f"q{round(at * 100):02d}", value=value, reference=before if known else None,
            effect=(value - before) / spread if known and spread > 0 else None, n=len(current), m=len(reference),
            users=len(np.unique(current.unit)),
        )  # fmt: skip


def _sd_by_unit(seen: Observations) -> float:
    """Return the standard deviation of one observation that makes the mean's variance right for users (design effect included)."""
    influence = (seen.numerator - ratio(seen) * seen.denominator) / seen.denominator.sum()
    return math.sqrt(variance_of_mean(influence, seen.unit) * len(seen))


def _change_rows(metric: Metric, sides: tuple[Observations, Observations], pair: Pair, config: MonitorsConfig) -> Iterator[Row]:
    current, reference = (side.counted() for side in sides)
    if len(current) < config.min_n or (sigma := _sd_by_unit(current)) <= 0:
        return
    threshold = drift.page_hinkley_threshold(len(current), alpha=config.alpha)
    within = drift.page_hinkley(current.numerator, sigma=sigma, threshold=threshold)
    fell = within.fell_at is not None
    common = {"about": metric.about, "n": len(current), "m": len(reference), "users": len(np.unique(current.unit))}
    why = f"fell after turn {within.fell_at} of its life, and the policy is the same" if fell else "no fall inside the policy's life"
    yield _row(
        pair, metric.name, kind="page_hinkley", value=within.down, reference=threshold, effect=within.down, alarm=fell,
        cause="traffic" if fell else None, reason=why, **common,
    )  # fmt: skip
    if len(reference) < config.min_n or pair.reference_version == pair.version or not pair.comparable:
        return
    scores, slack = _hourly_scores(sides, pair)
    if len(scores) < 2:
        return
    lasting = drift.cusum(scores, slack=slack)
    low = lasting.fell_at is not None
    why = f"below the reference for hours, since its hour {lasting.fell_at}" if low else f"{len(scores)} hours, no lasting fall"
    yield _row(
        pair, metric.name, kind="cusum", value=lasting.down, reference=drift.CUSUM_H, effect=lasting.down, alarm=low,
        cause="policy" if low else None, reason=why, **common,
    )  # fmt: skip


def _hourly_scores(sides: tuple[Observations, Observations], pair: Pair) -> tuple[Floats, Floats]:
    """Return the standardised mean residual of each hour with enough turns, and the slack that the reference's own error asks for.

    Slack is k + 2 sqrt(n_hour / m): the reference's mean is off by up to 2 sigma / sqrt(m), in every hour the same way.
    """
    current, reference = sides[0], sides[1].counted()
    means, _ = stratum_means(reference, int(max(current.stratum.max(), reference.stratum.max())) + 1)
    sigma = _sd_by_unit(reference)
    counted = current.denominator > 0
    residual = (current.numerator - means[current.stratum] * current.denominator)[counted]
    hours = pair.current.filter(pl.Series(counted)).select(pl.col("started_at").dt.truncate("1h")).to_series()
    sums = (
        pl.DataFrame({"hour": hours, "residual": residual})
        .group_by("hour")
        .agg(pl.col("residual").mean(), pl.len().alias("n"))
        .sort("hour")
    )
    enough = sums.filter(pl.col("n") >= MIN_HOUR)
    n = enough["n"].to_numpy().astype(np.float64)
    if sigma <= 0:
        return np.zeros(0), np.zeros(0)
    return enough["residual"].to_numpy() * np.sqrt(n) / sigma, drift.CUSUM_K + 2 * np.sqrt(n / len(reference))


def _correlation_rows(pair: Pair, config: MonitorsConfig) -> Iterator[Row]:
    """Compare how well the reward agrees with what people showed later: late survival where measured, else an evaluation."""

    truth = pl.coalesce(*[2 * pl.col(name) - 1 for name in TRUTH[:-1]], TRUTH[-1])  # one scale, [-1, 1]

    def both(turns: pl.DataFrame) -> pl.DataFrame:
        return turns.select("user_key", "reward", truth=truth).drop_nulls()

    current, reference = both(pair.current), both(pair.reference)
    value = drift.correlation(current["reward"].to_numpy(), current["truth"].to_numpy())
    if value is None:
        return
    other = drift.correlation(reference["reward"].to_numpy(), reference["truth"].to_numpy())
    users = current["user_key"].n_unique()
    known = {"n": len(current), "m": len(reference), "users": users, "value": value, "reference": other}
    if other is None or min(len(current), len(reference)) < config.min_n:
        yield _row(pair, "proxy_truth", about="truth", kind="correlation", **known, reason="too little to compare")
        return
    p = drift.fisher_z_p(value, len(current), second=other, m=len(reference))
    fell = other - value >= CORRELATION_FLOOR and p <= config.alpha / LOOKS_A_DAY
    why = "the reward agrees less with what people showed later" if fell else "no fall beyond its limits"
    yield _row(
        pair, "proxy_truth", about="truth", kind="correlation", **known, expected=other, effect=value - other, p=p, alarm=fell,
        cause="policy" if fell and pair.reference_version != pair.version else "traffic" if fell else None, reason=why,
    )  # fmt: skip


def _input_rows(item: Input, pair: Pair, config: MonitorsConfig) -> Iterator[Row]:
    """Compare the shape of one property of the traffic, over the sessions that began in the window."""
    current, reference = (
        side.filter(pl.col("opens") & pl.col(item.column).is_not_null()) for side in (pair.recent, pair.reference)
    )  # fmt: skip
    common = {"about": "traffic", "n": len(current), "m": len(reference), "users": current["user_key"].n_unique()}
    if min(len(current), len(reference)) < config.min_n:
        return
    now, then = (side[item.column] for side in (current, reference))
    sizes = [_effective(side[item.column], side["user_key"], numeric=item.numeric) for side in (current, reference)]
    alpha = config.alpha / LOOKS_A_DAY
    clock = item.name == "hour_band" and min(_span(current), _span(reference)) < WHOLE_DAY
    counts = (
        drift.decile_counts(then.to_numpy(), now.to_numpy()) if item.numeric else drift.category_counts(then.to_list(), now.to_list())
    )  # fmt: skip
    stable, bins = drift.psi(*counts), len(counts[0])
    limit = max(drift.psi_cut(sizes[0], sizes[1], bins=bins, alpha=alpha), drift.PSI_FLOOR)
    alarm = stable > limit and not clock
    yield _shape(
        pair, item.name, kind="psi", value=stable, limit=limit, alarm=alarm, p=drift.psi_p(stable, *sizes, bins=bins), **common
    ) | ({"reason": "the two served at different times of day"} if clock else {})
    if item.numeric:
        before, after = then.to_numpy(), now.to_numpy()
        distance = drift.ks(before, after)
        cut = drift.ks_cut(sizes[0], sizes[1], alpha=alpha)
        p, limit = drift.ks_p(distance, *sizes), max(cut, drift.KS_FLOOR)
        yield _shape(pair, item.name, kind="ks", value=distance, limit=limit, alarm=distance > limit, p=p, **common)
        moved = drift.wasserstein_by_iqr(before, after)
        far = moved >= drift.WASSERSTEIN_FLOOR and distance > cut
        yield _shape(pair, item.name, kind="wasserstein", value=moved, limit=drift.WASSERSTEIN_FLOOR, alarm=far, p=p, **common)


def _shape(pair: Pair, metric: str, *, kind: str, value: float, limit: float, alarm: bool, p: float, **common: Any) -> dict[str, Any]:
    reason = "users ask for other things than before" if alarm else "no change beyond its limits"
    finite = {"value": value if math.isfinite(value) else None, "effect": value if math.isfinite(value) else None}
    limited = limit if math.isfinite(limit) else None
    cause = "traffic" if alarm else None
    return {**_row(pair, metric, kind=kind, reference=limited, p=p, alarm=alarm, cause=cause, reason=reason, **finite, **common)}


def _span(turns: pl.DataFrame) -> timedelta:
    return turns["started_at"].max() - turns["started_at"].min()  # type: ignore[operator, return-value]


def _effective(values: pl.Series, users: pl.Series, *, numeric: bool) -> float:
    """Return how many independent observations the values are worth: their number over the design effect of users.

    For categories the design effects of the indicators are averaged by variance, as in the first-order Rao-Scott correction
    (Rao, Scott, "The analysis of categorical data from complex sample surveys", 1981).
    """
    unit = users.rank("dense").to_numpy().astype(np.int64)
    if numeric:
        return len(values) / design_effect(drift.ranks(values.to_numpy().astype(np.float64)), unit)
    effects: list[tuple[float, float]] = []
    for name in values.unique().to_list():
        found = (values == name).to_numpy().astype(np.float64)
        effects.append((design_effect(found, unit), float(found.var())))
    weight = sum(variance for _, variance in effects)
    return len(values) / (sum(effect * variance for effect, variance in effects) / weight if weight > 0 else 1.0)
