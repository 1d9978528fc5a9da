"""Optimizer steps over packed rows with DeepSpeed: one process of N, on CPU ranks (gloo) or GPUs (nccl).

Takes: a policy, rows with advantages, a plan of steps. Gives: an updated policy and figures of each step. Leaves out: where
rows come from, when to stop for other reasons than numbers (`rank.py`), export (`publish.py`).

The loss is a sum over the whole optimizer batch divided by a Z fixed before the first forward, so a step does not depend on how
its rows are chained, cut into micro-batches or dealt to ranks. Figures travel as sums too.
"""

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pipelines.errors import MissingDependency
from trainer import deepspeed_config
from trainer.dataset import TrainingRow
from trainer.losses import LossBatch, LossSettings, named
from trainer.model import score_batch, tensors, trim
from trainer.packing import MicroBatch, PackedRow, pack, plan_rows

SUMS: Final = (
    "policy", "kl", "kept_tokens", "clipped_tokens", "masked_sequence_rows", "masked_veto_rows", "masked_negative_tokens",
    "loss", "tokens", "entropy", "log_ratio", "logprob",
)  # fmt: skip
"""Figures summed over micro-batches and ranks, in the order they travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What one optimizer step did, over all ranks."""

    sums: dict[str, float]
    nonfinite_rows: tuple[str, ...]
    """Rows with a NaN or an infinity in a log-probability, advantage or weight."""
    grad_norm: float
    applied: bool
    """False: the step was skipped (non-finite, or over the KL budget)."""
    over_budget: bool

    @property
    def kl(self) -> float:
        """Mean k3 to the approved checkpoint over kept tokens, nats a token."""
        return self.sums["kl"] / max(self.sums["kept_tokens"], 1.0)


def connect(*, timeout_s: float) -> tuple[int, int]:
    """Join the process group that torchrun set up and return (rank, world size).

    Raises:
        MissingDependency: A DeepSpeed version with wrong gradients is installed.
    """
    with _hidden("mlflow"):
        import deepspeed

    if fault := deepspeed_config.version_fault(deepspeed.__version__):
        raise MissingDependency(fault)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    accelerator: Any = deepspeed.get_accelerator()
    backend = "nccl" if accelerator.device_name() == "cuda" else "gloo"
    if backend == "gloo":
        # Else DeepSpeed compiles a shared-memory op on first use, for inference only: half a minute, and g++ and ninja must be there.
        deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)
    return dist.get_rank(), dist.get_world_size()


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Let imports in the block believe that a package is not installed.

    DeepSpeed's autotuner, unused here, imports MLflow where it can, and that imports Spark, pandas and a web framework: seconds and
    a tenth of a gigabyte on every rank, and a second engine in the trainer's process.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]  the import system's own mark of a module that cannot be found
    try:
        yield
    finally:
        del sys.modules[name]


