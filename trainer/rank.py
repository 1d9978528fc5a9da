"""One rank of a training job: `python -m trainer.rank FOLDER`, started by torchrun.

Order: compare a step of this very engine with plain torch (`parity.py`), load the parent, score rows with it (reference and parity
gate), restore the newest checkpoint, take the remaining steps, export and verify the candidate, write the result. Rows that the parent
itself sampled were logged with its log-probabilities, which are their reference; a part of them is scored again to see that this is
so. Rows of older policies are scored, in a pass without gradient. The proximal policy is the policy at the start of a step; with
`steps_per_prox` = 1 it is the very forward pass that is trained on.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from pipelines.errors import CheckpointInvalid, ContractViolation, StageError, StorageFull
from pipelines.storage import write_atomic
from trainer import candidates, checkpoint, deepspeed_config, guards, hindsight, mismatch, parity, publish
from trainer import job as jobs
from trainer.dataset import read_rows
from trainer.engine import StepFigures, Trainer, connect, disconnected_at_exit
from trainer.launch import die_with_parent, orphaned
from trainer.losses import LossSettings, adapted_beta
from trainer.model import Policy, add_lora, load, release, score
from trainer.packing import chains, order


@dataclass(slots=True)
class Run:
    """What changes while a job runs; saved with every checkpoint."""

    step: int = 0
    nonfinite_steps: int = 0
    nonfinite_in_a_row: int = 0
    quarantined: list[str] = field(default_factory=list)
    """Rows with non-finite log-probabilities: left out of all later steps."""
    stop_reason: str = "done"
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    kl_spent: float = 0.0
    beta: float = 0.0
    """Weight of the KL term now; it rises above the configured one where the KL runs ahead of its target."""

    def state(self) -> dict[str, Any]:
        """Return a JSON-able copy."""
        return {name: getattr(self, name) for name in self.__slots__}


class RankJob:
    """A job in one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.job = jobs.read(folder)
        self.rows = read_rows(folder / jobs.ROWS)
        settings = self.job.settings
        language_model = load(Path(self.job.parent_folder), dtype=settings.dtype)
        if settings.adapter == "lora":
            language_model = add_lora(language_model, settings)
        if settings.activation_checkpointing:
            language_model.activation_checkpointing_enable({"use_reentrant": False})
        names = LossSettings.__dataclass_fields__
        self.trainer = Trainer(
            Policy(language_model),
            loss=settings.loss,
            settings=LossSettings(**{name: getattr(settings, name) for name in names}),
            deepspeed=deepspeed_config.build(
                zero_stage=settings.zero_stage,
                dtype=settings.dtype,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                grad_clip=settings.grad_clip,
                offload=settings.offload,
            ),
            max_tokens=settings.max_tokens_per_micro_batch,
        )
        self.run = Run(beta=settings.beta)
        self.linked = chains([row.packed for row in self.rows], range(len(self.rows)))
        self.batches = order(self.linked, per_step=settings.rows_per_step, passes=settings.passes, seed=settings.seed)

    def tell(self, entry: dict[str, Any]) -> None:
        """Append a line to the progress file (rank 0)."""
        if self.rank == 0:
            with (self.folder / jobs.PROGRESS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": len(self.batches), **entry}) + "\n")

    def reference(self) -> tuple[list[np.ndarray], dict[str, float]]:
        """Return each row's log-probabilities under the parent, and how far logged and recomputed ones lie apart.

        Raises:
            ContractViolation: Too far: the parent did not sample these rows.
        """
        if not self.job.kl_limited:
            return [np.zeros(len(row.packed.trained), np.float32) for row in self.rows], {}
        settings = self.job.settings
        probed = mismatch.probe_rows(self.rows, self.linked, number=settings.parity_rows, seed=settings.seed)
        older = [i for i, row in enumerate(self.rows) if not row.same_version]
        found = self.trainer.score_all(self.rows, sorted({*probed, *older}))
        figures = mismatch.figures([(self.rows[i].mu, found[i]) for i in probed])
        mismatch.check(figures, settings)
        return [row.mu if row.same_version else found[i] for i, row in enumerate(self.rows)], figures

    def hindsight(self, ref: list[np.ndarray]) -> dict[int, np.ndarray]:
        """Score the hinted rows and return what each token's advantage gains; empty where hindsight is off."""
        settings = self.job.settings
        asked = {i: hindsight.hinted(row.packed, row.hint_ids) for i, row in enumerate(self.rows) if row.hint_ids is not None}
        found = self.trainer.score_packed(asked) if asked else {}
        return {i: hindsight.terms(ref[i], found[i], weight=settings.hindsight, clip=settings.hindsight_clip) for i in found}

    def train(self, ref: list[np.ndarray], added: dict[int, np.ndarray]) -> None:
        """Take the remaining steps, saving as it goes."""
        settings, run = self.job.settings, self.run
        prox: list[np.ndarray] | None = None
        while run.step < len(self.batches) and run.stop_reason == "done":
            quarantined = set(run.quarantined)
            chosen = [i for i in self.batches[run.step] if self.rows[i].row_id not in quarantined]
            if settings.steps_per_prox > 1 and run.step % settings.steps_per_prox == 0:
                prox = self._proximal(run.step)
            self.trainer.set_lr(settings.lr * min(1.0, (run.step + 1) / (self.job.warmup_steps + 1)))
            self.trainer.settings = replace(self.trainer.settings, beta=run.beta)
            if chosen:
                started = time.monotonic()
                budget = settings.kl_budget if self.job.kl_limited else None
                figures = self.trainer.step(self.rows, chosen, ref=ref, prox=prox, kl_budget=budget, hindsight=added)
                self._account(figures, seconds=time.monotonic() - started)
            run.step += 1
            whole = run.step % settings.steps_per_prox == 0
            if (run.step % settings.save_every_steps == 0 and whole) or run.step == len(self.batches) or run.stop_reason != "done":
                self.save()

    def _proximal(self, step: int) -> list[np.ndarray]:
        window = sorted({i for batch in self.batches[step : step + self.job.settings.steps_per_prox] for i in batch})
        found = self.trainer.score_all(self.rows, window)
        return [found.get(i, np.zeros(len(row.packed.trained), np.float32)) for i, row in enumerate(self.rows)]

    def _account(self, figures: StepFigures, *, seconds: float) -> None:
        run = self.run
        tokens = max(figures.sums["tokens"], 1.0)
        entry = {
            "step": float(run.step), "loss": figures.sums["loss"], "kl_nats_per_token": figures.kl, "grad_norm": figures.grad_norm,
            "entropy": figures.sums["entropy"] / tokens, "logprob": figures.sums["logprob"] / tokens,
            "kept_share": figures.sums["kept_tokens"] / tokens, "clipped_share": figures.sums["clipped_tokens"] / tokens,
            "beta": run.beta, "seconds": seconds, "tokens_per_s": tokens / seconds,
        }  # fmt: skip
        if figures.over_budget:
            run.stop_reason = "kl_budget"
        elif not figures.applied or figures.nonfinite_rows:
            run.nonfinite_steps += 1
            run.nonfinite_in_a_row += 1
            run.quarantined = sorted({*run.quarantined, *figures.nonfinite_rows})
            if run.nonfinite_in_a_row >= self.job.settings.max_nonfinite_steps:
                raise ContractViolation(
                    f"{run.nonfinite_in_a_row} steps in a row had a non-finite loss or gradient (rows {run.quarantined[:5]}); the "
                    "update was aborted, nothing was exported. Look at these rows, or lower trainer.lr"
                )
        else:
            run.nonfinite_in_a_row = 0
        if np.isfinite(entry["loss"]):
            run.first = run.first or entry
            run.last = entry
        if np.isfinite(figures.kl):
            run.kl_spent = max(run.kl_spent, figures.kl)
            if self.job.kl_limited:
                run.beta = adapted_beta(run.beta, figures.kl, base=self.job.settings.beta, target=self.job.settings.kl_target)
        self.tell({key: value for key, value in entry.items() if np.isfinite(value)} | {"loss": entry["loss"]})

    def save(self) -> None:
        """Take a transaction checkpoint."""
        root = self.folder / jobs.CHECKPOINTS
        if self.rank == 0:
            checkpoint.begin(root, self.run.step)
        dist.barrier()
        temporary = root / f".{checkpoint.name(self.run.step)}.tmp"
        self.trainer.save(temporary)
        dist.barrier()
        if self.rank == 0:
            state = self.run.state() | {
                "lake_version": self.job.lake_version, "reward_version": self.job.reward_version, "config_digest": self.job.config_digest,
                "frontier": self.job.frontier, "trainer_state": self.job.state,
            }  # fmt: skip
            checkpoint.commit(temporary, root, self.run.step, state, keep=self.job.settings.keep_checkpoints)
        dist.barrier()

    def restore(self) -> None:
        """Go on from the newest intact checkpoint, if there is one."""
        found: list[Any] = [checkpoint.latest(self.folder / jobs.CHECKPOINTS) if self.rank == 0 else None]
        dist.broadcast_object_list(found)
        if found[0] is None:
            return
        folder, state = found[0]
        self.trainer.restore(folder)
        for name in Run.__slots__:
            setattr(self.run, name, state[name])
        self.tell({"done": self.run.step})

    def probe(self) -> list[np.ndarray]:
        """Score the parent's probe with the policy as it is now; every rank takes part."""
        rows, _ = publish.read_probe(Path(self.job.parent_folder))
        self.trainer.engine.eval()
        return [logprobs for logprobs, _ in score(self.trainer.engine, rows)]

    def export(self, mismatches: dict[str, float], *, rounding: float) -> dict[str, Any] | None:
        """Merge, write, read back and seal the candidate (rank 0); every rank takes part in collecting weights.

        The weights are read back in fp32 and compared with the trainer on the probe. They may differ by the tolerance plus the
        rounding of the trainer's arithmetic: what it is on the parent or, since a surer policy rounds by more, on the exported
        weights themselves, whichever is larger (next to 0 for fp32).
        """
        job, run, settings = self.job, self.run, self.job.settings
        parent = Path(job.parent_folder)
        _, parent_fp32 = publish.read_probe(parent)
        seen = self.probe()
        masters = self.trainer.master_weights()
        if self.rank != 0:
            return None
        pristine = load(parent)
        if settings.adapter == "lora":
            change = publish.merged_lora(pristine, masters, scaling=settings.lora_alpha / settings.lora_rank)
        else:
            change = publish.replaced_weights(pristine, masters)
        publish.discard_staged(Path(job.store), label=self.folder.name)
        staged = publish.stage_child(pristine, parent, Path(job.store), label=self.folder.name)
        del pristine
        release()
        exported = publish.write_probe(staged)
        gap = publish.mean_gap(exported, seen)
        if gap > settings.probe_tolerance + rounding and settings.dtype != "fp32":
            rows, _ = publish.read_probe(staged)
            own = score(Policy(load(staged, dtype=settings.dtype)).eval(), rows)
            rounding = max(rounding, publish.mean_gap([logprobs for logprobs, _ in own], exported))
        publish.check_export(staged, gap=gap, change=change, tolerance=settings.probe_tolerance + rounding)
        if job.state:
            (staged / jobs.TRAINER_STATE).write_text(json.dumps(job.state, sort_keys=True), encoding="utf-8")
        figures: dict[str, float | int | str | None] = {
            "steps": run.step,
            "stop_reason": run.stop_reason,
            "nonfinite_steps": run.nonfinite_steps,
            "quarantined_rows": len(run.quarantined),
            "kl_nats_per_token": run.kl_spent if job.kl_limited else None,
            "loss_first": run.first.get("loss"),
            "loss_last": run.last.get("loss"),
            "entropy_last": run.last.get("entropy"),
            "relative_change": change,
            "probe_gap_nats": gap,
            "probe_rounding_nats": rounding,
            "probe_moved_nats": publish.mean_gap(exported, parent_fp32),
            **mismatches,
        }
        identity, path = publish.seal(
            staged,
            Path(job.store),
            kind=job.kind,
            base_model=job.base_model,
            parent=job.parent,
            created_at=publish.parse_instant(job.created_at),
            config_digest=job.config_digest,
            reward_version=job.reward_version,
            lake_version=job.lake_version,
            training=job.facts | figures,
        )
        return {"checkpoint": identity, "path": str(path), "parent": job.parent, **job.facts, **figures, "quarantined": run.quarantined}


class Clock:
    """Seconds of each part of a job, from the start of the process: imports take a good part of a small job."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = {"start": time.time() - psutil.Process().create_time()}

    def lap(self, part: str) -> None:
        """Close a part."""
        now = time.monotonic()
        self.seconds[part] = now - self._last
        self._last = now


def work(folder: Path, rank: int) -> None:
    """Run the whole job in one rank."""
    clock = Clock()
    job = jobs.read(folder)
    parity.check(job.settings)
    clock.lap("self-test")
    current = RankJob(folder, rank)
    clock.lap("load")
    candidates.read_manifest(Path(job.parent_folder))
    rounding = publish.mean_gap(current.probe(), publish.read_probe(Path(job.parent_folder))[1])
    ref, mismatches = current.reference()
    added = current.hindsight(ref)
    before = current.trainer.score_all(current.rows, range(len(current.rows))) if job.settings.lr == 0 else {}
    clock.lap("reference")
    current.restore()
    current.tell({})
    current.train(ref, added)
    clock.lap("train")
    if job.settings.lr == 0:
        result: dict[str, Any] | None = _self_test(current, before, mismatches)
    else:
        result = current.export(mismatches, rounding=rounding)
    clock.lap("export")
    if rank == 0 and result is not None:
        write_atomic(folder / jobs.RESULT, json.dumps(result | {"seconds": clock.seconds}).encode())


def _self_test(current: RankJob, before: dict[int, np.ndarray], mismatches: dict[str, float]) -> dict[str, Any]:
    """With lr = 0 nothing may move: compare the policy after all steps with itself before; exports nothing."""
    after = current.trainer.score_all(current.rows, range(len(current.rows)))
    moved = max(float(np.abs(after[i] - logprobs).max()) for i, logprobs in before.items())
    if moved > 0:
        raise CheckpointInvalid(f"with lr = 0 log-probabilities moved by {moved:.2e} nats; the training engine is at fault")
    return {"checkpoint": None, "self_test": "flat", "steps": current.run.step, **mismatches, **current.job.facts}


def main() -> int:
    """Run the job named on the command line; a foreseen failure is left in `failure.json`."""
    die_with_parent()
    if orphaned():
        return 1
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        job = jobs.read(folder)
        with guards.alone(folder, rank), guards.room(folder, Path(job.store)):
            connect(timeout_s=job.settings.collective_timeout_s)
            with disconnected_at_exit():
                work(folder, rank)
    except StageError as error:
        if rank == 0 or isinstance(error, StorageFull):  # every rank writes its own part of a checkpoint
            jobs.write_failure(folder, error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
