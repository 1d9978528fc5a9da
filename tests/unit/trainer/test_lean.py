"""Layers that keep less: the same numbers forward, the gradients of the plain graph backward."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from trainer.lean import Recipes, gated, make_lean, normalised


def config() -> LlamaConfig:
    """Return the sizes of a tiny Llama."""
    return LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        pad_token_id=None,
    )  # fmt: skip


def outcome(module: nn.Module, hidden: Tensor) -> list[Tensor]:
    """Return a module's output and the gradients of its input and weights."""
    entered = hidden.clone().requires_grad_()
    made = module(entered)
    weights = list(module.parameters())
    return [made, *torch.autograd.grad((made * torch.linspace(-1, 1, made.shape[-1]).to(made.dtype)).sum(), [entered, *weights])]


@pytest.mark.parametrize("kind", ["norm", "gated"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_lean_layer_gives_the_same_numbers_and_the_plain_gradients(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    layer: nn.Module = LlamaRMSNorm(16, eps=1e-5) if kind == "norm" else LlamaMLP(config())
    if kind == "norm":
        nn.init.normal_(next(layer.parameters()))
    layer.to(dtype)
    hidden = torch.randn(2, 7, 16).to(dtype)
    plain = outcome(layer, hidden)
    assert make_lean(layer) == 1
    lean = outcome(layer, hidden)
    assert torch.equal(plain[0], lean[0])
    for a, b in zip(plain[1:], lean[1:], strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).abs().max() / a.abs().max()) < tolerance


def test_a_normalisation_has_the_gradient_of_its_formula() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    formula = weight * hidden / (hidden.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = torch.autograd.grad(formula.square().sum(), [hidden, weight])
    found = torch.autograd.grad(normalised(hidden, weight, 1e-3).square().sum(), [hidden, weight])
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_gated_layer_has_the_gradient_of_its_formula() -> None:
    torch.manual_seed(2)
    gate, up = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    expected = torch.autograd.grad((gate * torch.sigmoid(gate) * up).square().sum(), [gate, up])
    found = torch.autograd.grad(gated(gate, up).square().sum(), [gate, up])
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_all_norms_and_gated_layers_of_a_model_are_changed_and_nothing_else() -> None:
    model = LlamaForCausalLM(config())
    assert make_lean(model) == 2 * 3 + 1  # two norms and a gated layer a block, and the last norm
    assert make_lean(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))) == 0


def kept_numbers(model: LlamaForCausalLM) -> int:
    """Return how many bytes the graph of one forward pass keeps, each storage once."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        held = model(input_ids=torch.arange(40)[None], use_cache=False).logits
    assert held.requires_grad
    return sum(seen.values())


def test_a_lean_model_keeps_less_for_its_backward_pass() -> None:
    model = LlamaForCausalLM(config())
    model.bfloat16()
    plain = kept_numbers(model)
    make_lean(model)
    assert kept_numbers(model) < 0.85 * plain


def test_what_is_made_again_saves_memory_and_changes_no_bit_of_any_gradient() -> None:
    torch.manual_seed(3)
    model, recipes = LlamaForCausalLM(config()).bfloat16(), Recipes()
    make_lean(model, recipes)
    without = kept_numbers(model)
    with recipes.in_use():
        held = model(input_ids=torch.arange(40)[None], use_cache=False).logits
    found = torch.autograd.grad(held.float().square().sum(), list(model.parameters()))
    plain = model(input_ids=torch.arange(40)[None], use_cache=False).logits
    assert torch.equal(held, plain)
    for mine, theirs in zip(found, torch.autograd.grad(plain.float().square().sum(), list(model.parameters())), strict=True):
        assert torch.equal(mine, theirs)
    assert kept_with(model, recipes) < 0.85 * without


def kept_with(model: LlamaForCausalLM, recipes: Recipes) -> int:
    """Return how many bytes a forward pass holds when what can be made again is kept as its recipe."""
    seen: dict[int, int] = {}
    keep = recipes._keep

    def note(tensor: Tensor) -> object:
        kept = keep(tensor)
        if isinstance(kept, Tensor):
            seen[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with recipes.in_use(), torch.autograd.graph.saved_tensors_hooks(note, recipes._give):
        held = model(input_ids=torch.arange(40)[None], use_cache=False).logits
    assert held.requires_grad
    return sum(seen.values())


def test_a_tensor_that_took_the_memory_of_another_is_not_taken_for_it() -> None:
    recipes = Recipes()
    weight = torch.ones(4, requires_grad=True)
    with recipes.in_use():
        first = torch.zeros(4)
        recipes.note("norm", first, lambda: torch.zeros(4))
        address = first.data_ptr()
        del first
        second = torch.full((4,), 3.0)  # the allocator hands out the same memory, if it can
        made = weight * second
    (gradient,) = torch.autograd.grad(made.sum(), [weight])
    assert gradient.tolist() == [3.0] * 4, address == second.data_ptr()


def test_recipes_are_kept_for_gradients_only() -> None:
    recipes = Recipes()
    with torch.no_grad(), recipes.in_use():
        recipes.note("norm", torch.zeros(2), lambda: torch.zeros(2))
        assert recipes._latest == {}
    recipes.note("norm", torch.zeros(2), lambda: torch.zeros(2))
    assert recipes._latest == {}
