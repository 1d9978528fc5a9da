"""Norms in the lake: the ones in force, and freezing new ones.

Takes: the deployment's home. Gives: `Norms`, and rows of the table `norms`. Leaves out: how they are computed and used (`norms.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

import pyarrow.compute as pc

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import lake
from signals.config import RewardsConfig
from signals.norms import NO_NORMS, NORMALISED, NormRow, Norms, freeze, load

_FIGURES: Final = tuple(NormRow.__dataclass_fields__)


def in_force(home: Home, config: RewardsConfig) -> Norms:
    """Return the norms frozen last; `NO_NORMS` before the first."""
    rows = lake.read(home, "norms", columns=["frozen_at", *_FIGURES])
    if not rows.num_rows:
        return NO_NORMS
    newest = rows.filter(pc.equal(rows["frozen_at"], pc.max(rows["frozen_at"])))
    return load([NormRow(**row) for row in newest.select(list(_FIGURES)).to_pylist()], min_turns=config.norm_min_turns)


def finished(home: Home, policy_versions: Sequence[int] = ()) -> tuple[list[dict[str, Any]], str]:
    """Return the lake's turns whose window has closed, with their components, and the reward version most of them have.

    Args:
        home: The deployment.
        policy_versions: Whose turns; empty means all.
    """
    chosen: list[tuple[str, str, Any]] = [("policy_version", "in", list(policy_versions))] if policy_versions else []
    keys = ["session_id", "turn_id"]
    facts = lake.read(
        home, "turns", columns=[*keys, "surface", "language", "sampling_ms", "final"], filters=[*chosen, ("final", "=", True)]
    )
    columns = [*keys, "user_key", "task_bucket", "reward_version", *NORMALISED]
    joined = lake.read(home, "rewards", columns=columns, filters=chosen or None).join(facts, keys, join_type="inner")
    versions = joined["reward_version"].value_counts().to_pylist() if joined.num_rows else []
    version = max(versions, key=lambda item: (item["counts"], item["values"]), default={"values": ""})["values"]
    return joined.to_pylist(), str(version)


def freeze_now(home: Home, config: RewardsConfig, *, now: datetime, policy_versions: Sequence[int] = ()) -> list[NormRow]:
    """Freeze what is usual now and put it in force for turns that are distilled from now on.

    Args:
        home: The deployment.
        config: From how many turns on a stratum has its own norms.
        now: Becomes the version's instant.
        policy_versions: Policies of the accepted cycle; empty means all.

    Raises:
        ConfigError: There is no finished turn to freeze anything from.
    """
    turns, version = finished(home, policy_versions)
    rows = freeze(turns, min_turns=config.norm_min_turns)
    if not rows:
        whose = f" of policies {', '.join(map(str, policy_versions))}" if policy_versions else ""
        raise ConfigError(f"the lake at {home.lake} holds no finished turn{whose} to freeze norms from; run: tidegate signals run --once")
    head = {"frozen_at": now, "reward_version": version, "policy_versions": sorted(policy_versions)}
    lake.create_missing(home)
    lake.append(home, "norms", [head | asdict(row) for row in rows])
    return rows
