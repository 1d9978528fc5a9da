"""Put rows of unequal length into packed micro-batches without padding.

A row is prompt + response; only response tokens are trained. A micro-batch is one packed sequence: rows laid end to end, each
a *segment* with position ids from 0, and attention that never crosses a segment (`model.py`). Position `i` of a causal model
predicts token `i + 1`, so a response token at offset `k` of its segment is read at offset `k - 1`.

Takes lengths and token arrays, gives index arrays. Leaves out: tensors on a device, attention, the loss.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One row as the packer sees it."""

    prompt_ids: Int[np.ndarray, " P"]
    """At least one token: the first response token needs a predecessor."""
    response_ids: Int[np.ndarray, " R"]
    trained: Int[np.ndarray, " N"]
    """Offsets into prompt + response of the tokens that enter the loss, ascending, each >= 1."""
    temperature: float
    """The logits are divided by this; 1 for supervised rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows laid end to end."""

    rows: tuple[int, ...]
    """Indices into the caller's rows, in packed order."""
    input_ids: Int[np.ndarray, " T"]
    position_ids: Int[np.ndarray, " T"]
    """From 0 in each segment."""
    lengths: tuple[int, ...]
    """Tokens of each segment; they sum to T."""
    read_at: Int[np.ndarray, " N"]
    """Packed position whose hidden state predicts each trained token."""
    targets: Int[np.ndarray, " N"]
    """The trained token ids."""
    segment: Int[np.ndarray, " N"]
    """Position in `rows` of the row that each trained token belongs to."""
    temperatures: Float[np.ndarray, " N"]


def reply_row(prompt_ids: Int[np.ndarray, " P"], response_ids: Int[np.ndarray, " R"], *, temperature: float = 1.0) -> PackedRow:
    """Return a row whose whole response is trained.

    Raises:
        ValueError: The prompt is empty.
    """
    if len(prompt_ids) == 0:
        raise ValueError("a row needs at least one prompt token: nothing predicts its first response token")
    trained = np.arange(len(prompt_ids), len(prompt_ids) + len(response_ids))
    return PackedRow(prompt_ids=prompt_ids, response_ids=response_ids, trained=trained, temperature=temperature)


def cost(length: int, *, attention_tokens: int = 6_000) -> float:
    """Return the relative cost of a segment: linear layers grow with L, attention with L^2.

    Args:
        length: Tokens.
        attention_tokens: Length at which attention costs as much as the linear layers (12 d / 1 for a Llama block of width
            d = 576, rounded).
    """
    return length + length * length / attention_tokens


def plan(lengths: Sequence[int], *, max_tokens: int, bins_multiple_of: int = 1) -> list[list[int]]:
    """Assign rows to bins of at most `max_tokens`, then even out what the bins cost.

    First-fit decreasing finds how few bins suffice; rows are then dealt, costliest first, to the cheapest bin that has room
    (longest processing time first), which keeps ranks from waiting for each other. Where that greedy deal does not fit, the
    first-fit bins stand. A row longer than `max_tokens` gets a bin of its own.

    Args:
        lengths: Tokens of each row.
        max_tokens: Tokens a bin may hold.
        bins_multiple_of: The bin count is rounded up to a multiple of this (the number of ranks); some bins may stay empty.

    Returns:
        Bins of row indices, ascending inside a bin. Every row is in exactly one bin.

    Source: Johnson, "Near-optimal bin packing algorithms", 1973 (first-fit decreasing); Graham, "Bounds on multiprocessing
        timing anomalies", 1969 (longest processing time).
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    fitted: list[list[int]] = []
    room: list[int] = []
    for row in order:
        slot = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if slot is None:
            fitted.append([])
            room.append(max_tokens)
            slot = len(fitted) - 1
        fitted[slot].append(row)
        room[slot] -= lengths[row]
    count = max(-(-len(fitted) // bins_multiple_of) * bins_multiple_of, bins_multiple_of)
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    costs = [0.0] * count
    for row in order:
        open_bins = [i for i in range(count) if tokens[i] + lengths[row] <= max_tokens or not bins[i]]
        if not open_bins:
            bins = fitted + [[] for _ in range(count - len(fitted))]
            break
        slot = min(open_bins, key=lambda i: (costs[i], i))
        bins[slot].append(row)
        tokens[slot] += lengths[row]
        costs[slot] += cost(lengths[row])
    return [sorted(rows) for rows in bins]


def pack(rows: Sequence[PackedRow], chosen: Sequence[int]) -> MicroBatch:
    """Lay the chosen rows end to end.

    Args:
        rows: All rows.
        chosen: Indices of the rows of this micro-batch; may be empty (a rank without work still takes part in collectives).
    """
    sequences = [np.concatenate([rows[i].prompt_ids, rows[i].response_ids]).astype(np.int64) for i in chosen]
    lengths = tuple(len(sequence) for sequence in sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    empty = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        rows=tuple(chosen),
        input_ids=np.concatenate([empty, *sequences]),
        position_ids=np.concatenate([empty, *(np.arange(length) for length in lengths)]),
        lengths=lengths,
        read_at=np.concatenate([empty, *(starts[k] + rows[i].trained - 1 for k, i in enumerate(chosen))]),
        targets=np.concatenate([empty, *(sequences[k][rows[i].trained] for k, i in enumerate(chosen))]),
        segment=np.concatenate([empty, *(np.full(len(rows[i].trained), k) for k, i in enumerate(chosen))]),
        temperatures=np.concatenate([np.zeros(0), *(np.full(len(rows[i].trained), rows[i].temperature) for i in chosen)]),
    )
