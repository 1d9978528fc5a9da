"""What became of a turn: exactly one outcome, with a reason where one is needed.

Order: our own failure first (the policy is not to blame), then what forbids training, then whether the window is still open,
then whether anything was observed. So every turn is counted once and nothing can be moved out of sight.

Takes: facts and whether there is evidence. Gives: an `Outcome` and a reason. Leaves out: the reward.
"""

from dataclasses import dataclass

from signals.filters import Capture, not_trainable
from signals.samples import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a turn went, apart from its evidence."""

    final: bool
    """Whether the window has closed."""
    completions: int
    provider_errors: int = 0
    """Tool results of class provider_error, and completions that finished with `error`."""
    stopped_by_system: bool = False
    stopped_by_user: bool = False


def infra_error(course: Course) -> str | None:
    """Return how our own machinery failed the turn, or None.

    A turn without a completion counts once its window has closed; before, the answer may still be on its way. If the user
    stopped it before an answer came, nobody failed.
    """
    if course.provider_errors:
        return "provider_error"
    if course.stopped_by_system:
        return "stopped_by_system"
    if course.completions == 0 and course.final and not course.stopped_by_user:
        return "no_completion"
    return None


def outcome(course: Course, capture: Capture, *, evident: bool, tombstoned: frozenset[int]) -> tuple[Outcome, str | None]:
    """Decide the one outcome of a turn.

    Args:
        course: How it went.
        capture: How well it was recorded.
        evident: Whether its components say anything (`rewards.is_evidence`).
        tombstoned: Policy versions whose release was rolled back.

    Returns:
        The outcome and its reason; None where the outcome says it all.
    """
    if (failure := infra_error(course)) is not None:
        return Outcome.INFRA_ERROR, failure
    if (reason := not_trainable(capture, tombstoned)) is not None:
        return Outcome.NOT_TRAINABLE, reason
    if not course.final:
        return Outcome.PENDING, None
    return (Outcome.SCORED if evident else Outcome.NO_EVIDENCE), None
