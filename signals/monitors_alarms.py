"""The newest look of the monitors, in a small file beside the lake, and the sentence that it amounts to.

The gateway's `/metrics`, `tidegate status` and `tidegate doctor` read this file instead of the table `drift`: no engine, no table
reader, a few kilobytes.

Takes: rows of the table `drift`. Gives: run/drift.json, what it says, and it as Prometheus metrics. Leaves out: how rows come about
(`monitors.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from pipelines.metrics import Registry
from pipelines.storage import Home, write_atomic

FILE: Final = "drift.json"
State = Literal["unknown", "quiet", "traffic", "policy"]
"""From least to most serious. `policy` wins over `traffic`: it asks for somebody's hand."""
RUNBOOK: Final = "infra/runbooks/reward-drift.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """What the monitors last saw of the policies that serve."""

    computed_at: datetime
    state: State
    sentence: str
    """What is alarming and whose doing it is."""
    do: str
    """What to do about it; empty when nothing is to be done."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the table that alarm, of the newest hour."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """metric, policy_version, value, expected, effect, n of the newest policy version's means."""


def shown(value: float | None, *, share: bool) -> str:
    """Return a figure for people: a share in per cent."""
    return "-" if value is None else f"{value:.1%}" if share else f"{value:.3g}"


def describe(row: Mapping[str, Any]) -> str:
    """Return one alarm as a clause: what, from where to where, how large, how certain."""
    if row["kind"] not in ("mean", "correlation"):
        value, limit = (shown(row[name], share=False) for name in ("value", "reference"))
        return f"{row['metric']} ({row['kind']} {value}, limit {limit}, n {row['n']})"
    share = bool(row.get("share"))
    value, before, expected = (shown(row[name], share=share) for name in ("value", "reference", "expected"))
    p = "" if row["p"] is None else f", p {row['p']:.1g}"
    if row["cause"] == "traffic":
        return f"{row['metric']} {before} -> {value} (expected of this traffic {expected}, n {row['n']}{p})"
    return f"{row['metric']} {expected} -> {value} ({row['effect']:+.2f} sd, n {row['n']}{p})"


def conclude(rows: Sequence[Mapping[str, Any]]) -> tuple[State, str, str]:
    """Return the state, a sentence, and what to do, of the rows of one look.

    Args:
        rows: Rows of the table `drift` (with `share` where known), of all policies that were looked at.
    """
    if not any(row["p"] is not None for row in rows):
        why = "no policy has enough turns and a reference to compare with yet"
        return (
            "unknown",
            f"nothing to say: {why}",
            "wait for more sessions, or name a reference: tidegate signals drift --reference VERSION",
        )
    alarms = [row for row in rows if row["alarm"]]
    policy = [row for row in alarms if row["cause"] == "policy"]
    traffic = [row for row in alarms if row["cause"] == "traffic"]
    if policy:
        versions = sorted({row["policy_version"] for row in policy})
        named = " and ".join(f"policy {version}" for version in versions)
        also = f"; the traffic or what is around it changed too ({_names(traffic)})" if traffic else ""
        more = f"{named} behaves differently on the same traffic: {'; '.join(map(describe, _worst(policy)))}{also}"
        return "policy", more, f"look at some of its turns (tidegate signals explain turn ID); if they are bad, roll back: see {RUNBOOK}"
    if traffic:
        clause = "; ".join(map(describe, _worst(traffic)))
        do = f"no roll-back: the policy does what it did before. Find out what users or clients changed: see {RUNBOOK}"
        what = "the traffic" if any(row["about"] == "traffic" for row in traffic) else "something around the policy"
        return "traffic", f"{what} changed, not the policy: {clause}", do
    tested = sum(row["p"] is not None for row in rows)
    return "quiet", f"quiet: {tested} comparisons, none beyond its limit", ""


def _worst(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return up to four alarms, one a metric, the reward first and then the most certain."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["metric"] != "reward", row["p"] if row["p"] is not None else 1.0, row["metric"])):
        first.setdefault(row["metric"], row)
    return list(first.values())[:4]


def _names(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({row["metric"] for row in rows}))


def write(home: Home, latest: Latest) -> None:
    """Write the newest look.

    Raises:
        StorageFull: No space left.
    """
    write_atomic(home.run / FILE, json.dumps(asdict(latest), default=str).encode())


def latest(home: Home) -> Latest | None:
    """Read the newest look; None before the first, or when the file cannot be read."""
    try:
        found = json.loads((home.run / FILE).read_text(encoding="utf-8"))
        return Latest(**{**found, "computed_at": datetime.fromisoformat(found["computed_at"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Meters:
    """The monitors' metrics, each declared here once. `metric` has the values of `monitors_metrics.NAMES`: some forty, never an id."""

    def __init__(self) -> None:
        self.registry: Final = Registry()
        of = self.registry
        self.alarm = of.gauge(
            "tidegate_drift_alarm", "1 while a metric of a serving policy alarms, by whose doing it is.", ["metric", "cause"]
        )
        self.value = of.gauge("tidegate_drift_value", "The newest policy's figure.", ["metric"])
        self.expected = of.gauge("tidegate_drift_expected", "What its reference would have on the same traffic.", ["metric"])
        self.effect = of.gauge("tidegate_drift_effect_sd", "Value less expected, in standard deviations of the reference.", ["metric"])
        self.observations = of.gauge("tidegate_drift_observations", "Observations behind the newest policy's figure.", ["metric"])
        self.version = of.gauge("tidegate_drift_policy_version", "The newest policy version that the monitors looked at.")
        self.reference = of.gauge("tidegate_drift_reference_version", "The policy version it is compared with.")
        self.computed = of.gauge("tidegate_drift_computed_timestamp_seconds", "When the monitors last looked, Unix time.")

    def set(self, found: Latest) -> None:
        """Take over the newest look."""
        self.computed.set(found.computed_at.timestamp())
        for row in found.figures:
            name = row["metric"]
            self.version.set(row["policy_version"])
            for cause in ("policy", "traffic"):
                self.alarm.set(0, metric=name, cause=cause)
            if row["reference_version"] is not None:
                self.reference.set(row["reference_version"])
            for gauge, key in ((self.value, "value"), (self.expected, "expected"), (self.effect, "effect"), (self.observations, "n")):
                if row[key] is not None:
                    gauge.set(row[key], metric=name)
        for row in found.alarms:
            self.alarm.set(1, metric=row["metric"], cause=row["cause"])


def metrics_text(home: Home) -> str:
    """Return the newest look in the Prometheus text format; names without samples before the first."""
    meters, found = Meters(), latest(home)
    if found is not None:
        meters.set(found)
    return meters.registry.render()
