"""The demo: the whole loop once or more, on real parts, with simulated users, ending in a report.

Takes: a size and a seed. Gives: a deployment under `<home>/demo` that did K cycles, and `report.html` and `report.json` in
`<home>/reports/demo`. A demo that was killed goes on where it stopped when the same command is given again; one that finished
starts anew, keeping only the checkpoints it can reuse. Everything it starts, it stops. Leaves out: figures (`readout.py`) and
looks (`report.py`).
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from deploy import launch, observe, orchestrator, readout, report, tasks
from deploy.config import Config
from pipelines.broker import EmbeddedBroker
from pipelines.storage import Home, write_atomic

SAMPLE: Final = Path(__file__).parents[1] / "pipelines" / "importers" / "samples" / "claude_code.jsonl"
TRANSCRIPTS: Final = Path("~/.claude/projects")
KEPT: Final = ("store", "keys", "training")
"""What a new demo keeps of a finished one: all of it is named by content, or secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The demo's size."""

    sessions: int
    """Simulated sessions before the first cycle and after each."""
    cycles: int
    seed: int
    imports: tuple[str, ...] = ()
    """Transcript folders or files to import besides the sample."""
    hack: Literal["invalid-tools", "none"] = "invalid-tools"
    """Which reward hack is planted at the end."""


class Run:
    """One demo's memory: what is done, and how long each stage took. Survives a kill."""

    def __init__(self, home: Home, plan: Plan) -> None:
        self.path = home.root / "demo.json"
        self.home = home
        state = self._read()
        if state is None or state["finished"] or state["plan"] != json.loads(json.dumps(asdict(plan))):
            _clear(home)
            state = {"plan": asdict(plan), "finished": False, "stages": {}, "results": {}}
        self.state: dict[str, Any] = state
        self._write()

    def _read(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):
            return None

    def _write(self) -> None:
        write_atomic(self.path, json.dumps(self.state, indent=1, default=str).encode())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Name a stage on the terminal and add its seconds."""
        print(f"── {name}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            yield
        finally:
            self.state["stages"][name] = round(self.state["stages"].get(name, 0.0) + time.monotonic() - begun, 2)
            self._write()

    def once(self, name: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a stage's stored result, or do it and store it."""
        if name not in self.state["results"]:
            with self.timed(name):
                result = act()
            self.state["results"][name] = result
            self._write()
        return dict(self.state["results"][name])

    def finish(self) -> None:
        """Mark the demo as done, so that the next one starts anew."""
        self.state["finished"] = True
        self._write()


def _clear(home: Home) -> None:
    if home.root.exists():
        for path in home.root.iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    home.root.mkdir(parents=True, exist_ok=True)


def found_transcripts() -> int:
    """Return how many Claude Code transcripts this person has."""
    folder = TRANSCRIPTS.expanduser()
    return sum(1 for _ in folder.rglob("*.jsonl")) if folder.is_dir() else 0


def _warm_start(run: Run, setting: tasks.Setting) -> None:
    """Bring a first policy to serve: the packaged model, taught the tool-call syntax."""
    base = run.once("base model", lambda: setting.job("import-base", tasks.python_module("trainer", "import-base")))
    data = run.home.root / "demonstrations.jsonl"
    number = setting.config.warmstart.max_examples

    def demonstrations() -> dict[str, Any]:
        words = tasks.python_module("deploy.harness", "demonstrations", "--number", str(number), "--out", str(data))
        return setting.job("demonstrations", words)

    run.once("demonstrations", demonstrations)
    words = tasks.python_module("trainer", "warmstart", "--parent", base["checkpoint"], "--data", str(data))
    warm = run.once("warm start", lambda: setting.job("warmstart", words))
    setting.ledger.install(warm["checkpoint"])


