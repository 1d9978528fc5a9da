"""The demo's report: what the loop did, as `report.json` for machines and one self-contained HTML page for people.

Takes: rows already read from the lake, the ledger and the run. Gives: figures with intervals, JSON, HTML, SVG.
Leaves out: reading anything (`demo.py` does) and deciding anything (`release` does).
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np

BOOTSTRAP_ROUNDS: Final = 1000
TEMPLATE: Final = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One user's contribution to a figure: a ratio's numerator and denominator, or values to take the median of."""

    user_key: str
    numerator: float = 0.0
    denominator: float = 0.0
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """An estimate with its 95 % interval; all None when nothing was observed."""

    estimate: float | None
    low: float | None
    high: float | None
    n: int
    """Units behind it: edits, messages, turns or calls."""


def ratio(observations: Sequence[Observation], *, seed: int = 0) -> Figure:
    """Estimate sum(numerator) / sum(denominator) with an interval bootstrapped by user.

    Where all users agree (0 % or 100 %) the bootstrap is blind, so the Wilson interval of the pooled count is shown instead.
    """
    total = sum(o.denominator for o in observations)
    if total == 0:
        return Figure(estimate=None, low=None, high=None, n=0)
    estimate = sum(o.numerator for o in observations) / total
    if estimate in (0.0, 1.0) or len(observations) < 2:
        z = 1.959964
        centre = (estimate + z * z / (2 * total)) / (1 + z * z / total)
        half = z / (1 + z * z / total) * math.sqrt(estimate * (1 - estimate) / total + z * z / (4 * total * total))
        return Figure(estimate=estimate, low=max(0.0, centre - half), high=min(1.0, centre + half), n=int(total))

    numerators = np.array([o.numerator for o in observations])
    denominators = np.array([o.denominator for o in observations])
    picks = np.random.default_rng(seed).integers(0, len(observations), size=(BOOTSTRAP_ROUNDS, len(observations)))
    below = denominators[picks].sum(axis=1)
    values = numerators[picks].sum(axis=1)[below > 0] / below[below > 0]
    low, high = np.quantile(values, [0.025, 0.975])
    return Figure(estimate=estimate, low=float(low), high=float(high), n=int(total))


def median(observations: Sequence[Observation], *, seed: int = 0) -> Figure:
    """Estimate the median of all values with an interval bootstrapped by user."""
    pooled = [value for o in observations for value in o.values]
    if not pooled:
        return Figure(estimate=None, low=None, high=None, n=0)

    def statistic(chosen: Sequence[Observation]) -> float:
        values = [value for o in chosen for value in o.values]
        return float(np.median(values)) if values else math.nan

    picks = np.random.default_rng(seed).integers(0, len(observations), size=(BOOTSTRAP_ROUNDS, len(observations)))
    low, high = np.nanquantile([statistic([observations[i] for i in pick]) for pick in picks], [0.025, 0.975])
    return Figure(estimate=float(np.median(pooled)), low=float(low), high=float(high), n=len(pooled))


