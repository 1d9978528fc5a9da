"""TRL's GRPO step on the rows of `tidegate bench trainer`: `python -m trainer.bench_trl TASK.json`.

TRL is looked for, never required: `uv pip install --target DIR trl datasets`, then `PYTHONPATH=DIR tidegate bench trainer`. Its
trainer is built at its defaults (GRPOConfig, batches of eight) but for the model, the rows, threads and activation checkpointing,
which are those of every other way; its own `_compute_loss` and the backward pass are timed, and one optimizer step. Generation is
left out, as it is everywhere here.
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
from trainer.bench_worker import PADDED_ROWS, measured, peak_bytes, probe_gradients, task_rows
from trainer.config import UpdateConfig
from trainer.packing import PackedRow


def grpo_trainer(task: Task, folder: Path) -> Any:
    """Build TRL's trainer on the task's checkpoint."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=task.dtype == "bf16", report_to=[], per_device_train_batch_size=PADDED_ROWS,
        gradient_checkpointing=task.activation_checkpointing, learning_rate=1e-8, max_completion_length=bound(task),
    )  # fmt: skip
    peft: Any = None
    if task.adapter == "lora":
        from peft import LoraConfig

        defaults = UpdateConfig()
        peft = LoraConfig(
            task_type="CAUSAL_LM", r=defaults.lora_rank, lora_alpha=int(defaults.lora_alpha), target_modules=list(defaults.lora_targets)
        )
    return GRPOTrainer(
        model=task.checkpoint, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * PADDED_ROWS}), peft_config=peft,
    )  # fmt: skip


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


def main() -> int:
    """Measure TRL on the task named on the command line."""
    path = Path(sys.argv[1])
    task = Task(**json.loads(path.read_bytes()))
    torch.set_num_threads(task.threads)
    trainer = grpo_trainer(task, path.with_suffix(".trl"))
    model = trainer.model.train()
    packed, weights = task_rows(task, model.config.vocab_size)
    inputs = batches(packed, weights, sum(len(row.trained) for row in packed))
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(inputs)
    gradients: dict[str, list[float]] = {}

    def step() -> None:
        for batch in inputs:
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(model, batch)  # its own step, without its generation
            trainer.accelerator.backward(loss)
        if not gradients:
            gradients.update(probe_gradients((name, parameter.grad) for name, parameter in model.named_parameters()))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    seconds = measured(step, repeats=task.repeats)
    found = {"rank": 0, "world": 1, "seconds": seconds, "peak_bytes": peak_bytes(), "gradients": gradients}
    write_atomic(path.with_name(f"{path.stem}-result-0.json"), json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
