"""One update: the samples of a pinned lake version and the serving checkpoint become a candidate in the store.

Takes: a checkpoint id, its policy version, a lake. Gives: a sealed candidate and a result with every count. Selects rows,
estimates advantages, writes a job and starts its ranks. Leaves out: whether the candidate ships. The serving checkpoint's folder
is only read.

The same command after a kill finds its job by content and goes on. Baselines and consumed rows come from the parent's
`trainer_state.json`, so a candidate that was never promoted leaves no trace in the next update.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipelines.config import digest
from pipelines.errors import ContractViolation
from pipelines.storage import Home, exclusive, write_atomic
from trainer import advantages, candidates, hindsight, launch
from trainer import job as jobs
from trainer.advantages import Estimate, ScoredTurn
from trainer.config import TrainerConfig, UpdateConfig
from trainer.dataset import SampleTable, TrainingRow, frontier, read_samples, write_rows
from trainer.job import Job
from trainer.packing import PackedRow, chains, reply_row, tokens_of
from trainer.selection import Limits, Row, Selection, select
from trainer.tracking import tracked

CONSUMED_KEPT: Final = 100_000
"""Ids of trained rows that follow the lineage; older rows are refused by age anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Training rows with the account of how they came about."""

    rows: list[TrainingRow]
    facts: dict[str, float | int | str | None]
    state: dict[str, Any]
    reward_version: str | None


def read_state(folder: Path) -> dict[str, Any]:
    """Read baselines and consumed rows of a checkpoint; a base or warm-started one has none."""
    try:
        return json.loads((folder / jobs.TRAINER_STATE).read_bytes())
    except FileNotFoundError:
        return {"ema": {}, "consumed": []}


class NothingToLearn(ContractViolation):
    """The window holds too few rows that may be trained on."""

    def __init__(self, message: str, counts: Mapping[str, int]) -> None:
        super().__init__(message)
        self.counts = counts
        """As in the facts of an update: seen, rows, rejected.<code>."""


def scored_turns(records: Sequence[Mapping[str, Any]], *, origins: Set[str]) -> list[ScoredTurn]:
    """Return each scored, consented turn once, also those whose tokens cannot be trained on: returns need their rewards."""
    found: dict[tuple[str, str], ScoredTurn] = {}
    for record in sorted(records, key=lambda record: -record["attempt"]):  # the turn's first completion is seen last
        reward = record["reward"]
        if record["outcome"] != "scored" or reward is None or not np.isfinite(reward):
            continue
        if record["origin"] not in origins or record["consent"] != "train":
            continue
        found[record["session_id"], record["turn_id"]] = ScoredTurn(
            session_id=record["session_id"], user_key=record["user_key"], turn_index=record["turn_index"], reward=reward,
            bucket=advantages.bucket(record["task_bucket"], record["turn_index"], record["language"]),
            prompt=hashlib.sha256(record["prompt_ids"]).hexdigest() if record["prompt_ids"] else "",
        )  # fmt: skip
    return [found[key] for key in sorted(found)]


def prepare(
    records: Sequence[Mapping[str, Any]], limits: Limits, config: UpdateConfig, *, state: Mapping[str, Any], now: datetime
) -> Prepared:
    """Select rows and give each its advantage and weight. Pure.

    Args:
        records: Rows of the table `samples`.
        limits: What is accepted.
        config: Constants of advantages.
        state: The parent's `trainer_state.json`.
        now: Aware UTC.

    Raises:
        NothingToLearn: Fewer rows than `trainer.min_rows` are left; the message counts why.
    """
    selection = select(records, limits, now=now)
    if len(selection.rows) < config.min_rows:
        raise NothingToLearn(_too_few(selection, config), _counts(selection))
    trained = {(row.session_id, row.turn_id) for row in selection.rows}
    turns = scored_turns(records, origins=limits.origins)
    estimates = advantages.estimate(turns, ema=state["ema"], gamma=config.gamma, kappa=config.baseline_kappa, clip=config.advantage_clip)
    by_turn = _by_turn(records, turns, estimates)
    omegas = advantages.user_weights([row.user_key for row in selection.rows], cap=config.user_cap)
    hinted = hindsight.hints(selection.rows) if config.hindsight > 0 else {}
    rows = [
        TrainingRow(
            row_id=row.completion_id,
            packed=packed_row(row),
            mu=row.mu,
            advantage=by_turn[row.session_id, row.turn_id].advantage,
            omega=float(omega),
            same_version=row.policy_version == limits.policy_version,
            hint_ids=hinted.get(row.completion_id),
        )
        for row, omega in zip(selection.rows, omegas, strict=True)
    ]
    consumed = [*state["consumed"], *(row.completion_id for row in selection.rows)][-CONSUMED_KEPT:]
    ema = advantages.updated_ema(turns, estimates, ema=state["ema"], decay=config.baseline_decay)
    versions = sorted({row.reward_version for row in selection.rows if row.reward_version})
    facts: dict[str, float | int | str | None] = {
        "turns": len(trained), "users": len({row.user_key for row in selection.rows}),
        "trained_tokens": sum(len(row.response_ids) for row in selection.rows),
        "reward_mean": float(np.mean([turn.reward for turn in turns])),
        "advantage_positive_share": float(np.mean([row.advantage > 0 for row in rows])),
        **({"hinted_rows": len(hinted)} if config.hindsight > 0 else {}),
        **_tokens([row.packed for row in rows]),
        **_counts(selection),
    }  # fmt: skip
    return Prepared(rows=rows, facts=facts, state={"ema": ema, "consumed": consumed}, reward_version=",".join(versions) or None)


def packed_row(row: Row) -> PackedRow:
    """Return a completion as the packer sees it: completions of one session and one policy version may share a prefix."""
    group = f"{row.session_id} {row.policy_version}"
    return reply_row(row.prompt_ids, row.response_ids, temperature=row.temperature, group=group)


def _tokens(rows: Sequence[PackedRow]) -> dict[str, int]:
    """Count what one pass computes: with prefixes shared inside a session, and as if each completion were computed alone."""
    linked = chains(rows, range(len(rows)))
    return {
        "sequences": len(linked),
        "tokens": sum(tokens_of(rows[chain[-1]]) for chain in linked),
        "tokens_unmerged": sum(tokens_of(row) for row in rows),
    }


def _by_turn(
    records: Sequence[Mapping[str, Any]], turns: Sequence[ScoredTurn], estimates: Sequence[Estimate]
) -> dict[tuple[str, str], Estimate]:
    by_position = {(turn.session_id, turn.turn_index): found for turn, found in zip(turns, estimates, strict=True)}
    keys = {(record["session_id"], record["turn_id"]): (record["session_id"], record["turn_index"]) for record in records}
    return {key: by_position[position] for key, position in keys.items() if position in by_position}


def _counts(selection: Selection) -> dict[str, int]:
    rejected = {f"rejected.{code}": count for code, count in selection.rejected.items()}
    return {"seen": selection.seen, "rows": len(selection.rows), **rejected}


def _too_few(selection: Selection, config: UpdateConfig) -> str:
    why = ", ".join(f"{code} {count}" for code, count in selection.rejected.items()) or ("" if selection.seen else "the window is empty")
    return (
        f"{len(selection.rows)} of {selection.seen} samples can be trained on, fewer than trainer.min_rows = {config.min_rows}"
        f"{f' ({why})' if why else ''}; no candidate was made and the serving checkpoint stays as it is"
    )


def limits_for(
    parent: Path, manifest: candidates.Manifest, config: UpdateConfig, *, policy_version: int, consumed: Sequence[str]
) -> Limits:
    """Say what this update accepts, from the parent checkpoint and the settings."""
    return Limits(
        tokenizer_sha=manifest.tokenizer_sha, vocabulary=int(json.loads((parent / "config.json").read_bytes())["vocab_size"]),
        policy_version=policy_version, max_stale_versions=config.max_stale_versions, max_stale_hours=config.max_stale_hours,
        max_row_tokens=config.max_row_tokens, max_rows=config.max_rows, origins=frozenset(config.origins), consumed=frozenset(consumed),
    )  # fmt: skip


def rows_digest(rows: Sequence[TrainingRow]) -> str:
    """Return sha256 (hex) over everything in the rows that training depends on."""
    state = hashlib.sha256()
    for row in rows:
        facts = (row.row_id, row.advantage, row.omega, row.packed.temperature, row.same_version, row.packed.group)
        state.update(f"{facts!r}\n".encode())
        for array in (row.packed.prompt_ids, row.packed.response_ids, row.packed.trained):
            state.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        state.update(np.ascontiguousarray(row.mu, dtype="<f4").tobytes())
        if row.hint_ids is not None:
            state.update(b"hint" + np.ascontiguousarray(row.hint_ids, dtype="<i8").tobytes())
    return state.hexdigest()


def open_job(folder: Path, job: Job, rows: Sequence[TrainingRow]) -> None:
    """Write a job's folder where an earlier, perhaps killed, run of the same job left none."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / jobs.ROWS).exists():
        write_rows(folder / jobs.ROWS, rows)
    if not (folder / jobs.JOB).exists():
        write_atomic(folder / jobs.JOB, job.model_dump_json(indent=1).encode())


