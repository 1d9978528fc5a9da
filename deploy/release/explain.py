"""How a gate's answer looks: a table for a terminal, a dict for JSON and HTML (pure).

Leaves out: the answer itself (`gates.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from deploy.release.verdicts import Check, Report, Verdict

MARKS: Final = {Verdict.PASS: "yes", Verdict.FAIL: "NO", Verdict.INCONCLUSIVE: "?", Verdict.WARN: "warn"}


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON-able data; `from_dict` reads it back."""
    return {
        "verdict": report.verdict.value,
        "reasons": report.reasons,
        "checks": [asdict(check) | {"verdict": check.verdict.value} for check in report.checks],
    }


def from_dict(data: Mapping[str, Any]) -> Report:
    """Read a report that `to_dict` wrote."""
    checks = tuple(Check(**{**item, "verdict": Verdict(item["verdict"])}) for item in data["checks"])
    return Report(verdict=Verdict(data["verdict"]), checks=checks)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.4f}"


def _row(check: Check) -> tuple[str, ...]:
    interval = f"[{_figure(check.low)}, {_figure(check.high)}]" if check.low is not None else "-"
    n = "-" if check.n is None else f"{check.n}/{check.minimum_n}" if check.minimum_n is not None else str(check.n)
    effect = f"{check.design_effect:.1f}" if check.design_effect is not None else "-"
    return (MARKS[check.verdict], check.group, check.name, _figure(check.estimate), interval, _figure(check.margin), n, effect)


def to_text(report: Report) -> str:
    """Return the verdict table and, for every check, its formula, its reason and what would have flipped it."""
    heading = ("", "", "check", "estimate", "interval (95 % each side)", "margin", "n/min", "deff")
    rows = [heading, *(_row(check) for check in report.checks)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heading))]
    lines = [f"gate: {report.verdict.value.upper()}", ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    for check in report.checks:
        lines.append(f"{MARKS[check.verdict]:>4}  {check.name}: {check.reason}")
        lines.append(f"      {check.formula}; would flip with {check.flip}")
    return "\n".join(lines)
