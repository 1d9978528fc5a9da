"""How well follow-ups are read: figures with intervals, a reliability curve, and a picture of it.

Takes: labels and probabilities with the family and language of each row. Gives: figures as plain numbers, and SVG or HTML text.
Leaves out: fitting (`fitting.py`) and where files go (`followup_commands.py`).

Intervals are 95 % bootstrap percentiles over families, not rows: wordings of one idea are right or wrong together.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np

RESAMPLES: Final = 400
SEED: Final = 7
BINS: Final = 10
PRECISION: Final = 0.9

Array = np.ndarray


def auc(p: Array, y: Array) -> float:
    """Return the probability that a dissatisfied row scores above another, ties half; NaN where a class is missing.

    Source: Mann and Whitney (1947), by mid-ranks.
    """
    positive = int(y.sum())
    negative = len(y) - positive
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[y == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


def reliability(p: Array, y: Array, bins: int = BINS) -> list[dict[str, float]]:
    """Return for each of equal bins of P that holds rows: mean P, share dissatisfied, rows."""
    place = np.minimum((p * bins).astype(int), bins - 1)
    return [
        {"mean_p": round(float(p[place == b].mean()), 4), "share": round(float(y[place == b].mean()), 4), "rows": int((place == b).sum())}
        for b in range(bins)
        if (place == b).any()
    ]


def calibration_error(p: Array, y: Array) -> float:
    """Return the expected calibration error: the mean distance of P and share over BINS equal bins, by rows.

    Source: Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian Binning" (2015).
    """
    return sum(abs(b["mean_p"] - b["share"]) * b["rows"] for b in reliability(p, y)) / len(y)


def recall_at_precision(p: Array, y: Array, precision: float = PRECISION) -> float:
    """Return the largest share of dissatisfied rows found by a threshold with at least this precision; 0 where none has it."""
    order = np.argsort(-p, kind="stable")
    found = np.cumsum(y[order])
    last = np.append(p[order][1:] < p[order][:-1], True)
    good = last & (found / np.arange(1, len(y) + 1) >= precision)
    return float(found[good].max() / y.sum()) if good.any() else 0.0


MEASURES: Final[dict[str, Callable[[Array, Array], float]]] = {
    "auc": auc,
    "calibration_error": calibration_error,
    "recall_at_90_precision": recall_at_precision,
    "brier": lambda p, y: float(np.mean((p - y) ** 2)),
}


def figures(p: Array, y: Array, families: Sequence[str], *, threshold: float) -> dict[str, Any]:
    """Return all figures of some rows, each measure with a 95 % interval by families.

    Args:
        p: [N] probabilities.
        y: [N] labels in {0, 1}.
        families: [N] idea of each row.
        threshold: At or above it counts as dissatisfied.
    """
    names, place = np.unique(np.array(families), return_inverse=True)
    members = [np.flatnonzero(place == index) for index in range(len(names))]
    rng = np.random.default_rng(SEED)
    draws = [np.concatenate([members[i] for i in rng.integers(0, len(names), len(names))]) for _ in range(RESAMPLES)]
    out: dict[str, Any] = {"rows": len(y), "families": len(names), "dissatisfied": int(y.sum())}
    for name, measure in MEASURES.items():
        values = [measure(p[draw], y[draw]) for draw in draws if 0 < y[draw].sum() < len(draw)]
        low, high = np.percentile(values, [2.5, 97.5]) if values else (float("nan"), float("nan"))
        out[name] = {"value": round(measure(p, y), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
    hit = p >= threshold
    out["at_threshold"] = {
        "threshold": threshold,
        "tpr": round(float(hit[y == 1].mean()), 4) if y.any() else None,
        "fpr": round(float(hit[y == 0].mean()), 4) if not y.all() else None,
    }
    return out


def report(p: Array, y: Array, *, families: Sequence[str], groups: Mapping[str, Sequence[str]], threshold: float) -> dict[str, Any]:
    """Return figures over all rows and by group, and the reliability curve.

    Args:
        p: [N] probabilities.
        y: [N] labels.
        families: [N] idea of each row.
        groups: Name of a grouping ("language") -> [N] the group of each row.
        threshold: At or above it counts as dissatisfied.
    """
    out: dict[str, Any] = {"all": figures(p, y, families, threshold=threshold), "reliability": reliability(p, y)}
    for grouping, values in groups.items():
        column = np.array(values)
        out[f"by_{grouping}"] = {}
        for value in sorted(set(values)):
            inside = column == value
            out[f"by_{grouping}"][value] = {
                "rows": int(inside.sum()),
                "dissatisfied": int(y[inside].sum()),
                "auc": None if len(set(y[inside])) < 2 else round(auc(p[inside], y[inside]), 4),
                "calibration_error": None if len(set(y[inside])) < 2 else round(calibration_error(p[inside], y[inside]), 4),
                "recall_at_90_precision": None if len(set(y[inside])) < 2 else round(recall_at_precision(p[inside], y[inside]), 4),
                "right_at_half": round(float(((p[inside] >= 0.5) == (y[inside] == 1)).mean()), 4),
                "mean_p": round(float(p[inside].mean()), 4),
            }
    return out


def svg(found: Mapping[str, Any]) -> str:
    """Return the reliability curve of a report as a self-contained SVG."""
    side, edge = 320, 48

    def x(value: float) -> float:
        return round(edge + value * side, 1)

    def y(value: float) -> float:
        return round(edge + (1 - value) * side, 1)

    bins = found["reliability"]
    most = max(b["rows"] for b in bins)
    points = " ".join(f"{x(b['mean_p'])},{y(b['share'])}" for b in bins)
    ticks = "".join(
        f'<text x="{x(t)}" y="{edge + side + 18}" text-anchor="middle">{t:g}</text><text x="{edge - 8}" y="{y(t) + 4}" '
        f'text-anchor="end">{t:g}</text><path d="M{x(t)} {y(0)}V{y(1)}M{x(0)} {y(t)}H{x(1)}" stroke="#ddd"/>'
        for t in (0, 0.25, 0.5, 0.75, 1)
    )
    dots = "".join(
        f'<circle cx="{x(b["mean_p"])}" cy="{y(b["share"])}" r="{3 + 7 * (b["rows"] / most) ** 0.5:.1f}" fill="#1f6feb" fill-opacity=".6">'
        f"<title>P {b['mean_p']}, dissatisfied {b['share']}, {b['rows']} rows</title></circle>"
        for b in bins
    )
    whole = found["all"]
    head = f"AUC {whole['auc']['value']}, calibration error {whole['calibration_error']['value']}, {whole['rows']} held-out messages"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 2 * edge}" height="{side + 2 * edge + 16}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/><text x="{edge}" y="24" font-size="13">{escape(head)}</text>{ticks}'
        f'<path d="M{x(0)} {y(0)}L{x(1)} {y(1)}" stroke="#999" stroke-dasharray="4"/><polyline points="{points}" fill="none" '
        f'stroke="#1f6feb" stroke-width="2"/>{dots}<text x="{x(0.5)}" y="{edge + side + 40}" text-anchor="middle">'
        f'P(dissatisfied), mean of a bin</text><text transform="translate(14 {y(0.5)}) rotate(-90)" text-anchor="middle">'
        f"share that was dissatisfied</text></svg>\n"
    )


def html(found: Mapping[str, Any]) -> str:
    """Return the report as one self-contained page."""
    rows = "".join(
        f"<tr><td>{escape(grouping.removeprefix('by_'))}</td><td>{escape(group)}</td><td>{f['rows']}</td>"
        f"<td>{'' if f['auc'] is None else f['auc']}</td><td>{'' if f['auc'] is None else f['calibration_error']}</td>"
        f"<td>{'' if f['auc'] is None else f['recall_at_90_precision']}</td>"
        f"<td>{f['right_at_half']:.0%}</td></tr>"
        for grouping, values in found.items()
        if grouping.startswith("by_")
        for group, f in values.items()
    )
    measures = "".join(
        f"<li>{escape(name.replace('_', ' '))}: {found['all'][name]['value']} "
        f"(95 % interval {found['all'][name]['low']} to {found['all'][name]['high']})</li>"
        for name in MEASURES
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Follow-ups</title><style>body{font:15px sans-serif;max-width:46em;'
        "margin:2em auto}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ddd}</style><h1>How well follow-ups are read</h1>"
        f"<p>On held-out ideas; intervals are bootstrapped by idea.</p><ul>{measures}</ul>{svg(found)}<table><tr><th>by</th><th></th>"
        f"<th>rows</th><th>AUC</th><th>calibration error</th><th>recall at 90 % precision</th>"
        f"<th>right at 0.5</th></tr>{rows}</table></html>\n"
    )
