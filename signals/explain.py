"""Why a number is what it is: each event, component, weight, rule and norm behind a turn's reward.

Computed anew from the turn's events by the plain-Python rules and compared with what the lake stores, so an explanation that does not
fit its number says so.

Takes: the lake and the reward settings. Gives: one dict a turn, and its text. Leaves out: Spark.
"""

from datetime import UTC, datetime
from typing import Any, Final

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import lake, norm_table, sessions, verdict_store
from signals.components import classified, edit_weight, kept_share
from signals.config import RewardsConfig
from signals.judge import Judged
from signals.norms import Norms
from signals.rewards import COSTS, IN_PLACE_OF_EDITS, OUTCOMES, reward_version
from signals.tables import COMPONENT_DOCS

FACTS: Final = (
    "calls", "invalid_calls", "repeats", "serial_calls", "completions", "response_tokens", "sampling_ms", "claims", "claims_unread",
    "edit_expected", "edits_observed", "followed_up", "said",
)  # fmt: skip
"""Figures behind the components, as `components.Evidence` names them."""


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
    last = lake.last_distil(home)
    if not rows or last is None:
        raise ConfigError(f"the lake at {home.lake} has no distilled session {session_id!r}; distil first: tidegate signals run --once")
    stored = {row["turn_id"]: row for row in lake.read(home, "rewards", filters=[("session_id", "=", session_id)]).to_pylist()}
    # A window that was open at the turn's last distil is judged as it was judged then.
    final = {row["turn_id"]: row["final"] for row in lake.read(home, "turns", filters=[("session_id", "=", session_id)]).to_pylist()}
    now_ms = int(last["distilled_at"].timestamp() * 1000)
    norms, judged = norm_table.in_force(home, config), verdict_store.in_force(home)
    turns = sessions.distil(rows, config, now_ms=now_ms, tombstoned=frozenset(last["tombstoned"]), norms=norms, judged=judged)
    events = {row["event_id"]: row for row in rows}
    return [_explained(item, config, norms, judged, stored.get(item.turn_id), events) for item in turns if item.turn_id in final]


def _rule(name: str, item: sessions.TurnResult) -> str:
    """Say how a component enters the mean."""
    if name not in item.pieces:
        if not item.course.final:
            return "the window is open"
        if not any(found in item.components for found in OUTCOMES) and name not in COSTS:
            return "says nothing by itself"
        return "stored, no mass: nothing to pay for" if name in COSTS else "stored, not in the mean"
    if not any(found in item.components for found in OUTCOMES):
        return "only costs: the worst is the reward"
    if name in COSTS:
        return "a cost: pulls towards -1 by its size"
    if name in IN_PLACE_OF_EDITS and "deferral" in item.components:
        return "on a deferred turn only what speaks against it"
    return "a share of the mean"


def _components(item: sessions.TurnResult, config: RewardsConfig, norms: Norms) -> dict[str, dict[str, Any]]:
    """Return each component the turn can have: value, weight, mass and value in the mean, rule, norm, maturity."""
    scale = norms.scale_of(item.evidence.surface, item.evidence.language, item.task_bucket)
    found: dict[str, dict[str, Any]] = {}
    for name, doc in COMPONENT_DOCS.items():
        if name not in item.maturity and name not in item.components:
            continue
        mass, value = item.pieces.get(name, (0.0, None))
        mean, sd = scale.get("edits_kept" if name == "deferral" else name, (None, None))
        found[name] = {
            "value": item.components.get(name), "weight": config.weights.get(name, 0.0), "mass": mass, "value_in_mean": value,
            "in_mean": name in item.pieces, "rule": _rule(name, item), "norm": None if mean is None else {"mean": mean, "sd": sd},
            "maturity": item.maturity[name].value if name in item.maturity else None, "means": doc,
        }  # fmt: skip
    return found


