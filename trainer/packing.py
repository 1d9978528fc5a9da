"""Put rows of unequal length into packed micro-batches without padding, and compute a shared prefix once.

A row is prompt + response; only response tokens are trained. Rows of one session are a *chain* where each row's prompt begins
with exactly the tokens of its predecessor's prompt + response; the last row's tokens then hold all of them, and each row trains
its own span of it. A row whose prefix breaks by a single token starts a chain of its own. A micro-batch is one packed sequence:
chains laid end to end, each a *segment* of attention with position ids from 0, and attention that never crosses a segment
(`model.py`). Position `i` of a causal model predicts token `i + 1`, so a response token at offset `k` of its chain is read at
offset `k - 1`. All that is counted per row (masks, means, weights) stays per row: a chain exists for the forward pass only.

Takes lengths and token arrays, gives index arrays. Leaves out: tensors on a device, attention, the loss.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections.abc import Iterable, Sequence
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
    group: str = ""
    """Rows of one group (a session under one policy version) may share a prefix; an empty group shares with nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Chains laid end to end."""

    rows: tuple[int, ...]
    """Indices into the caller's rows, in packed order."""
    input_ids: Int[np.ndarray, " T"]
    position_ids: Int[np.ndarray, " T"]
    """From 0 in each chain."""
    lengths: tuple[int, ...]
    """Tokens of each chain; they sum to T."""
    read_at: Int[np.ndarray, " N"]
    """Packed position whose hidden state predicts each trained token."""
    targets: Int[np.ndarray, " N"]
    """The trained token ids."""
    segment: Int[np.ndarray, " N"]
    """Position in `rows` of the row that each trained token belongs to."""
    temperatures: Float[np.ndarray, " N"]


def reply_row(
    prompt_ids: Int[np.ndarray, " P"], response_ids: Int[np.ndarray, " R"], *, temperature: float = 1.0, group: str = ""
) -> PackedRow:
    """Return a row whose whole response is trained.

    Args:
        prompt_ids: What the policy read.
        response_ids: What it sampled.
        temperature: Divides the logits.
        group: See `PackedRow`.

    Raises:
        ValueError: The prompt is empty.
    """
    if len(prompt_ids) == 0:
        raise ValueError("a row needs at least one prompt token: nothing predicts its first response token")
    trained = np.arange(len(prompt_ids), len(prompt_ids) + len(response_ids))
    return PackedRow(prompt_ids=prompt_ids, response_ids=response_ids, trained=trained, temperature=temperature, group=group)


def tokens_of(row: PackedRow) -> int:
    """Return the length of prompt + response."""
    return len(row.prompt_ids) + len(row.response_ids)


def chains(rows: Sequence[PackedRow], chosen: Iterable[int]) -> list[list[int]]:
    """Link rows that continue each other token by token.

    Shortest prompts come first; a row joins the chain with the longest end (prompt + response of its last row) that its prompt
    begins with. Where two rows continue the same one, the later of them starts a chain of its own. Rows are linked only within
    one group and at one temperature. A chain is as long as its last row, so chaining never makes anything longer.

    Args:
        rows: All rows.
        chosen: Indices of the rows to link.

    Returns:
        Chains of indices, each in the order of its tokens, sorted by their first index. Every chosen row is in exactly one; the
        chains of a union of whole chains are those same chains.
    """
    ordered = sorted(chosen, key=lambda i: (len(rows[i].prompt_ids), i))
    found: list[list[int]] = []
    ends: dict[tuple[str, float], list[tuple[np.ndarray, list[int]]]] = {}
    for i in ordered:
        row = rows[i]
        siblings = ends.setdefault((row.group, row.temperature), []) if row.group else []
        fits = [at for at, (end, _) in enumerate(siblings) if np.array_equal(end, row.prompt_ids[: len(end)])]
        end = np.concatenate([row.prompt_ids, row.response_ids])
        if fits:
            best = max(fits, key=lambda at: len(siblings[at][0]))
            siblings[best][1].append(i)
            siblings[best] = (end, siblings[best][1])
        else:
            found.append([i])
            siblings.append((end, found[-1]))
    return sorted(found, key=min)


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
    first-fit bins stand. A row longer than `max_tokens` gets a bin of its own. Bins come costliest first: ranks take them in step, so
    bins that are worked on at the same time cost alike.

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
    even = sorted(bins, key=lambda rows: (-sum(cost(lengths[row]) for row in rows), rows))
    return [sorted(rows) for rows in even]


