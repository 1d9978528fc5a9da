"""Fit the follow-up model on labelled messages: weights, calibration, threshold, and figures on kinds of messages it had not seen.

Labels come in families (one idea in several languages and wordings). A family is never on both sides of a split: neither of the folds
that penalty, calibration and threshold are chosen by, nor of the part held out for the report. The fit is deterministic.

Takes: labelled rows. Gives: a head to commit (`followups.Head`) and out-of-fold and held-out probabilities.
Leaves out: figures and plots (`followup_report.py`), using the head (`followups.py`).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import ConfigError
from signals import followups
from signals.followup_cues import NAMES, UNIT
from signals.followup_scoring import DIM, Row, Scorer

LABELLED: Final = Path(__file__).parent / "data" / "followups.jsonl"
FOLDS: Final = 10
PENALTIES: Final = (1.0, 3.0, 10.0, 30.0)
"""L2 penalties to choose from by out-of-fold log loss."""
EMBEDDING_SCALE: Final = 5.0
"""Components of a unit vector are small; scaled so that one penalty fits embedding, cues and behaviour."""
STEP: Final = 2.0**-20
"""What one step of the whole-number sum is worth."""
PRECISION: Final = 0.9
"""Of the threshold, out of fold."""
PLATT_PENALTY: Final = 1e-3

Array = np.ndarray


class Labelled(BaseModel):
    """One labelled follow-up, as a line of the labels file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    family: str
    """The idea; rows of one family are near each other in meaning."""
    language: str
    shape: str
    split: str
    """`fit` or `held_out`; the same for a whole family."""
    previous: str | None = None
    text: str
    stack_traces: int = 0
    reply_delay_ms: int | None = None
    interrupted: bool = False
    dissatisfied: bool

    def row(self) -> Row:
        """Return what is scored."""
        return Row(
            message=self.text,
            previous=self.previous,
            stack_traces=self.stack_traces,
            reply_delay_ms=self.reply_delay_ms,
            interrupted=self.interrupted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A head and how it was found."""

    head: followups.Head
    penalty: float
    out_of_fold: Array
    """[F] probabilities of the fit rows, each from a head that had not seen its family."""
    held_out: Array
    """[H] probabilities of the held-out rows."""


def labelled(path: Path = LABELLED) -> list[Labelled]:
    """Read the labelled follow-ups.

    Raises:
        ConfigError: A line is no labelled follow-up, or a family is on both sides of the split; says where.
    """
    rows: list[Labelled] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(Labelled.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{path}:{number}: {'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}") from error
    sides: dict[str, set[str]] = {}
    for row in rows:
        sides.setdefault(row.family, set()).add(row.split)
    if mixed := sorted(family for family, splits in sides.items() if len(splits) > 1 or not splits <= {"fit", "held_out"}):
        raise ConfigError(f"{path}: family {mixed[0]!r} needs one split for all its rows, fit or held_out")
    for split in ("fit", "held_out"):
        if len({row.dissatisfied for row in rows if row.split == split}) < 2:
            raise ConfigError(f"{path}: the split {split} needs rows of both labels")
    return rows


def scales(behaviours: int) -> Array:
    """Return what brings each feature to a common size: [DIM + surface + behaviour]."""
    return np.concatenate([np.full(DIM, EMBEDDING_SCALE / followups.SCALE), np.full(len(NAMES) + behaviours, 1.0 / UNIT)])


def sigmoid(z: Array) -> Array:
    """Return 1 / (1 + exp(-z)) without overflow."""
    return np.where(z >= 0, 1.0, np.exp(-np.abs(z))) / (1.0 + np.exp(-np.abs(z)))


def logistic(x: Array, y: Array, penalty: float) -> Array:
    """Fit penalised logistic regression by Newton's method.

    Args:
        x: [N, F] features.
        y: [N] labels in {0, 1}.
        penalty: L2 on all coefficients but the intercept.

    Returns:
        [F + 1]: intercept, then coefficients.
    """
    design = np.column_stack([np.ones(len(x)), x])
    ridge = np.full(design.shape[1], penalty)
    ridge[0] = 0.0
    w = np.zeros(design.shape[1])
    for _ in range(50):
        p = sigmoid(design @ w)
        hessian = (design * np.maximum(p * (1 - p), 1e-9)[:, None]).T @ design
        hessian[np.diag_indices_from(hessian)] += ridge
        step = np.linalg.solve(hessian, design.T @ (p - y) + ridge * w)
        w = w - step
        if np.abs(step).max() < 1e-8:
            break
    return w


def folds(families: Sequence[str]) -> Array:
    """Assign every row to one of FOLDS folds by its family's name: [N] int."""
    return np.array([int(hashlib.sha256(family.encode()).hexdigest(), 16) % FOLDS for family in families])


def out_of_fold(x: Array, y: Array, fold: Array, penalty: float) -> Array:
    """Return for every row its score from a fit without its fold: [N]."""
    scores = np.empty(len(y))
    for number in np.unique(fold):
        inside = fold == number
        w = logistic(x[~inside], y[~inside], penalty)
        scores[inside] = w[0] + x[inside] @ w[1:]
    return scores


def log_loss(p: Array, y: Array) -> float:
    """Return the mean of -log P(label)."""
    return float(-np.mean(np.log(np.clip(np.where(y == 1, p, 1 - p), 1e-12, 1.0))))


def platt(scores: Array, y: Array) -> tuple[float, float]:
    """Return slope and offset of the calibration of scores.

    Source: Platt, "Probabilistic outputs for support vector machines" (1999), with his smoothed targets.
    """
    positive, negative = float(y.sum()), float(len(y) - y.sum())
    targets = np.where(y == 1, (positive + 1) / (positive + 2), 1 / (negative + 2))
    w = logistic(scores[:, None], targets, PLATT_PENALTY)
    return float(w[1]), float(w[0])


def threshold_at(p: Array, y: Array, precision: float) -> float:
    """Return the lowest threshold at and above which all higher ones also keep the precision of all rows at or above them."""
    order = np.argsort(-p, kind="stable")
    right = np.cumsum(y[order]) / np.arange(1, len(y) + 1)
    last = np.append(p[order][1:] < p[order][:-1], True)
    kept = [index for index in range(len(y)) if last[index] and right[index] >= precision]
    return float(p[order][kept[-1]]) if kept else 1.0


def _head(w: Array, scale: Array, calibration: tuple[float, float]) -> followups.Head:
    whole = [round(value) for value in (w[1:] * scale / STEP).tolist()]
    slope, offset = calibration
    return followups.Head(
        embedding=tuple(whole[:DIM]),
        surface=tuple(whole[DIM : DIM + len(NAMES)]),
        behaviour=tuple(whole[DIM + len(NAMES) :]),
        intercept=round(float(w[0]) / STEP),
        unit=STEP,
        slope=round(slope, 6),
        offset=round(offset, 6),
        threshold=1.0,
        tpr=0.0,
        fpr=0.0,
        encoder_sha256="",
        labels_sha256="",
        digest="",
    )


def fit(rows: Sequence[Labelled], *, progress: Callable[[str], None] = lambda _: None) -> Fitted:
    """Fit on the rows of the split `fit` and score those held out.

    Args:
        rows: From `labelled`.
        progress: Told what is being done.
    """
    from signals.followup_encoder import WEIGHTS_SHA256

    progress("embedding")
    empty = followups.Head(
        embedding=(0,) * DIM, surface=(0,) * len(NAMES), behaviour=(0,) * len(followups.BEHAVIOUR), intercept=0, unit=STEP, slope=1.0,
        offset=0.0, threshold=1.0, tpr=0.0, fpr=0.0, encoder_sha256="", labels_sha256="", digest="",
    )  # fmt: skip
    scale = scales(len(followups.BEHAVIOUR))
    x = Scorer(empty).matrix([row.row() for row in rows]) * scale
    y = np.array([float(row.dissatisfied) for row in rows])
    inside = np.array([row.split == "fit" for row in rows])
    fold = folds([row.family for row in rows])[inside]
    best: tuple[float, float, Array] | None = None
    for penalty in PENALTIES:
        progress(f"penalty {penalty:g}")
        scores = out_of_fold(x[inside], y[inside], fold, penalty)
        loss = log_loss(sigmoid(scores), y[inside])
        if best is None or loss < best[0]:
            best = loss, penalty, scores
    assert best is not None
    _, penalty, scores = best
    calibration = platt(scores, y[inside])
    calibrated = sigmoid(calibration[0] * scores + calibration[1])
    head = _head(logistic(x[inside], y[inside], penalty), scale, calibration)
    held_out = np.array(Scorer(head).score([row.row() for row in rows if row.split == "held_out"]))
    threshold = round(threshold_at(calibrated, y[inside], PRECISION), 4)
    labels = y[~inside] == 1
    head = replace(
        head,
        threshold=threshold,
        tpr=round(float((held_out[labels] >= threshold).mean()), 4),
        fpr=round(float((held_out[~labels] >= threshold).mean()), 4),
        encoder_sha256=WEIGHTS_SHA256,
        labels_sha256=hashlib.sha256("\n".join(row.model_dump_json() for row in rows).encode()).hexdigest(),
    )
    return Fitted(head=head, penalty=penalty, out_of_fold=calibrated, held_out=held_out)


def as_json(head: followups.Head) -> str:
    """Return a head as the text of its file."""
    content: Mapping[str, Any] = {
        "embedding": list(head.embedding),
        "surface": dict(zip(NAMES, head.surface, strict=True)),
        "behaviour": dict(zip(followups.BEHAVIOUR, head.behaviour, strict=True)),
        **{name: getattr(head, name) for name in ("intercept", "unit", "slope", "offset", "threshold", "tpr", "fpr")},
        "encoder_sha256": head.encoder_sha256,
        "labels_sha256": head.labels_sha256,
    }
    return json.dumps(content, ensure_ascii=True) + "\n"
