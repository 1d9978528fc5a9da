"""Up, down, reset: the long-lived processes of a local deployment.

`up` starts broker, Prefect's server, the served schedule, the stream and the gateway, each detached, each until it is healthy;
what runs already is left alone, so it can be given twice. `down` stops what `up` started, by pid file, in the reverse order.
`reset` removes all state of a deployment that is down. Takes the deployment and its settings. Leaves out: what they do.
"""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cyclopts import App

from deploy import launch, observe, orchestrator
from deploy.config import Config
from deploy.release.ledger import Ledger
from deploy.tasks import common_options, python_module, write_tombstoned
from pipelines import broker
from pipelines.errors import Busy, ConfigError, Refused
from pipelines.storage import Home, write_atomic
from pipelines.terminal import Common, run

ORDER: Final = ("broker", "prefect", "schedule", "stream", "gateway")
"""Order of starting; stopping goes the other way round, so that the last events still find the broker."""

STREAM_SETTLE_S: Final = 3.0
"""A stream that cannot start (no topic, no Java) ends within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What became of one service."""

    name: str
    state: str
    """started, already running, skipped, stopped, or not running."""
    where: str = ""
    """Its address, or why it was skipped."""


def _start_broker(config: Config, home: Home) -> Service:
    if config.kafka.bootstrap_servers:
        return Service(name="broker", state="skipped", where=config.kafka.bootstrap_servers)
    if (address := broker.address(home)) is not None:
        return Service(name="broker", state="already running", where=address)
    try:
        found = broker.EmbeddedBroker(home, config=config.kafka).start(detached=True)
    except Busy:  # another `up` was faster
        return Service(name="broker", state="already running", where=broker.address(home) or "")
    return Service(name="broker", state="started", where=found.bootstrap)


def _ensure_topics(config: Config, home: Home) -> None:
    from pipelines import kafka

    kafka.ensure_topics(config, home)


def _start(home: Home, name: str, argv: list[str], *, ready: Callable[[], bool], deadline_s: float, where: Callable[[], str]) -> Service:
    if launch.find(home, name) is not None:
        return Service(name=name, state="already running", where=where())
    launch.start(home, name, argv, ready=ready, deadline_s=deadline_s, detached=True)
    return Service(name=name, state="started", where=where())


def _settled(home: Home, name: str) -> Callable[[], bool]:
    """Ready when the process has lived for a while: it has no address to ask."""

    begun = time.monotonic()
    return lambda: launch.find(home, name) is not None and time.monotonic() - begun > STREAM_SETTLE_S


def up(config: Config, home: Home, *, settings: Path | None = None, overrides: list[str] | None = None) -> list[Service]:
    """Start everything that does not run yet.

    Args:
        config: The resolved settings.
        home: The deployment.
        settings: The TOML file that the services read.
        overrides: `section.key=value` texts that the services get.

    Returns:
        What became of each service, in order.

    Raises:
        StageError: A service does not come up; those before it stay up, and the same command again goes on.
    """
    home.run.mkdir(parents=True, exist_ok=True)
    common = list(common_options(home, settings, overrides or []))
    done = [_start_broker(config, home)]
    _ensure_topics(config, home)
    ran = orchestrator.server_url(home) is not None
    url = orchestrator.start_server(home, detached=True)
    done.append(Service(name="prefect", state="already running" if ran else "started", where=url))
    schedule = [*python_module("deploy.orchestrator", "serve"), *common]
    every = f"every {config.schedule.interval_hours:g} h since {config.schedule.anchor_at:%Y-%m-%d %H:%M} UTC"
    done.append(_start(home, "schedule", schedule, ready=_settled(home, "schedule"), deadline_s=60, where=lambda: every))
    tombstoned = write_tombstoned(home, Ledger(home.ledger)) if home.ledger.exists() else home.root / "tombstoned.json"
    if not tombstoned.exists():
        write_atomic(tombstoned, b"[]")
    stream = [*python_module("signals", "run"), "--tombstoned", str(tombstoned), *common]
    done.append(_start(home, "stream", stream, ready=_settled(home, "stream"), deadline_s=60, where=lambda: str(home.lake)))
    if not home.ledger.exists() or Ledger(home.ledger).serving() is None:
        why = "no checkpoint is installed yet (tidegate demo makes one); then: tidegate up"
        return [*done, Service(name="gateway", state="skipped", where=why)]
    gateway = [*python_module("deploy.serving"), *common]
    done.append(
        _start(
            home,
            "gateway",
            gateway,
            ready=lambda: observe.gateway_status(home) is not None,
            deadline_s=config.release.engine_start_s,
            where=lambda: observe.gateway_url(home) or "",
        )
    )
    return done


def down(home: Home) -> list[Service]:
    """Stop everything that `up` started; what does not run is passed over."""
    done: list[Service] = []
    for name in reversed(ORDER):
        if name == "broker":
            ran = broker.running(home) is not None
            broker.EmbeddedBroker(home).stop()
        else:
            ran = launch.stop(home, name)
        done.append(Service(name=name, state="stopped" if ran else "not running"))
    return done


def running(home: Home) -> list[str]:
    """Return the names of live processes of this deployment."""
    names = [name for name in launch.names(home) if launch.find(home, name) is not None]
    return names + (["broker"] if broker.running(home) is not None else [])


def reset(home: Home) -> None:
    """Remove all state of a deployment.

    Raises:
        Busy: Something of it still runs.
        ConfigError: The folder is not a deployment's.
    """
    if not home.root.exists():
        return
    if alive := running(home):
        raise Busy(f"{', '.join(alive)} still run in {home.root}; stop them first: tidegate down")
    known = {path.name for path in (home.broker, home.lake, home.store, home.ledger, home.logs, home.run, home.keys)}
    if not known & {path.name for path in home.root.iterdir()}:
        raise ConfigError(f"{home.root} does not look like a deployment's folder; it is left alone")
    shutil.rmtree(home.root)


def _show(common: Common, services: list[Service]) -> None:
    listed: list[dict[str, Any]] = [{"name": s.name, "state": s.state, "where": s.where} for s in services]
    common.show({"services": listed}, lambda: "\n".join(f"{s.name:<9} {s.state:<16} {s.where}".rstrip() for s in services))


app = App(name="supervise", help="Start and stop a local deployment.")


@app.command(name="up")
def up_command(*, common: Common = Common()) -> None:
    """Start broker, stream, gateway, Prefect and the five-hour schedule; what runs already is left alone."""
    settings = orchestrator.config_path(common)
    _show(common, up(common.tree(Config), common.place(), settings=settings, overrides=list(common.set)))


@app.command(name="down")
def down_command(*, common: Common = Common()) -> None:
    """Stop what `up` started."""
    _show(common, down(common.place()))


@app.command(name="reset")
def reset_command(*, yes: bool = False, common: Common = Common()) -> None:
    """Remove all state of this deployment: events, lake, checkpoints, ledger.

    Args:
        yes: Do not ask.
        common: Options of every command.
    """
    home = common.place()
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody is there to ask; add --yes to do it")
        print(f"remove everything under {home.root}? [y/N] ", file=sys.stderr, end="", flush=True)
        if input().strip().lower() not in ("y", "yes"):
            raise Refused("nothing was removed")
    reset(home)
    common.show({"removed": str(home.root)}, lambda: f"removed {home.root}")


if __name__ == "__main__":
    sys.exit(run(app))