def panel_svg(points: Sequence[tuple[str, Figure]], *, unit: str) -> str:
    """Draw estimates with their intervals, one mark a policy, on a scale that starts at 0."""
    width, height, left, bottom, top = 210, 150, 8, 22, 20
    known = [f for _, f in points if f.estimate is not None]
    if not known:
        return f'<svg viewBox="0 0 {width} {height}" role="img"><text x="{left}" y="70">nothing observed</text></svg>'
    ceiling = 1.0 if unit == "%" else max(f.high or 0.0 for f in known) * 1.1 or 1.0
    shown = max(f.high or 0.0 for f in known)
    ceiling = min(ceiling, max(shown * 1.25, 0.1)) if unit == "%" else ceiling

    def y(value: float) -> float:
        return height - bottom - (height - bottom - top) * min(value, ceiling) / ceiling

    parts = [f'<line class="axis" x1="{left}" x2="{width - left}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>']
    step = (width - 2 * left) / len(points)
    for index, (name, figure) in enumerate(points):
        x = left + step * (index + 0.5)
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{html.escape(name)}</text>')
        if figure.estimate is None or figure.low is None or figure.high is None:
            parts.append(f'<text x="{x:.1f}" y="{y(0) - 6:.1f}" text-anchor="middle">none</text>')
            continue
        parts.append(f'<line class="mark" stroke-width="2" x1="{x:.1f}" x2="{x:.1f}" y1="{y(figure.low):.1f}" y2="{y(figure.high):.1f}"/>')
        parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y(figure.estimate):.1f}" r="4.5"/>')
        label = f"{100 * figure.estimate:.0f} %" if unit == "%" else f"{figure.estimate:.1f} {unit}"
        parts.append(f'<text class="value" x="{x:.1f}" y="{max(y(figure.high) - 6, 11):.1f}" text-anchor="middle">{label}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def timings_svg(stages: Mapping[str, float]) -> str:
    """Draw seconds per stage as bars, in the order the stages ran."""
    longest = max(stages.values(), default=1.0) or 1.0
    row, left, width = 22, 190, 620
    parts: list[str] = []
    for index, (name, seconds) in enumerate(stages.items()):
        y = index * row
        length = max(1.0, (width - left - 70) * seconds / longest)
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y + 4}" width="{length:.1f}" height="{row - 9}" rx="2"/>')
        parts.append(f'<text class="value" x="{left + length + 6:.1f}" y="{y + 14}">{seconds:.0f} s</text>')
    return f'<svg viewBox="0 0 {width} {max(row, row * len(stages))}" role="img">{"".join(parts)}</svg>'


def headline(policies: Sequence[Mapping[str, Any]]) -> str:
    """Say in one sentence what happened to the kept-edit rate, also when nothing moved."""
    rates = [(p["version"], p["figures"]["kept_edits"]) for p in policies if p["figures"]["kept_edits"].estimate is not None]
    if not rates:
        return "No edits were observed, so nothing can be said about the policy."
    (first, before), (last, after) = rates[0], rates[-1]
    if first == last:
        return f"Policy {first} kept serving; its users kept {100 * before.estimate:.0f} % of its edits."
    moved = "up" if after.low > before.high else "down" if after.high < before.low else "intervals overlap"
    was, now = f"{100 * before.estimate:.0f} %", f"{100 * after.estimate:.0f} %"
    return f"Users kept {was} of the edits of policy {first} and {now} of those of policy {last} ({moved})."


PANELS: Final = (
    ("kept_edits", "Edits kept", "share of proposed edits the user kept; higher is better", "%"),
    ("dissatisfied", "Dissatisfied follow-ups", "share of next messages read as dissatisfied; lower is better", "%"),
    ("latency_s", "Turn latency", "median seconds spent sampling a turn; lower is better", "s"),
    ("invalid_calls", "Invalid tool calls", "share of calls that were malformed or unknown; lower is better", "%"),
)


def _figure_text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _span_text(value: tuple[float | None, float | None]) -> str:
    low, high = value
    return "" if low is None and high is None else f"{_figure_text(low) or '…'} to {_figure_text(high) or '…'}"


def _component_text(value: Mapping[str, float] | None) -> str:
    return "not observed" if not value or not value.get("n") else f"{value['mean']:+.2f} (n {value['n']:.0f})"


def render(
    report: Mapping[str, Any], *, policies: Sequence[Mapping[str, Any]], gates: Sequence[Mapping[str, Any]], duckdb_line: str
) -> str:
    """Render the page.

    Args:
        report: The content of `report.json`.
        policies: One entry a policy version, ascending: `version`, `figures` (name -> Figure), `reward` (component -> {mean, n}).
        gates: One entry a gate run: `title`, `checks`, `weakness`, `open`.
        duckdb_line: What to paste to open a table.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"figure": _figure_text, "span": _span_text, "component": _component_text}
    panels = [
        {"title": title, "better": better, "svg": panel_svg([(f"policy {p['version']}", p["figures"][key]) for p in policies], unit=unit)}
        for key, title, better, unit in PANELS
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        headline=headline(policies),
        minutes=f"{sum(report['stages'].values()) / 60:.0f}",
        panels=panels,
        gates=gates,
        policies=policies,
        components=sorted({name for p in policies for name in p["reward"]}),
        total_turns=sum(report["turns"].values()) or 1,
        timings=timings_svg(report["stages"]),
        duckdb_line=duckdb_line,
    )
