"""Commands about releases: gate, ship, rollback, freeze, thaw, anchor, ckpt.

Verbs that change what serves or ships need a reason, print what they will do and ask, unless `--yes`; rollback asks for a reason
only. Exit codes: 4 the gate said no, 5 it could not tell, 6 refused, 3 someone else is at it.
"""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from deploy.config import Config
from deploy.release import artifact, evidence, explain, gates, retention
from deploy.release import rollback as rolling_back
from deploy.release import ship as shipping
from deploy.release.ledger import Ledger
from deploy.release.records import Event, Pointer
from deploy.release.verdicts import Verdict
from pipelines.errors import CheckpointInvalid, ConfigError, Refused
from pipelines.terminal import Common, progress, run
from trainer import candidates

app = App(name="release", help="Releases: gate, ship, roll back, freeze.")
gate = App(name="gate", help="Plan, run and explain the gate.")
ship = App(name="ship", help="Ships: list, show, status.")
anchor = App(name="anchor", help="Set or show the checkpoint that drift is measured against.")
ckpt = App(name="ckpt", help="Checkpoints: list, verify, collect garbage.")
for part in (gate, ship, anchor, ckpt):
    app.command(part)

Reason = Annotated[str, Parameter(help="Why, for the people after you.")]
Yes = Annotated[bool, Parameter(help="Do not ask.", negative="")]
EXIT_CODES = {Verdict.PASS: 0, Verdict.WARN: 0, Verdict.FAIL: 4, Verdict.INCONCLUSIVE: 5}


def _ledger(common: Common) -> Ledger:
    home = common.place()
    if not home.ledger.exists():
        raise ConfigError(f"there is no ledger at {home.ledger}; name the deployment with --home, or start one: tidegate demo")
    return Ledger(home.ledger)


def _serving(ledger: Ledger) -> Pointer:
    pointer = ledger.serving()
    if pointer is None:
        raise Refused(f"nothing serves in {ledger.path} yet; start with: tidegate demo")
    return pointer


