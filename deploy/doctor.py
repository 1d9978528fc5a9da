"""`tidegate doctor`: what is wrong with this machine or this deployment, and what to do about it.

One function a check, in a table; each gives findings (ok, warn, fail) and none changes anything. A check that fails in a way
nobody foresaw is itself a finding. Useful on a fresh machine (no home yet) as on a running deployment.
Leaves out: repairs, and gradient parity of the training engine: every training job checks its own, `tidegate trainer doctor` all.
"""

import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import psutil
from cyclopts import App

from deploy import launch, observe
from deploy.config import Config
from deploy.harness.sandbox import open_sandbox
from deploy.release.ledger import Ledger
from deploy.release.states import FINAL
from pipelines import broker
from pipelines.errors import StageError
from pipelines.java import find_java, jars_folder
from pipelines.storage import Home
from pipelines.terminal import Common, progress, run
from trainer import candidates, deepspeed_config

Level = Literal["ok", "warn", "fail"]

ROOT: Final = Path(__file__).parents[1]
PINS: Final = ROOT / "infra" / "requirements" / "all.txt"
JAR_LISTS: Final = ROOT / "infra" / "jvm"
WATCHED: Final = (
    "pyspark",
    "delta-spark",
    "deltalake",
    "kafka-python",
    "torch",
    "deepspeed",
    "transformers",
    "prefect",
    "mlflow",
    "pandas",
)
"""Packages whose exact version this project depends on."""
DISK_FAIL_BYTES: Final = 2_000_000_000
DISK_WARN_BYTES: Final = 10_000_000_000
"""A demo writes about 3 GB: two checkpoints, a Kafka log, the lake."""
MEMORY_WARN_BYTES: Final = 6_000_000_000
CLOCK_SKEW_S: Final = 5.0
DRIFT_STALE_H: Final = 3.0
"""The stream has the monitors look every hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    found: str
    do: str = ""
    """What to do; empty when it is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is looked at."""

    config: Config
    home: Home
    now: datetime

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, None in a fresh home."""
        return Ledger(self.home.ledger) if self.home.ledger.exists() else None


def _ok(check: str, found: str) -> Finding:
    return Finding(check=check, level="ok", found=found)


# The machine ------------------------------------------------------------------------------------------------------------


def java(_: Place) -> Iterator[Finding]:
    """Java is new enough."""
    yield _ok("java", str(find_java()))


