"""One measurement of `tidegate bench trainer`, in a process of its own: `python -m trainer.bench_worker TASK.json`.

A task names a way to do the same work: one optimizer step over the same rows with the same loss. `ours` is the engine that updates
run on; `bare` is what no trainer can beat, forward and backward of the plain model with the head on trained tokens and no
reinforcement at all; the grid switches packing, the fused head and trained-only one by one. Writes seconds of each repeat, peak
memory and the gradient of a few weights, so that a figure of speed never stands without the proof that the same thing was computed:
on a few short rows once more as measured and once in fp32, because bf16 rounds differently wherever a sum is cut differently, so
that two bf16 gradients can be compared only by how far each of them is from the exact one.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from trainer.packing import PackedRow, pack, plan_rows, tokens_of

PADDED_ROWS: Final = 8
"""Rows of one padded micro-batch: TRL's own default."""
PROBES: Final = (
    "layers.0.input_layernorm.weight", "layers.0.self_attn.k_proj.weight", "model.norm.weight",
    "layers.0.self_attn.q_proj.lora_B.default.weight", "layers.1.mlp.down_proj.lora_B.default.weight",
)  # fmt: skip
"""Weights whose gradient is compared, where they are trained: the far end and the near end of the backward pass."""
WARM_UP_ROWS: Final = 3
"""Rows of the step before the first that counts: enough to fill caches, allocate the optimizer's state and load what is lazy."""


def task_rows(task: Task, vocabulary: int) -> tuple[list[PackedRow], list[float]]:
    """Return the task's rows and their advantages."""
    made = bench_rows.rows(task.histogram, number=task.rows, vocabulary=vocabulary)
    weights = bench_rows.advantages(task.rows)
    kept = bench_rows.chosen([tokens_of(row) for row in made], task)
    return [made[i] for i in kept], [weights[i] for i in kept]


def language_model(task: Task) -> Any:
    """Load the checkpoint as the task says."""
    model = load(Path(task.checkpoint), dtype=task.dtype)
    if task.adapter == "lora":
        model = add_lora(model, UpdateConfig())
        fix_adapters(model)
    if task.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def fix_adapters(model: Any) -> None:
    """Give every way the same adapters: gradients of B depend on A, which each library draws for itself."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def peak_bytes() -> int:
    """Return the largest resident memory this process ever had."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


class Stopwatch:
    """Seconds, and seconds of this process's processors, of each repeat of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def time(self, part: str, work: Callable[[], Any]) -> Any:
        """Do something and note how long it took."""
        begun, used = time.perf_counter(), time.process_time()
        made = work()
        self.seconds.setdefault(part, []).append(time.perf_counter() - begun)
        self.cpu_seconds.setdefault(part, []).append(time.process_time() - used)
        return made

    def found(self, gradients: dict[str, list[float]], exact: dict[str, list[float]], *, peak: int) -> dict[str, Any]:
        """Return what goes into the result."""
        return {
            "seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "peak_bytes": peak, "gradients": gradients, "exact": exact,
        }  # fmt: skip


def probe_gradients(named: Iterator[tuple[str, Tensor | None]]) -> dict[str, list[float]]:
    """Return the gradients of the probe weights, flat."""
    return {
        probe: gradient.detach().float().flatten().tolist()
        for name, gradient in named
        for probe in PROBES
        if name.endswith(probe) and gradient is not None
    }


# ours -----------------------------------------------------------------------------------------------------------------------


def engine_of(task: Task) -> tuple[Any, list[TrainingRow], list[np.ndarray]]:
    """Return a trainer, its rows as if its own policy had sampled them, and their log-probabilities."""
    from trainer.engine import Trainer

    model = language_model(task)
    config = deepspeed_config.build(zero_stage=1, dtype=task.dtype, lr=0.0, weight_decay=0.0, grad_clip=1e9)
    packed, weights = task_rows(task, model.config.vocab_size)
    trainer = Trainer(Policy(model), loss="decoupled_ppo", settings=LossSettings(), deepspeed=config, max_tokens=task.max_tokens)
    unscored = [
        TrainingRow(row_id=str(i), packed=row, mu=np.zeros(len(row.trained), np.float32), advantage=weights[i], omega=1.0,
                    same_version=True)
        for i, row in enumerate(packed)
    ]  # fmt: skip
    logged = trainer.score_all(unscored, range(len(packed)))
    return trainer, [replace(row, mu=logged[i]) for i, row in enumerate(unscored)], [logged[i] for i in range(len(packed))]


def engine_gradients(trainer: Any, rows: list[TrainingRow], logged: list[np.ndarray], *, shortest: int = 0) -> dict[str, list[float]]:
    """Return the probes' gradients over all rows or the shortest, once: no step is taken, because any KL is over a budget below zero."""
    from deepspeed.utils import safe_get_full_grad

    by_length = sorted(range(len(rows)), key=lambda i: (tokens_of(rows[i].packed), i))
    trainer.step(rows, sorted(by_length[: shortest or len(rows)]), ref=logged, prox=None, kl_budget=-1.0)
    named = trainer.engine.module.named_parameters()
    return probe_gradients((name, safe_get_full_grad(p)) for name, p in named if p.requires_grad and name.endswith(PROBES))


