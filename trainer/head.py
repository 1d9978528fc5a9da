"""The last layer of a language model, on trained tokens only: log-probability and entropy without keeping logits.

Logits of N tokens over a vocabulary of V are N x V numbers, and a plain graph keeps several copies of them until the backward pass.
Here they exist for one chunk of tokens at a time. The gradient of a log-probability with respect to its hidden state,
(W[target] - E_p[W]) / temperature, does not depend on the loss, so it is taken while the chunk is there: where the layer itself is
not trained (LoRA), the backward pass is one multiplication and nothing is computed twice. Where it is trained, its own gradient
takes the logits again, now all tokens against a few rows of the weight at a time: each row's gradient is one product, summed in fp32
and rounded once, and no second copy of the weight's gradient ever exists.

Takes: hidden states, the layer's weight, targets, temperatures. Gives: two [N] vectors. The layer stays a module that owns its
weight, so that a partitioned one (ZeRO 3) is gathered around it as around any other layer. Leaves out: the model (`model.py`).
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipelines.errors import ConfigError

CHUNK_NUMBERS: Final = 1 << 24
"""Logits that exist at one time: 64 MiB in fp32, 341 tokens of a vocabulary of 49,152."""
CPU_CHUNK_NUMBERS: Final = 1 << 22
"""The same on a CPU: 16 MiB, which a large cache holds, and as fast as four times as much (measured)."""
SCALED_LOGITS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of models that change their logits after this layer; scoring without that would be another policy."""


