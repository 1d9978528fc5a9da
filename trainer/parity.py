"""Gradient parity self-test, `python -m trainer.parity`: DeepSpeed's accumulated gradient against plain torch on a tiny model.

Prints one JSON object: relative difference by ZeRO stage. Cheap (a 3-layer perceptron, one rank), because it is to run at start.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import nn

from trainer import deepspeed_config


def tiny(seed: int) -> nn.Module:
    """Return a small perceptron with fixed random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def difference(zero_stage: int) -> float:
    """Return the largest relative difference of the gradient norm and of each weight after one step with two micro-batches."""
    import deepspeed as untyped

    library: Any = untyped  # its annotations name fewer types than it takes
    plain = tiny(0)
    wrapped = tiny(0)
    config = deepspeed_config.build(zero_stage=zero_stage, dtype="fp32", lr=1e-3, weight_decay=0.0, grad_clip=1e9)
    engine: Any = library.initialize(model=wrapped, model_parameters=list(wrapped.parameters()), config=config)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for position, part in enumerate(inputs):
        plain(part).square().sum().backward()
        engine.set_gradient_accumulation_boundary(position == 1)
        engine.backward(engine(part).square().sum())
    norm = torch.sqrt(sum((p.grad.square().sum() for p in plain.parameters() if p.grad is not None), torch.zeros(())))
    optimizer.step()
    engine.step()
    worst = abs(float(engine.get_global_grad_norm()) - float(norm)) / float(norm)
    for ours, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
        worst = max(worst, float((ours.detach() - theirs.detach()).abs().max() / ours.detach().abs().max()))
    return worst


def main() -> int:
    """Run stages 1 and 2 in one process."""
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    from trainer.engine import connect

    connect(timeout_s=60)
    print(json.dumps({f"zero_{stage}": difference(stage) for stage in (1, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