def ours(task: Task) -> dict[str, Any]:
    """Measure the engine that updates run on, on however many ranks torchrun started: a step, and a scoring pass for a reference."""
    from trainer.engine import connect

    rank, _ = connect(timeout_s=600)
    torch.set_num_threads(task.threads)
    trainer, rows, logged = engine_of(task)
    everything, watch = range(len(rows)), Stopwatch()
    trainer.step(rows, everything[:WARM_UP_ROWS], ref=logged, prox=None, kl_budget=None)
    for _ in range(task.repeats):
        watch.time("step", lambda: trainer.step(rows, everything, ref=logged, prox=None, kl_budget=None))
        if task.exact_rows:
            watch.time("reference", lambda: trainer.score_all(rows, everything))
    peak = peak_bytes()
    exact = rough = {}
    if task.exact_rows:
        rough = engine_gradients(trainer, rows, logged, shortest=task.exact_rows)
        del trainer
        exact = engine_gradients(*engine_of(exact_task(task)))
    return watch.found(rough, exact, peak=peak) | {"rank": rank, "rough": rough}


def few_rows(task: Task) -> Task:
    """Return the task on its shortest rows."""
    return replace(task, shortest=task.exact_rows)


def exact_task(task: Task) -> Task:
    """Return the task in fp32 on its shortest rows."""
    return replace(few_rows(task), dtype="fp32")


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


def losses(task: Task, model: Any, packed: list[PackedRow], weights: Tensor) -> Iterator[Tensor]:
    """Yield the losses of the task's way over these rows; they sum to that of the whole batch."""
    total = sum(len(row.trained) for row in packed)
    if task.way == "bare_single":
        return single(model, packed, weights, total)
    way = "packed-plain-trained" if task.way == "bare_packed" else task.way
    return in_rows_of_batches(model, packed, weights, total, way=way, max_tokens=task.max_tokens)


def plain_model(task: Task) -> tuple[Any, list[PackedRow], Tensor]:
    """Return a model without an engine, the rows and their advantages."""
    model = language_model(task)
    packed, advantage = task_rows(task, model.config.vocab_size)
    if task.way == "bare_single" or task.way.startswith("padded"):
        model.set_attn_implementation("sdpa")
    return model, packed, torch.tensor(advantage)


def plain_gradients(task: Task, model: Any, packed: list[PackedRow], weights: Tensor) -> dict[str, list[float]]:
    """Go forward and backward over the rows; returns the probes' gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    for loss in losses(task, model, packed, weights):
        loss.backward()
    return probe_gradients((name, parameter.grad) for name, parameter in model.named_parameters())


def plain(task: Task) -> dict[str, Any]:
    """Measure forward and backward without an engine."""
    parts = plain_model(task)
    plain_gradients(task, parts[0], parts[1][:WARM_UP_ROWS], parts[2])
    watch = Stopwatch()
    gradients: dict[str, list[float]] = {}
    for _ in range(task.repeats):
        gradients = watch.time("step", lambda: plain_gradients(task, *parts))
    peak = peak_bytes()
    exact = rough = {}
    if task.exact_rows:
        packed, weights = task_rows(few_rows(task), parts[0].config.vocab_size)
        rough = plain_gradients(task, parts[0], packed, torch.tensor(weights))
        exact = plain_gradients(exact_task(task), *plain_model(exact_task(task)))
    return watch.found(gradients, exact, peak=peak) | {"rank": 0, "rough": rough}


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
