"""The cycle as a Prefect flow: freeze a window, train, evaluate, gate, ship or keep.

Prefect is the schedule, the retries of stages that end with exit code 75, and the UI. It is not the lock (the ledger's lease),
not the memory (the journal and the ledger) and not the truth. Runs in a process that loads no other engine; stages are processes.
Leaves out: what the parts do (`tasks.py`) and where the server is (`orchestrator.py`).
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from deploy import tasks
from deploy.config import Config
from deploy.release import ship
from deploy.release.evidence import Evidence
from deploy.release.leases import SHIP_LEASE
from pipelines.config import load
from pipelines.errors import Refused, StageError, TransientError
from pipelines.storage import Home

CYCLE_LEASE: Final = "cycle"


def _may_help(_task: object, _run: object, state: Any) -> bool:
    """Tell Prefect whether trying again can help: only what says so itself (exit code 75)."""
    return isinstance(state.result(raise_on_failure=False), TransientError)


def part(setting: tasks.Setting, name: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one part of the cycle as a Prefect task with the configured retries."""
    schedule = setting.config.schedule

    @task(
        name=name, retries=schedule.retries, retry_delay_seconds=schedule.retry_delay_s, retry_condition_fn=_may_help,
        cache_policy=NO_CACHE, persist_result=False,
    )  # fmt: skip
    def attempt() -> dict[str, Any]:
        return act()

    return attempt()


@flow(name="tidegate-cycle", validate_parameters=False, persist_result=False)
def cycle(
    home: str,
    config: str | None = None,
    overrides: list[str] | None = None,
    commands: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Freeze a window, train, evaluate, gate, ship or keep.

    Args:
        home: The deployment's folder.
        config: TOML file with settings.
        overrides: `section.key=value` texts.
        commands: Stage commands to use instead of the real ones.

    Returns:
        `outcome` (shipped, kept, nothing_to_train), `candidate`, `policy_before`, `policy_after`, `verdict`, `reasons`, `seconds`,
        `ship` (see `ship.result`), ...

    Raises:
        Busy: Another cycle runs.
        StageError: A stage's failure.
    """
    place = Home(Path(home))
    settings = load(Config, Path(config) if config else None, overrides=overrides or [])
    common = tasks.common_options(place, Path(config) if config else None, overrides or [])
    setting = tasks.Setting(home=place, config=settings, common=common, commands=tasks.StageCommands.of(commands))
    with ship.holding(setting.ledger, CYCLE_LEASE, settings.release):
        return run(setting, now=datetime.now(UTC))


def run(setting: tasks.Setting, *, now: datetime) -> dict[str, Any]:
    """Do one cycle, or go on with the one that was killed.

    Raises:
        Refused: Nothing serves, or shipping is frozen.
    """
    pointer = tasks.serving_pointer(setting)
    if (reason := setting.ledger.frozen()) is not None:
        raise Refused(f"no cycle while shipping is frozen: {reason}")
    journal = tasks.Journal(setting.home)
    parent = journal.open(pointer, now=now)
    try:
        window = journal.step("freeze", lambda: part(setting, "freeze-window", lambda: tasks.freeze_window(setting)))
        trained = journal.step("train", lambda: part(setting, "train", lambda: tasks.train(setting, parent, window)))
        if trained["checkpoint"] is None:
            return _finish(setting, journal, parent, outcome="nothing_to_train", shipped=None)
        shipped = ship_or_keep(setting, journal, parent, window=window, candidate=trained["checkpoint"], now=now)
    except TransientError:
        raise  # the journal stays: the next run goes on with this window
    except StageError as error:
        journal.close(f"failed: {error}")
        raise
    return _finish(setting, journal, parent, outcome="shipped" if shipped["promoted"] else "kept", shipped=shipped)


def ship_or_keep(
    setting: tasks.Setting, journal: tasks.Journal, parent: tasks.Parent, *, window: dict[str, Any], candidate: str, now: datetime
) -> dict[str, Any]:
    """Evaluate and gate the candidate; promote it when the gate passes, else keep what serves.

    Raises:
        Busy: Another shipper is at work.
        Refused: Frozen, fenced off, rolled back, or the parent no longer serves.
    """

    def measure() -> Evidence:
        files = journal.step("evaluate", lambda: part(setting, "evaluate", lambda: tasks.evaluate(setting, parent, candidate, window)))
        return tasks.evidence(parent, candidate, files)

    def whole_ship() -> dict[str, Any]:
        with ship.holding(setting.ledger, SHIP_LEASE, setting.config.release) as lease:
            return ship.run(
                tasks.shipper(setting, lease.epoch), parent.checkpoint, candidate, measure=measure,
                wait_for_gateway=lambda moved: tasks.wait_for_gateway(setting, moved), now=now,
            )  # fmt: skip

    return journal.step("ship", lambda: part(setting, "gate-and-ship", whole_ship))


def _finish(
    setting: tasks.Setting, journal: tasks.Journal, parent: tasks.Parent, *, outcome: str, shipped: dict[str, Any] | None
) -> dict[str, Any]:
    pointer = tasks.serving_pointer(setting)
    mirror = tasks.mirror(setting)
    record = journal.close(outcome)
    if shipped is not None and not shipped["promoted"]:
        tasks.forget_measurements(setting, shipped["candidate"])
    steps = record.get("steps", {})
    return {
        "outcome": outcome,
        "cycle": record.get("cycle"),
        "policy_before": parent.policy_version,
        "policy_after": pointer.policy_version,
        "parent": parent.checkpoint,
        "candidate": steps.get("train", {}).get("checkpoint"),
        "verdict": shipped["verdict"] if shipped else None,
        "reasons": shipped["reasons"] if shipped else [steps.get("train", {}).get("reason", "")],
        "ship": shipped,
        "window": steps.get("freeze"),
        "training": steps.get("train"),
        "seconds": record.get("seconds", {}),
        "mirror": mirror,
    }