def finished(folder: Path) -> dict[str, Any] | None:
    """Return an earlier result of the same job when its checkpoint is still in the store."""
    found = jobs.result(folder)
    if found is None:
        return None
    if found["checkpoint"] is not None and not (Path(found["path"]) / candidates.MANIFEST).exists():
        (folder / jobs.RESULT).unlink()
        return None
    return found


def update(
    config: TrainerConfig, home: Home, *, parent: str, policy_version: int, lake_version: int | None, now: datetime
) -> dict[str, Any]:
    """Make one candidate.

    Args:
        config: Settings.
        home: The deployment's folder.
        parent: Checkpoint id (or an unambiguous prefix) of the serving policy.
        policy_version: Its version in the ledger.
        lake_version: Delta version of `samples`; None for the newest.
        now: Aware UTC.

    Returns:
        checkpoint, path, parent, and every count and figure of the manifest; with too few rows checkpoint is None and `reason` says why.

    Raises:
        Busy: Another update runs in this deployment.
        CheckpointInvalid: The parent is not intact, or the export failed its check.
        ContractViolation: Rows that this parent cannot have sampled.
    """
    settings = config.trainer
    with exclusive(home.run / "trainer.lock", what="a training job"):
        identity, folder = candidates.find(home.store, parent)
        manifest = candidates.verify(folder)
        oldest = now - timedelta(hours=2 * settings.max_stale_hours)
        samples: SampleTable = read_samples(home.lake, version=lake_version, since_us=int(oldest.timestamp() * 1e6))
        records = list(samples.records())
        state = read_state(folder)
        limits = limits_for(folder, manifest, settings, policy_version=policy_version, consumed=state["consumed"])
        try:
            prepared = prepare(records, limits, settings, state=state, now=now)
        except NothingToLearn as nothing:
            with tracked(config.mlflow, home, experiment="tidegate-update", name=identity[:12], tags={"parent": identity}) as tracker:
                tracker.step(nothing.counts)
            return {"checkpoint": None, "parent": identity, "reason": str(nothing), **nothing.counts}
        job = Job(
            kind="update",
            parent=identity,
            parent_folder=str(folder),
            store=str(home.store),
            base_model=manifest.base_model,
            settings=settings,
            kl_limited=True,
            created_at=now.isoformat(),
            config_digest=digest(config),
            reward_version=prepared.reward_version,
            lake_version=samples.version,
            frontier=frontier(home, samples.version),
            facts=prepared.facts,
            state=prepared.state,
        )
        return run_job(config, home, job, prepared.rows, label="update")


def run_job(config: TrainerConfig, home: Home, job: Job, rows: Sequence[TrainingRow], *, label: str) -> dict[str, Any]:
    """Run a job's ranks with tracking, or return what the same job made before (`cached` says which)."""
    folder = jobs.folder_for(home.training, job, rows_digest(rows))
    if (found := finished(folder)) is not None:
        jobs.tidy(folder)
        return found | {"cached": True}
    open_job(folder, job, rows)
    tags = {"parent": job.parent, "kind": job.kind, "job": folder.name}
    with tracked(config.mlflow, home, experiment=f"tidegate-{job.kind}", name=folder.name, tags=tags) as tracker:
        result = launch.run(folder, label=label, on_step=tracker.step)
        tracker.step({key: value for key, value in result.items() if isinstance(value, int | float)} | {"step": result["steps"]})
    jobs.tidy(folder)
    return result | {"cached": False}
