"""Why a number is what it is: each event, component, weight and rule version behind a turn's reward.

Computed anew from the turn's events by the plain-Python rules and compared with what the lake stores, so an explanation that does not
fit its number says so.

Takes: the lake and the reward settings. Gives: one dict a turn, and its text. Leaves out: Spark.
"""

from datetime import UTC, datetime
from typing import Any

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import lake, sessions
from signals.config import RewardsConfig
from signals.rewards import edit_weight, kept_share, reward_version
from signals.samples import COMPONENTS


def turn(home: Home, config: RewardsConfig, turn_id: str) -> dict[str, Any]:
    """Explain one turn.

    Raises:
        ConfigError: The lake has no such turn.
    """
    found = lake.read(home, "turns", columns=["session_id"], filters=[("turn_id", "=", turn_id)])["session_id"].to_pylist()
    if not found:
        raise ConfigError(
            f"the lake at {home.lake} has no turn {turn_id!r}; list them with lake.turns, or distil first: tidegate signals run --once"
        )
    (explained,) = [item for item in session(home, config, found[0]) if item["turn_id"] == turn_id]
    return explained


def session(home: Home, config: RewardsConfig, session_id: str) -> list[dict[str, Any]]:
    """Explain every turn of a session, as of the last distil.

    Raises:
        ConfigError: The lake has no such session.
    """
    rows = lake.events(home, session_id=session_id).to_pylist()
    last = lake.last(lake.read(home, "distilled"), "distilled_at")
    if not rows or last is None:
        raise ConfigError(f"the lake at {home.lake} has no distilled session {session_id!r}; distil first: tidegate signals run --once")
    stored = {row["turn_id"]: row for row in lake.read(home, "rewards", filters=[("session_id", "=", session_id)]).to_pylist()}
    # A window that was open at the turn's last distil is judged as it was judged then.
    final = {row["turn_id"]: row["final"] for row in lake.read(home, "turns", filters=[("session_id", "=", session_id)]).to_pylist()}
    now_ms = int(last["distilled_at"].timestamp() * 1000)
    turns = sessions.distil(rows, config, now_ms=now_ms, tombstoned=frozenset(last["tombstoned"]))
    events = {row["event_id"]: row for row in rows}
    return [_explained(item, config, stored.get(item.turn_id), events) for item in turns if item.turn_id in final]


def _explained(item: sessions.TurnResult, config: RewardsConfig, stored: dict[str, Any] | None, events: dict[str, Any]) -> dict[str, Any]:
    used = [name for name in COMPONENTS if name in item.components and not (name == "tool_calls" and item.components[name] == 0.0)]
    number = None if stored is None else stored["reward"]
    agrees = number == item.reward or (number is not None and item.reward is not None and abs(number - item.reward) < 1e-9)
    version = reward_version(config)
    return {
        "session_id": item.session_id, "turn_id": item.turn_id, "turn_index": item.turn_index, "policy_version": item.policy_version,
        "outcome": item.outcome.value, "outcome_reason": item.outcome_reason, "reward": item.reward, "stored": number, "agrees": agrees,
        "reward_version": version, "stored_version": stored["reward_version"] if stored else None,
        "closes_at": datetime.fromtimestamp(item.closes_at_ms / 1000, UTC).isoformat(), "final": item.course.final, "late": item.late,
        "components": {
            name: {"value": value, "weight": config.weights.get(name, 0.0), "in_mean": name in used}
            for name, value in item.components.items()
        },
        "dissatisfied": item.dissatisfied,
        "edits": [
            {
                "edit_id": e.edit_id, "decision": e.decision, "survival": e.survival,
                "kept": kept_share(e), "weight": edit_weight(e.chars_added),
            }
            for e in item.evidence.edits
        ],
        "calls": item.evidence.calls, "invalid_calls": item.evidence.invalid_calls, "sampling_ms": item.evidence.sampling_ms,
        "events": [{"event_id": identity, "type": events[identity]["type"], "at_ms": events[identity]["occurred_at_ms"],
                    "partition": events[identity].get("partition"), "offset": events[identity].get("offset")} for identity in item.sources],
    }  # fmt: skip


def text(item: dict[str, Any]) -> str:
    """Return an explanation for people."""
    why = f" ({item['outcome_reason']})" if item["outcome_reason"] else ""
    window = "closed" if item["final"] else "open"
    lines = [
        f"turn {item['turn_id']} (number {item['turn_index']} of session {item['session_id']}, policy {item['policy_version']})",
        f"  outcome {item['outcome']}{why}; window {window} at {item['closes_at']}; {item['late']} late pieces of evidence not used",
        f"  reward {_number(item['reward'])} = weighted mean, rules {item['reward_version']}",
    ]
    for name, part in item["components"].items():
        note = "" if part["in_mean"] else "  (stored, not in the mean: no call was invalid)"
        lines.append(f"    {name:12} {part['value']:+.4f}  x {part['weight']}{note}")
    for edit in item["edits"]:
        kept = "no evidence" if edit["kept"] is None else f"kept {edit['kept']:.3f} x {edit['weight']:.2f}"
        lines.append(f"      edit {edit['edit_id']}: {kept} (decision {edit['decision']}, survival {_number(edit['survival'])})")
    if item["dissatisfied"] is not None:
        lines.append(f"      next message: P(dissatisfied) {item['dissatisfied']:.3f}")
    lines.append(f"      tool calls {item['calls']}, invalid {item['invalid_calls']}; sampling {_number(item['sampling_ms'])} ms")
    lines += [f"    event {e['at_ms']} {e['type']:14} {e['event_id']} @{e['partition']}:{e['offset']}" for e in item["events"]]
    if not item["agrees"] or item["stored_version"] not in (None, item["reward_version"]):
        lines.append(
            f"  STORED {_number(item['stored'])} under rules {item['stored_version']}: settings or events changed since; "
            "recompute with: tidegate signals run --once --everything"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
