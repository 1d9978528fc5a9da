"""Supervised training before reinforcement: demonstrations teach the tool-call format, through the same engine as an update.

Takes: a checkpoint and a JSON-lines file, one `{"messages": [...], "tools": [...]}` a line. Gives: a sealed checkpoint of kind
`warmstart`. The loss is on assistant tokens, end token included. The same parent, data and settings give the same checkpoint
at once. Leaves out: how demonstrations are made (`deploy.harness`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config import digest
from pipelines.errors import ContractViolation
from pipelines.storage import Home, exclusive
from trainer import candidates
from trainer.chat import Chat, load, supervised
from trainer.config import TrainerConfig, UpdateConfig
from trainer.dataset import TrainingRow
from trainer.job import Job
from trainer.packing import PackedRow
from trainer.update import run_job


def read_demonstrations(path: Path, *, limit: int) -> list[dict[str, Any]]:
    """Read at most `limit` demonstrations.

    Raises:
        ContractViolation: The file is missing or empty, or a line is no demonstration (its number is named).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ContractViolation(f"{path} does not exist; make it with `tidegate harness demonstrations --out {path}`") from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(found) == limit:
            break
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ContractViolation(f"{path}:{number} is not JSON: {error}") from error
        messages = entry.get("messages") if isinstance(entry, dict) else None
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ContractViolation(f'{path}:{number} is no demonstration; a line is {{"messages": [...], "tools": [...]}}')
        found.append(entry)
    if not found:
        raise ContractViolation(f"{path} holds no demonstration")
    return found


def rows_from(chat: Chat, demonstrations: Sequence[Mapping[str, Any]], *, max_row_tokens: int) -> tuple[list[TrainingRow], int]:
    """Render demonstrations to training rows.

    Returns:
        Rows, and how many demonstrations were left out as longer than `max_row_tokens`.
    """
    rows: list[TrainingRow] = []
    too_long = 0
    for number, entry in enumerate(demonstrations):
        ids, trained = supervised(chat, entry["messages"], tools=entry.get("tools"))
        if len(ids) > max_row_tokens:
            too_long += 1
            continue
        cut = trained[0]
        packed = PackedRow(
            prompt_ids=np.asarray(ids[:cut]), response_ids=np.asarray(ids[cut:]), trained=np.asarray(trained), temperature=1.0
        )
        zeros = np.zeros(len(trained), np.float32)
        rows.append(TrainingRow(row_id=f"{number}", packed=packed, mu=zeros, advantage=1.0, omega=1.0, same_version=False))
    return rows, too_long


def settings_for(config: TrainerConfig) -> UpdateConfig:
    """Return the engine's settings for supervised training: full weights, SFT loss."""
    warm = config.warmstart
    return config.trainer.model_copy(
        update={
            "adapter": "full",
            "loss": "sft",
            "lr": warm.lr,
            "passes": warm.passes,
            "rows_per_step": warm.examples_per_step,
            "dtype": warm.dtype,
            "max_tokens_per_micro_batch": warm.max_tokens_per_micro_batch,
            "steps_per_prox": 1,
            "save_every_steps": warm.save_every_steps,
            "keep_checkpoints": 1,
        }
    )


def warmstart(
    config: TrainerConfig, home: Home, *, parent: str, data: Path, max_examples: int | None = None, sabotage: bool = False, now: datetime
) -> dict[str, Any]:
    """Fine-tune a checkpoint on demonstrations.

    Args:
        config: Settings.
        home: The deployment's folder.
        parent: Checkpoint id or prefix.
        data: Demonstrations.
        max_examples: Stop after this many; None: `warmstart.max_examples`.
        sabotage: Mark the result as made on purpose to be refused.
        now: Aware UTC.

    Returns:
        checkpoint, path, parent and figures; `cached` when the same training was done before.

    Raises:
        Busy: Another training job runs in this deployment.
        CheckpointInvalid: The parent is not intact.
        ContractViolation: The data cannot be used.
    """
    with exclusive(home.run / "trainer.lock", what="a training job"):
        identity, folder = candidates.find(home.store, parent)
        manifest = candidates.verify(folder)
        demonstrations = read_demonstrations(data, limit=max_examples or config.warmstart.max_examples)
        settings = settings_for(config)
        rows, too_long = rows_from(load(folder), demonstrations, max_row_tokens=settings.max_row_tokens)
        if not rows:
            raise ContractViolation(f"every demonstration in {data} is longer than trainer.max_row_tokens = {settings.max_row_tokens}")
        facts: dict[str, float | int | str | None] = {
            "rows": len(rows), "rejected.too_long": too_long, "trained_tokens": sum(len(row.packed.trained) for row in rows),
            "tokens": sum(len(row.packed.prompt_ids) + len(row.packed.response_ids) for row in rows),
        }  # fmt: skip
        used = {"trainer": settings.model_dump(mode="json"), "warmstart": config.warmstart.model_dump(mode="json")}
        job = Job(
            kind="sabotage" if sabotage else "warmstart", parent=identity, parent_folder=str(folder), store=str(home.store),
            base_model=manifest.base_model, settings=settings, kl_limited=False, warmup_steps=config.warmstart.warmup_steps,
            created_at=now.isoformat(), config_digest=digest(used), facts=facts,
        )  # fmt: skip
        return run_job(config, home, job, rows, label="warm start")
