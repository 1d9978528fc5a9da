"""Score logged tokens with two checkpoints: the distances that the gate's group B reads. Never trains, never decides.

Takes: a candidate, the checkpoint that serves, a lake version. Gives per row, and in total: how far the serving checkpoint is
from its own logs (self-check), the candidate's KL to it, ratio tails and entropies; and whether every weight is finite.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pipelines.storage import Home
from pipelines.terminal import progress
from trainer import candidates
from trainer.config import TrainerConfig
from trainer.dataset import read_samples
from trainer.model import Policy, load, release, score_batch
from trainer.packing import plan_rows
from trainer.selection import Row, select
from trainer.update import limits_for, packed_row

SCORED_TOKENS: Final = 2048
"""Of one forward pass; between two the progress moves."""


def nonfinite_weights(folder: Path) -> list[str]:
    """Return the names of tensors with a NaN or an infinity, read one at a time."""
    from safetensors import safe_open

    bad: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            bad += [name for name in file.keys() if not torch.isfinite(file.get_tensor(name)).all()]  # noqa: SIM118  not a dict
    return bad


def relative_change(folder: Path, reference: Path) -> float:
    """Return norm(dtheta) / norm(theta) between two checkpoints of the same shape, NaN when tensors differ in name or shape."""
    from safetensors import safe_open

    def open_all(place: Path) -> dict[str, Any]:
        files = [safe_open(path, framework="pt") for path in sorted(place.glob("*.safetensors"))]
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a dict

    ours, theirs = open_all(folder), open_all(reference)
    if set(ours) != set(theirs):
        return float("nan")
    total = moved = 0.0
    for name in ours:
        mine, other = ours[name].get_tensor(name).double(), theirs[name].get_tensor(name).double()
        if mine.shape != other.shape:
            return float("nan")
        moved += float((mine - other).square().sum())
        total += float(other.square().sum())
    return (moved / total) ** 0.5


def score_rows(folder: Path, rows: Sequence[Row], *, dtype: str, label: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return log-probabilities and entropies of each row's response under a checkpoint, nats."""
    policy = Policy(load(folder, dtype=dtype)).eval()
    packed = [packed_row(row) for row in rows]
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    with progress(label, total=len(rows)) as advance:
        for chosen in filter(None, plan_rows(packed, range(len(packed)), max_tokens=SCORED_TOKENS)):
            found |= score_batch(policy, packed, chosen)
            advance(len(chosen))
    del policy
    release()
    return [found[i] for i in range(len(rows))]


