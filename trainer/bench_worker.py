"""One measurement of `tidegate bench trainer`, in a process of its own: `python -m trainer.bench_worker TASK.json`.

A task names a way to do the same work: one optimizer step over the same rows with the same loss. `ours` is the engine that updates
run on; `bare` is what no trainer can beat, forward and backward of the plain model with the head on trained tokens and no
reinforcement at all; the grid switches packing, the fused head and trained-only one by one. Writes seconds of each repeat, peak
memory and the gradient of a few weights, so that a figure of speed never stands without the proof that the same thing was computed.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pipelines.storage import write_atomic
from trainer import bench_rows, deepspeed_config
from trainer.bench_rows import Task
from trainer.config import UpdateConfig
from trainer.dataset import TrainingRow
from trainer.head import token_scores
from trainer.losses import LossSettings
from trainer.model import DTYPES, Policy, add_lora, load, tensors
from trainer.packing import PackedRow, pack, plan_rows

PADDED_ROWS: Final = 8
"""Rows of one padded micro-batch: TRL's own default."""
PROBES: Final = ("layers.0.input_layernorm.weight", "model.norm.weight", "layers.0.self_attn.q_proj.lora_B.default.weight")
"""Weights whose gradient is compared, where they are trained: the far end and the near end of the backward pass."""


def task_rows(task: Task, vocabulary: int) -> tuple[list[PackedRow], list[float]]:
    """Return the task's rows and their advantages."""
    made = bench_rows.rows(task.histogram, number=task.rows, vocabulary=vocabulary)
    weights = bench_rows.advantages(task.rows)
    if task.shortest:
        kept = sorted(range(len(made)), key=lambda i: len(made[i].prompt_ids) + len(made[i].response_ids))[: task.shortest]
        made, weights = [made[i] for i in kept], [weights[i] for i in kept]
    return made, weights


def language_model(task: Task) -> Any:
    """Load the checkpoint as the task says."""
    model = load(Path(task.checkpoint), dtype=task.dtype)
    if task.adapter == "lora":
        model = add_lora(model, UpdateConfig())
    if task.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def peak_bytes() -> int:
    """Return the largest resident memory this process ever had."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def measured(step: Callable[[], None], *, repeats: int) -> list[float]:
    """Run a step once without looking, then `repeats` times; returns seconds of each."""
    seconds: list[float] = []
    for number in range(repeats + 1):
        begun = time.perf_counter()
        step()
        if number:
            seconds.append(time.perf_counter() - begun)
    return seconds


def probe_gradients(named: Iterator[tuple[str, Tensor | None]]) -> dict[str, list[float]]:
    """Return the gradients of the probe weights, flat."""
    return {
        probe: gradient.detach().float().flatten().tolist()
        for name, gradient in named
        for probe in PROBES
        if name.endswith(probe) and gradient is not None
    }


# ours -----------------------------------------------------------------------------------------------------------------------


def ours(task: Task) -> dict[str, Any]:
    """Measure the engine that updates run on, on however many ranks torchrun started."""
    from deepspeed.utils import safe_get_full_grad

    from trainer.engine import Trainer, connect

    rank, world = connect(timeout_s=600)
    model = language_model(task)
    config = deepspeed_config.build(zero_stage=1, dtype=task.dtype, lr=1e-8, weight_decay=0.0, grad_clip=1e9)
    packed, weights = task_rows(task, model.config.vocab_size)
    trainer = Trainer(Policy(model), loss="decoupled_ppo", settings=LossSettings(), deepspeed=config, max_tokens=task.max_tokens)

    def training_row(i: int, mu: np.ndarray) -> TrainingRow:
        return TrainingRow(row_id=str(i), packed=packed[i], mu=mu, advantage=weights[i], omega=1.0, same_version=True)

    unscored = [training_row(i, np.zeros(len(row.trained), np.float32)) for i, row in enumerate(packed)]
    chosen = range(len(packed))
    logged = trainer.score_all(unscored, chosen)
    rows = [training_row(i, logged[i]) for i in chosen]

    def step() -> None:
        ref = trainer.score_all(rows, chosen) if task.way == "ours_reference" else logged
        trainer.step(rows, chosen, ref=[ref[i] for i in chosen], prox=None, kl_budget=None)

    seconds = measured(step, repeats=task.repeats)
    peak = peak_bytes()
    trainer.step(rows, chosen, ref=[logged[i] for i in chosen], prox=None, kl_budget=-1.0)  # over any budget: the gradient stays
    named = trainer.engine.module.named_parameters()
    gradients = probe_gradients((name, safe_get_full_grad(p)) for name, p in named if p.requires_grad and name.endswith(PROBES))
    return {"rank": rank, "world": world, "seconds": seconds, "peak_bytes": peak, "gradients": gradients}


# the limit, and the grid ------------------------------------------------------------------------------------------------------


def _plain_scores(hidden: Tensor, head: Any, targets: Tensor) -> Tensor:
    logits = head(hidden).float()
    return logits.gather(-1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)


def _weighted(logprobs: Tensor, row_of: Tensor, weights: Tensor, total: int) -> Tensor:
    return -(weights[row_of] * logprobs).sum() / total


def single(model: Any, packed: list[PackedRow], weights: Tensor, total: int) -> Iterator[Tensor]:
    """Yield the loss of one row at a time, the head on trained tokens."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    for i, row in enumerate(packed):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))[None]
        hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logprobs = _plain_scores(hidden[row.trained - 1], causal.get_output_embeddings(), torch.from_numpy(row.response_ids))
        yield _weighted(logprobs, torch.full((len(logprobs),), i), weights, total)


