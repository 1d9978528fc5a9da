"""Gradient parity self-test: DeepSpeed's accumulated gradient against plain torch on a tiny model.

The model is a real, random Llama behind the same `Policy` that updates use: packed rows, segmented attention, the fused output layer,
two micro-batches. Every job checks its own stage, adapter and arithmetic at its start, in its own ranks. `python -m trainer.parity`
(`tidegate trainer doctor`) runs all of them in one rank and prints one JSON object of relative differences. Leaves out: whether ranks
that see different rows agree with one that sees all, which the integration tests compare.
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pipelines.errors import TerminalError
from trainer import deepspeed_config
from trainer.config import UpdateConfig
from trainer.model import DTYPES, SEGMENTED, Policy, add_lora, tensors
from trainer.packing import MicroBatch, pack, reply_row

LR: Final = 1e-3
TOLERANCE: Final = {"fp32": 1e-5, "bf16": 1e-2}
"""Relative, by arithmetic: sums in another order. bf16 has three digits; a wrong gradient is wrong in the first."""
CASES: Final = (
    *((stage, adapter, "fp32", "none") for stage in (0, 1, 2, 3) for adapter in ("lora", "full")),
    (1, "lora", "bf16", "none"),
    (2, "lora", "bf16", "none"),
    (2, "full", "fp32", "optimizer"),
    (3, "lora", "fp32", "parameters"),
)
"""ZeRO stage, adapter, arithmetic, what is offloaded."""


def tiny(adapter: str, dtype: str) -> Policy:
    """Return a two-layer Llama with fixed random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, pad_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation(SEGMENTED)
    model.config.use_cache = False
    model.to(DTYPES[dtype])
    if adapter == "lora":
        model = add_lora(model, UpdateConfig(lora_rank=4))
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as in the middle of a run: with B = 0 half of the adapter would have no gradient
                parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05
    return Policy(model)


def micro_batches() -> list[MicroBatch]:
    """Return two packed micro-batches of five rows."""
    rng = np.random.default_rng(1)
    rows = [reply_row(rng.integers(0, 97, p), rng.integers(0, 97, r), temperature=t) for p, r, t in
            [(3, 4, 1.0), (9, 2, 0.7), (1, 6, 1.0), (5, 5, 1.3), (2, 3, 1.0)]]  # fmt: skip
    return [pack(rows, [0, 1, 2]), pack(rows, [3, 4])]


def loss_of(policy: Any, batch: MicroBatch, device: torch.device) -> Tensor:
    """Return a sum over trained tokens, a different weight for each."""
    logprobs, _ = policy(**tensors(batch, device))
    return -(torch.linspace(0.5, 1.5, len(logprobs), device=device) * logprobs).sum() / 20


def plain_gradients(policy: Policy, device: torch.device) -> dict[str, Tensor]:
    """Accumulate the gradients of both micro-batches in fp32, without DeepSpeed."""
    found: dict[str, Tensor] = {}
    for batch in micro_batches():
        loss_of(policy, batch, device).backward()
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, torch.zeros((), device=device)) + parameter.grad.float()
                parameter.grad = None
    return found


def _wide(gradient: Any) -> Tensor:
    return gradient.float()


def _worst(ours: Iterable[tuple[str, Tensor]], theirs: dict[str, Tensor]) -> float:
    pairs = ((mine.cpu(), theirs[name].cpu()) for name, mine in ours)
    return max(float((mine - other).abs().max() / other.abs().max().clamp(min=1e-12)) for mine, other in pairs)


def difference(zero_stage: int, adapter: str, dtype: str, offload: str) -> float:
    """Return the largest relative difference of the gradient norm, of each gradient, and (fp32) of each weight after a step."""
    import deepspeed as untyped
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    library: Any = untyped  # its annotations name fewer types than it takes
    wrapped = tiny(adapter, dtype)
    config = deepspeed_config.build(zero_stage=zero_stage, dtype=dtype, lr=LR, weight_decay=0.0, grad_clip=1e9, offload=offload)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    engine: Any = library.initialize(model=wrapped, model_parameters=trained, config=config)[0]
    plain = tiny(adapter, dtype).to(engine.device, DTYPES[dtype])
    expected = plain_gradients(plain, engine.device)
    norm = float(torch.nn.utils.get_total_norm(list(expected.values())))
    batches = micro_batches()
    for position, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(position == len(batches) - 1)
        engine.backward(loss_of(engine, batch, engine.device))
    names = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    worst = _worst(((name, _wide(safe_get_full_grad(parameter))) for name, parameter in names), expected)
    engine.step()
    if hasattr(engine.optimizer, "overflow"):  # ZeRO 0 in fp32 tells no norm; the update takes its own (`engine.py`)
        worst = max(worst, abs(float(engine.get_global_grad_norm()) - norm) / norm)
    if dtype == "fp32":
        after = dict(plain.named_parameters())
        for name, gradient in expected.items():
            after[name].grad = gradient
        torch.optim.AdamW([p for p in after.values() if p.grad is not None], lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0).step()
        masters = ((name, safe_get_full_fp32_param(parameter)) for name, parameter in names)
        ours = ((name, (dict(names)[name] if full is None else full).detach().float()) for name, full in masters)
        worst = max(worst, _worst(ours, {name: parameter.detach().float() for name, parameter in after.items()}))
    return worst


def check(settings: UpdateConfig) -> None:
    """Refuse to train with an engine whose gradient is not the loss's; called on every rank.

    Raises:
        TerminalError: The difference is over the tolerance or NaN.
    """
    found = difference(settings.zero_stage, settings.adapter, settings.dtype, settings.offload)
    if not found <= TOLERANCE[settings.dtype]:
        raise TerminalError(
            f"DeepSpeed's gradient differs from plain torch's by {found:.1e} (relative) at trainer.zero_stage={settings.zero_stage}, "
            f"adapter={settings.adapter!r}, dtype={settings.dtype!r}; nothing was trained. Run `tidegate trainer doctor` and "
            "infra/scripts/setup, or choose another stage"
        )


def main() -> int:
    """Run all cases in one process."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    from trainer.engine import connect

    connect(timeout_s=60)
    print(
        json.dumps(
            {
                f"zero_{stage}_{adapter}_{dtype}_offload_{away}": difference(stage, adapter, dtype, away)
                for stage, adapter, dtype, away in CASES
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
