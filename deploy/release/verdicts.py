"""Verdicts: what a check says, how an estimate is held against a margin, and how checks add up (pure).

Three answers to a margin: the interval lies inside (PASS), wholly beyond (FAIL), or across, which is no evidence either way
(INCONCLUSIVE). No data is never PASS. Leaves out: which checks there are (`gates.py`) and how they look (`explain.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from deploy.release import stats
from deploy.release.evidence import all_finite

Group = Literal["A", "B", "C", "D", "H"]


class Verdict(StrEnum):
    """What a check or a gate says."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the verdict table."""

    name: str
    group: Group
    verdict: Verdict
    formula: str
    reason: str
    """One sentence for a person."""
    flip: str = ""
    """What would have turned the verdict."""
    estimate: float | None = None
    low: float | None = None
    """One-sided 95 % lower bound."""
    high: float | None = None
    margin: float | None = None
    n: int | None = None
    """Independent units; None for facts."""
    minimum_n: int | None = None
    design_effect: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A gate's answer with everything it rests on."""

    verdict: Verdict
    checks: tuple[Check, ...]

    @property
    def reasons(self) -> list[str]:
        """Why it is not a plain PASS: the reason of every check that is not."""
        return [f"{check.name}: {check.reason}" for check in self.checks if check.verdict is not Verdict.PASS]


def overall(checks: Sequence[Check], *, required: Iterable[str]) -> Verdict:
    """Return FAIL if any check fails, INCONCLUSIVE if any is open or a required one is missing, else PASS."""
    verdicts = {check.verdict for check in checks}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in verdicts or set(required) - {check.name for check in checks} or not checks:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


def fact(name: str, group: Group, *, formula: str, problem: str | None, good: str) -> Check:
    """Decide on a fact: FAIL with `problem`, PASS without one."""
    if problem is not None:
        return Check(name=name, group=group, verdict=Verdict.FAIL, formula=formula, reason=problem, flip="this fact")
    return Check(name=name, group=group, verdict=Verdict.PASS, formula=formula, reason=good, flip="the opposite fact")


def no_data(name: str, group: Group, *, formula: str, minimum_n: int | None, what: str) -> Check:
    """Say that there is nothing to decide on, which is never PASS."""
    return Check(
        name=name, group=group, verdict=Verdict.INCONCLUSIVE, formula=formula, reason=f"no data: {what}",
        flip="data", n=0, minimum_n=minimum_n
    )  # fmt: skip


def bounded(
    name: str,
    group: Group,
    estimate: stats.Estimate | None,
    *,
    formula: str,
    above: float | None,
    below: float | None,
    minimum_n: int,
    what: str,
) -> Check:
    """Decide whether an estimate stays below `above` and above `below` (either None: that side is free)."""
    if estimate is None:
        return no_data(name, group, formula=formula, minimum_n=minimum_n, what=what)
    e = estimate
    margin = above if above is not None else below
    if not all_finite((e.value, e.low, e.high)):
        verdict, reason, flip = Verdict.FAIL, "the figure is not a number", "finite figures"
        return Check(
            name=name, group=group, verdict=verdict, formula=formula, reason=reason, flip=flip, margin=margin, n=e.n, minimum_n=minimum_n
        )
    # How far the nearest bound is inside (positive) or outside its margin; and whether even the far bound is outside.
    rooms = [above - e.high] if above is not None else []
    rooms += [e.low - below] if below is not None else []
    room = min(rooms)
    beyond = (above is not None and e.low > above) or (below is not None and e.high < below)
    if beyond:
        verdict, reason = Verdict.FAIL, f"{what} {e.value:+.4f}: the whole interval lies beyond the margin"
        flip = f"an interval that reaches back over the margin {margin:+.4f}"
    elif e.n < minimum_n:
        verdict, reason, flip = Verdict.INCONCLUSIVE, f"{what}: n = {e.n} of at least {minimum_n}", f"{minimum_n - e.n} more units"
    elif room >= 0:
        verdict, reason, flip = Verdict.PASS, f"{what} {e.value:+.4f} within the margin", f"a bound {room:.4f} further out"
    else:
        verdict, reason = Verdict.INCONCLUSIVE, f"{what} {e.value:+.4f}: the interval crosses the margin, no evidence either way"
        flip = f"a bound {-room:.4f} further in"
    return Check(
        name=name, group=group, verdict=verdict, formula=formula, reason=reason, flip=flip, estimate=e.value, low=e.low, high=e.high,
        margin=margin, n=e.n, minimum_n=minimum_n, design_effect=e.design_effect,
    )  # fmt: skip
