"""How likely the next user message shows that the user was not satisfied: a calibrated linear model on sentence embeddings and behaviour.

It looks at what people do when an answer missed: they say so, ask for it undone or done differently, repeat themselves, paste the failure,
stop the agent, come back at once. A message that merely mentions errors is a new task ("kill the process, fix the error handling").
"Dissatisfied" means: the message shows that the previous answer did not do what the user wanted. Building on an answer, answering a
question of the agent, reporting a problem of something else and moving on do not.

Everything is added up in whole numbers, so a probability is the same on every machine, in every batch and in both implementations.

Takes: two consecutive user messages and what lay between them. Gives: features and P(dissatisfied).
Leaves out: the embedding model (`followup_encoder.py`, loaded on first use), the same for many rows (`followup_scoring.py`) and as a
column (`followup_columns.py`), how the weights came about (`fitting.py`).
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from signals.followup_cues import BUCKETS, NAMES, UNIT, cleaned, normalise, surface, words
from signals.followup_phrases import PHRASES

HEAD_FILE: Final = Path(__file__).parent / "data" / "followup_head.json"
DIM: Final = 512
"""Length of an embedding."""
SCALE: Final = 4096
"""An embedding of length 1 has components in [-SCALE, SCALE]."""
BEHAVIOUR: Final = ("interrupted", "stack_trace", "quick", "slow", "similar")
"""What the user did beside writing: stopped the turn, attached a stack trace, came back within QUICK_S, came back after SLOW_S, and how
near in meaning the two messages are. Whole numbers in [0, UNIT]; 0 also when unknown."""
QUICK_S: Final = 15.0
"""Nobody has read an answer and tried it in this time."""
SLOW_S: Final = 300.0
"""Time enough to have used the answer."""
FLOOR: Final = 1e-6
"""No message is certain evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the model looks at, as whole numbers."""

    embedding: tuple[int, ...]
    """[DIM] embedding of the message, in steps of 1 / SCALE."""
    surface: tuple[int, ...]
    """Cues and shape of the text, in the order of `followup_cues.NAMES`."""
    words: tuple[int, ...]
    """[BUCKETS] words of the text, see `followup_cues.words`."""
    behaviour: tuple[int, ...]
    """In the order of BEHAVIOUR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fitted weights and how the model did on messages of kinds that it had not seen."""

    embedding: tuple[int, ...]
    surface: tuple[int, ...]
    words: tuple[int, ...]
    behaviour: tuple[int, ...]
    intercept: int
    unit: float
    """What one step of the sum is worth before calibration."""
    slope: float
    offset: float
    """Platt calibration, fitted on out-of-fold sums: P = 1 / (1 + exp(-(slope * unit * sum + offset)))."""
    threshold: float
    """A message at or above it counts as dissatisfied where a yes or no is needed: the largest tpr - fpr out of fold."""
    tpr: float
    """Share of dissatisfied messages at or above the threshold, out of fold by idea; with `fpr` it corrects rates,
    (q - fpr) / (tpr - fpr)."""
    fpr: float
    """Share of other messages at or above the threshold, out of fold."""
    penalty: float
    """L2 penalty that the weights were fitted with."""
    encoder_sha256: str
    labels_sha256: str
    digest: str
    """Of the file, the cues and the rules here; part of `reward_version`."""


RULES: Final = 3
"""Raise it when a rule here or in `followup_cues.py` changes, so that the reward version changes with it."""


def read_head(path: Path = HEAD_FILE) -> Head:
    """Read a head.

    Raises:
        ValueError: It belongs to other features than these.
    """
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(raw)
    if (
        tuple(found["surface"]) != NAMES
        or tuple(found["behaviour"]) != BEHAVIOUR
        or (len(found["embedding"]), len(found["words"])) != (DIM, BUCKETS)
    ):
        raise ValueError(f"{path} was fitted on other features; fit it again: tidegate signals followup fit")
    return Head(
        embedding=tuple(found["embedding"]),
        surface=tuple(found["surface"].values()),
        words=tuple(found["words"]),
        behaviour=tuple(found["behaviour"].values()),
        **{name: found[name] for name in ("intercept", "unit", "slope", "offset", "threshold", "tpr", "fpr", "penalty")},
        encoder_sha256=found["encoder_sha256"],
        labels_sha256=found["labels_sha256"],
        digest=hashlib.sha256(json.dumps([RULES, PHRASES]).encode() + raw).hexdigest()[:12],
    )


@cache
def head() -> Head:
    """Return the committed head."""
    return read_head()


def version() -> str:
    """Return the digest of everything that decides a probability: weights, calibration, encoder, rules."""
    return head().digest


def behaviour(*, stack_traces: int, reply_delay_ms: int | None, interrupted: bool, similarity: int) -> tuple[int, ...]:
    """Describe what the user did, in the order of BEHAVIOUR.

    Args:
        stack_traces: Stack traces attached to the message.
        reply_delay_ms: From the turn's end to the message; None when unknown.
        interrupted: Whether the user stopped the turn.
        similarity: Product of the two embeddings, in steps of 1 / SCALE^2; 0 when there is no previous message.
    """
    seconds = None if reply_delay_ms is None else max(reply_delay_ms, 0) / 1000.0
    return (
        UNIT if interrupted else 0,
        UNIT if stack_traces > 0 else 0,
        UNIT if seconds is not None and seconds <= QUICK_S else 0,
        UNIT if seconds is not None and seconds >= SLOW_S else 0,
        min(max(similarity, 0) * UNIT // (SCALE * SCALE), UNIT),
    )


def features(message: str, *, previous: str | None, stack_traces: int, reply_delay_ms: int | None, interrupted: bool) -> Features:
    """Describe a follow-up; loads the embedding model on first use.

    Args:
        message: The next user message.
        previous: The user message of the turn that is judged; None when its text was not kept.
        stack_traces: Stack traces attached to the next message.
        reply_delay_ms: From the turn's end to the message; None when unknown.
        interrupted: Whether the user stopped the turn.

    Raises:
        MissingDependency: See `followup_encoder.encoder`.
    """
    from signals.followup_encoder import embed

    text, before = cleaned(message), None if previous is None else cleaned(previous)
    vectors = [tuple(map(int, row)) for row in embed([text] if before is None else [text, before])]
    similarity = 0 if before is None else sum(a * b for a, b in zip(*vectors, strict=True))
    buckets, value = words(normalise(text))
    return Features(
        embedding=vectors[0],
        surface=surface(text, before),
        words=tuple(value if bucket in buckets else 0 for bucket in range(BUCKETS)),
        behaviour=behaviour(stack_traces=stack_traces, reply_delay_ms=reply_delay_ms, interrupted=interrupted, similarity=similarity),
    )


def total(x: Features, weights: Head) -> int:
    """Return the weighted sum of features, exactly."""
    own = (*x.embedding, *x.surface, *x.words, *x.behaviour)
    weighted = (*weights.embedding, *weights.surface, *weights.words, *weights.behaviour)
    return weights.intercept + sum(w * v for w, v in zip(weighted, own, strict=True))


def probability(summed: int, weights: Head) -> float:
    """Return the calibrated probability of a sum, in [FLOOR, 1 - FLOOR], rounded to what every machine computes alike."""
    score = weights.slope * (weights.unit * summed) + weights.offset
    p = 1.0 / (1.0 + math.exp(-score)) if score > -700.0 else 0.0
    return min(max(round(p, 6), FLOOR), 1.0 - FLOOR)


def dissatisfied(x: Features) -> float:
    """Return P(dissatisfied), in (0, 1)."""
    return probability(total(x, head()), head())
