"""How far logged log-probabilities lie from what the trainer recomputes: the gate that stops training on another policy's rows.

Rows of the very checkpoint that an update starts from carry its log-probabilities as the serving engine saw them. Where trainer and
engine agree on a part of these rows, the others need no second forward pass: the logged numbers are the reference. Pure.

Takes arrays. Gives figures, or a refusal. Leaves out: forward passes (`engine.py`).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pipelines.errors import ContractViolation
from trainer.config import UpdateConfig
from trainer.dataset import TrainingRow

OUTSIDE_BAND: Final = float(np.log(1.1))
"""A token outside +-10 % of its logged probability."""


def probe_rows(rows: Sequence[TrainingRow], chains: Sequence[Sequence[int]], *, number: int, seed: int) -> list[int]:
    """Choose rows of the parent's own to score again: whole chains, because a chain costs what its last row costs.

    Args:
        rows: All rows.
        chains: Their indices by chain, each in one.
        number: Rows wanted; the last chain taken may exceed it.
        seed: The same seed chooses the same rows on every rank.

    Returns:
        Ascending indices of rows with `same_version`; all of them where there are no more than `number`.
    """
    chosen: list[int] = []
    for at in np.random.default_rng([seed, len(rows)]).permutation(len(chains)).tolist():
        if len(chosen) >= number:
            break
        chosen += [i for i in chains[at] if rows[i].same_version]
    return sorted(chosen)


def figures(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Compare (logged, recomputed) log-probabilities, nats.

    Returns:
        `parity_rows`, and when there are any: `parity_median`, `parity_p99` of |d| in nats, `parity_outside_share`.
    """
    found: dict[str, float] = {"parity_rows": float(len(pairs))}
    if pairs:
        joined = np.concatenate([np.abs(recomputed - logged) for logged, recomputed in pairs])
        found |= {
            "parity_median": float(np.median(joined)),
            "parity_p99": float(np.quantile(joined, 0.99)),
            "parity_outside_share": float(np.mean(~(joined <= OUTSIDE_BAND))),
        }
    return found


def check(found: dict[str, float], settings: UpdateConfig) -> None:
    """Refuse to train when the trainer does not see the policy that served (fails closed, NaN included).

    Raises:
        ContractViolation: A figure is over its limit.
    """
    for name in ("parity_median", "parity_p99", "parity_outside_share"):
        limit = getattr(settings, name)
        if name in found and not found[name] <= limit:
            raise ContractViolation(
                f"the trainer's log-probabilities differ from the logged ones: {name} {found[name]:.4f} > trainer.{name} {limit}. "
                "The rows were not sampled by this checkpoint, at another temperature, or the engines disagree; nothing was trained"
            )
