"""How final each component is, and what turned out later (pure).

A component is `pending` while its turn's window is open. After that it is `observed` (its value rests on events inside the window),
`defaulted` (the window passed in full and nothing was seen: nobody wrote, nobody undid; where that means something it has a value) or
`censored` (the window was cut short, by the session's end or by feedback, so that what was not seen might still have come).

Truth is what became of the same edits later: at their commit, after a day, after a week, and what external evaluations said, whenever.
It changes the columns `truth_*` in a new version of the table, for gates and calibration. It never changes a reward that was trained on.

Takes: evidence and survival facts. Gives: states and truth. Leaves out: the same rules as columns (`judgement.py`, `edit_columns.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from signals.components import Edit, Evidence, edit_weight, exact, is_eligible
from signals.config import RewardsConfig
from signals.samples import COMPONENTS

DAY_S: Final = 86_400
WEEK_S: Final = 7 * DAY_S


class Maturity(StrEnum):
    """How final a component is."""

    PENDING = "pending"
    OBSERVED = "observed"
    DEFAULTED = "defaulted"
    CENSORED = "censored"


def states(present: Mapping[str, float], evidence: Evidence, config: RewardsConfig, *, closed_early: bool) -> dict[str, Maturity]:
    """Return the state of each component that the turn can have; others are not listed.

    Args:
        present: The turn's components.
        evidence: What they were made of.
        config: From when on an edit is expected.
        closed_early: Whether something closed the window before it had passed.
    """
    answered = evidence.completions > 0
    can_have = {
        "edits_kept": bool(evidence.edits),
        "follow_up": answered,
        "conventions": bool(evidence.edits),
        "explicit": answered,
        "deferral": answered and not evidence.edits and is_eligible(evidence, config),
    }
    found: dict[str, Maturity] = {}
    for name in COMPONENTS:
        if name not in present and not can_have.get(name, False):
            continue
        if not evidence.final:
            found[name] = Maturity.PENDING
        elif name in present:
            found[name] = Maturity.DEFAULTED if name == "deferral" and not evidence.followed_up else Maturity.OBSERVED
        else:
            found[name] = Maturity.CENSORED if closed_early else Maturity.DEFAULTED
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Shares of an edit, or of a turn's edits, that still stood later, in [0, 1]; None when not measured."""

    commit: float | None = None
    day: float | None = None
    week: float | None = None


def truth_of(survivals: Iterable[Mapping[str, Any]], last_decision: str | None) -> Truth:
    """Return what later became of one edit.

    The first measurement at or after a day (a week), the last one at a commit; of two at the same horizon the worse. An edit that was
    rejected or undone, whenever, stands for nothing where it was not measured.

    Args:
        survivals: Payloads of edit_survival whose branch had not changed.
        last_decision: The last decision about the edit, however late.
    """
    measured = [(item["horizon_s"], item["survival_no_revert"], item.get("milestone")) for item in survivals]
    gone = 0.0 if last_decision in ("rejected", "undone") else None
    day = min(((h, s) for h, s, _ in measured if DAY_S <= h < WEEK_S), default=None)
    week = min(((h, s) for h, s, _ in measured if h >= WEEK_S), default=None)
    commit = max(((h, -s) for h, s, milestone in measured if milestone == "commit"), default=None)
    return Truth(
        commit=gone if commit is None else -commit[1],
        day=gone if day is None else day[1],
        week=gone if week is None else week[1],
    )


def truth_of_turn(edits: Sequence[tuple[Edit, Truth]]) -> Truth:
    """Return the mean over a turn's edits that were measured, each weighed by the root of its size."""

    def mean(name: str) -> float | None:
        known = [(edit_weight(edit.chars_added), value) for edit, truth in edits if (value := getattr(truth, name)) is not None]
        total = sum(exact(weight) for weight, _ in known)
        return sum(exact(weight * value) for weight, value in known) / total if total else None

    return Truth(commit=mean("commit"), day=mean("day"), week=mean("week"))
