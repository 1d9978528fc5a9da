"""Causal attention inside each segment of a packed row, without a mask over the row and without keeping its probabilities.

On a GPU every segment goes to PyTorch's own kernel. On a CPU that kernel is a large part of a step: in bf16 its backward pass reaches
a tenth of what a matrix product reaches. So there attention is matrix products: queries in blocks, each block against the keys before
its end, heads that share keys as one taller matrix (keys and values are never repeated), scores and softmax in fp32. The backward
pass makes the probabilities of a block again; kept are queries, keys, values and the result, the last in the layout that the next
layer keeps anyway.

Takes: queries, keys and values of a packed row and the lengths of its segments. Gives: the attended values. Leaves out: windows and
dropout.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

BLOCK: Final = 64
"""Queries of a block: scores of nine heads against 1,500 keys are 3.5 MB in fp32, and more of a block's own triangle would be thrown away
in larger ones. Measured best of 64, 128, 256 and 512 at every length from 120 to 1,500."""


def _blocks(lengths: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
    """Yield the size of each block of queries, where its queries lie in the packed row, and where the keys that they may see lie."""
    start = 0
    for length in lengths:
        for first in range(start, start + length, BLOCK):
            end = min(first + BLOCK, start + length)
            yield end - first, slice(first, end), slice(start, end)
        start += length


def _tall(part: Tensor, groups: int) -> Tensor:
    """Lay heads that share keys under each other: [kv_heads x groups, B, d] to [kv_heads, groups x B, d]."""
    return part.reshape(part.shape[0] // groups, groups * part.shape[1], part.shape[2])


class _Segmented(torch.autograd.Function):
    """Shapes inside: queries [heads, T, d], keys and values [kv_heads, T, d], result [T, heads, d]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        wide_type = torch.promote_types(query.dtype, torch.float32)
        groups = query.shape[0] // key.shape[0]
        made = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        wide_key = (key * scale if wide_type == query.dtype else key.to(wide_type).mul_(scale)).transpose(1, 2)
        for size, queries, keys in _blocks(lengths):
            weights = _probabilities(_tall(query[:, queries], groups).to(wide_type), wide_key[:, :, keys], size)
            attended = torch.bmm(weights.to(value.dtype), value[:, keys])
            made[queries] = attended.reshape(query.shape[0], size, value.shape[2]).transpose(0, 1)
        ctx.save_for_backward(query, key, value, made)
        ctx.lengths, ctx.scale = lengths, scale
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, made = ctx.saved_tensors
        wide_type = torch.promote_types(query.dtype, torch.float32)
        groups = query.shape[0] // key.shape[0]
        wide_key = (key * ctx.scale if wide_type == query.dtype else key.to(wide_type).mul_(ctx.scale)).transpose(1, 2)
        wide_value = value.to(wide_type).transpose(1, 2)
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key, dtype=wide_type), torch.zeros_like(value, dtype=wide_type)
        for size, queries, keys in _blocks(ctx.lengths):
            mine = _tall(query[:, queries], groups)
            outer = _tall(grads[0][queries].transpose(0, 1), groups)
            wide_outer = outer.to(wide_type)
            weights = _probabilities(mine.to(wide_type), wide_key[:, :, keys], size)
            to_value[:, keys] += torch.bmm(weights.to(value.dtype).transpose(1, 2), outer)
            along = (wide_outer * _tall(made[queries].transpose(0, 1), groups)).sum(-1, keepdim=True)
            slope = torch.bmm(wide_outer, wide_value[:, :, keys]).sub_(along).mul_(weights).to(key.dtype)
            to_query[:, queries] = torch.bmm(slope, key[:, keys]).mul_(ctx.scale).reshape(query.shape[0], size, query.shape[2])
            to_key[:, keys] += torch.bmm(slope.transpose(1, 2), mine)
        return to_query, to_key.mul_(ctx.scale).to(key.dtype), to_value.to(value.dtype), None, None


def _probabilities(tall: Tensor, wide_key: Tensor, size: int) -> Tensor:
    """Return the softmax of a block's scores [kv_heads, groups x B, K]; the last B keys are the block's own, seen up to each query."""
    scores = torch.bmm(tall, wide_key)
    own = scores.view(scores.shape[0], -1, size, scores.shape[2])[..., -size:]
    own.masked_fill_(torch.ones(size, size, dtype=torch.bool, device=own.device).triu_(1), -torch.inf)
    return torch.softmax(scores, dim=-1)


def attend(
    query: Float[Tensor, "1 H T d"],
    key: Float[Tensor, "1 K T d"],
    value: Float[Tensor, "1 K T d"],
    *,
    lengths: Sequence[int],
    scale: float | None = None,
) -> Float[Tensor, "1 T H d"]:
    """Attend causally inside each segment.

    Args:
        query: Of each head.
        key: H is a multiple of K; each key serves H / K heads.
        value: As keys.
        lengths: Tokens of each segment, summing to T.
        scale: Multiplies scores; None: d^-0.5.

    Source: Dao et al., "FlashAttention: Fast and memory-efficient exact attention", section 3.1 (probabilities again in the backward
        pass), arXiv 2205.14135; Ainslie et al., "GQA", arXiv 2305.13245.
    """
    parts = list(lengths)
    if query.device.type == "cpu":
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return _Segmented.apply(query[0], key[0], value[0], tuple(parts), factor)[None]
    groups = query.shape[1] // key.shape[1]
    made = [
        functional.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), is_causal=True, scale=scale
        ).transpose(1, 2)
        for q, k, v in zip(query.split(parts, dim=2), key.split(parts, dim=2), value.split(parts, dim=2), strict=True)
    ]
    return torch.cat(made, dim=1)