@contextmanager
def _services(run: Run, setting: tasks.Setting) -> Iterator[str]:
    """Run broker and gateway for the life of the block; yields the gateway's address."""
    home = run.home
    with ExitStack() as stack:
        with run.timed("start broker"):
            stack.enter_context(EmbeddedBroker(home, config=setting.config.kafka))
        with run.timed("start Prefect"):
            stack.callback(launch.stop, home, "prefect")
            orchestrator.start_server(home, detached=False)
        _warm_start(run, setting)
        with run.timed("start gateway"):
            argv = setting.argv(tasks.python_module("deploy.serving"))
            launch.stop(home, "gateway")  # left by a killed demo
            running = launch.service(
                home,
                "gateway",
                argv,
                ready=lambda: observe.gateway_status(home) is not None,
                deadline_s=setting.config.release.engine_start_s,
            )
            stack.enter_context(running)
        url = observe.gateway_url(home)
        assert url is not None, "the gateway answered, so its address is written"
        yield url


def _sessions(run: Run, setting: tasks.Setting, plan: Plan, url: str, round_number: int) -> None:
    words = tasks.python_module(
        "deploy.harness", "run", "--gateway", url, "--sessions", str(plan.sessions), "--seed", str(plan.seed + 1000 * round_number),
        "--out", str(run.home.root / "sessions" / str(round_number)),
    )  # fmt: skip
    run.once(f"sessions {round_number}", lambda: setting.job("sessions", words))


def _import(run: Run, setting: tasks.Setting, plan: Plan) -> None:
    words = tasks.python_module("pipelines", "claude-code", str(SAMPLE), *plan.imports)
    run.once("import transcripts", lambda: setting.job("import", words))


