"""Fit the follow-up model on labelled messages: weights, calibration, threshold, and figures on kinds of messages it had not seen.

Labels come in families (one idea in several languages and wordings). A family is never on both sides of a split. Figures come from a fit
without the held-out families; the head that is written is fitted on all rows, with a penalty, calibration and rates found out of fold.
The fit is deterministic.

Takes: labelled rows. Gives: a head to commit (`followups.Head`) and out-of-fold and held-out probabilities.
Leaves out: figures and plots (`followup_report.py`), using the head (`followups.py`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import ConfigError
from signals import followups
from signals.followup_cues import BUCKETS, NAMES, UNIT, WORD_UNIT
from signals.followup_scoring import DIM, Row, Scorer, word_matrix

LABELLED: Final = Path(__file__).parent / "data" / "followups.jsonl"
FOLDS: Final = 10
PENALTIES: Final = (0.75, 1.5, 3.0)
"""L2 penalties to choose from by out-of-fold log loss."""
EMBEDDING_SCALE: Final = 1.4
WORD_SCALE: Final = 1.0
PAIR_SCALE: Final = 0.5
"""How far each kind of feature is trusted under one penalty, found out of fold on the fit rows: a pair of cues should add little to what
both say alone."""
STEP: Final = 2.0**-20
"""What one step of the whole-number sum is worth."""
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
    held_out: Array
    """[H] probabilities of the held-out rows, from a fit without them."""
    out_of_fold: Array
    """[N] probabilities of all rows, each from a fit without its fold."""


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


def labels_digest(rows: Sequence[Labelled]) -> str:
    """Return the sha256 of labels."""
    return hashlib.sha256("\n".join(row.model_dump_json() for row in rows).encode()).hexdigest()


def scales(behaviours: int) -> Array:
    """Return what brings each feature to a common size: [DIM + surface + words + behaviour]."""
    cues = np.array([PAIR_SCALE / UNIT if "+" in name else 1.0 / UNIT for name in NAMES])
    parts = np.full(DIM, EMBEDDING_SCALE / followups.SCALE), cues, np.full(BUCKETS, WORD_SCALE / WORD_UNIT), np.full(behaviours, 1.0 / UNIT)
    return np.concatenate(parts)


def sigmoid(z: Array) -> Array:
    """Return 1 / (1 + exp(-z)) without overflow."""
    return np.where(z >= 0, 1.0, np.exp(-np.abs(z))) / (1.0 + np.exp(-np.abs(z)))


def logistic(x: Array, y: Array, penalty: float, *, weight: Array | None = None) -> Array:
    """Fit penalised logistic regression by Newton's method.

    Args:
        x: [N, F] features.
        y: [N] labels in {0, 1}.
        penalty: L2 on all coefficients but the intercept.
        weight: [N] what each row counts; None: 1.

    Returns:
        [F + 1]: intercept, then coefficients.
    """
    design = np.column_stack([np.ones(len(x)), x])
    ridge = np.full(design.shape[1], penalty)
    ridge[0] = 0.0
    w = np.zeros(design.shape[1])
    counts = np.ones(len(x)) if weight is None else weight
    for _ in range(50):
        p = sigmoid(design @ w)
        hessian = (design * (counts * np.maximum(p * (1 - p), 1e-9))[:, None]).T @ design
        hessian[np.diag_indices_from(hessian)] += ridge
        step = np.linalg.solve(hessian, design.T @ (counts * (p - y)) + ridge * w)
        w = w - step
        if np.abs(step).max() < 1e-8:
            break
    return w


def folds(families: Sequence[str]) -> Array:
    """Assign every row to one of FOLDS folds by its family's name: [N] int."""
    return np.array([int(hashlib.sha256(family.encode()).hexdigest(), 16) % FOLDS for family in families])


def weights(families: Sequence[str]) -> Array:
    """Return what each row counts in a fit: [N], 1 in the mean.

    An idea counts as the root of its wordings, since they are not new evidence each; without it the most worded ideas decide.
    """
    sizes = Counter(families)
    raw = np.array([sizes[family] ** -0.5 for family in families])
    return raw / raw.mean()


def out_of_fold(x: Array, y: Array, fold: Array, penalty: float, *, weight: Array | None = None) -> Array:
    """Return for every row its score from a fit without its fold: [N]."""
    scores = np.empty(len(y))
    for number in np.unique(fold):
        inside = fold == number
        w = logistic(x[~inside], y[~inside], penalty, weight=None if weight is None else weight[~inside])
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


def best_threshold(p: Array, y: Array) -> float:
    """Return the threshold with the largest tpr - fpr (the lowest of several): a rate corrected with it varies least.

    Source: Youden, "Index for rating diagnostic tests" (1950).
    """
    order = np.argsort(-p, kind="stable")
    hits = np.cumsum(y[order]) / y.sum() - np.cumsum(1 - y[order]) / (1 - y).sum()
    last = np.append(p[order][1:] < p[order][:-1], True)
    best = np.flatnonzero(last & (hits >= hits[last].max()))
    return float(p[order][best[-1]])


