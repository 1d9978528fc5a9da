"""What evidence says about a turn, as numbers: components in [-1, 1] and their weighted mean.

Every component is absent when nothing was observed for it; an absent component is never 0. Three rules keep the mean honest:
- `latency` alone is no evidence: a fast turn that nobody reacted to is not a good turn.
- `tool_calls` is 0 or negative. A 0 is stored but stays out of the mean, or a spurious valid call would halve a bad reward.
- One invalid call is evidence enough: a turn cannot escape a bad reward by leaving `scored`.

Takes: `TurnFacts`. Gives: components, the scalar and `reward_version`. Leaves out: which turn evidence belongs to (`credit.py`),
whether it has matured and what may be trained on (`outcomes.py`), and the same rules as columns (`transforms.py`).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from signals import followups
from signals.config import RewardsConfig
from signals.samples import COMPONENTS

RULES: Final = 1
"""Raise it when a rule below changes, so that the reward version changes with it."""
SEVERITY: Final = ("accepted", "partly", "rejected", "undone")
"""Decisions from best to worst; of two at the same instant the worse one counts."""
PARTLY_KEPT: Final = 0.5
"""Kept share of an edit that was partly accepted and never measured: we know no better."""
ANY_BUCKET: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit and what became of it inside its turn's window."""

    edit_id: str
    chars_added: int
    decision: str | None
    """The last decision, one of SEVERITY; None when there was none."""
    survival: float | None
    """Share not taken back at the last horizon measured, in [0, 1]; None when not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The next user message of the session, with text."""

    message: str
    previous: str | None
    """The judged turn's own user message; None when its text was not kept."""
    stack_traces: int
    reply_delay_ms: int | None
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that the reward of one turn looks at."""

    edits: tuple[Edit, ...] = ()
    follow_up: FollowUp | None = None
    sampling_ms: float | None = None
    """Time spent sampling in the turn; None when unknown."""
    task_bucket: str | None = None
    calls: int = 0
    invalid_calls: int = 0


def kept_share(edit: Edit) -> float | None:
    """Return how much of an edit counts as kept, in [0, 1]; None without evidence.

    Rejected or undone is 0 whatever survived; else the measured survival; an acceptance nobody measured counts at horizon 0.
    """
    if edit.decision in ("rejected", "undone"):
        return 0.0
    if edit.survival is not None:
        return edit.survival
    return {"accepted": 1.0, "partly": PARTLY_KEPT}.get(edit.decision or "")


def edit_weight(chars_added: int) -> float:
    """Return sqrt(max(chars_added, 1)): large edits matter more, splitting one edit into many gains little."""
    return math.sqrt(max(chars_added, 1))


def edits_kept(edits: Sequence[Edit]) -> float | None:
    """Return 2 sum(w k) / sum(w) - 1 over judged edits, in [-1, 1]; None when none is judged."""
    total = kept = 0.0
    for edit in sorted(edits, key=lambda item: item.edit_id):
        share = kept_share(edit)
        if share is not None:
            weight = edit_weight(edit.chars_added)
            total += weight
            kept += weight * share
    return 2.0 * (kept / total) - 1.0 if total else None


def dissatisfied(follow_up: FollowUp | None) -> float | None:
    """Return P(dissatisfied) of the next user message, in (0, 1); None without one."""
    if follow_up is None:
        return None
    return followups.dissatisfied(
        followups.features(
            follow_up.message,
            previous=follow_up.previous,
            stack_traces=follow_up.stack_traces,
            reply_delay_ms=follow_up.reply_delay_ms,
            interrupted=follow_up.interrupted,
        )
    )


def latency(sampling_ms: float | None, median_ms: float | None) -> float | None:
    """Return -tanh(log(sampling_ms / median_ms)), in (-1, 1); None when either is unknown or the duration is not positive."""
    if sampling_ms is None or sampling_ms <= 0 or median_ms is None:
        return None
    return -math.tanh(math.log(sampling_ms / median_ms))


def tool_calls(calls: int, invalid_calls: int) -> float | None:
    """Return -1 per invalid call, capped at -1; None when no call was made."""
    return -float(min(invalid_calls, 1)) if calls > 0 else None


def median_for(task_bucket: str | None, config: RewardsConfig) -> float | None:
    """Return the frozen median of a task bucket, or of any other, or None."""
    medians = config.latency_medians_ms
    return medians.get(task_bucket or ANY_BUCKET, medians.get(ANY_BUCKET))


def components(evidence: Evidence, config: RewardsConfig) -> dict[str, float]:
    """Return the present components of a turn, in the order of COMPONENTS."""
    p = dissatisfied(evidence.follow_up)
    values = {
        "edits_kept": edits_kept(evidence.edits),
        "follow_up": None if p is None else 1.0 - 2.0 * p,
        "latency": latency(evidence.sampling_ms, median_for(evidence.task_bucket, config)),
        "tool_calls": tool_calls(evidence.calls, evidence.invalid_calls),
    }
    return {name: value for name in COMPONENTS if (value := values[name]) is not None}


def is_evidence(present: Mapping[str, float]) -> bool:
    """Return whether these components say anything about the turn (see the module's rules)."""
    return "edits_kept" in present or "follow_up" in present or present.get("tool_calls", 0.0) < 0.0


def scalar(present: Mapping[str, float], config: RewardsConfig) -> float | None:
    """Return sum(w c) / sum(w) over present components, in [-1, 1]; None without evidence or where all weights are 0."""
    if not is_evidence(present):
        return None
    total = value = 0.0
    for name in COMPONENTS:
        if name not in present or (name == "tool_calls" and present[name] == 0.0):
            continue
        weight = config.weights.get(name, 0.0)
        total += weight
        value += weight * present[name]
    return value / total if total else None


def reward_version(config: RewardsConfig) -> str:
    """Return the digest of everything that decides a reward: rules, model, phrase lists, weights, window, medians."""
    parts = {
        "rules": RULES,
        "components": COMPONENTS,
        "partly_kept": PARTLY_KEPT,
        "follow_up": followups.version(),
        "config": config.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:12]