def _explained(
    item: sessions.TurnResult, config: RewardsConfig, norms: Norms, judged: Judged, stored: dict[str, Any] | None, events: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    number = None if stored is None else stored["reward"]
    agrees = number == item.reward or (number is not None and item.reward is not None and abs(number - item.reward) < 1e-9)
    evidence = item.evidence
    return {
        "session_id": item.session_id, "turn_id": item.turn_id, "turn_index": item.turn_index, "policy_version": item.policy_version,
        "outcome": item.outcome.value, "outcome_reason": item.outcome_reason, "reward": item.reward, "stored": number, "agrees": agrees,
        "reward_version": reward_version(config, norms, judged=judged.version), "norms_version": norms.version or None,
        "stored_version": stored["reward_version"] if stored else None,
        "closes_at": datetime.fromtimestamp(item.closes_at_ms / 1000, UTC).isoformat(), "final": item.course.final, "late": item.late,
        "components": _components(item, config, norms), "dissatisfied": item.dissatisfied,
        "judge": _judge(item, judged), "asked": item.asked, "deferred": item.deferred,
        "facts": {name: getattr(evidence, name) for name in FACTS},
        "checks": {name: value for name in evidence.checks.__slots__ if (value := getattr(evidence.checks, name)) is not None},
        "shared": [{"share": share, "score": score} for share, score in evidence.shared],
        "truth": {"commit": item.truth.commit, "24h": item.truth.day, "7d": item.truth.week, "evaluation": item.truth_evaluation},
        "edits": [
            {
                "edit_id": e.edit_id, "decision": e.decision, "survival": e.survival,
                "kept": kept_share(e), "weight": edit_weight(e.chars_added),
            }
            for e in evidence.edits
        ],
        "calls": evidence.calls, "invalid_calls": evidence.invalid_calls, "sampling_ms": evidence.sampling_ms,
        "events": [{"event_id": identity, "type": events[identity]["type"], "at_ms": events[identity]["occurred_at_ms"],
                    "partition": events[identity].get("partition"), "offset": events[identity].get("offset")} for identity in item.sources],
    }  # fmt: skip


def _judge(item: sessions.TurnResult, judged: Judged) -> dict[str, Any] | None:
    """Return the judge's part in P(dissatisfied); None where it has no verdict on the next message."""
    follow_up = item.evidence.follow_up
    if follow_up is None or follow_up.verdict is None or item.dissatisfied is None:
        return None
    return {"verdict": follow_up.verdict, "share": follow_up.share, "classifier": classified(follow_up), "version": judged.version}


def text(item: dict[str, Any]) -> str:
    """Return an explanation for people."""
    why = f" ({item['outcome_reason']})" if item["outcome_reason"] else ""
    window = "closed" if item["final"] else "open"
    norms = f", norms {item['norms_version']}" if item["norms_version"] else ", no norms frozen"
    lines = [
        f"turn {item['turn_id']} (number {item['turn_index']} of session {item['session_id']}, policy {item['policy_version']})",
        f"  outcome {item['outcome']}{why}; window {window} at {item['closes_at']}; {item['late']} late pieces of evidence not used",
        f"  reward {_number(item['reward'])} = sum(mass x value) / sum(mass), rules {item['reward_version']}{norms}",
    ]
    for name, part in item["components"].items():
        value = "absent " if part["value"] is None else f"{part['value']:+.4f}"
        mean = f"mass {part['mass']:.4f} x {part['value_in_mean']:+.4f}" if part["in_mean"] else "not in the mean"
        norm = f"; usual {part['norm']['mean']:+.3f} sd {part['norm']['sd']:.3f}" if part["norm"] else ""
        lines.append(f"    {name:11} {value}  weight {part['weight']}  {mean}  {part['maturity']}: {part['rule']}{norm}")
    for edit in item["edits"]:
        kept = "no evidence" if edit["kept"] is None else f"kept {edit['kept']:.3f} x {edit['weight']:.2f}"
        lines.append(f"      edit {edit['edit_id']}: {kept} (decision {edit['decision']}, survival {_number(edit['survival'])})")
    if item["dissatisfied"] is not None:
        judge = item["judge"]
        how = (
            ""
            if judge is None
            else " = classifier {classifier:.3f} and judge {verdict:.3f} with share {share} of the log-odds".format(**judge)
        )
        lines.append(f"      next message: P(dissatisfied) {item['dissatisfied']:.3f}{how}")
    facts = {name: value for name, value in (item["facts"] | item["checks"]).items() if value is not None}
    lines.append("      " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    lines += [f"      said of the session: {said['score']:+.2f}, this turn's share {said['share']:.3f}" for said in item["shared"]]
    later = {name: value for name, value in item["truth"].items() if value is not None}
    if later:
        told = ", ".join(f"{name} {value:.3f}" for name, value in later.items())
        lines.append(f"      later (truth, not in the reward): {told}")
    lines += [f"    event {e['at_ms']} {e['type']:14} {e['event_id']} @{e['partition']}:{e['offset']}" for e in item["events"]]
    if not item["agrees"] or item["stored_version"] not in (None, item["reward_version"]):
        lines.append(
            f"  STORED {_number(item['stored'])} under rules {item['stored_version']}: settings, norms or events changed since; "
            "recompute with: tidegate signals run --once --everything"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