def head_of(w: Array, scale: Array, calibration: tuple[float, float]) -> followups.Head:
    """Return a head in whole numbers from fitted weights [1 + F], the scales of features [F], and a calibration."""
    whole = [round(value) for value in (w[1:] * scale / STEP).tolist()]
    slope, offset = calibration
    cues = DIM + len(NAMES)
    return followups.Head(
        embedding=tuple(whole[:DIM]),
        surface=tuple(whole[DIM:cues]),
        words=tuple(whole[cues : cues + BUCKETS]),
        behaviour=tuple(whole[cues + BUCKETS :]),
        intercept=round(float(w[0]) / STEP),
        unit=STEP,
        slope=round(slope, 6),
        offset=round(offset, 6),
        threshold=1.0,
        tpr=0.0,
        fpr=0.0,
        penalty=0.0,
        encoder_sha256="",
        labels_sha256="",
        digest="",
    )


def examples(rows: Sequence[Labelled]) -> tuple[Array, Array, Array]:
    """Return scaled features [N, F], labels [N] and the scales [F]."""
    scale = scales(len(followups.BEHAVIOUR))
    blank = head_of(np.zeros(len(scale) + 1), scale, (1.0, 0.0))
    asked = [row.row() for row in rows]
    cues = DIM + len(NAMES)
    rest = Scorer(blank).matrix(asked)
    x = np.concatenate([rest[:, :cues], word_matrix(asked), rest[:, cues:]], axis=1) * scale
    return x, np.array([float(row.dissatisfied) for row in rows]), scale


def _choose(x: Array, y: Array, families: Sequence[str], progress: Callable[[str], None]) -> tuple[float, Array, tuple[float, float]]:
    """Return the penalty with the least out-of-fold log loss, its out-of-fold scores and their calibration."""
    tried: list[tuple[float, float, Array]] = []
    fold, weight = folds(families), weights(families)
    for penalty in PENALTIES:
        progress(f"penalty {penalty:g}")
        scores = out_of_fold(x, y, fold, penalty, weight=weight)
        tried.append((log_loss(sigmoid(scores), y), penalty, scores))
    _, penalty, scores = min(tried, key=lambda item: item[:2])
    return penalty, scores, platt(scores, y)


def fit(rows: Sequence[Labelled], *, progress: Callable[[str], None] = lambda _: None) -> Fitted:
    """Fit on all rows, and once without the held-out ones to see how it does on ideas it has not seen.

    Args:
        rows: From `labelled`.
        progress: Told what is being done: 1 + 2 x PENALTIES steps.
    """
    from signals.followup_encoder import WEIGHTS_SHA256

    progress("embedding")
    x, y, scale = examples(rows)
    families = [row.family for row in rows]
    known = [row.family for row in rows if row.split == "fit"]
    inside = np.array([row.split == "fit" for row in rows])
    penalty, _, calibration = _choose(x[inside], y[inside], known, progress)
    tested = head_of(logistic(x[inside], y[inside], penalty, weight=weights(known)), scale, calibration)
    held_out = np.array(Scorer(tested).score([row.row() for row in rows if row.split == "held_out"]))
    penalty, scores, calibration = _choose(x, y, families, progress)
    calibrated = sigmoid(calibration[0] * scores + calibration[1])
    threshold = round(best_threshold(calibrated, y), 4)
    head = replace(
        head_of(logistic(x, y, penalty, weight=weights(families)), scale, calibration),
        penalty=penalty,
        threshold=threshold,
        tpr=round(float((calibrated[y == 1] >= threshold).mean()), 4),
        fpr=round(float((calibrated[y == 0] >= threshold).mean()), 4),
        encoder_sha256=WEIGHTS_SHA256,
        labels_sha256=labels_digest(rows),
    )
    return Fitted(head=head, penalty=penalty, held_out=held_out, out_of_fold=calibrated)


def as_json(head: followups.Head) -> str:
    """Return a head as the text of its file."""
    content: Mapping[str, Any] = {
        "embedding": list(head.embedding),
        "surface": dict(zip(NAMES, head.surface, strict=True)),
        "words": list(head.words),
        "behaviour": dict(zip(followups.BEHAVIOUR, head.behaviour, strict=True)),
        **{name: getattr(head, name) for name in ("intercept", "unit", "slope", "offset", "threshold", "tpr", "fpr", "penalty")},
        "encoder_sha256": head.encoder_sha256,
        "labels_sha256": head.labels_sha256,
    }
    return json.dumps(content, ensure_ascii=True) + "\n"