def plan_rows(rows: Sequence[PackedRow], chosen: Iterable[int], *, max_tokens: int, bins_multiple_of: int = 1) -> list[list[int]]:
    """Assign whole chains to bins; see `plan`.

    Args:
        rows: All rows.
        chosen: Indices of the rows to assign.
        max_tokens: Tokens a bin may hold, a shared prefix counted once.
        bins_multiple_of: The bin count is rounded up to a multiple of this.

    Returns:
        Bins of row indices; every chosen row is in exactly one bin.
    """
    linked = chains(rows, chosen)
    bins = plan([tokens_of(rows[chain[-1]]) for chain in linked], max_tokens=max_tokens, bins_multiple_of=bins_multiple_of)
    return [[i for chain in chains_of_bin for i in linked[chain]] for chains_of_bin in bins]


def pack(rows: Sequence[PackedRow], chosen: Iterable[int]) -> MicroBatch:
    """Lay the chosen rows end to end, each chain once.

    Args:
        rows: All rows.
        chosen: Indices of the rows of this micro-batch; may be empty (a rank without work still takes part in collectives).
    """
    linked = chains(rows, chosen)
    sequences = [np.concatenate([rows[chain[-1]].prompt_ids, rows[chain[-1]].response_ids]).astype(np.int64) for chain in linked]
    lengths = tuple(len(sequence) for sequence in sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    placed = [(at, i) for at, chain in enumerate(linked) for i in chain]
    empty = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        rows=tuple(i for _, i in placed),
        input_ids=np.concatenate([empty, *sequences]),
        position_ids=np.concatenate([empty, *(np.arange(length) for length in lengths)]),
        lengths=lengths,
        read_at=np.concatenate([empty, *(starts[at] + rows[i].trained - 1 for at, i in placed)]),
        targets=np.concatenate([empty, *(sequences[at][rows[i].trained] for at, i in placed)]),
        segment=np.concatenate([empty, *(np.full(len(rows[i].trained), k) for k, (_, i) in enumerate(placed))]),
        temperatures=np.concatenate([np.zeros(0), *(np.full(len(rows[i].trained), rows[i].temperature) for _, i in placed)]),
    )


def order(chains: Sequence[Sequence[int]], *, per_step: int, passes: int, seed: int) -> list[list[int]]:
    """Plan the optimizer batches: each pass visits every row once, chain by chain in its own random order.

    A chain stays in one batch, because apart its rows cost their shared prefix each; only one of more than `per_step` rows is cut
    into pieces of at most that many. A batch takes the next chain when that brings it nearer to `per_step` rows.

    Args:
        chains: Rows by index, each in one chain.
        per_step: Rows of one batch; the last batch of a pass may be smaller, and joins its predecessor when below half.
        passes: Number of passes.
        seed: The same seed gives the same plan on every rank and after a restart.
    """
    pieces = [list(chain[i : i + per_step]) for chain in chains for i in range(0, len(chain), per_step)]
    batches: list[list[int]] = []
    for number in range(passes):
        cut: list[list[int]] = [[]]
        for at in np.random.default_rng([seed, number]).permutation(len(pieces)).tolist():
            if cut[-1] and len(cut[-1]) + len(pieces[at]) - per_step > per_step - len(cut[-1]):
                cut.append([])
            cut[-1] += pieces[at]
        if len(cut) > 1 and 2 * len(cut[-1]) < per_step:
            short = cut.pop()
            cut[-1] = cut[-1] + short
        batches += cut
    return batches
