"""DeepSpeed's settings for a run, and the versions that must not be used. Pure.

Gradients are summed, not averaged: losses are already divided by the normaliser of the whole optimizer batch, so `engine.py`
multiplies by the world size what DeepSpeed divides by it. Leaves out: schedules (set per step by `engine.py`), ranks.
"""

from typing import Any, Final

from packaging.version import InvalidVersion, Version

from pipelines.errors import ConfigError

BROKEN_FROM: Final = Version("0.18.3")
BROKEN_TO: Final = Version("0.19.3")
"""Inclusive: silently wrong ZeRO-2 bf16 gradients (deepspeedai/DeepSpeed#8224, PR#7985, #7839, #7786)."""


def version_fault(version: str) -> str | None:
    """Say why a DeepSpeed version is refused, None when it is fine."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return f"DeepSpeed reports the version {version!r}, which cannot be read; install 0.19.8"
    if BROKEN_FROM <= parsed <= BROKEN_TO:
        return f"DeepSpeed {version} computes silently wrong ZeRO-2 bf16 gradients (0.18.3 to 0.19.3 do); install 0.19.8"
    return None


def build(*, zero_stage: int, dtype: str, lr: float, weight_decay: float, grad_clip: float, offload: str = "none") -> dict[str, Any]:
    """Return the DeepSpeed configuration.

    Args:
        zero_stage: 0 to 3.
        dtype: fp32 or bf16; with bf16 the optimizer keeps fp32 masters, and gradients accumulate and travel in fp32.
        lr: Learning rate of the first step.
        weight_decay: Decoupled (AdamW).
        grad_clip: Largest global gradient norm.
        offload: `optimizer`: its states live in CPU memory (ZeRO 1 to 3); `parameters`: the weights too (ZeRO 3).

    Raises:
        ConfigError: This stage cannot offload that.
    """
    if (offload == "parameters" and zero_stage != 3) or (offload == "optimizer" and zero_stage == 0):
        raise ConfigError(
            f"trainer.offload={offload!r} needs trainer.zero_stage={'3' if offload == 'parameters' else '1, 2 or 3'}, not {zero_stage}"
        )
    away = {"offload_optimizer": {"device": "cpu"}} if offload != "none" else {}
    if offload == "parameters":
        away["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": grad_clip,
        "optimizer": {
            "type": "AdamW",
            # fused: one pass over the weights; the plain one makes two temporary copies of all of them, which were the peak of a step
            "params": {"lr": lr, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": weight_decay, "torch_adam": True, "fused": True},
        },
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "round_robin_gradients": False,
            **away,
        },
        # immediate: each weight's gradient goes to its fp32 sum and is freed as soon as it is there; else all live twice after backward
        "bf16": {"enabled": dtype == "bf16", "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own CPU Adam is compiled on first use, which needs a C++ compiler
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
