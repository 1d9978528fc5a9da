"""Commands about what is usual and what policies earn: `signals baselines` and `signals rates`."""

import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from cyclopts import Parameter

from pipelines.storage import Home
from pipelines.terminal import Common
from signals.config import SignalsConfig

ENOUGH: Final = 0.95
"""Share of next messages that should have come inside the window."""

Flag = Annotated[bool, Parameter(negative="")]
Versions = Annotated[tuple[int, ...], Parameter(negative="")]


def baselines(*, freeze: Flag = False, policy_version: Versions = (), common: Common = Common()) -> None:
    """Show what is usual (median sampling times, spread of components, kept edits, delays), and freeze it for the next cycle.

    Args:
        freeze: Put it in force: turns distilled from now on are compared with it.
        policy_version: Only turns of this policy, the accepted cycle's; repeatable. Default: all.
        common: Options of every command.
    """
    from signals import estimate_rows, norm_table
    from signals.norms import freeze as usual

    config, home, now = common.tree(SignalsConfig), common.place(), datetime.now(UTC)
    if freeze:
        rows = norm_table.freeze_now(home, config.rewards, now=now, policy_versions=policy_version)
    else:
        rows = usual(norm_table.finished(home, policy_version)[0], min_turns=config.rewards.norm_min_turns)
    medians = {row.task_bucket or "unknown": round(row.value or 0.0, 1) for row in rows if row.kind == "median_ms"}
    window_s = config.rewards.window_s
    cdf = estimate_rows.delays(_turns(home), window_s=window_s, now_ms=int(now.timestamp() * 1000))
    reached, shown = cdf.reaching(ENOUGH), [asdict(row) for row in rows if row.kind != "kept_by_user"]
    found: dict[str, Any] = {
        "latency_medians_ms": medians, "norms": shown, "frozen": freeze,
        "norms_version": norm_table.in_force(home, config.rewards).version or None,
        "window_s": window_s, "replies": len(cdf.delays_ms), "reply_share_in_window": cdf.at(window_s * 1000) if cdf.delays_ms else None,
        "reply_s_p95": None if reached is None else reached / 1000,
    }  # fmt: skip

    def text() -> str:
        lines = ["[rewards.latency_medians_ms]", *[f"{json.dumps(bucket)} = {value}" for bucket, value in medians.items()], ""]
        for row in shown:
            where = " / ".join(row[name] or "unknown" for name in ("surface", "language", "task_bucket"))
            if row["kind"] == "scale":
                lines.append(f"{where:40} {row['component']:12} mean {row['mean']:+.3f} sd {row['sd']:.3f} ({row['turns']} turns)")
            elif row["kind"] == "kept":
                lines.append(f"{where:40} kept share   {row['total'] / row['turns']:.3f} ({row['turns']} turns)")
        if reached is not None:
            share = f"{cdf.at(window_s * 1000):.1%} of next messages came inside the window of {window_s} s; 95 % by {reached / 1000:.0f} s"
            lines.append(share + ("" if reached <= window_s * 1000 else f": set rewards.window_s to at least {reached // 1000 + 1}"))
        lines.append(f"norms in force: {found['norms_version'] or 'none; freeze these with --freeze'}")
        return "\n".join(lines)

    common.show(found, text)


def _turns(home: Home) -> list[dict[str, Any]]:
    """Read turns with their rewards, and when they last acted."""
    from signals import lake

    keys = ["session_id", "turn_id"]
    facts = ["policy_version", "user_key", "task_bucket", "final", "acted_at", "edits", "followed_up", "replied_after_ms",
             "asked", "eligible", "deferred"]  # fmt: skip
    turns = lake.read(home, "turns", columns=[*keys, *facts])
    rewards = lake.read(home, "rewards", columns=[*keys, "reward", "edits_kept", "dissatisfied"])
    rows = turns.join(rewards, keys, join_type="inner").to_pylist()
    flags = ("asked", "eligible", "deferred")
    return [
        row | {name: bool(row[name]) for name in flags} | {"ended_at_ms": int(row["acted_at"].timestamp() * 1000)}
        for row in rows
        if row["acted_at"] is not None
    ]


def _numbers(value: Any) -> Any:
    """Return a record with None for what is no number: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def rates(*, seed: int = 0, common: Common = Common()) -> None:
    """Show what each policy earns, allowing for late, missing and misread outcomes and for users with many turns.

    Args:
        seed: Of the bootstrap intervals.
        common: Options of every command.
    """
    from signals import followups
    from signals.estimate_rows import Reader
    from signals.estimate_rows import rates as estimated

    config, head = common.tree(SignalsConfig), followups.head()
    reader = Reader(threshold=head.threshold, tpr=head.tpr, fpr=head.fpr)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    rows = estimated(_turns(common.place()), reader, window_s=config.rewards.window_s, now_ms=now_ms, seed=seed)
    found = [_numbers(asdict(item)) for item in rows]

    def text() -> str:
        lines = [f"{'policy':>8} {'turns':>6} {'users':>5} {'scored':>7} {'reward [95 % by user]':>24} {'kept share [95 %]':>22} "
                 f"{'clipped':>7} {'replies':>7} {'dissat.':>7} {'corrected':>9} {'asked':>6} {'deferred':>8}"]  # fmt: skip
        for row in found:
            policy = "foreign" if row["policy_version"] is None else row["policy_version"]
            lines.append(
                f"{policy:>8} {row['turns']:>6} {row['users']:>5} {_figure(row['scored_share']):>7} {_interval(row['reward']):>24} "
                f"{_interval(row['kept']):>22} {_figure(row['kept_imputed']['clipped_share']):>7} "
                f"{_figure(row['followed_up']['expected']):>7} {_figure(row['dissatisfied']):>7} "
                f"{_figure(row['dissatisfied_corrected']):>9} {_figure(row['asked']):>6} {_figure(row['deferred']):>8}"
            )
        return "\n".join(lines if found else ["no turns yet; run: tidegate signals run --once"])

    common.show({"rates": found}, text)


def _interval(item: dict[str, Any]) -> str:
    return f"{_figure(item['mean'])} [{_figure(item['low'])}, {_figure(item['high'])}]"
