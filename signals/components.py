"""The nine reward components: what evidence says about a turn, each a number in [-1, 1] or absent.

Absent means that nothing was observed for it; it is never 0. Takes: `Evidence` of one turn. Gives: components by name.
Leaves out: their weights and their sum (`rewards.py`), which turn evidence belongs to (`credit.py`, `sessions.py`), whether it has matured
(`maturity.py`), and the same rules as columns (`component_columns.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from signals import followups
from signals.config import RewardsConfig
from signals.judge import mixed
from signals.norms import NO_NORMS, Norms
from signals.samples import COMPONENTS

SEVERITY: Final = ("accepted", "partly", "rejected", "undone")
"""Decisions from best to worst; of two at the same instant the worse one counts."""
PARTLY_KEPT: Final = 0.5
"""Kept share of an edit that was partly accepted and never measured: we know no better."""
PASSED: Final = ("pass", "passed", "correct", "good", "relevant", "true", "yes", "positive", "helpful", "safe")
FAILED: Final = ("fail", "failed", "incorrect", "bad", "irrelevant", "false", "no", "negative", "unhelpful", "unsafe")
"""Labels of external evaluations that mean 1 and -1, whatever their case."""


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
    verdict: float | None = None
    """The judge's frozen verdict, in (0, 1); None without one."""
    share: float = 0.0
    """How much the verdict counts (`judge.mixed`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The last lint delta and the last test run of a turn; each figure None when there was none."""

    issues_before: int | None = None
    issues_after: int | None = None
    rules_checked: int | None = None
    rules_broken: int | None = None
    passed_before: int | None = None
    failed_before: int | None = None
    passed_after: int | None = None
    failed_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that the reward of one turn looks at."""

    user_key: str = ""
    surface: str | None = None
    language: str | None = None
    task_bucket: str | None = None
    edits: tuple[Edit, ...] = ()
    """Edits that the turn proposed."""
    edits_observed: bool = False
    """Whether the client records every change, so that a turn without an edit made none."""
    edit_expected: float | None = None
    """P(the user asked for a change), from the prompt alone; None when not read."""
    follow_up: FollowUp | None = None
    followed_up: bool = False
    """Whether a user message came next inside the window, with or without text."""
    final: bool = True
    """Whether the window has closed."""
    completions: int = 1
    response_tokens: int = 0
    sampling_ms: float | None = None
    """Time spent sampling in the turn; None when unknown."""
    calls: int = 0
    invalid_calls: int = 0
    repeats: int = 0
    """Valid calls that repeat an earlier one of the turn with nothing changed in between."""
    serial_calls: int = 0
    """Valid look-ups in a later completion that could have gone out in parallel."""
    claims: int = 0
    """Files that the replies speak of."""
    claims_unread: int = 0
    checks: Checks = Checks()
    said: float | None = None
    """What was said about the turn in its window, in [-1, 1]: mean of the last feedback and the last evaluation; None without."""
    shared: tuple[tuple[float, float], ...] = ()
    """What was said about the session as a whole: this turn's share in (0, 1], and the score in [-1, 1]."""


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


def exact(value: float) -> int:
    """Return a value in whole billionths: sums of these have no order, so that no order of arrival can change a bit of them."""
    return math.floor(value * 1e9 + 0.5)


def edits_kept(edits: Sequence[Edit]) -> float | None:
    """Return 2 sum(w k) / sum(w) - 1 over judged edits, in [-1, 1]; None when none is judged.

    A ratio and not characters kept, which would favour many trivial edits.
    Source: events edit_proposed, edit_decided, edit_survival (`survival_no_revert` as defined in `pipelines.survival`).
    """
    judged = [(edit_weight(edit.chars_added), share) for edit in edits if (share := kept_share(edit)) is not None]
    total = sum(exact(weight) for weight, _ in judged)
    return 2.0 * (sum(exact(weight * share) for weight, share in judged) / total) - 1.0 if total else None


def dissatisfied(follow_up: FollowUp | None) -> float | None:
    """Return P(dissatisfied) of the next user message, in (0, 1), joined with the judge's verdict where there is one; None without one."""
    p = classified(follow_up)
    if p is None or follow_up is None or follow_up.verdict is None:
        return p
    return mixed(p, follow_up.verdict, follow_up.share)


@lru_cache(maxsize=256)
def classified(follow_up: FollowUp | None) -> float | None:
    """Return the classifier's P(dissatisfied) alone. Remembered for a while: it embeds two texts."""
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
    """Return -tanh(log(sampling_ms / median_ms)), in (-1, 1); None when either is unknown or the duration is not positive.

    Only time spent sampling: a slow tool is not the policy's doing. Source: completion.duration_ms.
    """
    if sampling_ms is None or sampling_ms <= 0 or median_ms is None:
        return None
    return -math.tanh(math.log(sampling_ms / median_ms))


def tool_calls(evidence: Evidence, config: RewardsConfig) -> float | None:
    """Return -min(1, invalid + repeat_cost repeats + serial_cost serial), in [-1, 0]; None when no call was made.

    Always present when a call was made, however broken: a call that dropped out of sight could not be punished. Calls that went out in
    parallel cost nothing. Source: events tool_call and tool_result.
    """
    if evidence.calls == 0:
        return None
    cost = evidence.invalid_calls + config.repeat_cost * evidence.repeats + config.serial_cost * evidence.serial_calls
    return 0.0 - min(1.0, cost)


