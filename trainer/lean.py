"""Layers that keep less for the backward pass than a plain graph does, with the very same numbers in the forward pass.

Of the tensors that a Llama-like block keeps, the normalisations keep their input twice in fp32, and the gated layer keeps what it can
compute again from its two inputs. Here a normalisation keeps its input as it came, and a gated layer its two inputs: less memory a
token, and fewer passes over it. Takes: a loaded causal LM. Gives: the same model, some modules with another forward function.
Leaves out: models whose layers are not exactly these; they stay as they are.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

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


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(hidden, weight, scale)
        return weight * (wide * scale).to(hidden.dtype)

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
    return normalised(hidden_states, module.weight, module.variance_epsilon)


def _gated_forward(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(gated(module.gate_proj(x), module.up_proj(x)))


def make_lean(model: nn.Module) -> int:
    """Give the modules named above their lean forward function; returns how many there were."""
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
        changed += 1
    return changed
