"""What a deployment looks like from outside: topic, lake, gateway, processes. Reads only, changes nothing.

Takes the deployment's folder. Gives facts for `status`, `doctor` and the cycle; what does not answer is None, never an error.
`python -m deploy.observe --result FILE` writes the topic's end offsets, so that the orchestrator's process needs no Kafka client.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import httpx
from cyclopts import App
from pydantic import BaseModel

from deploy.serving.keys import load_keys
from pipelines.config import PipelinesConfig, digest
from pipelines.storage import Home
from pipelines.terminal import Common, run
from signals import monitors_alarms
from signals.monitors_alarms import Latest

HTTP_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeState:
    """How far the lake is."""

    frontier: dict[str, int]
    """"topic-partition" -> offset after the last event that lies in the lake."""
    distilled: dict[str, int]
    """The same for events that turns and rewards were made of."""
    distilled_at: datetime | None
    versions: dict[str, int]
    """Table versions that belong together, after the last finished distil."""
    tombstoned: frozenset[int]
    """Policy versions whose turns that distil took out of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEdits:
    """Edits of one policy version that were decided."""

    policy_version: int | None
    kept: float
    """Sum of the shares that count as kept."""
    decided: int


def digest_of(section: BaseModel) -> str:
    """Return the digest of one section of the settings."""
    return digest(section)


def answers(url: str) -> Callable[[], bool]:
    """Return a function that tells whether `url` answers 200."""

    def ask() -> bool:
        try:
            return httpx.get(url, timeout=HTTP_TIMEOUT_S).status_code == 200
        except httpx.HTTPError:
            return False

    return ask


def gateway_url(home: Home) -> str | None:
    """Return the address in run/gateway.json, or None."""
    try:
        return str(json.loads((home.run / "gateway.json").read_text(encoding="utf-8"))["url"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def api_key(home: Home) -> str:
    """Return a key that this deployment's gateway accepts."""
    return next(iter(load_keys(home, os.environ).values()))


def gateway_status(home: Home) -> dict[str, Any] | None:
    """Return the gateway's own status, or None when none answers."""
    url = gateway_url(home)
    if url is None:
        return None
    try:
        key = {"Authorization": f"Bearer {api_key(home)}"}
        reply = httpx.get(f"{url}/admin/status", headers=key, timeout=HTTP_TIMEOUT_S)
        return dict(reply.json()) if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def served_policy(status: dict[str, Any]) -> int | None:
    """Return the policy version that new sessions get, by the gateway's own status."""
    return next((replica["policy_version"] for replica in status.get("replicas", []) if replica["state"] == "serving"), None)


def topic_ends(config: PipelinesConfig, home: Home) -> dict[str, int]:
    """Return "topic-partition" -> next offset.

    Raises:
        BrokerUnavailable: No answer, or no such topic.
    """
    from pipelines import kafka

    return {f"{config.kafka.topic}-{part}": end for part, end in kafka.end_offsets(config, home).items()}


def lake_state(home: Home) -> LakeState:
    """Read how far the lake is.

    Raises:
        ContractViolation: A table is damaged.
    """
    from signals import lake

    newest = lake.last_distil(home) or {}
    return LakeState(
        frontier=lake.frontier(home), distilled=dict(newest.get("frontier") or {}), distilled_at=newest.get("distilled_at"),
        versions=dict(newest.get("versions") or {}), tombstoned=frozenset(newest.get("tombstoned") or ()),
    )  # fmt: skip


def accepted_gaps(home: Home, *, since: datetime | None) -> list[str]:
    """Return the events that Kafka lost before they were read and a person wrote off after `since` (None: ever), a sentence each.

    Raises:
        ContractViolation: A table is damaged.
    """
    from signals import lake

    return [
        f"{row['topic']}-{row['partition']}: offsets {row['start']} to {row['end']}, accepted {row['accepted_at']:%Y-%m-%d %H:%M}"
        for row in lake.read(home, "gaps").to_pylist()
        if since is None or row["accepted_at"] > since
    ]


def turn_outcomes(home: Home) -> dict[str, int]:
    """Return outcome -> turns.

    Raises:
        ContractViolation: A table is damaged.
    """
    from signals import lake

    counted: Counter[str] = Counter()
    for row in lake.counts(home):
        counted[row["outcome"]] += row["turns"]
    return dict(counted)


def kept_edits(home: Home) -> list[KeptEdits]:
    """Return kept and decided edits by policy version.

    Raises:
        ContractViolation: A table is damaged.
    """
    from signals import lake

    kept: defaultdict[int | None, float] = defaultdict(float)
    decided: Counter[int | None] = Counter()
    for row in lake.read(home, "edits", columns=["policy_version", "kept"]).to_pylist():
        if row["kept"] is not None:
            decided[row["policy_version"]] += 1
            kept[row["policy_version"]] += row["kept"]
    return [
        KeptEdits(policy_version=version, kept=kept[version], decided=decided[version])
        for version in sorted(decided, key=lambda v: (v is None, v or 0))
    ]


def drift(home: Home) -> Latest | None:
    """Return what the monitors last saw, None before their first look."""
    return monitors_alarms.latest(home)


app = App(name="observe", help="Print the topic's end offsets.")


@app.default
def ends(*, common: Common = Common()) -> None:
    """Print the topic's end offsets."""
    found = {"ends": topic_ends(common.tree(PipelinesConfig), common.place())}
    common.show(found, lambda: "\n".join(f"{part} {end}" for part, end in sorted(found["ends"].items())))


if __name__ == "__main__":
    sys.exit(run(app))
