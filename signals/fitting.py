"""Fit and check the follow-up model on the committed labelled set.

Takes: `signals/data/followups.jsonl` (own-written messages with labels). Gives: coefficients to commit and held-out figures.
Leaves out: using them (`followups.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from signals.followups import Features, features

LABELLED: Final = Path(__file__).parent / "data" / "followups.jsonl"
PENALTY: Final = 1.0
"""L2 on all coefficients but the intercept: with about 140 rows, rare features must not decide alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted model and how it did on rows it had not seen."""

    intercept: float
    coefficients: Features
    rows: int
    brier: float
    """Mean squared error of leave-one-out probabilities; 0.25 is a coin."""
    accuracy: float
    """Share right at 0.5, leave-one-out."""
    calibration_error: float
    """Expected calibration error over five equal bins, leave-one-out."""


def labelled(path: Path = LABELLED) -> list[Mapping[str, Any]]:
    """Read the labelled follow-ups."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def matrix(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return features [N, 8] and labels [N] in {0, 1}."""
    described = [
        features(
            row["message"],
            previous=row["previous"],
            stack_traces=row["stack_traces"],
            reply_delay_ms=row["reply_delay_ms"],
            interrupted=row["interrupted"],
        )
        for row in rows
    ]
    return np.array([astuple(x) for x in described]), np.array([float(row["dissatisfied"]) for row in rows])


def logistic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Fit penalised logistic regression by Newton's method.

    Args:
        x: [N, F] features.
        y: [N] labels.

    Returns:
        [F + 1]: intercept, then coefficients.
    """
    design = np.column_stack([np.ones(len(x)), x])
    penalty = np.diag([0.0] + [PENALTY] * x.shape[1])
    w = np.zeros(design.shape[1])
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-design @ w))
        step = np.linalg.solve(design.T @ (design * (p * (1 - p))[:, None]) + penalty, design.T @ (p - y) + penalty @ w)
        w = w - step
        if np.abs(step).max() < 1e-10:
            break
    return w


def fit(rows: Sequence[Mapping[str, Any]]) -> Fit:
    """Fit on all rows and measure by leaving one out at a time."""
    x, y = matrix(rows)
    held_out = np.empty(len(y))
    for index in range(len(y)):
        keep = np.arange(len(y)) != index
        w = logistic(x[keep], y[keep])
        held_out[index] = 1.0 / (1.0 + np.exp(-(w[0] + x[index] @ w[1:])))
    bins = np.minimum((held_out * 5).astype(int), 4)
    error = sum(abs(held_out[bins == b].mean() - y[bins == b].mean()) * (bins == b).mean() for b in range(5) if (bins == b).any())
    w = np.round(logistic(x, y), 2)
    names = Features.__dataclass_fields__
    return Fit(
        intercept=float(w[0]),
        coefficients=Features(**dict(zip(names, map(float, w[1:]), strict=True))),
        rows=len(y),
        brier=float(np.mean((held_out - y) ** 2)),
        accuracy=float(np.mean((held_out > 0.5) == (y == 1))),
        calibration_error=float(error),
    )