def _cycle(run: Run, number: int, cycle: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    before = len(run.state["stages"])
    result = run.once(f"cycle {number}", cycle)
    parts = {f"cycle {number}: {name}": seconds for name, seconds in result.get("seconds", {}).items()}
    if parts and len(run.state["stages"]) > before:
        whole = run.state["stages"].pop(f"cycle {number}")
        rest = whole - sum(parts.values())
        run.state["stages"] |= parts | {f"cycle {number}: orchestration": round(max(rest, 0.0), 2)}
    return result


def _plant(run: Run, setting: tasks.Setting) -> dict[str, Any]:
    """Make a candidate that breaks its tool calls, and hand it to the same gate."""
    pointer = tasks.serving_pointer(setting)
    data = run.home.root / "broken.jsonl"
    setting.job("demonstrations", tasks.python_module("deploy.harness", "demonstrations", "--broken", "--number", "32", "--out", str(data)))
    words = tasks.python_module("trainer", "sabotage", "--parent", pointer.checkpoint, "--kind", "invalid-tools", "--data", str(data))
    candidate = setting.job("sabotage", words)["checkpoint"]
    return tasks.try_candidate(setting, candidate, now=datetime.now(UTC))


def run_demo(plan: Plan, config: Config, home: Home, *, settings: Path, overrides: list[str]) -> dict[str, Any]:
    """Run the demo and write its report.

    Args:
        plan: Its size.
        config: All settings.
        home: The demo's own folder.
        settings: The TOML file that stage processes read.
        overrides: `section.key=value` texts that stage processes get.

    Returns:
        The content of `report.json`.

    Raises:
        StageError: A stage's own failure; the same command again goes on.
    """
    run = Run(home, plan)
    setting = tasks.Setting(home=home, config=config, common=tasks.common_options(home, settings, overrides))

    def cycle() -> dict[str, Any]:
        return orchestrator.cycle(config, home, settings=settings, overrides=overrides)

    with _services(run, setting) as url:
        _import(run, setting, plan)
        cycles: list[dict[str, Any]] = []
        for number in range(1, plan.cycles + 1):
            _sessions(run, setting, plan, url, number)
            cycles.append(_cycle(run, number, cycle))
        _sessions(run, setting, plan, url, plan.cycles + 1)
        ends = run.once("count events", lambda: setting.job("observe", setting.commands.observe))["ends"]
        run.once("last distil", lambda: tasks.freeze_window(setting))
        planted = run.once("planted hack", lambda: _plant(run, setting)) if plan.hack != "none" else None
    with run.timed("report"):
        data = _report(run, plan, home, cycles=cycles, planted=planted, produced=sum(ends.values()))
    run.finish()
    return data


def _report(
    run: Run, plan: Plan, home: Home, *, cycles: list[dict[str, Any]], planted: dict[str, Any] | None, produced: int
) -> dict[str, Any]:
    policies = readout.policies(home)
    by_version = {policy["version"]: policy for policy in policies}
    data: dict[str, Any] = {
        "seed": plan.seed,
        "sessions": plan.sessions * (plan.cycles + 1),
        "stages": run.state["stages"],
        "events": readout.event_counts(home, produced=produced),
        "turns": readout.outcomes(home),
        "cycles": [
            {
                "policy_before": cycle["policy_before"],
                "policy_after": cycle["policy_after"],
                "candidate": cycle["candidate"],
                "verdict": cycle["verdict"],
                "reasons": cycle["reasons"],
                "reward": by_version.get(cycle["policy_before"], {}).get("reward", {}),
                "reward_after": by_version.get(cycle["policy_after"], {}).get("reward", {}),
            }
            for cycle in cycles
        ],
        "policies": [
            {"version": p["version"], "reward": p["reward"]} | {name: asdict(figure) for name, figure in p["figures"].items()}
            for p in policies
        ],
        "planted_hack": planted
        and {
            "story": "A candidate was trained to emit malformed tool calls, so that its turns would drop out of a careless reward.",
            "verdict": planted["verdict"],
            "reasons": planted["reasons"],
        },
        "tables": readout.tables(home),
        "lake": str(home.lake),
        "ledger": str(home.ledger),
    }
    gates = [
        _gate(f"Cycle {number}: every check of the gate", cycle.get("ship"), opened=False) for number, cycle in enumerate(cycles, start=1)
    ] + [_gate("The planted hack: every check of the gate", planted, opened=False)]
    page = report.render(
        data, policies=policies, gates=[gate for gate in gates if gate], duckdb_line=readout.lake.duckdb_line(home, "rewards")
    )
    write_atomic(home.reports / "report.html", page.encode())
    write_atomic(home.reports / "report.json", json.dumps(data, indent=1, default=str).encode())
    return data


def _gate(title: str, ship: dict[str, Any] | None, *, opened: bool) -> dict[str, Any] | None:
    if not ship or not ship.get("checks"):
        return None
    return {"title": title, "checks": ship["checks"], "weakness": ship.get("weakness", ""), "open": opened}


def to_text(data: dict[str, Any], home: Home) -> str:
    """Return the closing table for a terminal."""
    lines = [f"{'policy':>8} {'edits kept':>22} {'dissatisfied':>22} {'sampling s':>22} {'invalid calls':>22}"]
    for policy in data["policies"]:
        cells = [_cell(policy[key], percent=key != "latency_s") for key in ("kept_edits", "dissatisfied", "latency_s", "invalid_calls")]
        lines.append(f"{policy['version']:>8} " + " ".join(f"{cell:>22}" for cell in cells))
    for number, cycle in enumerate(data["cycles"], start=1):
        why = "; ".join(cycle["reasons"]) or "every required check passed"
        lines.append(
            f"cycle {number}: policy {cycle['policy_before']} -> {cycle['policy_after']}, {cycle['verdict'] or 'nothing to train'}: {why}"
        )
    if data["planted_hack"]:
        lines.append(f"planted hack: {data['planted_hack']['verdict']}: " + "; ".join(data["planted_hack"]["reasons"][:3]))
    lines.append("turns: " + ", ".join(f"{outcome} {count}" for outcome, count in data["turns"].items()))
    lines.append(f"{sum(data['stages'].values()) / 60:.1f} minutes; report: {home.reports / 'report.html'}")
    return "\n".join(lines)


def _cell(figure: dict[str, Any], *, percent: bool) -> str:
    if figure["estimate"] is None:
        return "none"
    scale, unit = (100, " %") if percent else (1, "")
    return f"{scale * figure['estimate']:.1f}{unit} [{scale * figure['low']:.1f}, {scale * figure['high']:.1f}]"
