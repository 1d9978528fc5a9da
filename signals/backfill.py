"""`signals backfill`: rewards of past turns under other settings, beside the ones that were trained on, and what that would have meant.

The result goes to the table `rewards_backfill` under a name; the tables that training reads are not touched. Then past policies are ranked
by both rewards on the same turns: weights that turn the ranking round are to be understood before anything is trained with them.

Takes: Spark, the lake, settings with the new weights, a range of days. Gives: rows in `rewards_backfill` and a comparison.
Leaves out: choosing weights, and making them the trained ones (set them in the configuration and run with --everything).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import chunks, distil, distil_task, lake, parts, verdict_store
from signals.config import SignalsConfig
from signals.norm_table import in_force
from signals.rewards import reward_version
from signals.tables import DAY, INSTANT

TABLE: Final = "rewards_backfill"
MIN_TURNS: Final = 2
"""A policy with fewer scored turns is listed, not ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRank:
    """One policy under both rewards, on turns that both score."""

    policy_version: int | None
    turns: int
    trained: float
    """Mean of the stored reward."""
    backfilled: float
    """Mean of the backfilled reward."""
    trained_rank: int | None
    """1 is best; None with too few turns."""
    backfilled_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the other settings do to the past."""

    turns: int
    """Turns that both rewards score."""
    only_trained: int
    """Turns that lose their reward."""
    only_backfilled: int
    """Turns that gain one."""
    correlation: float | None
    """Pearson, over turns; None when one of them does not vary."""
    sign_changes: float
    """Share of turns whose reward changes sign."""
    kendall_tau: float | None
    """Agreement of the two rankings of policies, 1 the same to -1 reversed; None with fewer than two ranked."""
    swapped: tuple[tuple[int | None, int | None], ...]
    """Pairs of policies whose order is turned round: (better before, better now)."""
    policies: tuple[PolicyRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfilled:
    """What one backfill did."""

    name: str
    reward_version: str
    """Digest of the settings it was computed with."""
    trained_versions: tuple[str, ...]
    """Digests that the stored rewards of those days carry."""
    rows: int
    """Turns computed."""
    compared: Comparison


def check_range(start: date, end: date) -> None:
    """Refuse a range of days that holds none.

    Raises:
        ConfigError: The range is empty.
    """
    if end <= start:
        raise ConfigError(f"--from {start} --to {end}: the range is empty; --to is the day after the last")


def backfill(
    spark: SparkSession,
    home: Home,
    config: SignalsConfig,
    name: str,
    *,
    start: date,
    end: date,
    now: datetime,
    sessions_a_task: int | None = None,
) -> "Backfilled":
    """Compute the rewards of a range of days under `config.rewards` into `rewards_backfill`; the same name again replaces that range.

    Args:
        spark: The session.
        home: The deployment.
        config: Settings; `rewards` holds the weights and windows to try.
        name: Names the side version.
        start: First UTC day (of the turns' start).
        end: The day after the last.
        now: The instant that windows are closed against.
        sessions_a_task: Most sessions that are computed at once; None leaves that to their events.

    Raises:
        ConfigError: The range is empty, or holds no turns.
    """
    check_range(start, end)
    sessions = sorted(lake.turns(home, start, end, columns=["session_id"])["session_id"].unique().to_pylist())
    if not sessions:
        held = lake.turns(home, columns=[DAY])[DAY]
        span = f"the lake holds turns from {pc.min(held)} to {pc.max(held)}" if len(held) else "the lake holds no turns"
        raise ConfigError(f"no turn started from {start} up to {end}; {span}")
    before = lake.last_distil(home)
    norms, judged = in_force(home, config.rewards), verdict_store.in_force(home)
    since = start - timedelta(days=config.signals.lookback_days)
    work = distil_task.Work(
        lake=home.lake.absolute(), tables=("rewards",), rewards=config.rewards, now_ms=int(now.timestamp() * 1000),
        tombstoned=frozenset(before["tombstoned"]) if before else frozenset(), norms=norms, judged=judged, since=since, span=(start, end),
        into={"rewards": TABLE}, more={"computed_at": pa.scalar(now, INSTANT)}, values={"backfill": name},
    )  # fmt: skip
    slots = spark.sparkContext.defaultParallelism
    done = distil.compute(spark, work, chunks.cut(home, sessions, since=since, slots=slots, most=sessions_a_task))
    fresh = [part for found in done for part in found.parts["rewards"]]
    parts.overwrite(home, TABLE, fresh, [("backfill", "=", name), (DAY, ">=", str(start)), (DAY, "<", str(end))])
    own = lake.scan(home, TABLE, None, (ds.field("backfill") == name) & (ds.field(DAY) >= start) & (ds.field(DAY) < end))
    trained = lake.rewards(home, start, end)
    versions = tuple(sorted(set(trained["reward_version"].to_pylist()) - {None}))
    return Backfilled(
        name=name, reward_version=reward_version(config.rewards, norms, judged=judged.version), trained_versions=versions,
        rows=own.num_rows, compared=compare(trained, own),
    )  # fmt: skip


def compare(trained: pa.Table, backfilled: pa.Table) -> Comparison:
    """Compare two rewards of the same turns.

    Args:
        trained: Rows of `rewards`.
        backfilled: Rows of `rewards_backfill`, one a turn.
    """
    keys = ["session_id", "turn_id"]
    left = trained.select([*keys, "policy_version", "reward"])
    joined = left.join(backfilled.select([*keys, "reward"]).rename_columns([*keys, "other"]), keys, join_type="full outer")
    has, gains = joined["reward"].is_valid(), joined["other"].is_valid()
    both = joined.filter(pc.and_(has, gains))
    one, two = both["reward"].to_numpy(), both["other"].to_numpy()
    varies = len(one) > 1 and float(np.std(one)) > 0 and float(np.std(two)) > 0
    policies = ranked(both)
    tau, swapped = agreement(policies)
    return Comparison(
        turns=len(one), only_trained=pc.sum(pc.and_(has, pc.invert(gains))).as_py() or 0,
        only_backfilled=pc.sum(pc.and_(gains, pc.invert(has))).as_py() or 0,
        correlation=float(np.corrcoef(one, two)[0, 1]) if varies else None,
        sign_changes=float(np.mean(np.sign(one) != np.sign(two))) if len(one) else 0.0, kendall_tau=tau, swapped=swapped, policies=policies,
    )  # fmt: skip


def ranked(both: pa.Table) -> tuple[PolicyRank, ...]:
    """Rank policies by the mean of each reward.

    Args:
        both: `policy_version`, `reward`, `other`; no nulls in the rewards.
    """
    grouped = both.group_by("policy_version").aggregate([("reward", "mean"), ("other", "mean"), ("reward", "count")]).to_pylist()
    enough = [row for row in grouped if row["reward_count"] >= MIN_TURNS and row["policy_version"] is not None]
    first = {row["policy_version"]: rank for rank, row in enumerate(sorted(enough, key=lambda row: -row["reward_mean"]), start=1)}
    second = {row["policy_version"]: rank for rank, row in enumerate(sorted(enough, key=lambda row: -row["other_mean"]), start=1)}
    found = [
        PolicyRank(
            policy_version=row["policy_version"], turns=row["reward_count"], trained=row["reward_mean"], backfilled=row["other_mean"],
            trained_rank=first.get(row["policy_version"]), backfilled_rank=second.get(row["policy_version"]),
        )
        for row in grouped
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda policy: (policy.policy_version is None, policy.policy_version or 0)))


def agreement(policies: Sequence[PolicyRank]) -> tuple[float | None, tuple[tuple[int | None, int | None], ...]]:
    """Return Kendall's tau of the two rankings and the pairs that are turned round.

    tau = (concordant - discordant) / pairs. Source: Kendall, A New Measure of Rank Correlation, Biometrika 30 (1938).
    """
    listed = [(p.trained_rank, p.backfilled_rank, p.policy_version) for p in policies if p.trained_rank and p.backfilled_rank]
    listed.sort()
    pairs = [(a, b) for index, a in enumerate(listed) for b in listed[index + 1 :]]
    if not pairs:
        return None, ()
    turned = tuple((a[2], b[2]) for a, b in pairs if a[1] > b[1])
    return 1.0 - 2.0 * len(turned) / len(pairs), turned
