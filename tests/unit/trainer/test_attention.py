"""Attention inside segments: the values and gradients of the plain formula, however rows are cut, and nothing but its inputs kept."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from trainer.attention import BLOCK, attend


def parts(tokens: int, *, heads: int = 4, shared: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys and values as a model lays them out: heads of a token beside each other."""
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(1, tokens, n, 8, generator=generator, dtype=torch.float64) for n in (heads, shared, shared)]
    return [part.to(dtype).transpose(1, 2).requires_grad_() for part in made]


def formula(inputs: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    """Attend with one dense mask over the packed row."""
    query, key, value = inputs
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(owner))
    seen = (owner[:, None] == owner[None]) & (order[:, None] >= order[None])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


def attended(inputs: list[Tensor], lengths: list[int], *, scale: float | None = None) -> Tensor:
    """Call what is tested."""
    return attend(inputs[0], inputs[1], inputs[2], lengths=lengths, scale=scale)


def outcome(made: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return a result and the gradients of its inputs for a fixed outer gradient."""
    outer = torch.linspace(-1, 2, made.numel(), dtype=torch.float64).to(made.dtype).view(made.shape)
    return [made.detach(), *torch.autograd.grad((made * outer).sum(), inputs)]


@given(st.lists(st.integers(1, 2 * BLOCK + 3), min_size=1, max_size=3), st.sampled_from([(4, 2), (3, 1), (2, 2)]))
@settings(deadline=None, max_examples=20)
def test_values_and_gradients_are_those_of_a_dense_mask(lengths: list[int], heads: tuple[int, int]) -> None:
    inputs = parts(sum(lengths), heads=heads[0], shared=heads[1])
    found = outcome(attended(inputs, lengths, scale=0.3), inputs)
    for mine, theirs in zip(found, outcome(formula(inputs, lengths, 0.3), inputs), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-11)


def test_two_tokens_worked_by_hand() -> None:
    # scores of the second token 0 and ln 3, so it takes a quarter of the first value and three quarters of the second
    query, key = torch.tensor([[[[5.0], [1.0]]]]), torch.tensor([[[[0.0], [math.log(3)]]]])
    made = attend(query, key, torch.tensor([[[[8.0], [4.0]]]]), lengths=[2], scale=1.0)
    assert made.flatten().tolist() == pytest.approx([8.0, 5.0])


def test_without_a_scale_it_is_one_over_the_root_of_the_width() -> None:
    inputs = parts(5)
    assert torch.equal(attended(inputs, [5]), attended(inputs, [5], scale=8**-0.5))


def test_in_bf16_no_gradient_is_farther_from_the_exact_one_than_a_plain_kernels() -> None:
    exact = [part.detach().double().requires_grad_() for part in parts(300, dtype=torch.bfloat16)]
    truth = outcome(formula(exact, [300], 8**-0.5), exact)
    narrow = parts(300, dtype=torch.bfloat16)
    query, key, value = narrow[0], narrow[1].repeat_interleave(2, dim=1), narrow[2].repeat_interleave(2, dim=1)
    plain = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    ours, theirs = (
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(outcome(made, narrow), truth, strict=True)]
        for made in (attended(narrow, [300]), plain)
    )
    assert max(ours) < 1.5 * max(theirs)
    assert max(ours) < 0.02


def test_nothing_of_the_size_of_the_scores_is_kept() -> None:
    inputs = parts(4 * BLOCK, dtype=torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        attended(inputs, [4 * BLOCK])
    assert sorted(kept) == sorted([*(part.numel() for part in inputs), inputs[0].numel()])