def in_rows_of_batches(model: Any, packed: list[PackedRow], weights: Tensor, total: int, *, way: str, max_tokens: int) -> Iterator[Tensor]:
    """Yield the loss of packed or padded micro-batches with a plain or fused head on all or trained tokens."""
    layout, head_kind, tokens = way.split("-")
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal.get_output_embeddings()
    for chosen in _micro_batches(packed, layout=layout, max_tokens=max_tokens):
        hidden, ids, read_at, row_of, trained = _hidden(causal, packed, chosen, layout=layout)
        if tokens == "trained":
            hidden, ids, row_of, trained = hidden[read_at[trained]], ids[read_at[trained] + 1], row_of[trained], trained[trained]
        else:
            hidden, ids = hidden[read_at], ids[read_at + 1]
        if head_kind == "fused":
            logprobs, _ = token_scores(hidden, head.weight, ids, torch.ones(len(ids)))
        else:
            logprobs = _plain_scores(hidden, head, ids)
        yield _weighted(torch.where(trained, logprobs, 0.0), row_of, weights, total)


def _micro_batches(packed: list[PackedRow], *, layout: str, max_tokens: int) -> list[list[int]]:
    if layout == "packed":
        return [chosen for chosen in plan_rows(packed, range(len(packed)), max_tokens=max_tokens) if chosen]
    return [list(range(start, min(start + PADDED_ROWS, len(packed)))) for start in range(0, len(packed), PADDED_ROWS)]


def _hidden(causal: Any, packed: list[PackedRow], chosen: list[int], *, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return flat hidden states and ids, every position that predicts a token, its row, and whether that token is trained."""
    if layout == "packed":
        batch = pack(packed, chosen)
        parts = tensors(batch)
        hidden = causal.model(
            input_ids=parts["input_ids"][None], position_ids=parts["position_ids"][None], use_cache=False, segment_lengths=parts["lengths"]
        ).last_hidden_state[0]
        ids, spans = parts["input_ids"], list(zip(batch.rows, batch.lengths, strict=True))
        width = None
    else:
        texts = [np.concatenate([packed[i].prompt_ids, packed[i].response_ids]) for i in chosen]
        width = max(map(len, texts))
        padded = torch.from_numpy(np.stack([np.pad(text, (0, width - len(text))) for text in texts]))
        mask = torch.from_numpy(np.stack([np.arange(width) < len(text) for text in texts])).long()
        hidden = causal.model(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state.flatten(0, 1)
        ids, spans = padded.flatten(), list(zip(chosen, map(len, texts), strict=True))
    read_at, row_of, trained, start = [], [], [], 0
    for row, length in spans:
        read_at.append(np.arange(start, start + length - 1))
        row_of.append(np.full(length - 1, row))
        trained.append(np.isin(np.arange(1, length), packed[row].trained))
        start += width or length
    positions, owners, flags = (torch.from_numpy(np.concatenate(part)) for part in (read_at, row_of, trained))
    return hidden, ids, positions, owners, flags


def plain(task: Task) -> dict[str, Any]:
    """Measure forward and backward without an engine."""
    model = language_model(task)
    packed, advantage = task_rows(task, model.config.vocab_size)
    weights = torch.tensor(advantage)
    total = sum(len(row.trained) for row in packed)
    if task.way == "bare_single" or task.way.startswith("padded"):
        model.set_attn_implementation("sdpa")
    way = "packed-plain-trained" if task.way == "bare_packed" else task.way

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        losses = (
            single(model, packed, weights, total)
            if way == "bare_single"
            else in_rows_of_batches(model, packed, weights, total, way=way, max_tokens=task.max_tokens)
        )
        for loss in losses:
            loss.backward()

    seconds = measured(step, repeats=task.repeats)
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {"rank": 0, "world": 1, "seconds": seconds, "peak_bytes": peak_bytes(), "gradients": probe_gradients(named)}


def main() -> int:
    """Measure the task named on the command line; rank r writes RESULT-r.json beside it."""
    path = Path(sys.argv[1])
    task = Task(**json.loads(path.read_bytes()))
    if task.dtype not in DTYPES:
        raise SystemExit(f"{task.dtype} is no arithmetic")
    torch.set_num_threads(task.threads)
    found = ours(task) if task.way.startswith("ours") else plain(task)
    write_atomic(path.with_name(f"{path.stem}-result-{os.environ.get('RANK', '0')}.json"), json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
