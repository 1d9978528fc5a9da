"""Layers that keep less for the backward pass than a plain graph does, with the very same numbers in the forward pass.

Of the tensors that a Llama-like block keeps, the normalisations keep their input twice in fp32, the gated layer keeps what it can
compute again from its two inputs, and the linear layers behind both keep what these gave them. Here a normalisation keeps its input
as it came and a gated layer its two inputs; a linear layer's input that one of them made is kept as its recipe and made again, bit
for bit, in a pass or two over the tokens: half the memory a token, and no matrix product is done twice. Takes: a loaded causal LM.
Gives: the same model, some modules with another forward function. Leaves out: models whose layers are not exactly these; they stay
as they are.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import ACT2FN

NORMS: Final = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Modules whose forward is weight * (x / rms(x)) with the mean taken in fp32 and the product in the input's type."""
GATED: Final = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Modules whose forward is down(act(gate(x)) * up(x)) without bias."""

SILU: Final = type(ACT2FN["silu"])


class _Recipe:
    """How to make a tensor again. Every operation that keeps it holds the recipe, and with the last of them what was made goes too."""

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self.alive = weakref.ref(tensor)
        self.make = make
        self.made: Tensor | None = None

    def same(self, tensor: Tensor) -> bool:
        """Say whether a tensor is that of this recipe, whatever its shape. Memory that was freed may hold another one by now."""
        mine = self.alive()
        return mine is not None and tensor.data_ptr() == mine.data_ptr() and tensor.numel() == mine.numel() and tensor.is_contiguous()

    def again(self) -> Tensor:
        """Make the tensor, once."""
        if self.made is None:
            self.made = self.make()
        return self.made


class Recipes:
    """Keeps tensors that a lean layer has just made as their recipes, for one model.

    It knows the last of each kind of layer only: those before are not anybody's input any more, and knowing them would hold memory.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _Recipe] = {}
        self._on = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep recipes for the backward pass of what is computed in the block."""
        self._on = torch.is_grad_enabled()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, self._give):
                yield
        finally:
            self._on = False
            self._latest.clear()

    def note(self, kind: str, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Remember how a tensor is made again, in `in_use`."""
        if self._on:
            self._latest[kind] = _Recipe(tensor, make)

    def _keep(self, tensor: Tensor) -> Any:
        recipe = next((recipe for recipe in self._latest.values() if recipe.same(tensor)), None)
        return tensor if recipe is None else (recipe, tensor.shape)

    def _give(self, kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].again().view(kept[1])


def _unit(hidden: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return hidden / rms(hidden) in fp32 and 1 / rms."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide * scale, scale


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        unit, scale = _unit(hidden, epsilon)
        ctx.save_for_backward(hidden, weight, scale)
        return weight * unit.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, scale = ctx.saved_tensors
        unit = hidden.float() * scale
        outer = grads[0].float()
        to_weight = (outer * unit).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        outer = outer * weight.float()
        inner = (outer * unit).mean(-1, keepdim=True)
        return outer.sub_(unit.mul_(inner)).mul_(scale).to(hidden.dtype), to_weight, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        to_up = functional.silu(gate).mul_(grads[0])
        return torch.ops.aten.silu_backward(grads[0] * up, gate), to_up


def normalised(hidden: Float[Tensor, "*B D"], weight: Float[Tensor, " D"], epsilon: float) -> Float[Tensor, "*B D"]:
    """Return weight * hidden / sqrt(mean(hidden^2) + epsilon), the mean in fp32.

    Source: Zhang and Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    return _Normalised.apply(hidden, weight, epsilon)


def gated(gate: Float[Tensor, "*B I"], up: Float[Tensor, "*B I"]) -> Float[Tensor, "*B I"]:
    """Return silu(gate) * up.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """
    return _Gated.apply(gate, up)


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    made = normalised(hidden_states, module.weight, module.variance_epsilon)
    hidden, weight, epsilon = hidden_states.detach(), module.weight, module.variance_epsilon
    module.recipes.note("norm", made, lambda: weight.detach() * _unit(hidden, epsilon)[0].to(hidden.dtype))
    return made


def _gated_forward(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    made = gated(gate, up)
    parts = gate.detach(), up.detach()
    module.recipes.note("gated", made, lambda: functional.silu(parts[0]).mul_(parts[1]))
    return module.down_proj(made)


def make_lean(model: nn.Module, recipes: Recipes | None = None) -> int:
    """Give the modules named above their lean forward function; returns how many there were.

    Args:
        model: A causal LM, or a part of one.
        recipes: Where they note how to make again what they made; None: what they made is kept.
    """
    changed = 0
    for module in model.modules():
        kind = type(module).__name__
        some: Any = module
        if kind in NORMS:
            some.forward = MethodType(_norm_forward, module)
        elif kind in GATED and isinstance(some.act_fn, (nn.SiLU, SILU)):
            some.forward = MethodType(_gated_forward, module)
        else:
            continue
        some.recipes = recipes or Recipes()
        changed += 1
    return changed
