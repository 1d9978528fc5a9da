"""What a gate of a given size can and cannot see (pure).

For each check on a rate or a mean: how often an equal candidate passes, which margin would let it pass as often as wanted, and
the smallest regression that is kept out four times in five. Margins of small deployments come from here, and so does the
sentence that says how weak their evidence is. Rates are taken as independent users (exact enumeration up to 80 users, normal
above), the benchmark as paired tasks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from deploy.release import stats
from deploy.release.config import GateConfig
from deploy.release.evidence import INFRA_ERROR, Attempt, Evidence

EXACT_UNITS: Final = 80
"""Up to here the distribution of the bound is enumerated."""

CAUGHT: Final = 0.8
"""A regression counts as caught when it is kept out with this probability."""

Side = Literal["rise", "fall", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much a gate gets to see, and what is normal there."""

    tasks: int
    """Benchmark tasks, paired."""
    attempts: int
    """Attempts at each task, per checkpoint."""
    users: int
    """Distinct users behind the rates, per checkpoint."""
    solve_rate: float = 0.5
    """The rate at which attempts differ most; nearer 0 or 1 the gate sees more."""
    invalid_rate: float = 0.05
    unscored_rate: float = 0.15
    ask_rate: float = 0.05
    edit_rate: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One check's power."""

    name: str
    margin: float
    """As configured."""
    needed: float
    """Margin at which an equal candidate passes with the wanted probability."""
    passes: float
    """Probability that an equal candidate passes at the configured margin."""
    caught: float
    """Smallest change (in the bad direction) that is kept out with probability `CAUGHT`; 1 or more: none is."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All lines, and what they mean together."""

    lines: tuple[Line, ...]
    passes: float
    """Lower bound of the probability that an equal candidate passes all of them (as if independent)."""

    @property
    def sentence(self) -> str:
        """How weak this evidence is, for a person."""
        weakest = "; ".join(f"{line.name} {line.caught:.0%}" for line in self.lines)
        return (
            f"An equal candidate passes with probability about {self.passes:.2f}. A candidate is kept out 4 times in 5 only when it is "
            f"worse by at least: {weakest} (share points). Smaller regressions can ship."
        )


@lru_cache(maxsize=65536)
def _bounds(k1: int, k2: int, n: int) -> tuple[float, float]:
    return stats.newcombe((k1, n), (k2, n))


def _outcomes(candidate: float, serving: float, *, n: int) -> list[tuple[float, float, float]]:
    """Return (probability, low, high) of the difference's interval over all counts."""
    first = [math.comb(n, k) * candidate**k * (1 - candidate) ** (n - k) for k in range(n + 1)]
    second = [math.comb(n, k) * serving**k * (1 - serving) ** (n - k) for k in range(n + 1)]
    return [(p * q, *_bounds(i, j, n)) for i, p in enumerate(first) if p > 1e-9 for j, q in enumerate(second) if q > 1e-9]


def rate_passes(candidate: float, serving: float, *, n: int, margin: float, side: Side) -> float:
    """Return the probability that a check on a difference of two rates passes.

    Args:
        candidate: True rate.
        serving: True rate.
        n: Users, each.
        margin: Allowed change.
        side: Which change is held against the margin.
    """
    if n > EXACT_UNITS:
        se = math.sqrt((candidate * (1 - candidate) + serving * (1 - serving)) / n)
        change = candidate - serving
        up = stats.pass_probability(-change, margin=margin, standard_error=se, df=2 * n - 2)
        down = stats.pass_probability(change, margin=margin, standard_error=se, df=2 * n - 2)
        return up if side == "rise" else down if side == "fall" else max(0.0, up + down - 1)
    return math.fsum(
        p
        for p, low, high in _outcomes(candidate, serving, n=n)
        if (side == "fall" or high <= margin) and (side == "rise" or low >= -margin)
    )


def _smallest(works: Callable[[float], bool], *, step: float = 0.005, limit: float = 1.0) -> float:
    """Return the smallest multiple of `step` that works, or the limit; `works` is monotone."""
    low, high = 0, math.ceil(limit / step)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle * step) else (middle + 1, high)
    return round(low * step, 6)