def jars(_: Place) -> Iterator[Finding]:
    """The pinned jars are there, byte for byte."""
    for name in ("kafka", "spark"):
        folder = jars_folder(name)
        listed = JAR_LISTS / f"{name}.sha256"
        if not listed.exists():
            yield Finding(check=f"jars.{name}", level="warn", found=f"{listed} is not here to compare with", do="run from a clone")
            continue
        wanted = {line.split()[1].lstrip("*"): line.split()[0] for line in listed.read_text().splitlines() if len(line.split()) == 2}
        wrong = [jar for jar, sha in wanted.items() if not (folder / jar).exists() or _sha256(folder / jar) != sha]
        if wrong:
            found = f"{len(wrong)} of {len(wanted)} jars missing or altered: {', '.join(wrong[:3])}"
            yield Finding(check=f"jars.{name}", level="fail", found=found, do="bash infra/scripts/setup")
        else:
            yield _ok(f"jars.{name}", f"{len(wanted)} jars as pinned in {folder}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions(_: Place) -> Iterator[Finding]:
    """Installed packages are the pinned ones; known-bad DeepSpeed versions are refused."""
    pins = {}
    if PINS.exists():
        for line in PINS.read_text().splitlines():
            name, equals, rest = line.partition("==")
            if equals:
                pins[name.split("[")[0].strip().lower()] = rest.split()[0].rstrip("\\").strip()
    drifted: list[str] = []
    for name in WATCHED:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(check="versions", level="fail", found=f"{name} is not installed", do="bash infra/scripts/setup")
            continue
        if name in pins and installed != pins[name]:
            drifted.append(f"{name} {installed} (pinned {pins[name]})")
        if name == "deepspeed" and (fault := deepspeed_config.version_fault(installed)):
            yield Finding(check="versions.deepspeed", level="fail", found=fault, do="bash infra/scripts/setup")
    if drifted:
        yield Finding(check="versions", level="warn", found=", ".join(drifted), do="bash infra/scripts/setup")
    else:
        yield _ok("versions", f"{len(WATCHED)} packages as pinned")


def sandbox(place: Place) -> Iterator[Finding]:
    """The policy's commands can be confined."""
    if place.config.harness.sandbox == "none":
        do = 'set harness.sandbox = "bubblewrap" unless this machine is a sandbox itself'
        yield Finding(check="sandbox", level="warn", found="the policy's commands run unconfined", do=do)
        return
    open_sandbox(place.config.harness)
    yield _ok("sandbox", f"{place.config.harness.sandbox} confines commands")


def room(place: Place) -> Iterator[Finding]:
    """There is disk and memory left."""
    existing = next(path for path in (place.home.root, *place.home.root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    level: Level = "fail" if free < DISK_FAIL_BYTES else "warn" if free < DISK_WARN_BYTES else "ok"
    do = "" if level == "ok" else "free some space, move TIDEGATE_HOME, or run: tidegate ckpt gc --reason '...'"
    yield Finding(check="disk", level=level, found=f"{free / 1e9:.1f} GB free in {existing}", do=do)
    memory = psutil.virtual_memory().available
    enough = memory >= MEMORY_WARN_BYTES
    do = "" if enough else "stop other programs; the demo needs about 6 GB at once"
    yield Finding(check="memory", level="ok" if enough else "warn", found=f"{memory / 1e9:.1f} GB available", do=do)


def cores(place: Place) -> Iterator[Finding]:
    """Threads do not outnumber cores: an OpenMP barrier next to a busy neighbour is 50 times slower."""
    count = len(os.sched_getaffinity(0))
    threads = place.config.serving.engine_threads()
    asked = os.environ.get("OMP_NUM_THREADS")
    if threads > count or (asked and asked.isdigit() and int(asked) > count):
        found = f"{count} cores for {threads} engine threads (OMP_NUM_THREADS={asked or 'unset'})"
        yield Finding(check="cores", level="warn", found=found, do=f"set serving.threads and OMP_NUM_THREADS to at most {count}")
    else:
        yield _ok("cores", f"{count} cores, {threads} engine threads")


def training(place: Place) -> Iterator[Finding]:
    """Ranks have cores, and the chosen ZeRO stage can do what is asked of it."""
    settings = place.config.trainer
    deepspeed_config.build(
        zero_stage=settings.zero_stage, dtype=settings.dtype, lr=settings.lr, weight_decay=settings.weight_decay,
        grad_clip=settings.grad_clip, offload=settings.offload,
    )  # fmt: skip
    count, asked = len(os.sched_getaffinity(0)), settings.world_size * settings.threads_per_rank
    ranks = f"{settings.world_size} ranks of {settings.threads_per_rank} threads"
    found = f"{ranks}, ZeRO {settings.zero_stage}, {settings.adapter}, {settings.dtype}"
    if asked > count and not Path("/dev/nvidia0").exists():
        do = f"lower trainer.world_size or trainer.threads_per_rank: there are {count} cores"
        yield Finding(check="training", level="warn", found=found, do=do)
    else:
        yield _ok("training", found)


def ports(place: Place) -> Iterator[Finding]:
    """A configured port is free or ours."""
    port = place.config.serving.port
    if port == 0:
        yield _ok("ports", "free ports are taken as needed")
        return
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr[1] == port]
    ours = launch.find(place.home, "gateway")
    if listening and (ours is None or ours.pid not in {c.pid for c in listening}):
        do = "stop that program or choose another serving.port (0 takes a free one)"
        yield Finding(check="ports", level="fail", found=f"port {port} is taken by pid {listening[0].pid}", do=do)
    else:
        yield _ok("ports", f"port {port} is {'ours' if listening else 'free'}")


# The deployment ---------------------------------------------------------------------------------------------------------


def topic(place: Place) -> Iterator[Finding]:
    """The broker answers, and keeps events long enough for a cycle that is late twice."""
    needed = 3 * (place.config.schedule.interval_hours + place.config.rewards.window_s / 3600)
    kept = place.config.kafka.retention_hours
    if kept < needed:
        do = f"set kafka.retention_hours to at least {needed:.0f}"
        yield Finding(check="topic.retention", level="fail", found=f"events are kept {kept} h, three cycles need {needed:.0f} h", do=do)
    else:
        yield _ok("topic.retention", f"events are kept {kept} h, {needed:.0f} h are needed")
    if not place.config.kafka.bootstrap_servers and broker.running(place.home) is None:
        yield Finding(check="topic.broker", level="warn", found="the embedded broker is not running", do="tidegate up")
        return
    ends = observe.topic_ends(place.config, place.home)
    yield _ok("topic.broker", f"answers; {sum(ends.values())} events on {len(ends)} partitions")
    behind = sum(end - observe.lake_state(place.home).frontier.get(part, 0) for part, end in ends.items())
    lagging = behind > 0 and launch.find(place.home, "stream") is None
    do = "tidegate up, or: tidegate signals run --once" if lagging else ""
    yield Finding(check="topic.lag", level="warn" if lagging else "ok", found=f"{behind} events are not in the lake yet", do=do)


def lake(place: Place) -> Iterator[Finding]:
    """Offsets and rows of the lake add up, and every turn has one outcome."""
    from signals import lake as tables

    if not tables.exists(place.home, "offset_ledger"):
        yield _ok("lake", "no events yet")
        return
    booked: dict[tuple[str, int], list[tuple[int, int]]] = {}
    uneven = 0
    for row in tables.read(place.home, "offset_ledger").to_pylist():
        booked.setdefault((row["topic"], row["partition"]), []).append((row["start"], row["end"]))
        uneven += row["end"] - row["start"] != row["kept"] + row["quarantined"]
    holes = sum(b[0] != a[1] for spans in booked.values() for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
    accepted = tables.read(place.home, "gaps").num_rows
    if uneven or holes > accepted:
        found = f"{uneven} batches whose offsets and rows differ, {holes} holes or overlaps ({accepted} accepted as lost)"
        yield Finding(check="lake.offsets", level="fail", found=found, do="tidegate signals run --once --resume-from-ledger")
    else:
        yield _ok("lake.offsets", f"{sum(map(len, booked.values()))} batches, every offset booked once")
    names = tables.read(place.home, "turns", columns=["session_id", "turn_id", "outcome"]).to_pylist()
    keys = {(row["session_id"], row["turn_id"]) for row in names}
    without = sum(row["outcome"] is None for row in names)
    if without or len(keys) != len(names):
        found = f"{without} turns without outcome, {len(names) - len(keys)} turns twice"
        yield Finding(check="lake.turns", level="fail", found=found, do="recompute: tidegate signals run --once --everything")
    else:
        yield _ok("lake.turns", f"{len(names)} turns, each with one outcome")


def stream(place: Place) -> Iterator[Finding]:
    """The stream's state and the lake belong together."""
    from signals import lake as tables

    state = any(place.home.streams.rglob("offsets")) if place.home.streams.exists() else False
    rows = tables.exists(place.home, "offset_ledger") and tables.read(place.home, "offset_ledger").num_rows > 0
    if state and not rows:
        found = "the stream has state but the lake has no offsets: the lake was removed or restored"
        yield Finding(check="stream", level="fail", found=found, do="tidegate signals run --once --resume-from-ledger")
    elif rows and not state:
        found = "the lake has offsets but the stream has no state: it was removed"
        yield Finding(check="stream", level="warn", found=found, do="tidegate signals run --once --resume-from-ledger")
    else:
        yield _ok("stream", "state and lake belong together" if rows else "not started yet")


def release(place: Place) -> Iterator[Finding]:
    """What serves is intact; nothing hangs half-way; shipping is not frozen."""
    ledger = place.ledger
    pointer = ledger.serving() if ledger else None
    if ledger is None or pointer is None:
        yield _ok("release", "nothing serves yet")
        return
    folder = place.home.store / pointer.checkpoint
    candidates.verify(folder)
    if candidates.checkpoint_id(folder) != pointer.checkpoint:
        found = f"{folder} is not the checkpoint its name says"
        yield Finding(check="release.serving", level="fail", found=found, do="tidegate rollback --reason '...'")
    else:
        yield _ok("release.serving", f"{pointer.checkpoint[:12]} (policy {pointer.policy_version}) is intact")
    if pointer.checkpoint in ledger.tombstones():
        yield Finding(check="release.tombstone", level="fail", found="what serves is tombstoned", do="tidegate rollback --reason '...'")
    if (reason := ledger.frozen()) is not None:
        yield Finding(check="release.frozen", level="warn", found=f"shipping is frozen: {reason}", do="tidegate thaw --reason '...'")
    held = {lease.name for lease in ledger.leases()}
    old = [
        s for s in ledger.ships(limit=50) if s.state not in FINAL and "ship" not in held and place.now - s.updated_at > timedelta(hours=1)
    ]
    for ship in old:
        found = f"ship {ship.ship_id[:12]} stands at {ship.state} since {ship.updated_at:%Y-%m-%d %H:%M} and nobody works on it"
        yield Finding(check="release.open", level="warn", found=found, do="tidegate cycle goes on with it or overtakes it")
    yield from _gateway(place, pointer.policy_version)


def _gateway(place: Place, policy_version: int) -> Iterator[Finding]:
    status = observe.gateway_status(place.home)
    if status is None:
        yield Finding(check="release.gateway", level="warn", found="no gateway answers", do="tidegate up (or: tidegate serve)")
    elif (served := observe.served_policy(status)) != policy_version:
        why = (status.get("refused") or {}).get("reason") or "it is still loading"
        found = f"the gateway answers from policy {served}, the ledger says {policy_version}: {why}"
        yield Finding(check="release.gateway", level="warn", found=found, do="wait a minute; then see logs/gateway.log")
    else:
        yield _ok("release.gateway", f"answers from policy {served}")


def drift(place: Place) -> Iterator[Finding]:
    """What serves does what its predecessor did, and somebody looked."""
    found = observe.drift(place.home)
    if found is None:
        yield _ok("drift", "the monitors have not looked yet")
        return
    age_h = (place.now - found.computed_at).total_seconds() / 3600
    if age_h > DRIFT_STALE_H and launch.find(place.home, "stream") is not None:
        yield Finding(check="drift.age", level="warn", found=f"the monitors last looked {age_h:.1f} h ago", do="tidegate signals drift")
    alarming = found.state in ("policy", "traffic")
    yield Finding(check="drift", level="warn" if alarming else "ok", found=found.sentence, do=found.do if alarming else "")


def leftovers(place: Place) -> Iterator[Finding]:
    """Nothing of dead processes lies around; no events wait on disk."""
    dead = [name for name in launch.names(place.home) if launch.find(place.home, name) is None]
    do = "tidegate down removes them" if dead else ""
    found = f"pid files of dead processes: {', '.join(dead)}" if dead else "no stale pid files"
    yield Finding(check="leftovers.pids", level="warn" if dead else "ok", found=found, do=do)
    waiting = [path for path in place.home.spool.rglob("*") if path.is_file()] if place.home.spool.exists() else []
    size = sum(path.stat().st_size for path in waiting)
    found = f"{size} bytes of events wait for the broker in {place.home.spool}" if size else "no events wait on disk"
    yield Finding(check="leftovers.spool", level="warn" if size else "ok", found=found, do="tidegate up sends them" if size else "")
    journal = place.home.root / "cycles" / "current.json"
    if journal.exists() and (place.ledger is None or not any(lease.name == "cycle" for lease in place.ledger.leases())):
        do = "tidegate cycle goes on where it stopped"
        yield Finding(check="leftovers.cycle", level="warn", found="a cycle was interrupted", do=do)


def clock(place: Place) -> Iterator[Finding]:
    """The clock has not run backwards since the ledger's last event, and agrees with the file system's."""
    newest = place.ledger.history(limit=1) if place.ledger else []
    ahead = (newest[0].at - place.now).total_seconds() if newest else 0.0
    if ahead > CLOCK_SKEW_S:
        found = f"the ledger's last event lies {ahead:.0f} s in the future: this clock ran backwards"
        yield Finding(check="clock", level="fail", found=found, do="set the clock by NTP; leases and windows need it")
    else:
        yield _ok("clock", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, not behind the ledger")


CHECKS: Final[dict[str, Callable[[Place], Iterator[Finding]]]] = {
    "java": java, "jars": jars, "versions": versions, "sandbox": sandbox, "room": room, "cores": cores, "training": training,
    "ports": ports, "topic": topic, "stream": stream, "lake": lake, "release": release, "drift": drift, "leftovers": leftovers,
    "clock": clock,
}  # fmt: skip
"""Every check, the machine's first."""


def examine(place: Place) -> list[Finding]:
    """Run every check; one that raises is a finding, and the others go on."""
    found: list[Finding] = []
    with progress("looking", total=len(CHECKS)) as advance:
        for name, check in CHECKS.items():
            try:
                found += list(check(place))
            except StageError as error:
                what, _, do = str(error).partition("; ")
                found.append(Finding(check=name, level="fail", found=what, do=do or "see the message"))
            except Exception as error:  # noqa: BLE001  a doctor that falls ill with its patient helps nobody
                found.append(Finding(check=name, level="fail", found=f"{type(error).__name__}: {error}", do="report it; it is a fault"))
            advance(1)
    return found


def to_text(findings: list[Finding]) -> str:
    """Return the findings for a terminal, worst first."""
    order = {"fail": 0, "warn": 1, "ok": 2}
    lines: list[str] = []
    for item in sorted(findings, key=lambda f: order[f.level]):
        lines.append(f"{item.level:<5} {item.check:<18} {item.found}")
        lines += [f"{'':<24} -> {item.do}"] if item.do else []
    return "\n".join(lines)


app = App(name="doctor", help="Find what is wrong with this machine or deployment, and say what to do.")


@app.default
def doctor(*, common: Common = Common()) -> int:
    """Find what is wrong with this machine or this deployment, and say what to do. Exit code 1 when anything fails."""
    begun = time.monotonic()
    findings = examine(Place(config=common.tree(Config), home=common.place(), now=datetime.now(UTC)))
    counts = {level: sum(item.level == level for item in findings) for level in ("ok", "warn", "fail")}
    result: dict[str, Any] = {
        "counts": counts,
        "findings": [asdict(item) for item in findings],
        "seconds": round(time.monotonic() - begun, 2),
    }
    common.show(result, lambda: to_text(findings))
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(run(app))
