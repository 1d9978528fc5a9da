"""What the parts of a cycle do: freeze a window, train, evaluate, gate, ship or keep.

Plain functions over a `Cycle`; `flows.py` strings them together for Prefect, which is schedule, retries and UI and nothing more.
Each launches stage processes and never imports their loops. What a part returned is kept in the cycle's journal, so that the
same command after a kill goes on with the same window and the same candidate.

Takes: the deployment's folder, settings, and the stages' commands (`StageCommands`; tests give small real scripts).
Leaves out: statistics and decisions (`release/`), processes (`launch.py`).
"""

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from deploy import launch, observe
from deploy.config import Config
from deploy.release import ship, signing
from deploy.release.evidence import Attempt, Evidence, parse_attempts, parse_scores, read_pooled, read_rows
from deploy.release.leases import SHIP_LEASE
from deploy.release.ledger import Ledger
from deploy.release.records import Pointer
from pipelines import errors
from pipelines.storage import Home, write_atomic

log = logging.getLogger(__name__)

FRONTIER_POLL_S: Final = 2.0
BENCHMARK_SEED: Final = 20_260_101
"""One seed for all gates: serving and candidate meet the same tasks, users and sampling seeds."""


def python_module(*words: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation."""
    return (sys.executable, "-m", *words)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCommands:
    """Commands of the stages; `{name}` is filled in, the common options are appended (not to `observe`)."""

    signals: tuple[str, ...] = python_module("signals", "run", "--once", "--tombstoned", "{tombstoned}")
    observe: tuple[str, ...] = python_module("deploy.observe")
    train: tuple[str, ...] = python_module(
        "trainer", "update", "--parent", "{parent}", "--policy-version", "{policy_version}", "--lake-version", "{lake_version}"
    )
    score: tuple[str, ...] = python_module(
        "trainer", "score", "--checkpoint", "{candidate}", "--reference", "{serving}", "--policy-version", "{policy_version}",
        "--lake-version", "{lake_version}", "--limit", "{limit}",
    )  # fmt: skip
    gateway: tuple[str, ...] = python_module(
        "deploy.serving", "--pin", "{folder}", "--policy-version", "{policy_version}", "--arm", "{arm}", "--port", "{port}"
    )
    benchmark: tuple[str, ...] = python_module("deploy.benchmark", "run", "--gateway", "{url}", "--seed", "{seed}", "--out", "{out}")

    mirror: tuple[str, ...] = python_module("deploy.release.registry")

    @classmethod
    def of(cls, given: Mapping[str, list[str]] | None) -> "StageCommands":
        """Return the commands with some replaced.

        Raises:
            ConfigError: A name is not a stage's.
        """
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(given or {}) - known):
            raise errors.ConfigError(f"{', '.join(unknown)}: no such stage command; known: {', '.join(sorted(known))}")
        return cls(**{name: tuple(words) for name, words in (given or {}).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a cycle runs and with what; all of it can be written down as the parameters of a scheduled run."""

    home: Home
    config: Config
    common: tuple[str, ...] = ()
    """Options given to every stage: --home, --config, --set."""
    commands: StageCommands = field(default_factory=StageCommands)

    def argv(self, command: tuple[str, ...], **values: object) -> list[str]:
        """Fill in a command and append the common options."""
        return [word.format(**values) for word in command] + list(self.common)

    def job(self, name: str, command: tuple[str, ...], **values: object) -> dict[str, Any]:
        """Run a stage's command to its end (see `launch.run_job`)."""
        return launch.run_job(self.home, name, self.argv(command, **values), timeout_s=self.config.schedule.stage_timeout_s)

    @property
    def ledger(self) -> Ledger:
        """The deployment's ledger."""
        return Ledger(self.home.ledger)


def common_options(home: Home, config: Path | None, overrides: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Return the options that make a stage see this deployment with these settings."""
    words = ["--home", str(home.root)]
    if config is not None:
        words += ["--config", str(config.absolute())]
    for text in overrides:
        words += ["--set", text]
    return tuple(words)


# The journal ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What served when the cycle began."""

    checkpoint: str
    policy_version: int
    anchor: str


class Journal:
    """What the current cycle has done so far, in `cycles/current.json`; survives a kill, ends with the cycle."""

    def __init__(self, home: Home) -> None:
        self.folder = home.root / "cycles"
        self.path = self.folder / "current.json"

    def open(self, pointer: Pointer, *, now: datetime) -> Parent:
        """Return the parent of the unfinished cycle, or begin one over what serves.

        A cycle that was killed goes on while its parent serves, or its candidate does (then only its end is missing);
        any other is closed as overtaken.
        """
        current = self.read()
        if current is not None:
            candidate = current["steps"].get("train", {}).get("checkpoint")
            if pointer.checkpoint in (current["parent"]["checkpoint"], candidate):
                return Parent(**current["parent"])
            self.close("overtaken")
        parent = Parent(checkpoint=pointer.checkpoint, policy_version=pointer.policy_version, anchor=pointer.anchor)
        name = f"{now:%Y%m%dT%H%M%S%fZ}-{parent.checkpoint[:8]}"
        self._write({"cycle": name, "parent": asdict(parent), "started_at": now.isoformat(), "steps": {}, "seconds": {}})
        return parent

    def read(self) -> dict[str, Any] | None:
        """Return the current cycle's record, or None."""
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def frozen_before(self) -> datetime | None:
        """Return when the newest earlier cycle that froze a window began; None when there was none."""
        begun: list[datetime] = []
        for path in self.folder.glob("2*.json"):  # closed records are named by their time
            record = json.loads(path.read_text(encoding="utf-8"))
            if "freeze" in record.get("steps", {}):
                begun.append(datetime.fromisoformat(record["started_at"]))
        return max(begun, default=None)

    def step(self, name: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the step's stored result, or do it and store it with its own seconds (without those of steps inside it)."""
        current = self.read()
        if current is None:
            raise errors.ContractViolation(f"{self.path} is missing; start the cycle again: tidegate cycle")
        if name in current["steps"]:
            return dict(current["steps"][name])
        begun, before = time.monotonic(), set(current["seconds"])
        result = act()
        current = self.read() or current  # a step inside this one has written its own result
        inner = sum(seconds for step, seconds in current["seconds"].items() if step not in before)
        current["steps"][name] = result
        current["seconds"][name] = round(max(0.0, time.monotonic() - begun - inner), 3)
        self._write(current)
        return dict(result)

    def close(self, outcome: str) -> dict[str, Any]:
        """End the cycle, keep its record under its own name, and return it."""
        current = self.read()
        if current is None:
            return {}
        current["outcome"] = outcome
        write_atomic(self.folder / f"{current['cycle']}.json", json.dumps(current, indent=1).encode())
        self.path.unlink(missing_ok=True)
        return current

    def _write(self, record: Mapping[str, Any]) -> None:
        write_atomic(self.path, json.dumps(record, indent=1).encode())


# The parts of a cycle ---------------------------------------------------------------------------------------------------


def serving_pointer(setting: Setting) -> Pointer:
    """Return what serves.

    Raises:
        Refused: Nothing serves yet.
    """
    pointer = setting.ledger.serving()
    if pointer is None:
        raise errors.Refused(
            f"nothing serves in {setting.home.root} yet; install a first checkpoint: tidegate ckpt install ID (or tidegate demo)"
        )
    return pointer


def freeze_window(setting: Setting) -> dict[str, Any]:
    """Bring every event that is on the topic now into the lake, and name the table versions that hold them.

    Raises:
        TransientError: A running stream did not get there in time.
    """
    since = Journal(setting.home).frozen_before()
    tombstoned = write_tombstoned(setting.home, setting.ledger)
    try:
        result = setting.job("signals", setting.commands.signals, tombstoned=tombstoned)
        window = {
            "lake_version": result["lake_versions"].get("samples"), "lake_versions": result["lake_versions"],
            "frontier": result["frontier"], "signals": result,
        }  # fmt: skip
    except errors.Busy:
        window = _wait_for_stream(setting)
    return window | {"gaps": observe.accepted_gaps(setting.home, since=since)}


def write_tombstoned(home: Home, ledger: Ledger) -> Path:
    """Write the policy versions whose turns must not be trained on, for the signal jobs; returns the file."""
    path = home.root / "tombstoned.json"
    write_atomic(path, json.dumps(ledger.quarantined()).encode())
    return path


def _wait_for_stream(setting: Setting) -> dict[str, Any]:
    """The stream is alive: wait until the lake holds what the topic holds now and has distilled it, without what was rolled back."""
    dead = frozenset(setting.ledger.quarantined())
    deadline = time.monotonic() + setting.config.schedule.freeze_timeout_s
    wanted: dict[str, int] = launch.run_job(setting.home, "observe", setting.argv(setting.commands.observe), timeout_s=60)["ends"]
    while time.monotonic() < deadline:
        seen = observe.lake_state(setting.home)
        if seen.versions and seen.tombstoned == dead and all(seen.distilled.get(part, 0) >= end for part, end in wanted.items()):
            return {
                "lake_version": seen.versions.get("samples"),
                "lake_versions": seen.versions,
                "frontier": seen.distilled,
                "signals": None,
            }
        time.sleep(FRONTIER_POLL_S)
    raise errors.TransientError(
        f"the running stream did not reach the end of the topic in {setting.config.schedule.freeze_timeout_s:.0f} s; "
        f"see {setting.home.logs / 'stream.log'} and tidegate status"
    )


def train(setting: Setting, parent: Parent, window: Mapping[str, Any]) -> dict[str, Any]:
    """Train one candidate on the window, sign it and give it its policy version; `checkpoint` is None when there was nothing to learn.

    Raises:
        StageError: The trainer's own failure.
    """
    if window["lake_version"] is None:
        return {"checkpoint": None, "policy_version": None, "reason": "there are no samples yet"}
    if gaps := window.get("gaps"):
        reason = f"events of this window are lost, so nothing is promoted from it ({'; '.join(gaps)}); the next cycle goes on"
        return {"checkpoint": None, "policy_version": None, "reason": reason}
    result = setting.job(
        "trainer", setting.commands.train, parent=parent.checkpoint, policy_version=parent.policy_version,
        lake_version=window["lake_version"],
    )  # fmt: skip
    candidate = result.get("checkpoint")
    if candidate and candidate != parent.checkpoint:
        signing.sign(setting.home, candidate)
        return result | {"policy_version": setting.ledger.register(candidate, parent.checkpoint)}
    return result | {"checkpoint": None, "policy_version": None}


def evaluate(setting: Setting, parent: Parent, candidate: str, window: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the candidate beside serving and anchor; returns the result files.

    Raises:
        StageError: A stage's own failure; nothing is decided then.
    """
    versions = {checkpoint: number for number, checkpoint in setting.ledger.policies().items()}
    benchmark = {
        arm: str(benchmark_file(setting, checkpoint, arm=arm, policy_version=versions[checkpoint]))
        for arm, checkpoint in (("serving", parent.checkpoint), ("candidate", candidate), ("anchor", parent.anchor))
    }
    scores = setting.home.root / "cycles" / f"scores-{candidate[:16]}-{window['lake_version']}.json"
    if not scores.exists():
        result = setting.job(
            "score", setting.commands.score, candidate=candidate, serving=parent.checkpoint, policy_version=parent.policy_version,
            lake_version=window["lake_version"],
            limit=setting.config.release.score_rows,
        )  # fmt: skip
        write_atomic(scores, json.dumps(result).encode())
    return {"benchmark": benchmark, "scores": str(scores)}


def benchmark_file(setting: Setting, checkpoint: str, *, arm: str, policy_version: int) -> Path:
    """Return a checkpoint's benchmark results, running the benchmark the first time.

    Raises:
        EngineUnavailable: The pinned gateway did not come up.
    """
    folder = setting.home.root / "benchmark" / f"{checkpoint[:16]}-{observe.digest_of(setting.config.benchmark)[:8]}-{BENCHMARK_SEED}"
    found = folder / "results.jsonl"
    if (folder / "DONE").exists():
        return found
    port = launch.free_port()
    url = f"http://127.0.0.1:{port}"
    stamped = "none" if arm == "serving" else arm
    gateway = setting.commands.gateway
    argv = setting.argv(gateway, folder=setting.home.store / checkpoint, policy_version=policy_version, arm=stamped, port=port)
    name = f"gateway-{arm}"
    launch.stop(setting.home, name)  # left by a killed run: it may serve another checkpoint
    ready = observe.answers(f"{url}/health")
    with launch.service(setting.home, name, argv, ready=ready, deadline_s=setting.config.release.engine_start_s):
        launch.run_job(
            setting.home, f"benchmark-{arm}", setting.argv(setting.commands.benchmark, url=url, seed=BENCHMARK_SEED, out=folder),
            timeout_s=setting.config.schedule.stage_timeout_s, env={"TIDEGATE_API_KEY": observe.api_key(setting.home)},
        )  # fmt: skip
    write_atomic(folder / "DONE", b"")
    return found


def evidence(parent: Parent, candidate: str, files: Mapping[str, Any]) -> Evidence:
    """Read the result files of `evaluate`.

    Raises:
        ContractViolation: A file is missing or breaks its schema.
    """

    def attempts(arm: str) -> tuple[Attempt, ...]:
        path = Path(files["benchmark"][arm])
        return parse_attempts(read_rows(path), source=str(path))

    scores = Path(files["scores"])
    return Evidence(
        serving=parent.checkpoint, candidate=candidate, anchor=parent.anchor, artifact=None,
        scores=parse_scores(read_rows(scores), source=str(scores)), pooled=read_pooled(scores), benchmark_serving=attempts("serving"),
        benchmark_candidate=attempts("candidate"), benchmark_anchor=attempts("anchor"),
    )  # fmt: skip


def try_candidate(setting: Setting, candidate: str, *, now: datetime) -> dict[str, Any]:
    """Take a candidate that is in the store through the same steps as a trained one, measured on the lake as it is.

    Args:
        setting: The deployment.
        candidate: Its id; it is signed here, so only give what this deployment made.
        now: For the limit of ships a day.

    Returns:
        See `ship.result`.

    Raises:
        Busy: Another shipper is at work.
        Refused: Frozen, tombstoned, or its parent does not serve.
    """
    pointer = serving_pointer(setting)
    parent = Parent(checkpoint=pointer.checkpoint, policy_version=pointer.policy_version, anchor=pointer.anchor)
    signing.sign(setting.home, candidate)
    setting.ledger.register(candidate, parent.checkpoint)

    def measure() -> Evidence:
        window = {"lake_version": observe.lake_state(setting.home).versions.get("samples")}
        return evidence(parent, candidate, evaluate(setting, parent, candidate, window))

    with ship.holding(setting.ledger, SHIP_LEASE, setting.config.release) as lease:
        return ship.run(
            shipper(setting, lease.epoch), parent.checkpoint, candidate, measure=measure,
            wait_for_gateway=lambda moved: wait_for_gateway(setting, moved), now=now,
        )  # fmt: skip


def wait_for_gateway(setting: Setting, pointer: Pointer) -> bool:
    """Wait until the gateway answers from a policy; False when none runs or it did not swap in time."""
    deadline = time.monotonic() + setting.config.release.swap_timeout_s
    while time.monotonic() < deadline:
        status = observe.gateway_status(setting.home)
        if status is None:
            return False
        if observe.served_policy(status) == pointer.policy_version:
            return True
        time.sleep(FRONTIER_POLL_S / 4)
    return False


def mirror(setting: Setting) -> dict[str, Any]:
    """Bring MLflow's registry up to date; a failure is told and counted, it stops nothing."""
    try:
        return setting.job("mirror", setting.commands.mirror) | {"failed": 0}
    except errors.StageError as error:
        log.warning("registry mirror not written", extra={"fields": {"error": str(error)}})
        return {"created": 0, "aliases": 0, "failed": 1}


def shipper(setting: Setting, epoch: int) -> ship.Shipper:
    """Return what the steps of a ship need."""
    return ship.Shipper(ledger=setting.ledger, home=setting.home, gate=setting.config.gate, release=setting.config.release, epoch=epoch)


def forget_measurements(setting: Setting, candidate: str) -> None:
    """Remove a rejected candidate's benchmark results, which nothing reads again."""
    for folder in (setting.home.root / "benchmark").glob(f"{candidate[:16]}-*"):
        shutil.rmtree(folder, ignore_errors=True)