def row_figures(row: Row, candidate: tuple[np.ndarray, np.ndarray], reference: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """Compare one row under two checkpoints.

    Returns:
        `self_gap` mean |reference - logged|; `kl` mean r - 1 - ln r with r = candidate / reference (the k3 estimate of
        KL(reference || candidate) on tokens the reference sampled); `p99_abs_log_ratio`, `max_abs_log_ratio`; entropies. NaN
        figures are None.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = np.clip(candidate[0].astype(np.float64) - reference[0], -20, 20)
    figures = {
        "self_gap": float(np.mean(np.abs(reference[0] - row.mu))),
        "kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "p99_abs_log_ratio": float(np.quantile(np.abs(log_ratio), 0.99)),
        "max_abs_log_ratio": float(np.max(np.abs(log_ratio))),
        "log_ratio_sum": float(np.sum(log_ratio)),
        "entropy": float(np.mean(candidate[1])),
        "reference_entropy": float(np.mean(reference[1])),
    }
    return {"completion_id": row.completion_id, "session_id": row.session_id, "user_key": row.user_key, "n_tokens": len(row.mu)} | {
        name: value if np.isfinite(value) else None for name, value in figures.items()
    }


def score_pair(
    config: TrainerConfig, home: Home, *, checkpoint: str, reference: str, policy_version: int | None, lake_version: int | None,
    limit: int, dtype: str, now: datetime,
) -> dict[str, Any]:  # fmt: skip
    """Score the newest rows of the reference's policy with both checkpoints.

    Args:
        config: Settings.
        home: The deployment's folder.
        checkpoint: The candidate's id or prefix.
        reference: The serving checkpoint's id or prefix.
        policy_version: Only rows that this version sampled; None: the newest version among the rows.
        lake_version: Delta version of `samples`; None for the newest.
        limit: Rows at most.
        dtype: Arithmetic of the scoring forward passes.
        now: Aware UTC.

    Raises:
        CheckpointInvalid: One of the folders is not intact.
    """
    identity, folder = candidates.find(home.store, checkpoint)
    other, other_folder = candidates.find(home.store, reference)
    candidates.verify(folder)
    manifest = candidates.verify(other_folder)
    oldest = now - timedelta(hours=2 * config.trainer.max_stale_hours)
    samples = read_samples(home.lake, version=lake_version, since_us=int(oldest.timestamp() * 1e6))
    records = list(samples.records())
    version = (
        policy_version if policy_version is not None else max((r["policy_version"] for r in records if r["policy_version"]), default=0)
    )
    settings = config.trainer.model_copy(update={"max_stale_versions": 0, "max_rows": limit})
    selection = select(records, limits_for(other_folder, manifest, settings, policy_version=version, consumed=()), now=now)
    bad = nonfinite_weights(folder)
    if not selection.rows:  # the gate says INCONCLUSIVE to no data; that is its word, not ours
        return {
            "checkpoint": identity, "reference": other, "policy_version": version, "lake_version": samples.version,
            "all_finite": not bad, "nonfinite_tensors": bad[:10], "rejected": selection.rejected, "rows": [],
        }  # fmt: skip
    ours = score_rows(folder, selection.rows, dtype=dtype, label="score candidate")
    theirs = score_rows(other_folder, selection.rows, dtype=dtype, label="score serving")
    rows = [row_figures(*parts) for parts in zip(selection.rows, ours, theirs, strict=True)]
    return {
        "checkpoint": identity, "reference": other, "policy_version": version, "lake_version": samples.version,
        "all_finite": not bad, "nonfinite_tensors": bad[:10], "relative_change": _finite(relative_change(folder, other_folder)),
        "rejected": selection.rejected, "rows": rows, **totals(rows, ours, theirs),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def totals(
    rows: Sequence[dict[str, Any]], ours: Sequence[tuple[np.ndarray, np.ndarray]], theirs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """Pool rows: token-weighted means, the 99th percentile over all tokens, and the effective sample size share of the rows.

    Returns:
        `kl_mean`, `self_gap_mean`, `p99_abs_log_ratio`, `ess_share` = (sum w)^2 / (n sum w^2) with w = a row's clipped ratio,
        `entropy_ratio`, `tokens`; None where a NaN makes a figure unknown.
    """
    tokens = np.asarray([row["n_tokens"] for row in rows], dtype=np.float64)

    def mean(name: str) -> float | None:
        values = [row[name] for row in rows]
        return None if None in values else float(np.average(np.asarray(values, dtype=np.float64), weights=tokens))

    joined = np.concatenate([mine[0].astype(np.float64) - other[0] for mine, other in zip(ours, theirs, strict=True)])
    sums = [row["log_ratio_sum"] for row in rows]
    weights = None if None in sums else np.exp(np.clip(np.asarray(sums, dtype=np.float64), -20, 20))
    entropy, other_entropy = mean("entropy"), mean("reference_entropy")
    return {
        "tokens": int(tokens.sum()),
        "kl_mean": mean("kl"),
        "self_gap_mean": mean("self_gap"),
        "p99_abs_log_ratio": _finite(float(np.quantile(np.abs(joined), 0.99))),
        "ess_share": None if weights is None else float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
        "entropy_ratio": None if entropy is None or not other_entropy else entropy / other_entropy,
    }