class Trainer:
    """A policy with its optimizer, spread over the ranks of the process group."""

    def __init__(self, policy: nn.Module, *, loss: str, settings: LossSettings, deepspeed: Mapping[str, Any], max_tokens: int) -> None:
        """Partition the optimizer.

        Args:
            policy: A `Policy`; parameters with `requires_grad` are trained.
            loss: Key of `LOSSES`.
            settings: Constants of the loss.
            deepspeed: As from `deepspeed_config.build`.
            max_tokens: Tokens of one packed micro-batch.
        """
        import deepspeed as untyped

        library: Any = untyped  # its annotations name fewer types than it takes
        self.loss = named(loss)
        self.settings = settings
        self.max_tokens = max_tokens
        policy.register_state_dict_post_hook(_without_frozen)
        gc.freeze()  # DeepSpeed collects garbage several times while it starts; a second each over the imported libraries' objects
        trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.engine: Any = library.initialize(model=policy, model_parameters=trainable, config=dict(deepspeed))[0]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        trim()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def bins(self, rows: Sequence[TrainingRow], chosen: Sequence[int]) -> list[list[int]]:
        """Plan the micro-batches of a step; rank r takes bins r, r + world, ... so that all ranks have equally many."""
        return plan_rows([row.packed for row in rows], chosen, max_tokens=self.max_tokens, bins_multiple_of=self.world)

    def step(
        self,
        rows: Sequence[TrainingRow],
        chosen: Sequence[int],
        *,
        ref: Sequence[np.ndarray],
        prox: Sequence[np.ndarray] | None,
        kl_budget: float | None,
        hindsight: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> StepFigures:
        """Take one optimizer step.

        Args:
            rows: All rows of the job.
            chosen: The rows of this optimizer batch, the same on every rank.
            ref: Log-probabilities of each row's trained tokens under the approved checkpoint.
            prox: The same under the proximal policy; None: the policy as it is now, taken from this very forward pass.
            kl_budget: Above this mean KL to the approved checkpoint the step is not applied; None for no budget.
            hindsight: By row, what is added to the advantage of each of its trained tokens (`hindsight.py`).
        """
        normaliser = float(sum(rows[i].omega * len(rows[i].packed.trained) for i in chosen))
        mine = self.bins(rows, chosen)[self.rank :: self.world]
        totals = torch.zeros(len(SUMS), dtype=torch.float64)
        bad: list[str] = []
        trim()
        self.engine.train()
        for position, chosen_here in enumerate(mine):
            self.engine.set_gradient_accumulation_boundary(position == len(mine) - 1)
            batch = pack([row.packed for row in rows], chosen_here or [chosen[0]])
            weight = 1.0 if chosen_here else 0.0  # a rank without rows still takes part in every collective
            theta, entropy = self.engine(**tensors(batch, self.engine.device))
            inputs = self._loss_batch(batch, rows, theta, ref, prox, weight=weight, hindsight=hindsight)
            value = self.loss(inputs, normaliser, self.settings)
            self.engine.backward(value.loss * self.world)  # DeepSpeed averages over ranks; this is a sum
            if chosen_here:
                found = {name: float(total) for name, total in value.sums.items()} | _token_sums(inputs, entropy, value.loss)
                totals += torch.tensor([found.get(name, 0.0) for name in SUMS], dtype=torch.float64)
                bad += [rows[batch.rows[k]].row_id for k in _nonfinite(inputs)]
        return self._apply(totals, bad, kl_budget=kl_budget)

    def _apply(self, totals: torch.Tensor, bad: list[str], *, kl_budget: float | None) -> StepFigures:
        dist.all_reduce(totals)
        everywhere: list[list[str]] = [[] for _ in range(self.world)]
        dist.all_gather_object(everywhere, bad)
        sums: dict[str, float] = dict(zip(SUMS, totals.tolist(), strict=True))
        over = kl_budget is not None and sums["kl"] / max(sums["kept_tokens"], 1.0) > kl_budget
        norm, finite = self._step(apply=not over)
        applied = not over and finite
        rows = tuple(sorted({row for part in everywhere for row in part}))
        return StepFigures(sums=sums, nonfinite_rows=rows, grad_norm=norm, applied=applied, over_budget=over)

    def _step(self, *, apply: bool) -> tuple[float, bool]:
        """Apply the accumulated gradient unless it is not finite; returns its norm and whether it was finite.

        DeepSpeed's own optimizers skip such a step and say so; the plain one of ZeRO 0 in fp32 would write the NaN into every weight.
        """
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "overflow"):
            if apply:
                self.engine.step()
            return float(self.engine.get_global_grad_norm() or 0.0), not optimizer.overflow
        gradients = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if apply and np.isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm, bool(np.isfinite(norm))

    def _loss_batch(
        self, batch: MicroBatch, rows: Sequence[TrainingRow], theta: torch.Tensor, ref: Sequence[np.ndarray],
        prox: Sequence[np.ndarray] | None, *, weight: float, hindsight: Mapping[int, np.ndarray],
    ) -> LossBatch:  # fmt: skip
        device = theta.device

        def joined(parts: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)

        counts = [len(rows[i].packed.trained) for i in batch.rows]
        return LossBatch(
            theta=theta,
            prox=theta.detach() if prox is None else joined([prox[i] for i in batch.rows]),
            mu=joined([rows[i].mu for i in batch.rows]),
            ref=joined([ref[i] for i in batch.rows]),
            advantage=joined([np.full(n, rows[i].advantage) + hindsight.get(i, 0.0) for i, n in zip(batch.rows, counts, strict=True)]),
            omega=joined([np.full(n, rows[i].omega * weight) for i, n in zip(batch.rows, counts, strict=True)]),
            segment=torch.from_numpy(batch.segment).to(device),
            rows=len(batch.rows),
        )

    def score_all(self, rows: Sequence[TrainingRow], chosen: Sequence[int]) -> dict[int, np.ndarray]:
        """Score rows without gradient, each rank its share; every rank gets all log-probabilities by row index."""
        return self.score_packed({i: rows[i].packed for i in chosen})

    def score_packed(self, rows: Mapping[int, PackedRow]) -> dict[int, np.ndarray]:
        """Score packed rows as `score_all` does, by key."""
        names, packed = list(rows), list(rows.values())
        bins = plan_rows(packed, range(len(packed)), max_tokens=self.max_tokens, bins_multiple_of=self.world)
        self.engine.eval()
        mine: dict[Any, np.ndarray] = {}
        for chosen in bins[self.rank :: self.world]:  # equally many on every rank: partitioned weights are gathered together
            found = score_batch(self.engine, packed, chosen or [0])
            mine |= {names[i]: found[i][0] for i in chosen}
        parts: list[dict[Any, np.ndarray]] = [{} for _ in range(self.world)]
        dist.all_gather_object(parts, mine)
        return {row: logprobs for part in parts for row, logprobs in part.items()}

    def master_weights(self) -> dict[str, torch.Tensor]:
        """Collect the fp32 masters of all trained parameters, by their name inside the language model; called on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param

        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.engine.module.language_model.named_parameters():
            if parameter.requires_grad:
                full = safe_get_full_fp32_param(parameter)
                found[name] = (parameter.detach() if full is None else full).float().cpu().clone()
        return found

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and RNG of all ranks into a folder; called on every rank."""
        self.engine.save_checkpoint(
            str(folder), tag="engine", client_state={"rng": torch.get_rng_state()}, save_latest=False, exclude_frozen_parameters=True
        )

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote with the same number of ranks."""
        _, client = self.engine.load_checkpoint(str(folder), tag="engine", load_module_strict=False)
        torch.set_rng_state(client["rng"])


def _without_frozen(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Keep frozen weights out of checkpoints under every name: DeepSpeed leaves out one, and a tied output layer has two."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


def _token_sums(inputs: LossBatch, entropy: torch.Tensor, loss: torch.Tensor) -> dict[str, float]:
    theta = inputs.theta.detach()
    return {
        "loss": float(loss.detach()),
        "tokens": float(theta.numel()),
        "entropy": float(entropy.sum()),
        "log_ratio": float((theta - inputs.mu).sum()),
        "logprob": float(theta.sum()),
    }


def _nonfinite(inputs: LossBatch) -> list[int]:
    """Return the rows of a micro-batch in which anything that enters the loss is NaN or infinite."""
    whole = inputs.theta.detach() + inputs.mu + inputs.ref + inputs.advantage + inputs.omega
    return torch.unique(inputs.segment[~whole.isfinite()]).tolist()


@contextmanager
def disconnected_at_exit() -> Iterator[None]:
    """Leave the process group when the block ends well; after an error the peers find out by themselves."""
    yield
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