def rows_per_chunk(vocabulary: int, *, numbers: int = CHUNK_NUMBERS) -> int:
    """Return how many tokens' logits exist at one time: memory does not grow with vocabulary x tokens."""
    return max(16, numbers // vocabulary)


class _Workspace:
    """The buffers of one chunk, used again for every chunk: fresh ones would cost more in page faults than the arithmetic does."""

    def __init__(self, rows: int, hidden: Tensor, weight: Tensor) -> None:
        self.wide_type = torch.promote_types(hidden.dtype, torch.float32)
        shape = (min(rows, len(hidden)), weight.shape[0])
        self.narrow = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        self.scores = torch.empty(shape, dtype=self.wide_type, device=hidden.device)
        self.raised = torch.empty_like(self.scores)

    def softmax(self, hidden: Tensor, weight: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits / temperature [C, V], exp of them less their maximum [C, V], its sums [C], and log sum exp [C].

        One exponential a number, however much is made of it.
        """
        narrow, scores, raised = (buffer[: len(hidden)] for buffer in (self.narrow, self.scores, self.raised))
        torch.mm(hidden, weight.t(), out=narrow)
        scores.copy_(narrow).div_(temperatures[:, None])
        top = scores.amax(dim=-1, keepdim=True)
        torch.sub(scores, top, out=raised).exp_()
        total = raised.sum(dim=-1)
        return scores, raised, total, top[:, 0] + total.log()

    def slope(self, raised: Tensor, total: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Turn what `softmax` raised into (one-hot(target) - p) / temperature, in the weights' type [C, V]."""
        factor = 1 / temperatures
        raised.mul_((-factor / total)[:, None]).scatter_add_(-1, targets[:, None], factor[:, None])
        return self.narrow[: len(raised)].copy_(raised)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        space = _Workspace(chunk, hidden, weight)
        logprobs = torch.empty(len(hidden), dtype=space.wide_type, device=hidden.device)
        entropies, log_zs = torch.empty_like(logprobs), torch.empty_like(logprobs)
        direction = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            scores, raised, total, log_zs[part] = space.softmax(hidden[part], weight, temperatures[part])
            logprobs[part] = scores.gather(-1, targets[part, None])[:, 0] - log_zs[part]
            entropies[part] = log_zs[part] - torch.einsum("cv,cv->c", raised, scores) / total
            if direction is not None:
                torch.mm(space.slope(raised, total, targets[part], temperatures[part]), weight, out=direction[part])
        ctx.save_for_backward(direction, *((hidden, weight, targets, temperatures, log_zs) if ctx.needs_input_grad[1] else ()))
        ctx.numbers = chunk * weight.shape[0]
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        outer = grads[0]
        direction, *rest = ctx.saved_tensors
        to_hidden = None if direction is None else (outer[:, None] * direction).to(direction.dtype)
        return to_hidden, _to_weight(outer, *rest, numbers=ctx.numbers) if rest else None, None, None, None


def _to_weight(
    outer: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, log_zs: Tensor, *, numbers: int
) -> Tensor:
    """Return sum_n outer[n] / temperature[n] (one-hot(target[n]) - p[n]) hidden[n]^T [V, D], so many logits at a time."""
    made = torch.empty_like(weight)
    factor = (outer / temperatures)[:, None]
    rows = min(max(16, numbers // max(len(hidden), 1)), len(weight))
    narrow_all, wide_all = hidden.new_empty(rows * len(hidden)), log_zs.new_empty(rows * len(hidden))
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        narrow, wide = (buffer[: len(hidden) * len(part)].view(len(hidden), len(part)) for buffer in (narrow_all, wide_all))
        torch.mm(hidden, part.t(), out=narrow)
        wide.copy_(narrow).div_(temperatures[:, None]).sub_(log_zs[:, None]).exp_().mul_(-factor)
        mine = (targets >= start) & (targets < start + rows)
        wide[mine, targets[mine] - start] += factor[mine, 0]
        torch.mm(narrow.copy_(wide).t(), hidden, out=made[start : start + rows])
    return made


def token_scores(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    temperatures: Float[Tensor, " N"],
    *,
    chunk: int | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return log-probability and entropy of target tokens under softmax(hidden W^T / temperature).

    Args:
        hidden: State that predicts each target.
        weight: The layer's weight; it gets a gradient when it requires one.
        targets: Token ids, in [0, V).
        temperatures: > 0.
        chunk: Tokens whose logits exist at one time; None: `rows_per_chunk`.

    Returns:
        Log-probabilities, with gradient, and entropies, without; nats, fp32 (fp64 for fp64 inputs).
    """
    rows = chunk or rows_per_chunk(weight.shape[0], numbers=CPU_CHUNK_NUMBERS if hidden.device.type == "cpu" else CHUNK_NUMBERS)
    logprobs, entropies = _TokenScores.apply(
        hidden, weight, targets, temperatures.to(torch.promote_types(hidden.dtype, torch.float32)), rows
    )
    return logprobs, entropies


class TokenHead(nn.Module):
    """An output layer that answers for given tokens instead of the whole vocabulary."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, hidden: Float[Tensor, "N D"], targets: Int[Tensor, " N"], temperatures: Float[Tensor, " N"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """See `token_scores`."""
        return token_scores(hidden, self.weight, targets, temperatures)


def replace_head(causal: Any) -> None:
    """Put a `TokenHead` with the same weight in place of a causal language model's output layer, once.

    Args:
        causal: A Hugging Face causal LM; afterwards it can no longer generate.

    Raises:
        ConfigError: The model does more with its logits than a linear layer; nothing is approximated in silence.
    """
    settings = causal.config.get_text_config()
    scaled = [name for name in SCALED_LOGITS if getattr(settings, name, None) not in (None, 1.0)]
    head = causal.get_output_embeddings()
    if isinstance(head, TokenHead):
        return
    if scaled or type(head) is not nn.Linear or head.bias is not None:
        what = f"{', '.join(scaled)}" if scaled else f"an output layer of type {type(head).__name__}, not linear without bias"
        raise ConfigError(f"{settings.model_type} models cannot be trained here: {what}; choose a model with plain logits")
    causal.set_output_embeddings(TokenHead(cast(nn.Parameter, head.weight)))
