"""The rows that `tidegate bench trainer` measures on: fixed lengths, made-up tokens, a fixed share of them trained. Pure.

24 rows of 120 to 1,500 tokens, as spread out as sessions of an agent are: short questions beside long tool transcripts. Two
histograms share the lengths: `trained10`, where one token in ten was sampled by the policy (the rest is files and tool output), and
`trained60`. Leaves out: measuring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer.packing import PackedRow, cost, plan_rows, reply_row, tokens_of

HISTOGRAMS: Final = {"trained10": 0.1, "trained60": 0.6}
"""Name and share of trained tokens, in the order they are measured."""
SHORTEST: Final = 120
LONGEST: Final = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to measure."""

    way: str
    """ours, trl, bare_single, bare_packed, or a point of the grid: LAYOUT-HEAD-TOKENS."""
    histogram: str
    rows: int
    checkpoint: str
    adapter: str
    dtype: str
    threads: int
    repeats: int
    max_tokens: int
    activation_checkpointing: bool
    every: int = 1
    """Only each n-th row from the shortest to the longest: the same spread of lengths at less time."""
    shortest: int = 0
    """Only this many rows, the shortest; 0: all."""
    exact_rows: int = 0
    """After the measurement, in fp32, the gradient of so many of the shortest rows; 0: none."""


def lengths(number: int) -> list[int]:
    """Return row lengths evenly spread in their logarithm, in a fixed shuffled order."""
    spread = np.exp(np.linspace(np.log(SHORTEST), np.log(LONGEST), number)).round().astype(int)
    return np.random.default_rng(0).permutation(spread).tolist()


def rows(histogram: str, *, number: int, vocabulary: int) -> list[PackedRow]:
    """Return a histogram's rows.

    Args:
        histogram: Key of `HISTOGRAMS`.
        number: Rows.
        vocabulary: Token ids are drawn below this.
    """
    rng = np.random.default_rng(1)
    share = HISTOGRAMS[histogram]
    made: list[PackedRow] = []
    for length in lengths(number):
        replied = max(2, round(share * length))
        ids = rng.integers(3, vocabulary, length)
        made.append(reply_row(ids[:-replied], ids[-replied:]))
    return made


def advantages(number: int) -> list[float]:
    """Return fixed advantages of both signs, one a row."""
    return np.random.default_rng(2).uniform(-1, 1, number).tolist()


def chosen(lengths_of_rows: Sequence[int], task: Task) -> list[int]:
    """Return the rows that a task works on, by index, in their own order."""
    by_length = sorted(range(len(lengths_of_rows)), key=lambda i: (lengths_of_rows[i], i))[:: task.every]
    return sorted(by_length[: task.shortest] if task.shortest else by_length)


def packing_efficiency(packed: list[PackedRow], *, max_tokens: int, ranks: int) -> float:
    """Return the share of the ranks' time that is spent on tokens of rows, by the packer's own cost of a segment.

    Ranks take micro-batches in step, so a round lasts as long as its costliest micro-batch; nothing is padded.

    Returns:
        sum of all costs / (ranks x sum over rounds of the costliest micro-batch), in (0, 1].
    """
    bins = plan_rows(packed, range(len(packed)), max_tokens=max_tokens, bins_multiple_of=ranks)
    costs = [sum(cost(tokens_of(packed[i])) for i in chosen) for chosen in bins]
    rounds = [max(costs[start : start + ranks]) for start in range(0, len(costs), ranks)]
    return sum(costs) / (ranks * sum(rounds))