def _rate_line(name: str, *, rate: float, n: int, margin: float, side: Side, power: float) -> Line:
    worse: Callable[[float], float] = (lambda x: max(0.0, rate - x)) if side == "fall" else (lambda x: min(1.0, rate + x))
    return Line(
        name=name,
        margin=margin,
        needed=_smallest(lambda m: rate_passes(rate, rate, n=n, margin=m, side=side) >= power),
        passes=rate_passes(rate, rate, n=n, margin=margin, side=side),
        caught=_smallest(lambda x: rate_passes(worse(x), rate, n=n, margin=margin, side=side) <= 1 - CAUGHT),
        n=n,
    )


def _benchmark_line(config: GateConfig, size: Size, *, power: float) -> Line:
    sd = max(config.benchmark_sd_floor, math.sqrt(2 * size.solve_rate * (1 - size.solve_rate) / size.attempts))
    se, df = sd / math.sqrt(size.tasks), size.tasks - 1
    return Line(
        name="benchmark",
        margin=config.benchmark_margin,
        needed=stats.needed_margin(se, df=df, power=power),
        passes=stats.pass_probability(0.0, margin=config.benchmark_margin, standard_error=se, df=df),
        caught=max(0.0, -stats.caught_effect(margin=config.benchmark_margin, standard_error=se, df=df, power=CAUGHT)),
        n=size.tasks,
    )


def plan(config: GateConfig, size: Size, *, power: float = 0.97) -> Plan:
    """Work out what a gate can see.

    Args:
        config: Margins.
        size: Sample sizes and normal rates.
        power: Wanted probability that an equal candidate passes each single check; 0.97 leaves 0.8 for seven of them.
    """
    invalid = max(config.invalid_calls_margin, config.invalid_calls_relative * size.invalid_rate)
    lines = (
        _benchmark_line(config, size, power=power),
        _rate_line("invalid_calls", rate=size.invalid_rate, n=size.users, margin=invalid, side="rise", power=power),
        _rate_line("unscored_turns", rate=size.unscored_rate, n=size.users, margin=config.unscored_turns_margin, side="both", power=power),
        _rate_line("asks", rate=size.ask_rate, n=size.users, margin=config.ask_margin, side="rise", power=power),
        _rate_line("edits", rate=size.edit_rate, n=size.users, margin=config.edit_margin, side="fall", power=power),
    )
    return Plan(lines=lines, passes=math.prod(line.passes for line in lines))


def size_of(evidence: Evidence) -> Size | None:
    """Return the size and the serving policy's rates that a gate really had; None without a benchmark of both."""
    rows = [row for row in evidence.benchmark_serving if row.outcome != INFRA_ERROR]
    others = [row for row in evidence.benchmark_candidate if row.outcome != INFRA_ERROR]
    tasks = {(row.suite, row.task) for row in rows} & {(row.suite, row.task) for row in others}
    users = min(len({row.user_key for row in rows}), len({row.user_key for row in others}))
    if len(tasks) < 2 or users < 2:
        return None

    def rate(numerator: Callable[[Attempt], float], denominator: Callable[[Attempt], float]) -> float:
        total = math.fsum(denominator(row) for row in rows)
        return math.fsum(numerator(row) for row in rows) / total if total else 0.0

    return Size(
        tasks=len(tasks),
        attempts=max(1, len(rows) // len(tasks)),
        users=users,
        solve_rate=rate(lambda row: row.solved, lambda _: 1),
        invalid_rate=rate(lambda row: row.invalid_calls, lambda row: row.calls),
        unscored_rate=rate(lambda row: row.unscored_turns, lambda row: row.turns),
        ask_rate=rate(lambda row: row.asks > 0, lambda _: 1),
        edit_rate=rate(lambda row: row.edits_proposed > 0, lambda _: 1),
    )


def to_text(found: Plan) -> str:
    """Return the plan as a table with its sentence."""
    rows = [("check", "n", "margin", "needed", "equal passes", "caught from")]
    rows += [(x.name, str(x.n), f"{x.margin:.3f}", f"{x.needed:.3f}", f"{x.passes:.3f}", f"{x.caught:.3f}") for x in found.lines]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*table, "", found.sentence])
