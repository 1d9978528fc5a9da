"""A causal language model that scores packed rows: weights from a checkpoint folder, LoRA, segmented attention, trained-token head.

Takes: a checkpoint folder (any Hugging Face causal LM with pluggable attention) and packed micro-batches.
Gives: log-probability and entropy of trained tokens, in nats, fp32, at logits / temperature over the whole vocabulary.
Leaves out: the loss, the optimizer, ranks (`engine.py`), and generation (that is serving).

Attention runs per segment with a causal kernel, so a packed row costs what its segments cost; a dense block-diagonal mask over
the packed row loses to no packing at all on CPU. Linear layers see the whole packed row. The head sees trained positions only.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

import ctypes
import gc
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from trainer.attention import attend
from trainer.config import UpdateConfig
from trainer.head import replace_head
from trainer.lean import Recipes, make_lean
from trainer.packing import MicroBatch, PackedRow, pack, plan_rows

SEGMENTED: Final = "tidegate_segmented"
"""Name under which transformers finds the attention below."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def segmented_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of a packed row.

    Args:
        _module: The attention layer.
        query: [1, heads, T, d].
        key: [1, kv_heads, T, d].
        value: [1, kv_heads, T, d].
        _mask: Always None; segments replace it.
        settings: `segment_lengths` (tokens of each segment, summing to T) and `scaling`.

    Returns:
        [1, T, heads, d] and no attention weights.
    """
    return attend(query, key, value, lengths=settings["segment_lengths"], scale=settings.get("scaling")), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Tell transformers that segmented attention needs no mask."""


AttentionInterface.register(SEGMENTED, segmented_attention)
AttentionMaskInterface.register(SEGMENTED, _no_mask)


class Policy(nn.Module):
    """A language model whose forward pass returns what the loss needs and nothing else.

    It takes the model's output layer away (`head.py`): a wrapped model can no longer generate.
    """

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        replace_head(_unwrap(language_model))
        self.recipes = Recipes()
        make_lean(language_model, self.recipes)
        self.language_model = language_model

    def forward(
        self,
        input_ids: Int[Tensor, " T"],
        position_ids: Int[Tensor, " T"],
        lengths: tuple[int, ...],
        read_at: Int[Tensor, " N"],
        targets: Int[Tensor, " N"],
        temperatures: Float[Tensor, " N"],
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Score trained tokens.

        Args:
            input_ids: Packed tokens.
            position_ids: From 0 in each segment.
            lengths: Tokens of each segment of attention (a chain of rows).
            read_at: Position whose hidden state predicts each trained token.
            targets: Trained token ids.
            temperatures: Divides the logits of each trained token.

        Returns:
            Log-probabilities (with gradient) and entropies (without), nats, fp32.
        """
        causal = _unwrap(self.language_model)
        with self.recipes.in_use():
            hidden = causal.model(
                input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, segment_lengths=lengths
            ).last_hidden_state[0]
        return causal.get_output_embeddings()(hidden[read_at], targets, temperatures)


def _unwrap(language_model: nn.Module) -> Any:
    """Return the causal LM inside a PEFT wrapper, or the model itself."""
    wrapped: Any = language_model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped


def quiet() -> None:
    """Turn the bars of transformers off: this project's own progress shows what goes on."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load(folder: Path, *, dtype: str = "fp32") -> Any:
    """Load a checkpoint folder for training or scoring.

    Args:
        folder: A verified checkpoint folder (safetensors only).
        dtype: Key of `DTYPES`.

    Returns:
        A causal LM in train mode without dropout effects (these models have none), on the CPU.
    """
    quiet()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation=SEGMENTED, use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None  # pad = eos here, and a padding_idx would silently drop the gradient of the end token's embedding
    model.config.use_cache = False
    return model


def add_lora(language_model: Any, config: UpdateConfig) -> Any:
    """Wrap a model with fresh LoRA adapters (fp32, B = 0: the policy starts equal to the base).

    Args:
        language_model: As from `load`; its own weights are frozen.
        config: Rank, alpha, targets and seed.

    Source: Hu et al., "LoRA: Low-rank adaptation of large language models", arXiv 2106.09685.
    """
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]  peft divides it by r; a float is fine
        target_modules=list(config.lora_targets),
        lora_dropout=0.0,
    )
    torch.manual_seed(config.seed)
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return get_peft_model(language_model, settings)


def tensors(batch: MicroBatch, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the arguments of `Policy.forward` for a micro-batch."""
    return {
        "input_ids": torch.from_numpy(batch.input_ids).to(device),
        "position_ids": torch.from_numpy(batch.position_ids).to(device),
        "lengths": batch.lengths,
        "read_at": torch.from_numpy(batch.read_at).to(device),
        "targets": torch.from_numpy(batch.targets).to(device),
        "temperatures": torch.from_numpy(batch.temperatures).to(device, torch.float32),
    }


@torch.no_grad()
def score_batch(policy: nn.Module, rows: Sequence[PackedRow], chosen: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Score one packed micro-batch without gradient: log-probabilities and entropies by row index, float32, nats."""
    batch = pack(rows, chosen)
    logprobs, entropies = (part.cpu().numpy() for part in policy(**tensors(batch, next(policy.parameters()).device)))
    mine = {row: batch.segment == position for position, row in enumerate(batch.rows)}
    return {row: (logprobs[at], entropies[at]) for row, at in mine.items()}


def score(policy: nn.Module, rows: list[PackedRow], *, max_tokens: int = 2048) -> list[tuple[np.ndarray, np.ndarray]]:
    """Score rows without gradient, a prefix shared by rows of one group once.

    Args:
        policy: A `Policy`, possibly wrapped by DeepSpeed.
        rows: Rows to score.
        max_tokens: Tokens of one packed forward pass.

    Returns:
        Per row: log-probabilities and entropies of its trained tokens, float32, nats.
    """
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for chosen in plan_rows(rows, range(len(rows)), max_tokens=max_tokens):
        if chosen:
            found |= score_batch(policy, rows, chosen)
    return [found[i] for i in range(len(rows))]


def release() -> None:
    """Give memory of dropped models back before the next one is loaded."""
    gc.collect()
    trim()


def trim() -> None:
    """Hand freed memory back to the system, where the C library keeps it: with glibc, a tenth of a small model's step otherwise."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:
        give_back(0)
