"""Supervised training before reinforcement: demonstrations teach the tool-call format, through the same engine as an update.

Takes: a checkpoint; text and code (`texts.py`), a JSON-lines file of demonstrations or trajectories, one
`{"messages": [...], "tools": [...]}` in OpenAI's shape a line, or the deployment's own sessions: what the lake holds of turns that
earned enough, token by token as it was sampled. Gives: a sealed checkpoint of kind `warmstart`. On text the loss is on all tokens, in
a dialogue on the assistant's, end token included. The same parent, data and settings give the same checkpoint at once. Leaves out:
how demonstrations are made (`deploy.harness`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from pipelines.config import digest
from pipelines.errors import ContractViolation
from pipelines.storage import Home, exclusive
from trainer import candidates, texts
from trainer.chat import Chat, load, named_tool, normalised, supervised
from trainer.config import TrainerConfig, UpdateConfig
from trainer.dataset import TrainingRow, read_samples
from trainer.job import Job
from trainer.packing import PackedRow
from trainer.selection import select
from trainer.update import limits_for, packed_row, run_job

EVER_HOURS: Final = 1e6
"""What was good a year ago is still a good example: age matters for a policy gradient, not for imitation."""


def read_demonstrations(path: Path, *, limit: int) -> list[dict[str, Any]]:
    """Read at most `limit` demonstrations: messages as the model writes them, tools, and `where` they stand.

    Raises:
        ContractViolation: The file is missing or empty, or a line is no demonstration (its number is named).
    """
    found: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if len(found) == limit:
                    break
                if line.strip():
                    found.append(_demonstration(line, where=f"{path}:{number}"))
    except FileNotFoundError as error:
        raise ContractViolation(f"{path} does not exist; make it with `tidegate harness demonstrations --out {path}`") from error
    except IsADirectoryError as error:
        raise ContractViolation(f"{path} is a folder; --data takes a file of JSON lines, --text takes folders") from error
    except UnicodeDecodeError as error:
        raise ContractViolation(f"{path} is no UTF-8 text; demonstrations are JSON lines") from error
    if not found:
        raise ContractViolation(f"{path} holds no demonstration")
    return found


def _demonstration(line: str, *, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ContractViolation(f"{where} is not JSON: {error}") from error
    messages, tools = (entry.get("messages"), entry.get("tools") or []) if isinstance(entry, dict) else (None, [])
    if not isinstance(messages, list) or not messages or not isinstance(tools, list) or not all(map(named_tool, tools)):
        raise ContractViolation(f'{where} is no demonstration; a line is {{"messages": [...], "tools": [{{"name": ...}}, ...]}}')
    try:
        return {"messages": [normalised(message) for message in messages], "tools": tools, "where": where}
    except ContractViolation as error:
        raise ContractViolation(f"{where}: {error}") from error


def rows_from(chat: Chat, demonstrations: Sequence[Mapping[str, Any]], *, max_row_tokens: int) -> tuple[list[TrainingRow], int]:
    """Render demonstrations to training rows.

    Returns:
        Rows, and how many demonstrations were left out as longer than `max_row_tokens`.
    """
    rows: list[TrainingRow] = []
    too_long = 0
    for number, entry in enumerate(demonstrations):
        try:
            ids, trained = supervised(chat, entry["messages"], tools=entry["tools"])
        except ContractViolation as error:
            raise ContractViolation(f"{entry['where']}: {error}") from error
        if len(ids) > max_row_tokens:
            too_long += 1
            continue
        cut = trained[0]
        packed = PackedRow(
            prompt_ids=np.asarray(ids[:cut]), response_ids=np.asarray(ids[cut:]), trained=np.asarray(trained), temperature=1.0
        )
        rows.append(supervised_row(str(number), packed))
    return rows, too_long


def rewarded_rows(
    config: TrainerConfig, home: Home, folder: Path, *, least: float, limit: int, now: datetime
) -> tuple[list[TrainingRow], dict[str, int], int | None]:
    """Take the newest completions of the lake whose turn earned at least `least`, of whatever age and policy.

    Returns:
        Rows, a count of every sample that is not among them, and the lake's version.

    Raises:
        ContractViolation: There is no table `samples`, or none of it can be learned from.
    """
    samples = read_samples(home.lake)
    records = list(samples.records())
    enough = [record for record in records if record["reward"] is None or not record["reward"] < least]
    newest = max((record["policy_version"] or 0 for record in records), default=0)
    open_ended = config.trainer.model_copy(update={"max_stale_versions": newest, "max_stale_hours": EVER_HOURS, "max_rows": limit})
    limits = limits_for(folder, candidates.read_manifest(folder), open_ended, policy_version=newest, consumed=())
    selection = select(enough, limits, now=now)
    counts = {"rejected.below_reward": len(records) - len(enough)} | {f"rejected.{k}": count for k, count in selection.rejected.items()}
    if not selection.rows:
        said = ", ".join(f"{name.removeprefix('rejected.')} {count}" for name, count in counts.items())
        raise ContractViolation(f"no sample in {home.lake} earned {least} and can be learned from ({said})")
    rows = [supervised_row(row.completion_id, replace(packed_row(row), temperature=1.0)) for row in selection.rows]
    return rows, counts, samples.version


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
            "world_size": warm.world_size or config.trainer.world_size,
            "threads_per_rank": warm.threads_per_rank or config.trainer.threads_per_rank,
        }
    )


def supervised_row(row_id: str, packed: PackedRow) -> TrainingRow:
    """Return a row as the ranks read it: no behaviour policy, advantage and weight 1."""
    zeros = np.zeros(len(packed.trained), np.float32)
    return TrainingRow(row_id=row_id, packed=packed, mu=zeros, advantage=1.0, omega=1.0, same_version=False)


def warmstart(
    config: TrainerConfig, home: Home, *, parent: str, data: Path | None, rewarded: float | None = None,
    max_examples: int | None = None, sabotage: bool = False, now: datetime,
) -> dict[str, Any]:  # fmt: skip
    """Fine-tune a checkpoint on demonstrations, on rewarded completions of the lake, or on both.

    Args:
        config: Settings.
        home: The deployment's folder.
        parent: Checkpoint id or prefix.
        data: Demonstrations; None for none.
        rewarded: Least reward of the turns to learn from; None: the lake is not read.
        max_examples: Stop after this many of each; None: `warmstart.max_examples`.
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
        rows: list[TrainingRow] = []
        facts: dict[str, int] = {}
        lake_version: int | None = None
        limit = max_examples or warm.max_examples
        if data is not None:
            rows, too_long = rows_from(load(folder), read_demonstrations(data, limit=limit), max_row_tokens=settings.max_row_tokens)
            facts["rejected.too_long"] = too_long
            if not rows:
                raise ContractViolation(f"every demonstration in {data} is longer than trainer.max_row_tokens = {settings.max_row_tokens}")
        if rewarded is not None:
            more, counts, lake_version = rewarded_rows(config, home, folder, least=rewarded, limit=limit, now=now)
            rows += more
            facts |= {name: facts.get(name, 0) + count for name, count in counts.items()}
        used = {"trainer": settings.model_dump(mode="json"), "warmstart": warm.model_dump(mode="json")}
        kind: Literal["sabotage", "warmstart"] = "sabotage" if sabotage else "warmstart"
        job = _job(
            config, home, kind, identity, folder, settings=settings, rows=rows, facts=facts, used=used, lake_version=lake_version, now=now,
        )  # fmt: skip
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
    rows: Sequence[TrainingRow], facts: Mapping[str, int], used: Mapping[str, Any], lake_version: int | None = None, now: datetime,
) -> Job:  # fmt: skip
    counted: dict[str, float | int | str | None] = {
        "rows": len(rows), "trained_tokens": sum(len(row.packed.trained) for row in rows),
        "tokens": sum(len(row.packed.prompt_ids) + len(row.packed.response_ids) for row in rows),
    }  # fmt: skip
    return Job(
        kind=kind, parent=identity, parent_folder=str(folder), store=str(home.store), base_model=candidates.verify(folder).base_model,
        settings=settings, kl_limited=False, warmup_steps=config.warmstart.warmup_steps, created_at=now.isoformat(),
        config_digest=digest(used), facts=counted | dict(facts), lake_version=lake_version,
    )  # fmt: skip
