"""Which turns may be trained on, and if not, why: a reason from a closed set, never a silent drop.

Takes: facts about a turn's capture and consent. Gives: one reason or none. Leaves out: staleness, which only the trainer can
judge (it knows which policy is served), and the reward.
"""

from dataclasses import dataclass

NEEDS: tuple[str, ...] = ("no_consent", "quarantined_release", "capture_error", "no_token_ids", "truncated_sampling")
"""Reasons in the order in which they are given when several hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """How well a turn was recorded."""

    consent: str
    """Strictest consent seen in the turn."""
    policy_version: int | None
    without_ids: int = 0
    """Completions that lack token ids or log-probabilities."""
    broken: int = 0
    """Completions whose capture failed or whose arrays do not fit together."""
    truncated: int = 0
    """Completions sampled with top_p < 1 or top_k set: their log-probabilities are not those of the policy."""


def not_trainable(capture: Capture, tombstoned: frozenset[int]) -> str | None:
    """Return why a turn must not be trained on, or None.

    Args:
        capture: The turn.
        tombstoned: Policy versions whose release was rolled back; what they sampled is quarantined.
    """
    if capture.consent != "train":
        return "no_consent"
    if capture.policy_version is not None and capture.policy_version in tombstoned:
        return "quarantined_release"
    if capture.broken:
        return "capture_error"
    if capture.without_ids:
        return "no_token_ids"
    if capture.truncated:
        return "truncated_sampling"
    return None
