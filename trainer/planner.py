"""How fast and how large an update of a model would be on so many GPUs: arithmetic in FLOPs and bytes. Pure.

Formulas, per optimizer step over T tokens in segments of L_s, N of them trained, P_l weights in the linear layers, layers of width D,
vocabulary V:
    linear     2 P_l T forward; backward as much again for activations, and once more for the weights that are trained
    attention  2 D_h sum L_s^2 per layer forward (causal half of 4), twice that backward
    head       2 D V N for the logits, as much for their gradient; with a trained head twice more (logits again, and its own gradient)
    weights    b P / w3;  gradients 4 P_t / w2, optimizer 12 P_t / w1 (masters and two moments), w_z = ranks from ZeRO stage z, else 1
    activations  one micro-batch: b t (2 D + 2 D_h + 2 I + 2 kv) a layer, what `lean.py` and `attention.py` keep; adapters keep their inputs
                 in fp32 too; with activation checkpointing 2 b t D and one layer. Full weights: the embedding's gradient, b V D

A rate in FLOP/s turns FLOPs into seconds: measured here for this machine, or peak x MFU for a GPU. Leaves out: communication, which
ZeRO hides where nodes have fast links, and loading.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pipelines.errors import ConfigError

PEAK_FLOP_PER_S: Final = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12, "l40s": 362e12}
"""Dense bf16 peak of one GPU, from its maker's data sheet."""
GPU_BYTES: Final = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9, "l40s": 48e9}
"""Memory of one GPU, from the same."""
GPU_BASE_BYTES: Final = 2e9
"""What CUDA, its libraries and their workspaces take of a GPU before a model. Starting guess."""
USABLE: Final = 0.92
"""Share of a GPU's memory that can be planned with: the rest is lost between blocks. Starting guess."""
MFU: Final = 0.35
"""Share of the peak that packed training reaches on GPUs. Starting guess: 0.3 to 0.45 is what public trainers report."""
HEAD_BYTES: Final = 2 * 4 * (1 << 24) + 2 * (1 << 24)
"""Buffers of the fused head on a GPU, whatever the vocabulary (`head.py`)."""
CPU_HEAD_BYTES: Final = HEAD_BYTES // 4
"""The same on a CPU, whose chunks are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model the arithmetic needs."""

    width: int
    layers: int
    inner: int
    attention: int
    """heads x head size."""
    key_value: int
    """key-value heads x head size."""
    vocabulary: int
    tied: bool

    @property
    def linear(self) -> int:
        """Weights of the linear layers."""
        block = self.width * (2 * self.attention + 2 * self.key_value) + 3 * self.width * self.inner
        return self.layers * block

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.linear + self.vocabulary * self.width * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How it is trained."""

    adapter: str
    lora_rank: int = 16
    bytes_per_weight: int = 2
    zero_stage: int = 1
    ranks: int = 1
    micro_batch_tokens: int = 2048
    activation_checkpointing: bool = False
    head_bytes: int = HEAD_BYTES
    reference_pass: bool = False
    """Whether rows need a forward pass for their reference."""


def _known(width: int, layers: int, inner: int, heads: int, key_value_heads: int, vocabulary: int, *, tied: bool = False) -> Shape:
    head = 128
    return Shape(
        width=width, layers=layers, inner=inner, attention=heads * head, key_value=key_value_heads * head, vocabulary=vocabulary, tied=tied
    )  # fmt: skip


SHAPES: Final = {
    "qwen2.5-coder-7b": _known(3584, 28, 18944, 28, 4, 152064),
    "llama-3.1-8b": _known(4096, 32, 14336, 32, 8, 128256),
    "qwen2.5-coder-32b": _known(5120, 64, 27648, 40, 8, 152064),
    "llama-3.3-70b": _known(8192, 80, 28672, 64, 8, 128256),
}
"""Shapes as their public config.json files state them; any other model: give its config.json."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Read a shape from a Hugging Face `config.json`.

    Raises:
        KeyError: It does not say its sizes.
    """
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return Shape(
        width=config["hidden_size"], layers=config["num_hidden_layers"], inner=config["intermediate_size"], attention=heads * head,
        key_value=(config.get("num_key_value_heads") or heads) * head, vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )  # fmt: skip


def step_flops(shape: Shape, setup: Setup, *, segments: Sequence[int], trained: int) -> float:
    """Return the FLOPs of one optimizer step over segments of these lengths with so many trained tokens."""
    tokens = sum(segments)
    passes = 1 + int(setup.activation_checkpointing) + int(setup.reference_pass)  # forward passes
    backward = 1 if setup.adapter == "lora" else 2
    linear = 2.0 * shape.linear * tokens * (passes + backward)
    attention = 2.0 * shape.attention * shape.layers * sum(length * length for length in segments) * (passes + 2)
    head = 2.0 * shape.width * shape.vocabulary * trained * ((2 if setup.adapter == "lora" else 4) + int(setup.reference_pass))
    return linear + attention + head


def trained_weights(shape: Shape, setup: Setup) -> int:
    """Return how many weights have gradients."""
    if setup.adapter == "full":
        return shape.parameters
    inputs_and_outputs = 2 * (shape.width + shape.attention) + 2 * (shape.width + shape.key_value) + 3 * (shape.width + shape.inner)
    return shape.layers * setup.lora_rank * inputs_and_outputs


def rank_bytes(shape: Shape, setup: Setup, *, base_bytes: float = 0.0) -> float:
    """Return the peak memory of one rank.

    Args:
        shape: The model.
        setup: How it is trained.
        base_bytes: What the process takes before the model (libraries, CUDA context).
    """
    spread = {stage: setup.ranks if setup.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    weights = setup.bytes_per_weight * shape.parameters / spread[3]
    mine = trained_weights(shape, setup)
    states = 4 * mine / spread[2] + 12 * mine / spread[1]
    tokens = setup.micro_batch_tokens
    layer = 2 * tokens * setup.bytes_per_weight * (shape.width + shape.attention + shape.inner + shape.key_value)
    if setup.adapter == "lora":
        layer += 4 * tokens * (5 * shape.width + shape.attention + shape.inner)
    else:
        states += setup.bytes_per_weight * shape.vocabulary * shape.width
    kept = tokens * setup.bytes_per_weight * shape.width
    activations = shape.layers * kept * 2 + layer if setup.activation_checkpointing else shape.layers * layer
    return base_bytes + weights + states + activations + setup.head_bytes


def predicted(
    shape: Shape, setup: Setup, *, segments: Sequence[int], trained: int, flop_per_s: float, base_bytes: float = 0.0
) -> dict[str, float]:
    """Return `seconds` of a step, `trained_tok_s`, `total_tok_s` and `rank_bytes`.

    Args:
        shape: The model.
        setup: How it is trained.
        segments: Tokens of each packed row.
        trained: Trained tokens.
        flop_per_s: Of one rank.
        base_bytes: As for `rank_bytes`.
    """
    seconds = step_flops(shape, setup, segments=segments, trained=trained) / (flop_per_s * setup.ranks)
    return {
        "seconds": seconds,
        "trained_tok_s": trained / seconds,
        "total_tok_s": sum(segments) / seconds,
        "rank_bytes": rank_bytes(shape, setup, base_bytes=base_bytes),
    }


def table(
    name: str, shape: Shape, *, setup: Setup, gpu: str, gpus: int, row_tokens: int, trained_share: float, rows: int, passes: int, mfu: float
) -> dict[str, Any]:
    """Predict an update for each ZeRO stage.

    Args:
        name: Of the model, for people.
        shape: The model.
        setup: All but the stage.
        gpu: Key of `PEAK_FLOP_PER_S`.
        gpus: How many.
        row_tokens: Of an average row.
        trained_share: Share of them that is trained, in (0, 1].
        rows: Rows of the update.
        passes: How often each is visited.
        mfu: Share of the peak that is reached, in (0, 1].

    Raises:
        ConfigError: There is no such GPU, or a number makes no sense.
    """
    if gpu not in PEAK_FLOP_PER_S:
        raise ConfigError(f"--gpu {gpu!r} is not one of {', '.join(PEAK_FLOP_PER_S)}")
    if not (0 < mfu <= 1 and 0 < trained_share <= 1 and min(gpus, row_tokens, rows, passes, setup.micro_batch_tokens) >= 1):
        raise ConfigError("a plan needs 0 < mfu <= 1, 0 < trained share <= 1, and at least one GPU, row, pass and token")
    trained = max(1, round(trained_share * row_tokens))
    stages: list[dict[str, Any]] = []
    for stage in range(4):
        one = predicted(
            shape, replace(setup, zero_stage=stage), segments=[row_tokens], trained=trained,
            flop_per_s=mfu * PEAK_FLOP_PER_S[gpu], base_bytes=GPU_BASE_BYTES,
        )  # fmt: skip
        stages.append(
            {
                "zero_stage": stage, "trained_tok_s": one["trained_tok_s"], "total_tok_s": one["total_tok_s"],
                "bytes_per_gpu": one["rank_bytes"], "fits": one["rank_bytes"] <= USABLE * GPU_BYTES[gpu],
                "hours": one["seconds"] * rows * passes / 3600,
            }
        )  # fmt: skip
    return {
        "model": name, "parameters": shape.parameters, "gpu": gpu, "gpus": gpus, "gpu_gb": GPU_BYTES[gpu] / 1e9, "mfu": mfu,
        "adapter": setup.adapter, "micro_batch_tokens": setup.micro_batch_tokens,
        "activation_checkpointing": setup.activation_checkpointing, "rows": rows, "passes": passes, "stages": stages,
    }  # fmt: skip