def effort(evidence: Evidence, config: RewardsConfig) -> float | None:
    """Return -(1 - (1 + k x)^(1 - q)), in (-1, 0]; None when nothing was sampled.

    x = thousands of response tokens + calls + completions, each weighted. This is k (q - 1) times the published cost
    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), whose limit for q > 1 is 1 / (k (q - 1)): the same curve on the scale of a component.

    Source: Cursor, "Composer 2 Technical Report", length penalty; events completion and tool_call.
    """
    if evidence.completions == 0:
        return None
    x = config.effort_per_1k_tokens * (evidence.response_tokens / 1000.0)
    x = x + config.effort_per_call * evidence.calls + config.effort_per_completion * evidence.completions
    return math.pow(1.0 + config.effort_k * x, 1.0 - config.effort_q) - 1.0


def conventions(checks: Checks, config: RewardsConfig) -> float | None:
    """Return the mean of three parts that were checked, in [-1, 1]; None when none was.

    Lint: -tanh((issues after - before) / lint_scale). Tests: 1 - 2 bad / all, where tests that were there before and are gone count as
    bad, so that deleting a failing test gains nothing. Project rules: 1 - 2 broken / checked.
    Source: the turn's last lint_delta and test_run events.
    """
    parts: list[float] = []
    if checks.issues_before is not None and checks.issues_after is not None:
        parts.append(-math.tanh((checks.issues_after - checks.issues_before) / config.lint_scale))
    if checks.passed_after is not None and checks.failed_after is not None:
        before = (checks.passed_before or 0) + (checks.failed_before or 0)
        total = max(before, checks.passed_after + checks.failed_after)
        if total > 0:
            parts.append(1.0 - 2.0 * ((total - checks.passed_after) / total))
    if checks.rules_checked:
        parts.append(1.0 - 2.0 * (min(checks.rules_broken or 0, checks.rules_checked) / checks.rules_checked))
    total_parts = 0.0
    for part in parts:
        total_parts = total_parts + part
    return total_parts / len(parts) if parts else None


def unread_claims(claims: int, claims_unread: int) -> float | None:
    """Return -unread / claims, in [-1, 0]; None when the replies speak of no file.

    A claim about a file with a read or a search behind it costs nothing. Source: completion.claims and claims_unread.
    """
    return 0.0 - min(claims_unread, claims) / claims if claims > 0 else None


def evaluation_score(value: float | None, label: str | None) -> float | None:
    """Return an external evaluation on [-1, 1]: 1 or -1 by its label, else 2 value - 1; None when neither can be read.

    A value outside [0, 1] has a scale that only its maker knows, and is not used.
    """
    name = (label or "").strip(" ").lower()
    if name in PASSED:
        return 1.0
    if name in FAILED:
        return -1.0
    return 2.0 * value - 1.0 if value is not None and 0.0 <= value <= 1.0 else None


def explicit(evidence: Evidence) -> tuple[float, float] | None:
    """Return what people and evaluators said, in [-1, 1], and for how much it counts; None when nobody said anything.

    What was said about the turn counts once, what was said about the session counts by the turn's share of it (`credit.shares`).
    Source: events feedback and evaluation inside the window.
    """
    mass, value = (0.0, 0.0) if evidence.said is None else (1.0, evidence.said)
    for share, score in evidence.shared:
        mass, value = mass + share, value + share * score
    return (max(-1.0, min(1.0, value / mass)), mass) if mass > 0 else None


def is_eligible(evidence: Evidence, config: RewardsConfig) -> bool:
    """Return whether an edit was to be expected: from the prompt alone, and where edits would have been seen."""
    return evidence.edits_observed and evidence.edit_expected is not None and evidence.edit_expected >= config.edit_expected_from


def is_deferred(evidence: Evidence, config: RewardsConfig) -> bool:
    """Return whether the policy answered an eligible turn without an edit. Whether it asked, refused or just said that it was done makes
    no difference: a rule about question marks would be escaped by leaving them out."""
    return is_eligible(evidence, config) and not evidence.edits and evidence.completions > 0


def deferral(evidence: Evidence, config: RewardsConfig, norms: Norms = NO_NORMS) -> float | None:
    """Return the charge of a turn that put off the edit it was asked for, in [-1, 0]; None elsewhere and while it is open.

    -max(expected kept share of the bucket, estimated without the own user; defer_cost): asking is dear where edits are usually kept and
    nearly free where they are not. If nobody came back inside the window: the tenth percentile of the stratum, if that is worse.
    What the next turn earns is not added here: the trainer's discounted return does that, `R = gamma R_next - c_defer`, and adding it
    twice would make asking first worth 1.7 where editing is worth 1.
    Source: turn_started.edit_expected, session_started.edits_observed, edit_proposed.
    """
    if not is_deferred(evidence, config) or not (evidence.final or evidence.followed_up):
        return None
    kept = norms.expected_kept(evidence.task_bucket, without=evidence.user_key)
    charge = -max(config.expected_kept if kept is None else kept, config.defer_cost)
    if evidence.followed_up:
        return charge
    low = norms.abandoned(evidence.surface, evidence.language, evidence.task_bucket)
    return min(charge, config.abandoned if low is None else low)


def components(evidence: Evidence, config: RewardsConfig, norms: Norms = NO_NORMS) -> dict[str, float]:
    """Return the present components of a turn, in the order of COMPONENTS."""
    p = dissatisfied(evidence.follow_up)
    said = explicit(evidence)
    values: Mapping[str, float | None] = {
        "edits_kept": edits_kept(evidence.edits),
        "follow_up": None if p is None else 1.0 - 2.0 * p,
        "latency": latency(evidence.sampling_ms, norms.median_ms(evidence.task_bucket, config)),
        "tool_calls": tool_calls(evidence, config),
        "effort": effort(evidence, config),
        "conventions": conventions(evidence.checks, config),
        "evidence": unread_claims(evidence.claims, evidence.claims_unread),
        "explicit": None if said is None else said[0],
        "deferral": deferral(evidence, config, norms),
    }
    return {name: value for name in COMPONENTS if (value := values[name]) is not None}
