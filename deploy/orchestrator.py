"""Prefect's server, its served deployment, and the way to run a cycle now.

Prefect reads its settings from the environment when it is imported, so this module imports it late, after pointing it at the
deployment: own home folder, loopback, no analytics. Takes the deployment and its settings. Leaves out: what a cycle does
(`flows.py`).
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from cyclopts import App

from deploy import launch, observe
from deploy.config import Config
from pipelines.storage import Home, write_atomic
from pipelines.terminal import Common, run

DEPLOYMENT: Final = "every-five-hours"
SERVER_START_S: Final = 120.0


def environment(home: Home) -> dict[str, str]:
    """Return what Prefect must find in the environment to belong to this deployment and keep to itself."""
    found = {
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_PROFILES_PATH": str(home.prefect / "profiles.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(SERVER_START_S)),
        "PREFECT_LOGGING_LEVEL": os.environ.get("PREFECT_LOGGING_LEVEL", "CRITICAL"),  # failures are told once, by us
        "PREFECT_CLI_PROMPT": "false",
    }
    url = os.environ.get("PREFECT_API_URL") or server_url(home)
    return found | ({"PREFECT_API_URL": url} if url else {})


def server_url(home: Home) -> str | None:
    """Return the API address of the server that `up` started, when its process lives."""
    if launch.find(home, "prefect") is None:
        return None
    try:
        return str(json.loads((home.run / "prefect.json").read_text(encoding="utf-8"))["url"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def start_server(home: Home, *, detached: bool) -> str:
    """Start Prefect's server on a free loopback port, or return the address of the one that runs.

    Args:
        home: The deployment.
        detached: Whether it outlives us. A server that a flow starts for itself would outlive a killed flow, so a demo starts its own.

    Raises:
        EngineUnavailable: It does not come up.
    """
    if (url := server_url(home)) is not None:
        return url
    home.prefect.mkdir(parents=True, exist_ok=True)
    port = launch.free_port()
    url = f"http://127.0.0.1:{port}/api"
    write_atomic(home.run / "prefect.json", json.dumps({"url": url}).encode())
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    env = environment(home) | {"PREFECT_API_URL": url}
    launch.start(home, "prefect", argv, ready=observe.answers(f"{url}/health"), deadline_s=SERVER_START_S, detached=detached, env=env)
    return url


def cycle(
    config: Config,
    home: Home,
    *,
    settings: Path | None = None,
    overrides: list[str] | None = None,
    commands: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Run one cycle now, on the deployment's Prefect server or an ephemeral one.

    Args:
        config: The resolved settings (of `settings` and `overrides`; checked to be the same).
        home: The deployment.
        settings: The TOML file that stage processes read.
        overrides: `section.key=value` texts that stage processes get.
        commands: Stage commands to use instead of the real ones.

    Returns:
        See `flows.cycle`.

    Raises:
        ConfigError: `config` is not what the stage processes would read.
        StageError: See `flows.cycle`.
    """
    from pipelines.config import digest, load
    from pipelines.errors import ConfigError

    if digest(load(Config, settings, overrides=overrides or [])) != digest(config):
        raise ConfigError("a cycle's stages read --config and --set themselves; pass the same file and overrides that made this config")
    os.environ.update(environment(home))
    home.prefect.mkdir(parents=True, exist_ok=True)
    from deploy import flows

    return flows.cycle(str(home.root), str(settings.absolute()) if settings else None, overrides or [], commands)


def serve_deployment(config: Config, home: Home, *, settings: Path | None = None, overrides: list[str] | None = None) -> None:
    """Serve the cycle on its interval, until stopped. Cycles start at anchor + k * interval, whenever this was started."""
    os.environ.update(environment(home))
    from prefect.schedules import Interval

    from deploy import flows

    schedule = Interval(timedelta(hours=config.schedule.interval_hours), anchor_date=config.schedule.anchor_at)
    parameters = {"home": str(home.root), "config": str(settings.absolute()) if settings else None, "overrides": overrides or []}
    flows.cycle.serve(name=DEPLOYMENT, schedule=schedule, parameters=parameters, pause_on_shutdown=False, limit=1)


app = App(name="cycle", help="Freeze a window, train, evaluate, gate, ship or keep: now, or on its schedule.")


@app.default
def cycle_now(*, common: Common = Common()) -> int:
    """Run one cycle now. Exit codes: 0 shipped or nothing to train, 3 another runs, 4 gate said no, 5 inconclusive, 6 refused."""
    found = cycle(common.tree(Config), common.place(), settings=config_path(common), overrides=list(common.set))
    common.show(found, lambda: describe(found))
    return {"fail": 4, "inconclusive": 5}.get(found["verdict"] or "", 0)


@app.command
def serve(*, common: Common = Common()) -> None:
    """Serve the schedule until stopped (`tidegate up` does this)."""
    serve_deployment(common.tree(Config), common.place(), settings=config_path(common), overrides=list(common.set))


def config_path(common: Common) -> Path | None:
    """Return the settings file that `common.tree` reads."""
    from_environment = os.environ.get("TIDEGATE_CONFIG")
    return common.config or (Path(from_environment) if from_environment else None)


def describe(found: dict[str, Any]) -> str:
    """Say for a person how a cycle ended."""
    lines = [
        f"{found['outcome']}: policy {found['policy_before']} -> {found['policy_after']} (candidate {(found['candidate'] or 'none')[:12]})"
    ]
    lines += [f"  {reason}" for reason in found["reasons"] if reason]
    lines += [f"  {name}: {seconds:.0f} s" for name, seconds in found["seconds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(app))
