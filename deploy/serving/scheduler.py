"""Which sequences run when: joining and leaving the batch between steps, and the memory of prompts already read.

Pure bookkeeping of the embedded engine, torch-free: the decoder's tensors are opaque here.

Takes: requests as token ids. Gives: `Sampling`, `PrefixMemory`. Leaves out: tensors (`decoder.py`) and threads (`batching.py`).
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request draws its tokens."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """1 keeps the whole vocabulary."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_tokens: int = 256
    seed: int = 0
    """Same seed and same logits give the same tokens, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A stretch of tokens whose keys and values are known."""

    stored: Any
    """The decoder's copy."""
    length: int
    """Tokens of it that may be used."""


class PrefixMemory:
    """Keys and values of sequences that ended, least recently used out first.

    A new prompt mostly begins like an earlier one (the same session one turn before, or at least the same system prompt), and
    on a CPU reading the prompt is a large part of a short answer's cost. A hit is the longest common run of token ids with
    any entry, so it is exact by construction. A process serves one checkpoint for life: entries never go stale.
    """

    def __init__(self, *, max_bytes: int, token_bytes: int) -> None:
        self._max_tokens = max_bytes // token_bytes
        self._entries: OrderedDict[int, tuple[np.ndarray, Any]] = OrderedDict()
        self._next = 0
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self._tokens

    def find(self, ids: list[int]) -> Prefix | None:
        """Return the longest known prefix of `ids` that leaves at least one token to compute; None if there is none."""
        wanted = np.asarray(ids[:-1], dtype=np.int32)
        best, best_key = 0, -1
        for key, (known, _) in self._entries.items():
            common = common_prefix(known, wanted)
            if common > best:
                best, best_key = common, key
        if best == 0:
            return None
        self._entries.move_to_end(best_key)
        return Prefix(stored=self._entries[best_key][1], length=best)

    def keep(self, ids: list[int], stored: Any) -> None:
        """Remember a sequence; entries that it continues are dropped, then the oldest until the bound holds."""
        added = np.asarray(ids, dtype=np.int32)
        if not 0 < len(added) <= self._max_tokens:
            return
        for key, (known, _) in list(self._entries.items()):
            if common_prefix(known, added) == len(known):
                self._drop(key)
        self._entries[self._next] = (added, stored)
        self._next += 1
        self._tokens += len(added)
        while self._tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def wants(self, ids: list[int]) -> bool:
        """Whether keeping `ids` would add anything (False when an entry already holds all of it)."""
        if not 0 < len(ids) <= self._max_tokens:
            return False
        new = np.asarray(ids, dtype=np.int32)
        return not any(common_prefix(known, new) == len(new) for known, _ in self._entries.values())

    def _drop(self, key: int) -> None:
        known, _ = self._entries.pop(key)
        self._tokens -= len(known)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many leading elements two arrays share."""
    shared = min(len(left), len(right))
    differs = np.flatnonzero(left[:shared] != right[:shared])
    return int(differs[0]) if len(differs) else shared
