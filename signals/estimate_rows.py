"""What is said of each policy from the lake's turns: rates that allow for late, missing and misread outcomes and for busy users.

Takes: rows of turns with their rewards (dicts), now. Gives: one record a policy version. Leaves out: reading the lake and printing
(`estimate_commands.py`), the estimators (`estimates.py`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from signals import estimates
from signals.estimates import DelayCdf, Delayed, Imputed, Interval

USER_CAP: Final = 50.0
"""Turns that one user counts for at most in what is said of a policy."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One policy version."""

    policy_version: int | None
    turns: int
    users: int
    scored_share: float
    """Turns with a reward among finished ones: a policy that moves turns out of sight is gaming the reward."""
    reward: Interval
    """Mean reward of scored turns, users capped."""
    kept: Interval
    """Mean kept share of edits over eligible or edited turns; an eligible turn without a judged edit is imputed, users capped."""
    kept_imputed: Imputed
    followed_up: Delayed
    dissatisfied: float
    """Share of follow-ups that the classifier calls dissatisfied; NaN without one."""
    dissatisfied_corrected: float
    """The same, corrected for the classifier's errors."""
    follow_ups: int
    asked: float
    """Turns that ended in a question."""
    deferred: float
    """Eligible turns answered without an edit; NaN without an eligible turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How the follow-up classifier reads: its threshold and its errors."""

    threshold: float
    tpr: float
    fpr: float


def delays(rows: Rows, *, window_s: int, now_ms: int) -> DelayCdf:
    """Return how long next messages took, from turns old enough for any to have come inside the window."""
    old = [row for row in rows if now_ms - row["ended_at_ms"] >= 2 * window_s * 1000]
    return estimates.delay_cdf([row["replied_after_ms"] for row in old if row["replied_after_ms"] is not None])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _kept(rows: Rows, everyone: Rows) -> tuple[list[float], list[str], Imputed]:
    """Return the kept share of each turn where edits count, imputed by bucket without the own user where it was not observed.

    m is the bucket's mean over other users' turns of all policies, and e this policy's share of judged turns in the bucket.
    """
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    own: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in everyone:
        if row["edits_kept"] is not None:
            share = (row["edits_kept"] + 1.0) / 2.0
            for entry in (sums[row["task_bucket"] or ""], own[row["task_bucket"] or "", row["user_key"]]):
                entry[0] += share
                entry[1] += 1.0
    counted = [row for row in rows if row["edits"] > 0 or row["eligible"]]
    seen: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in counted:
        entry = seen[row["task_bucket"] or ""]
        entry[0] += row["edits_kept"] is not None
        entry[1] += 1.0
    overall = _mean([(row["edits_kept"] + 1.0) / 2.0 for row in everyone if row["edits_kept"] is not None])
    expected: list[float] = []
    for row in counted:
        bucket = row["task_bucket"] or ""
        total, number = (sums[bucket][at] - own[bucket, row["user_key"]][at] for at in (0, 1))
        fallback = 0.5 if math.isnan(overall) else overall
        expected.append(total / number if number > 0 else fallback)
    rewards = [None if row["edits_kept"] is None else (row["edits_kept"] + 1.0) / 2.0 for row in counted]
    # A deferred turn kept nothing: that is known, not missing.
    rewards = [0.0 if row["deferred"] else reward for row, reward in zip(counted, rewards, strict=True)]
    known = [1.0 if row["deferred"] else seen[row["task_bucket"] or ""][0] / seen[row["task_bucket"] or ""][1] for row in counted]
    values = estimates.imputed_values(rewards, expected, known)
    return list(map(float, values)), [row["user_key"] for row in counted], estimates.impute(rewards, expected, known)


def _policy(version: int | None, rows: Rows, everyone: Rows, reader: Reader, cdf: DelayCdf, *, now_ms: int, seed: int) -> Rates:
    rng = np.random.default_rng([seed, 0 if version is None else version + 1])
    finished = [row for row in rows if row["final"]]
    scored = [row for row in finished if row["reward"] is not None]
    judged = [float(row["dissatisfied"] >= reader.threshold) for row in rows if row["dissatisfied"] is not None]
    raw = _mean(judged)
    eligible = [row for row in rows if row["eligible"]]
    values, users, imputed = _kept(finished, everyone)
    owners = [row["user_key"] for row in scored]
    return Rates(
        policy_version=version, turns=len(rows), users=len({row["user_key"] for row in rows}),
        scored_share=len(scored) / len(finished) if finished else math.nan,
        reward=estimates.by_user(
            [row["reward"] for row in scored], owners, weights=list(estimates.user_weights(owners, cap=USER_CAP)), rng=rng
        ),
        kept=estimates.by_user(values, users, weights=list(estimates.user_weights(users, cap=USER_CAP)), rng=rng),
        kept_imputed=imputed,
        followed_up=estimates.delayed_rate(
            [row["followed_up"] for row in rows], [max(0.0, now_ms - row["ended_at_ms"]) for row in rows], cdf
        ),
        dissatisfied=raw,
        dissatisfied_corrected=math.nan if math.isnan(raw) else estimates.corrected_rate(raw, tpr=reader.tpr, fpr=reader.fpr),
        follow_ups=len(judged), asked=_mean([float(row["asked"]) for row in rows]),
        deferred=_mean([float(row["deferred"]) for row in eligible]),
    )  # fmt: skip


def rates(rows: Rows, reader: Reader, *, window_s: int, now_ms: int, seed: int = 0) -> list[Rates]:
    """Return one record a policy version, ascending, foreign policies first.

    Args:
        rows: Turns with policy_version, user_key, task_bucket, final, ended_at_ms, reward, edits, edits_kept, dissatisfied, followed_up,
            replied_after_ms, asked, eligible, deferred.
        reader: The follow-up classifier.
        window_s: The reward window.
        now_ms: Ages are counted to it.
        seed: Of the bootstrap.
    """
    grouped: defaultdict[int | None, list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["session_id"], row["turn_id"])):
        grouped[row["policy_version"]].append(row)
    everyone = [row for own in grouped.values() for row in own if row["final"]]
    cdf = delays(rows, window_s=window_s, now_ms=now_ms)
    ordered = sorted(grouped.items(), key=lambda item: -1 if item[0] is None else item[0])
    return [_policy(version, own, everyone, reader, cdf, now_ms=now_ms, seed=seed) for version, own in ordered]
