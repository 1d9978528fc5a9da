"""`tidegate status`: what serves, what shipped, what runs, how far the lake is, what became of the turns.

Reads only. A part that cannot be read says why in its place; the others are shown all the same.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from deploy import launch, observe
from deploy.config import Config
from deploy.release.ledger import Ledger
from pipelines import broker
from pipelines.errors import StageError
from pipelines.storage import Home
from pipelines.terminal import Common, run

SHIPS_SHOWN: Final = 5
SERVICES: Final = ("prefect", "schedule", "stream", "gateway")


def _try(read: Callable[[], Any]) -> Any:
    """Return what was read, or why it could not be: one part's fault never hides the others."""
    try:
        return read()
    except StageError as error:
        return {"error": str(error)}


def _release(home: Home) -> dict[str, Any]:
    if not home.ledger.exists():
        return {"serving": None, "ships": [], "leases": [], "frozen": None, "tombstoned": 0}
    ledger = Ledger(home.ledger)
    pointer = ledger.serving()
    return {
        "serving": asdict(pointer) | {"changed_at": pointer.changed_at.isoformat()} if pointer else None,
        "ships": [
            {
                "ship_id": ship.ship_id, "candidate": ship.candidate, "state": ship.state.value, "reason": ship.reason,
                "verdict": (ledger.steps(ship.ship_id).get("gate") or ledger.steps(ship.ship_id).get("stage") or {}).get("verdict"),
                "updated_at": ship.updated_at.isoformat(),
            }
            for ship in ledger.ships(limit=SHIPS_SHOWN)
        ],
        "leases": [{"name": lease.name, "holder": lease.holder, "expires_at": lease.expires_at.isoformat()} for lease in ledger.leases()],
        "frozen": ledger.frozen(),
        "tombstoned": len(ledger.tombstones()),
    }  # fmt: skip


def _processes(config: Config, home: Home) -> dict[str, Any]:
    found = broker.running(home)
    servers = config.kafka.bootstrap_servers
    states: dict[str, Any] = {"broker": servers or (found.bootstrap if found else None)}
    for name in SERVICES:
        alive = launch.find(home, name)
        states[name] = f"pid {alive.pid}" if alive else None
    return states


def _gateway(home: Home) -> dict[str, Any] | None:
    status = observe.gateway_status(home)
    if status is None:
        return None
    return {"url": observe.gateway_url(home), "policy_version": observe.served_policy(status)} | status


def _topic(config: Config, home: Home) -> dict[str, Any] | None:
    if not config.kafka.bootstrap_servers and broker.running(home) is None:
        return None
    ends = observe.topic_ends(config, home)
    lake = observe.lake_state(home)
    behind = {part: end - lake.frontier.get(part, 0) for part, end in ends.items()}
    return {"ends": ends, "behind": behind, "behind_total": sum(behind.values())}


def _lake(home: Home) -> dict[str, Any]:
    state = observe.lake_state(home)
    return {
        "frontier": state.frontier,
        "distilled_at": state.distilled_at.isoformat() if state.distilled_at else None,
        "turns": observe.turn_outcomes(home),
        "kept_edits": [asdict(item) for item in observe.kept_edits(home)],
    }


def _drift(home: Home) -> dict[str, Any] | None:
    found = observe.drift(home)
    if found is None:
        return None
    said = {"state": found.state, "sentence": found.sentence, "do": found.do}
    return said | {"computed_at": found.computed_at.isoformat(), "alarms": found.alarms}


def gather(config: Config, home: Home, *, now: datetime) -> dict[str, Any]:
    """Return the whole status; a part that cannot be read is `{"error": sentence}`."""
    return {
        "at": now.isoformat(),
        "home": str(home.root),
        "release": _try(lambda: _release(home)),
        "processes": _try(lambda: _processes(config, home)),
        "gateway": _try(lambda: _gateway(home)),
        "topic": _try(lambda: _topic(config, home)),
        "lake": _try(lambda: _lake(home)),
        "drift": _drift(home),
    }


def _release_lines(release: dict[str, Any]) -> list[str]:
    if "error" in release:
        return [f"release    {release['error']}"]
    pointer = release["serving"]
    lines = ["serving    nothing yet; start with: tidegate demo"]
    if pointer:
        lines = [f"serving    {pointer['checkpoint'][:12]} = policy {pointer['policy_version']} since {pointer['changed_at'][:19]}"]
        lines.append(f"           previous {(pointer['previous'] or 'none')[:12]}, anchor {pointer['anchor'][:12]}")
    lines += [f"frozen     {release['frozen']}"] if release["frozen"] else []
    lines += [f"lease      {lease['name']} by {lease['holder']} until {lease['expires_at'][:19]}" for lease in release["leases"]]
    lines += [
        f"ship       {ship['updated_at'][:19]} {ship['candidate'][:12]} {ship['state']:<11} {ship['verdict'] or ''}  {ship['reason'][:72]}"
        for ship in release["ships"]
    ]
    return lines


def _kept(items: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"policy {item['policy_version'] or 'foreign'} {item['kept'] / item['decided']:.0%} of {item['decided']}" for item in items
    )  # fmt: skip


def to_text(found: dict[str, Any]) -> str:
    """Return the status for a terminal."""
    lines = [f"{found['home']} at {found['at'][:19]}", *_release_lines(found["release"])]
    processes = found["processes"]
    lines += [f"{name:<10} {where or 'not running'}" for name, where in processes.items()]
    gateway = found["gateway"]
    if gateway and "error" not in gateway:
        refused = f", refuses {gateway['refused']['checkpoint'][:12]}: {gateway['refused']['reason']}" if gateway.get("refused") else ""
        lines.append(f"answers    {gateway['url']} from policy {gateway['policy_version']}{refused}")
    topic, lake = found["topic"], found["lake"]
    if topic is not None:
        lines.append(f"topic      {topic.get('error') or _behind(topic)}")
    if "error" in lake:
        lines.append(f"lake       {lake['error']}")
    else:
        turns = ", ".join(f"{outcome} {number}" for outcome, number in sorted(lake["turns"].items())) or "none yet"
        lines.append(f"turns      {turns}; distilled {(lake['distilled_at'] or 'never')[:19]}")
        lines.append(f"edits kept {_kept(lake['kept_edits']) or 'none decided yet'}")
    if drift := found["drift"]:
        lines.append(f"drift      {drift['sentence']}; looked {drift['computed_at'][:19]}")
        lines += [f"           -> {drift['do']}"] if drift["state"] in ("policy", "traffic") else []
    return "\n".join(lines)


def _behind(topic: dict[str, Any]) -> str:
    return f"{sum(topic['ends'].values())} events, {topic['behind_total']} not in the lake yet"


app = App(name="status", help="Show what serves, what shipped, how far the lake is.")


@app.default
def status(
    *,
    watch: Annotated[bool, Parameter(help="Show it again every few seconds until interrupted.", negative="")] = False,
    every_s: float = 3.0,
    common: Common = Common(),
) -> None:
    """Show what serves, what shipped, what runs, how far the lake is, and what became of the turns.

    Args:
        watch: Show it again until interrupted.
        every_s: Seconds between two looks.
        common: Options of every command.
    """
    config, home = common.tree(Config), common.place()
    while True:
        found = gather(config, home, now=datetime.now(UTC))
        if watch and sys.stdout.isatty() and not common.json:
            print("\x1b[H\x1b[2J", end="")
        common.show(found, lambda found=found: to_text(found))
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(every_s)


if __name__ == "__main__":
    sys.exit(run(app))
