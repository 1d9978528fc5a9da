"""The fused output layer equals the plain one, in values and gradients, and keeps no logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import ConfigError
from trainer import planner
from trainer.head import CHUNK_NUMBERS, CPU_CHUNK_NUMBERS, TokenHead, replace_head, rows_per_chunk, token_scores

N, D, V = 11, 6, 37


def inputs(*, dtype=torch.float64, grad=("hidden", "weight")):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    temperatures = torch.rand(N, generator=generator, dtype=torch.float64) + 0.5
    return hidden.requires_grad_("hidden" in grad), weight.requires_grad_("weight" in grad), targets, temperatures


def plain(hidden, weight, targets, temperatures):
    logp = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], -1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


@given(st.integers(1, N + 3))
@settings(deadline=None)
def test_values_and_gradients_equal_the_plain_layer_however_it_is_cut(chunk):
    hidden, weight, targets, temperatures = inputs()
    outer = torch.linspace(-1, 2, N, dtype=torch.float64)
    logprobs, entropies = token_scores(hidden, weight, targets, temperatures, chunk=chunk)
    found = torch.autograd.grad((outer * logprobs).sum(), (hidden, weight))
    expected, expected_entropies = plain(hidden, weight, targets, temperatures)
    truth = torch.autograd.grad((outer * expected).sum(), (hidden, weight))
    assert torch.allclose(logprobs, expected, atol=1e-12)
    assert torch.allclose(entropies, expected_entropies, atol=1e-12)
    for mine, theirs in zip(found, truth, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_two_tokens_worked_by_hand():
    # logits 0 and ln 3: p = 1/4, 3/4; at temperature 2 they are 0 and ln sqrt 3
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    hidden = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    logprobs, entropies = token_scores(hidden, weight, torch.tensor([1, 0]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    root = math.sqrt(3)
    assert logprobs.tolist() == pytest.approx([math.log(3 / 4), -math.log(1 + root)])
    assert entropies[0].item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    logprobs.sum().backward()
    # (W[1] - E W) = ln 3 - .75 ln 3;  (W[0] - E W) / 2 = -(sqrt 3 / (1 + sqrt 3)) ln 3 / 2
    assert hidden.grad[:, 0].tolist() == pytest.approx([0.25 * math.log(3), -root / (1 + root) * math.log(3) / 2])


@pytest.mark.parametrize("grad", [("hidden",), ("weight",), ("hidden", "weight")])
def test_what_needs_no_gradient_gets_none(grad):
    hidden, weight, targets, temperatures = inputs(grad=grad)
    token_scores(hidden, weight, targets, temperatures, chunk=4)[0].sum().backward()
    assert (hidden.grad is not None, weight.grad is not None) == ("hidden" in grad, "weight" in grad)


def test_bf16_scores_are_wide_and_close():
    hidden, weight, targets, temperatures = inputs(dtype=torch.bfloat16)
    logprobs, _ = token_scores(hidden, weight, targets, temperatures, chunk=4)
    expected, _ = plain(hidden.double(), weight.double(), targets, temperatures)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=0.1)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward_pass():
    hidden, weight, targets, temperatures = inputs()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        logprobs, _ = token_scores(hidden, weight, targets, temperatures, chunk=4)
    assert max(kept) == max(N * D, V * D) < N * V
    logprobs.sum().backward()


def test_where_the_layer_is_frozen_only_one_vector_a_token_is_kept():
    hidden, weight, targets, temperatures = inputs(grad=("hidden",))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        token_scores(hidden, weight, targets, temperatures, chunk=4)
    assert kept == [N * D]


def test_no_token_gives_empty_vectors():
    _, weight, _, _ = inputs()
    logprobs, entropies = token_scores(torch.zeros(0, D, dtype=torch.float64), weight, torch.zeros(0, dtype=torch.long), torch.zeros(0))
    assert logprobs.shape == entropies.shape == (0,)


def test_logits_of_one_chunk_are_bounded_whatever_the_vocabulary():
    assert [rows_per_chunk(v) * v * 4 <= 64 * 2**20 for v in (32_000, 49_152, 151_936, 256_000)] == [True] * 4
    assert rows_per_chunk(49_152) == 341
    assert rows_per_chunk(10**9) == 16


def test_the_planner_counts_the_buffers_that_a_chunk_takes():
    # scores and their exponentials in fp32, logits in bf16
    assert planner.HEAD_BYTES == (4 + 4 + 2) * CHUNK_NUMBERS
    assert planner.CPU_HEAD_BYTES == (4 + 4 + 2) * CPU_CHUNK_NUMBERS


class Settings:
    model_type = "gemma2"
    final_logit_softcapping = 30.0

    def get_text_config(self):
        return self


def test_a_model_that_bends_its_logits_is_refused():
    class Bent:
        config = Settings()

        def get_output_embeddings(self):
            return torch.nn.Linear(2, 3, bias=False)

    with pytest.raises(ConfigError, match="gemma2 models cannot be trained here: final_logit_softcapping"):
        replace_head(Bent())


def test_a_token_head_shares_the_embedding_it_was_given():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    assert TokenHead(weight).weight is weight
