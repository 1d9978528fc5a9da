"""What the lake says about each policy: the figures of the demo's report.

Takes: a deployment's lake. Gives: rates with intervals by policy version, reward components, outcomes, event counts.
Leaves out: how they look (`report.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deploy.report import Figure, Observation, median, ratio
from pipelines.storage import Home
from signals import lake
from signals.samples import COMPONENTS

Rows = Iterable[Mapping[str, Any]]


def _by_user(rows: Rows, contribution: Callable[[Mapping[str, Any]], tuple[float, float]]) -> list[Observation]:
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        numerator, denominator = contribution(row)
        sums[row["user_key"]][0] += numerator
        sums[row["user_key"]][1] += denominator
    return [Observation(user_key=user, numerator=n, denominator=d) for user, (n, d) in sorted(sums.items())]


def _figures(turns: list[dict[str, Any]], edits: list[dict[str, Any]], rewards: list[dict[str, Any]]) -> dict[str, Figure]:
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for turn in turns:
        if turn["sampling_ms"] is not None:
            seconds[turn["user_key"]].append(turn["sampling_ms"] / 1000)
    return {
        "kept_edits": ratio(_by_user((e for e in edits if e["kept"] is not None), lambda e: (e["kept"], 1.0))),
        "dissatisfied": ratio(
            _by_user((r for r in rewards if r["dissatisfied"] is not None), lambda r: (float(r["dissatisfied"] >= 0.5), 1.0))
        ),
        "latency_s": median([Observation(user_key=user, values=tuple(values)) for user, values in sorted(seconds.items())]),
        "invalid_calls": ratio(_by_user(turns, lambda t: (float(t["invalid_calls"]), float(t["calls"])))),
    }


def _reward_means(rewards: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return mean and number of each component; where nothing was seen the mean is null, for 0 would be a finding."""
    means: dict[str, dict[str, float | None]] = {}
    for name in (*COMPONENTS, "reward"):
        values = [row[name] for row in rewards if row[name] is not None]
        means[name] = {"mean": sum(values) / len(values) if values else None, "n": len(values)}
    return means


def policies(home: Home) -> list[dict[str, Any]]:
    """Return one entry a policy version that simulated users met, ascending: `version`, `figures`, `reward`."""
    chosen = [("origin", "=", "simulated")]
    turns = lake.read(home, "turns", filters=chosen).to_pylist()
    rewards = lake.read(home, "rewards", filters=chosen).to_pylist()
    owner = {(turn["session_id"], turn["turn_id"]): turn["user_key"] for turn in turns}
    edits = [
        edit | {"user_key": owner[key]} for edit in lake.edits(home).to_pylist() if (key := (edit["session_id"], edit["turn_id"])) in owner
    ]
    versions = sorted({turn["policy_version"] for turn in turns if turn["policy_version"] is not None})

    def of(rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        return [row for row in rows if row["policy_version"] == version]

    return [
        {
            "version": version,
            "figures": _figures(of(turns, version), of(edits, version), of(rewards, version)),
            "reward": _reward_means(of(rewards, version)),
        }
        for version in versions
    ]


def outcomes(home: Home) -> dict[str, int]:
    """Return outcome (with its reason) -> turns."""
    counted: defaultdict[str, int] = defaultdict(int)
    for row in lake.counts(home):
        counted[f"{row['outcome']}:{row['outcome_reason']}" if row["outcome_reason"] else row["outcome"]] += row["turns"]
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def event_counts(home: Home, *, produced: int) -> dict[str, int]:
    """Return how many records the topic took, and how many of them lie where.

    Args:
        home: The deployment.
        produced: Records on the topic, from its end offsets.
    """
    ids = lake.read(home, "events", columns=["event_id"]).column("event_id")
    return {
        "produced": produced,
        "in_lake": len(ids),
        "quarantined": lake.read(home, "quarantine", columns=["offset"]).num_rows,
        "duplicates": len(ids) - len(ids.unique()),
    }


def tables(home: Home) -> list[dict[str, Any]]:
    """Return name, rows and folder of every table."""
    return [{"name": name, "rows": lake.count(home, name), "path": str(lake.path(home, name))} for name in lake.versions(home)]
