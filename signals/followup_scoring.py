"""P(dissatisfied) of many follow-ups at once: the same whole numbers as `followups.py`, by matrices.

Takes: columns of messages and behaviour. Gives: probabilities, equal to `followups.dissatisfied` of each row to the last bit.
Leaves out: columns (`followup_columns.py`), files (`followup_commands.py`). Imported where there is something to score: in Spark's Python
workers and by commands.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from signals import followups
from signals.followup_cues import BUCKETS, cleaned, normalise, surface, word_buckets, words
from signals.followup_encoder import DIM, embed

REMEMBERED: Final = 20_000
"""Embeddings kept from batch to batch (20 MB): the message of a turn is the previous one of the next, and people repeat themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One follow-up."""

    message: str
    previous: str | None = None
    stack_traces: int = 0
    reply_delay_ms: int | None = None
    interrupted: bool = False


class Scorer:
    """Scores batches with one head; remembers embeddings of texts it has seen, which threads share in turn."""

    def __init__(self, head: followups.Head) -> None:
        self._turn = threading.Lock()
        self._head = head
        self._embedding = np.array(head.embedding, np.int64)
        self._rest = np.array((*head.surface, *head.behaviour), np.int64)
        self._words = head.words
        self._places: dict[str, int] = {}
        self._vectors = np.empty((REMEMBERED, DIM), np.int16)

    def embeddings(self, texts: Sequence[str]) -> np.ndarray:
        """Return embeddings [N, DIM] int16 of cleaned texts, each distinct text embedded once."""
        with self._turn:
            return self._embeddings(texts)

    def _embeddings(self, texts: Sequence[str]) -> np.ndarray:
        fresh = [text for text in dict.fromkeys(texts) if text not in self._places]
        if len(self._places) + len(fresh) > REMEMBERED:
            self._places.clear()
            fresh = list(dict.fromkeys(texts))
        if len(fresh) > REMEMBERED:
            return embed(texts)
        if fresh:
            start = len(self._places)
            self._vectors[start : start + len(fresh)] = embed(fresh)
            self._places.update(zip(fresh, range(start, start + len(fresh)), strict=True))
        return self._vectors[[self._places[text] for text in texts]]

    def matrix(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the features of rows but their words: [N, DIM + surface + behaviour] int64."""
        texts = [cleaned(row.message) for row in rows]
        before = [None if row.previous is None else cleaned(row.previous) for row in rows]
        # One request, so that a clearing of what is remembered cannot fall between a message and the one before it.
        vectors = self.embeddings([*texts, *(text or "" for text in before)]).astype(np.int64)
        own, earlier = vectors[: len(rows)], vectors[len(rows) :]
        alike = np.einsum("ij,ij->i", own, earlier).tolist()
        rest = [
            (
                *surface(text, old),
                *followups.behaviour(
                    stack_traces=row.stack_traces,
                    reply_delay_ms=row.reply_delay_ms,
                    interrupted=row.interrupted,
                    similarity=0 if old is None else similar,
                ),
            )
            for row, text, old, similar in zip(rows, texts, before, alike, strict=True)
        ]
        return np.concatenate([own, np.array(rest, np.int64).reshape(len(rows), len(self._rest))], axis=1)

    def _said(self, row: Row) -> int:
        """Return the weighted sum of a message's words."""
        buckets, value = words(normalise(cleaned(row.message)))
        return value * sum(self._words[bucket] for bucket in buckets)

    def score(self, rows: Sequence[Row]) -> list[float]:
        """Return P(dissatisfied) of each row, in (0, 1)."""
        if not rows:
            return []
        x = self.matrix(rows)
        sums = x[:, :DIM] @ self._embedding + x[:, DIM:] @ self._rest + self._head.intercept
        return [followups.probability(summed + self._said(row), self._head) for summed, row in zip(sums.tolist(), rows, strict=True)]


def word_matrix(rows: Sequence[Row]) -> np.ndarray:
    """Return the words of rows: [N, BUCKETS] int64. To fit with; a score needs only the few that a message holds."""
    found = np.zeros((len(rows), BUCKETS), np.int64)
    for place, row in enumerate(rows):
        buckets, value = words(normalise(cleaned(row.message)))
        found[place, list(buckets)] = value
    return found


_READY: list[Scorer] = []  # one a process: a worker keeps the model and what it remembers from batch to batch


def scorer() -> Scorer:
    """Return this process's scorer with the committed head."""
    if not _READY:
        _READY.append(Scorer(followups.head()))
    return _READY[0]


def forget() -> None:
    """Let this process forget the texts it has seen, as a new one would not know them."""
    _READY.clear()
    word_buckets.cache_clear()
