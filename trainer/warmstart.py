"""Supervised training before reinforcement: demonstrations teach the tool-call format, through the same engine as an update.

Takes: a checkpoint; text and code (`texts.py`), or a JSON-lines file of demonstrations or whole trajectories, one
`{"messages": [...], "tools": [...]}` a line. Gives: a sealed checkpoint of kind `warmstart`. On text the loss is on all tokens, in a
dialogue on the assistant's, end token included. The same parent, data and settings give the same checkpoint at once. Leaves out: how
demonstrations are made (`deploy.harness`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipelines.config import digest
from pipelines.errors import ContractViolation
from pipelines.storage import Home, exclusive
from trainer import candidates, texts
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
        rows.append(supervised_row(str(number), packed))
    return rows, too_long


def settings_for(config: TrainerConfig, *, lr: float, rows_per_step: int, passes: int) -> UpdateConfig:
    """Return the engine's settings for supervised training: full weights, SFT loss."""
    warm = config.warmstart
    return config.trainer.model_copy(
        update={
            "adapter": "full",
            "loss": "sft",
            "lr": lr,
            "passes": passes,
            "rows_per_step": rows_per_step,
            "dtype": warm.dtype,
            "max_tokens_per_micro_batch": warm.max_tokens_per_micro_batch,
            "steps_per_prox": 1,
            "save_every_steps": warm.save_every_steps,
            "keep_checkpoints": 1,
        }
    )


def supervised_row(row_id: str, packed: PackedRow) -> TrainingRow:
    """Return a row as the ranks read it: no behaviour policy, advantage and weight 1."""
    zeros = np.zeros(len(packed.trained), np.float32)
    return TrainingRow(row_id=row_id, packed=packed, mu=zeros, advantage=1.0, omega=1.0, same_version=False)


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
    warm = config.warmstart
    settings = settings_for(config, lr=warm.lr, rows_per_step=warm.examples_per_step, passes=warm.passes)
    with exclusive(home.run / "trainer.lock", what="a training job"):
        identity, folder = candidates.find(home.store, parent)
        demonstrations = read_demonstrations(data, limit=max_examples or warm.max_examples)
        rows, too_long = rows_from(load(folder), demonstrations, max_row_tokens=settings.max_row_tokens)
        if not rows:
            raise ContractViolation(f"every demonstration in {data} is longer than trainer.max_row_tokens = {settings.max_row_tokens}")
        used = {"trainer": settings.model_dump(mode="json"), "warmstart": warm.model_dump(mode="json")}
        kind: Literal["sabotage", "warmstart"] = "sabotage" if sabotage else "warmstart"
        job = _job(
            config, home, kind, identity, folder, settings=settings, rows=rows, facts={"rejected.too_long": too_long}, used=used, now=now
        )
        return run_job(config, home, job, rows, label="warm start")


def pretrain(config: TrainerConfig, home: Home, *, parent: str, places: Sequence[Path], now: datetime) -> dict[str, Any]:
    """Go on pretraining a checkpoint on text and code.

    Args:
        config: Settings.
        home: The deployment's folder.
        parent: Checkpoint id or prefix.
        places: Files and folders.
        now: Aware UTC.

    Returns:
        As `warmstart`; also how many files were read and left out.

    Raises:
        Busy: Another training job runs in this deployment.
        CheckpointInvalid: The parent is not intact.
        ContractViolation: There is no text.
    """
    more = config.pretrain
    settings = settings_for(config, lr=more.lr, rows_per_step=more.rows_per_step, passes=1)
    with exclusive(home.run / "trainer.lock", what="a training job"):
        identity, folder = candidates.find(home.store, parent)
        packed, counts = texts.rows(load(folder), places, row_tokens=more.row_tokens, max_tokens=more.max_tokens)
        rows = [supervised_row(str(number), row) for number, row in enumerate(packed)]
        used = {"trainer": settings.model_dump(mode="json"), "pretrain": more.model_dump(mode="json")}
        job = _job(config, home, "warmstart", identity, folder, settings=settings, rows=rows, facts=counts, used=used, now=now)
        return run_job(config, home, job, rows, label="pretraining")


def _job(
    config: TrainerConfig, home: Home, kind: Literal["warmstart", "sabotage"], identity: str, folder: Path, *, settings: UpdateConfig,
    rows: Sequence[TrainingRow], facts: Mapping[str, int], used: Mapping[str, Any], now: datetime,
) -> Job:  # fmt: skip
    counted: dict[str, float | int | str | None] = {
        "rows": len(rows), "trained_tokens": sum(len(row.packed.trained) for row in rows),
        "tokens": sum(len(row.packed.prompt_ids) + len(row.packed.response_ids) for row in rows),
    }  # fmt: skip
    return Job(
        kind=kind, parent=identity, parent_folder=str(folder), store=str(home.store), base_model=candidates.verify(folder).base_model,
        settings=settings, kl_limited=False, warmup_steps=config.warmstart.warmup_steps, created_at=now.isoformat(),
        config_digest=digest(used), facts=counted | dict(facts),
    )  # fmt: skip