def _confirm(plan: str, *, reason: str, yes: bool) -> None:
    if not reason.strip():
        raise ConfigError("--reason is empty; say why, for the people after you")
    print(plan, file=sys.stderr)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask; add --yes to do it")
    print("go on? [y/N] ", file=sys.stderr, end="", flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was changed")


# gate -------------------------------------------------------------------------------------------------------------------


@gate.command(name="plan")
def gate_plan(
    *, tasks: int = 35, attempts: int = 1, users: int = 24, solve_rate: float = 0.5, invalid_rate: float = 0.05, common: Common = Common()
) -> None:
    """Show what a gate of a given size can see, and the margins it would need.

    Args:
        tasks: Benchmark tasks, paired.
        attempts: Attempts at each task.
        users: Distinct users behind each rate.
        solve_rate: Share of attempts that serving solves.
        invalid_rate: Share of tool calls of serving that are invalid.
        common: Options of every command.
    """
    from deploy.release import plan

    if min(tasks, users) < 2 or attempts < 1:
        raise ConfigError(f"--tasks {tasks} --users {users} --attempts {attempts}: at least 2, 2 and 1")
    size = plan.Size(tasks=tasks, attempts=attempts, users=users, solve_rate=solve_rate, invalid_rate=invalid_rate)
    found = plan.plan(common.tree(Config).gate, size)
    common.show(asdict(found) | {"sentence": found.sentence, "size": asdict(size)}, lambda: plan.to_text(found))


@gate.command(name="run")
def gate_run(
    *,
    candidate: str,
    serving_results: Path,
    candidate_results: Path,
    scores: Path,
    anchor_results: Path | None = None,
    common: Common = Common(),
) -> int:
    """Decide on result files without shipping anything.

    Args:
        candidate: Checkpoint id or a prefix of it.
        serving_results: results.jsonl of the benchmark on what serves.
        candidate_results: The same on the candidate.
        scores: Result of `trainer score`.
        anchor_results: The same as serving_results on the anchor; default: serving's, if it is the anchor.
        common: Options of every command.
    """
    config, home, ledger = common.tree(Config), common.place(), _ledger(common)
    pointer = _serving(ledger)
    identity, _ = candidates.find(home.store, candidate)
    files = {"serving": serving_results, "candidate": candidate_results}
    if anchor_results or pointer.anchor == pointer.checkpoint:
        files["anchor"] = anchor_results or serving_results
    rows = {arm: evidence.parse_attempts(evidence.read_rows(path), source=str(path)) for arm, path in files.items()}
    now = datetime.now(UTC)
    process = evidence.ProcessFacts(
        lease_held=True, frozen=ledger.frozen(), ships_today=shipping.ships_today(ledger, now=now),
        tombstoned=identity in ledger.tombstones(), parent_serves=True,
    )  # fmt: skip
    found = evidence.Evidence(
        serving=pointer.checkpoint, candidate=identity, anchor=pointer.anchor,
        artifact=artifact.inspect(home, serving=pointer.checkpoint, candidate=identity),
        scores=evidence.parse_scores(evidence.read_rows(scores), source=str(scores)), pooled=evidence.read_pooled(scores),
        benchmark_serving=rows["serving"], benchmark_candidate=rows["candidate"], benchmark_anchor=rows.get("anchor", ()), process=process,
    )  # fmt: skip
    report = gates.decide(found, config.gate)
    common.show(explain.to_dict(report), lambda: explain.to_text(report))
    return EXIT_CODES[report.verdict]


@gate.command(name="explain")
def gate_explain(ship_id: str = "", /, *, common: Common = Common()) -> int:
    """Show every check of a ship: formula, estimate, interval, margin, n, and what would have flipped it.

    Args:
        ship_id: Its id or a prefix; default: the newest.
        common: Options of every command.
    """
    ledger = _ledger(common)
    found = _find(ledger, ship_id)
    if not found["checks"]:
        raise Refused(f"ship {found['ship_id'][:12]} is {found['state']}: no gate has decided on it yet")
    report = explain.from_dict(found)
    weakness = f"\n\n{found['weakness']}" if found["weakness"] else ""
    common.show(found, lambda: explain.to_text(report) + weakness)
    return EXIT_CODES[report.verdict]


# ship -------------------------------------------------------------------------------------------------------------------


def _find(ledger: Ledger, ship_id: str) -> dict[str, Any]:
    if not ship_id:
        newest = ledger.ships(limit=1)
        if not newest:
            raise Refused(f"no ship was ever proposed in {ledger.path}")
        ship_id = newest[0].ship_id
    return shipping.result(ledger, ledger.ship(ship_id).ship_id)


def _event(event: Event) -> dict[str, Any]:
    return asdict(event) | {"at": event.at.isoformat()}


@ship.command(name="list")
def ship_list(*, limit: int = 20, common: Common = Common()) -> None:
    """List the newest ships."""
    ledger = _ledger(common)
    found = [shipping.result(ledger, item.ship_id) for item in ledger.ships(limit=limit)]
    lines = [
        f"{item['created_at'][:19]}  {item['ship_id'][:12]}  policy {item['policy_version']}  {item['state']:<11} {item['verdict'] or '-'}"
        for item in found
    ]
    common.show({"ships": found}, lambda: "\n".join(lines) or "no ship was ever proposed")


@ship.command(name="show")
def ship_show(ship_id: str = "", /, *, common: Common = Common()) -> None:
    """Show one ship and its history.

    Args:
        ship_id: Its id or a prefix; default: the newest.
        common: Options of every command.
    """
    ledger = _ledger(common)
    found = _find(ledger, ship_id)
    history = [_event(event) for event in ledger.history(limit=10_000) if event.ship_id == found["ship_id"]]
    keys = ("ship_id", "candidate", "parent", "policy_version", "state", "verdict", "reason", "created_at", "updated_at")
    lines = [f"{key:<15} {found[key]}" for key in keys] + [f"  {item['at'][:19]} {item['kind']}" for item in reversed(history)]
    common.show(found | {"history": history}, lambda: "\n".join(lines))


@ship.command(name="status")
def ship_status(*, common: Common = Common()) -> None:
    """Show what serves, who holds the leases, and whether shipping is frozen."""
    ledger = _ledger(common)
    pointer = ledger.serving()
    serving = asdict(pointer) | {"changed_at": pointer.changed_at.isoformat()} if pointer else None
    leases = [asdict(lease) | {"expires_at": lease.expires_at.isoformat()} for lease in ledger.leases()]
    found = {"serving": serving, "leases": leases, "frozen": ledger.frozen(), "tombstones": ledger.tombstones()}
    lines = [f"serving  {pointer.checkpoint[:12]} (policy {pointer.policy_version})" if pointer else "serving  nothing"]
    lines += [f"lease    {lease['name']} by {lease['holder']} until {lease['expires_at'][:19]}" for lease in leases]
    lines.append(f"frozen   {found['frozen'] or 'no'}")
    common.show(found, lambda: "\n".join(lines))


@ship.command(name="run")
def ship_run(candidate: str, /, *, reason: Reason, yes: Yes = False, common: Common = Common()) -> int:
    """Take a candidate of this deployment's store through every step, and promote it when the gate passes.

    Args:
        candidate: Checkpoint id or a prefix of it.
        reason: Why, for the people after you.
        yes: Do not ask.
        common: Options of every command.
    """
    from deploy import tasks
    from deploy.orchestrator import config_path

    config, home, ledger = common.tree(Config), common.place(), _ledger(common)
    identity, _ = candidates.find(home.store, candidate)
    _confirm(
        f"sign, measure and gate {identity[:12]} over {_serving(ledger).checkpoint[:12]}; promote it on a PASS", reason=reason, yes=yes
    )
    setting = tasks.Setting(home=home, config=config, common=tasks.common_options(home, config_path(common), list(common.set)))
    found = tasks.try_candidate(setting, identity, now=datetime.now(UTC))
    common.show(found, lambda: explain.to_text(explain.from_dict(found)))
    return EXIT_CODES[Verdict(found["verdict"])]


# A person's verbs -------------------------------------------------------------------------------------------------------


@app.command
def rollback(*, reason: Reason, common: Common = Common()) -> None:
    """Serve the previous checkpoint again, now; bars the one that is taken away. Works from every state."""
    found = rolling_back.roll_back(_ledger(common), reason)
    common.show(found, lambda: rolling_back.describe(found))


@app.command
def freeze(*, reason: Reason, yes: Yes = False, common: Common = Common()) -> None:
    """Stop promotions until `thaw`."""
    ledger = _ledger(common)
    _confirm("no candidate will be promoted until: tidegate thaw --reason '...'", reason=reason, yes=yes)
    ledger.freeze(reason)
    common.show({"frozen": ledger.frozen()}, lambda: f"frozen: {ledger.frozen()}")


@app.command
def thaw(*, reason: Reason, yes: Yes = False, common: Common = Common()) -> None:
    """Allow promotions again."""
    ledger = _ledger(common)
    _confirm(f"candidates may be promoted again (frozen: {ledger.frozen() or 'no'})", reason=reason, yes=yes)
    ledger.thaw(reason)
    common.show({"frozen": ledger.frozen()}, lambda: "thawed")


@anchor.command(name="show")
def anchor_show(*, common: Common = Common()) -> None:
    """Show the checkpoint that drift is measured against."""
    pointer = _serving(_ledger(common))
    common.show({"anchor": pointer.anchor, "serving": pointer.checkpoint}, lambda: f"anchor {pointer.anchor}\nserving {pointer.checkpoint}")


@anchor.command(name="set")
def anchor_set(checkpoint: str = "", /, *, reason: Reason, yes: Yes = False, common: Common = Common()) -> None:
    """Pin the checkpoint that drift is measured against.

    Args:
        checkpoint: Its id or a prefix; default: what serves.
        reason: Why, for the people after you.
        yes: Do not ask.
        common: Options of every command.
    """
    ledger = _ledger(common)
    pointer = _serving(ledger)
    identity = candidates.find(common.place().store, checkpoint)[0] if checkpoint else pointer.checkpoint
    _confirm(f"measure drift against {identity[:12]} instead of {pointer.anchor[:12]}", reason=reason, yes=yes)
    ledger.set_anchor(identity, reason)
    common.show({"anchor": identity}, lambda: f"anchor {identity}")


# Checkpoints ------------------------------------------------------------------------------------------------------------


@ckpt.command(name="ls")
def ckpt_ls(*, common: Common = Common()) -> None:
    """List the store's checkpoints and what each is to the ledger."""
    found = retention.listing(common.place())
    lines = [
        f"{item['checkpoint'][:12]}  policy {item['policy_version'] or '-':<4} {item['bytes'] / 1e6:8.1f} MB  " + ", ".join(item["roles"])
        for item in found
    ]
    common.show({"checkpoints": found}, lambda: "\n".join(lines) or "the store is empty")


@ckpt.command(name="install")
def ckpt_install(checkpoint: str, /, *, common: Common = Common()) -> None:
    """Make a checkpoint the first policy of a new deployment: policy 1, serving and anchor. Later ones are shipped.

    Args:
        checkpoint: Its id or a prefix, as `tidegate trainer warmstart` prints it.
        common: Options of every command.
    """
    home = common.place()
    identity, folder = candidates.find(home.store, checkpoint)
    candidates.verify(folder)
    pointer = Ledger(home.ledger).install(identity)
    found = {"checkpoint": identity, "policy_version": 1, "serving": pointer.checkpoint}
    common.show(found, lambda: f"{identity[:12]} is policy 1; {pointer.checkpoint[:12]} serves")


@ckpt.command(name="verify")
def ckpt_verify(checkpoint: str = "", /, *, common: Common = Common()) -> int:
    """Check checkpoints against their manifests, byte for byte.

    Args:
        checkpoint: Its id or a prefix; default: all.
        common: Options of every command.
    """
    home = common.place()
    wanted = [candidates.find(home.store, checkpoint)[0]] if checkpoint else [item["checkpoint"] for item in retention.listing(home)]
    faults: dict[str, str] = {}
    with progress("verifying", total=len(wanted)) as advance:
        for identity in wanted:
            try:
                candidates.verify(home.store / identity)
                if candidates.checkpoint_id(home.store / identity) != identity:
                    faults[identity] = "its manifest is another checkpoint's"
            except CheckpointInvalid as error:
                faults[identity] = str(error)
            advance(1)
    text = "\n".join(f"{identity[:12]}  {faults.get(identity, 'ok')}" for identity in wanted)
    common.show({"verified": len(wanted), "faults": faults}, lambda: text or "the store is empty")
    return 1 if faults else 0


@ckpt.command(name="gc")
def ckpt_gc(*, reason: Reason, yes: Yes = False, common: Common = Common()) -> None:
    """Remove checkpoints that nothing needs: all but serving, previous, anchor, open ships and the last confirmed ones."""
    home, config = common.place(), common.tree(Config)
    ledger = _ledger(common)
    doomed = retention.removable(home, ledger, keep_confirmed=config.release.keep_confirmed)
    lines = [f"remove {item['checkpoint'][:12]} ({item['bytes'] / 1e6:.1f} MB)" for item in doomed]
    _confirm("\n".join(lines) or "nothing to remove", reason=reason, yes=yes or not doomed)
    for item in doomed:
        retention.remove(home, item["checkpoint"])
    common.show({"removed": doomed}, lambda: f"{len(doomed)} removed")


if __name__ == "__main__":
    sys.exit(run(app))
