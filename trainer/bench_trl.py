"""TRL's GRPO step on the rows of `tidegate bench trainer`: `python -m trainer.bench_trl TASK.json`.

TRL is looked for, never required: `uv pip install --target DIR trl datasets`, then `PYTHONPATH=DIR tidegate bench trainer`. Its
trainer is built at its defaults (GRPOConfig, batches of eight, fp32 weights under bf16 autocast) but for the model, the rows, threads
and activation checkpointing, which are those of every other way; its own `_compute_loss` and the backward pass are timed, and one
optimizer step. Generation is left out, as it is everywhere here, and so is its forward pass for log-probabilities of the sampling
policy, which its defaults do not need either.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.storage import write_atomic
from trainer.bench_rows import Task
from trainer.bench_worker import (
    PADDED_ROWS,
    WARM_UP_ROWS,
    Stopwatch,
    exact_task,
    few_rows,
    fix_adapters,
    peak_bytes,
    probe_gradients,
    task_rows,
)
from trainer.config import UpdateConfig
from trainer.packing import PackedRow


def grpo_trainer(task: Task, folder: Path) -> Any:
    """Build TRL's trainer on the task's checkpoint."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=task.dtype == "bf16", report_to=[], per_device_train_batch_size=PADDED_ROWS,
        gradient_checkpointing=task.activation_checkpointing, learning_rate=0.0, max_completion_length=bound(task),
    )  # fmt: skip
    peft: Any = None
    if task.adapter == "lora":
        from peft import LoraConfig

        defaults = UpdateConfig()
        peft = LoraConfig(
            task_type="CAUSAL_LM", r=defaults.lora_rank, lora_alpha=int(defaults.lora_alpha), target_modules=list(defaults.lora_targets)
        )
    made = GRPOTrainer(
        model=task.checkpoint, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * PADDED_ROWS}), peft_config=peft,
    )  # fmt: skip
    fix_adapters(made.model)
    if task.activation_checkpointing:  # its trainer switches this on in `train`, which is not called here
        made.model.activation_checkpointing_enable({"use_reentrant": False})
    made.create_optimizer()
    return made


def bound(task: Task) -> int:
    """Return a completion length that no row exceeds."""
    return max(len(row.response_ids) for row in task_rows(replace(task, shortest=0), 1000)[0])


def batches(packed: list[PackedRow], weights: list[float], total: int) -> list[dict[str, torch.Tensor]]:
    """Return TRL's inputs: prompts padded on the left, completions on the right, eight rows each."""

    def padded(parts: list[np.ndarray], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, parts))
        sides = [(width - len(part), 0) if left else (0, width - len(part)) for part in parts]
        ids = np.stack([np.pad(part, side) for part, side in zip(parts, sides, strict=True)])
        mask = np.stack([np.pad(np.ones(len(part), int), side) for part, side in zip(parts, sides, strict=True)])
        return torch.from_numpy(ids), torch.from_numpy(mask)

    made = []
    for start in range(0, len(packed), PADDED_ROWS):
        rows = packed[start : start + PADDED_ROWS]
        prompt_ids, prompt_mask = padded([row.prompt_ids for row in rows], left=True)
        completion_ids, completion_mask = padded([row.response_ids for row in rows], left=False)
        made.append(
            {
                "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids, "completion_mask": completion_mask,
                "advantages": torch.tensor(weights[start : start + PADDED_ROWS]), "num_items_in_batch": torch.tensor(float(total)),
            }
        )  # fmt: skip
    return made


def gradients_of(trainer: Any, task: Task, *, first: int | None = None) -> dict[str, list[float]]:
    """Go forward and backward over the task's rows, or the first few, as TRL does; returns the probes' gradients."""
    packed, weights = task_rows(task, trainer.model.config.vocab_size)
    inputs = batches(packed[:first], weights[:first], sum(len(row.trained) for row in packed))
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(inputs)
    for batch in inputs:
        with trainer.compute_loss_context_manager():
            loss = trainer._compute_loss(trainer.model, batch)  # its own step, without its generation
        trainer.accelerator.backward(loss)
    return probe_gradients((name, parameter.grad) for name, parameter in trainer.model.named_parameters())


def exact_gradients(trainer: Any, task: Task) -> dict[str, list[float]]:
    """Return the probes' gradients on a few rows in fp32: its weights are fp32, and the autocast around their forward pass goes off."""
    trainer.accelerator.native_amp = False
    return gradients_of(trainer, exact_task(task))


def main() -> int:
    """Measure TRL on the task named on the command line."""
    path = Path(sys.argv[1])
    task = Task(**json.loads(path.read_bytes()))
    torch.set_num_threads(task.threads)
    trainer = grpo_trainer(task, path.with_suffix(".trl"))
    trainer.model.train()

    def step(*, first: int | None = None) -> dict[str, list[float]]:
        found = gradients_of(trainer, task, first=first)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return found

    step(first=WARM_UP_ROWS)
    watch = Stopwatch()
    gradients: dict[str, list[float]] = {}
    for _ in range(task.repeats):
        gradients = watch.time("step", step)
    peak = peak_bytes()
    few = {"rough": gradients_of(trainer, few_rows(task))} if task.exact_rows else {}
    trainer.optimizer.zero_grad()
    exact = exact_gradients(trainer, task) if task.exact_rows else {}
    found = watch.found(gradients, exact, peak=peak) | few | {"rank": 0}
    write_atomic(path.with_name(f"{path.stem}-result-0.json"), json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
