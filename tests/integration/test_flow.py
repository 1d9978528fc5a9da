"""The cycle on a real Prefect server, with small real stage processes in place of Spark and the trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy import launch, tasks
from deploy.release.ledger import Ledger
from pipelines.errors import Busy, ConfigError, Refused, TerminalError
from pipelines.storage import Home

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "infra" / "config" / "demo.toml"
STAGES = str(ROOT / "tests" / "support" / "stages.py")
FAST = ["schedule.retry_delay_s=0", "release.swap_timeout_s=1", "release.engine_start_s=60"]
COMMANDS = {
    "signals": [sys.executable, STAGES, "signals"],
    "train": [sys.executable, STAGES, "train", "--parent", "{parent}"],
    "score": [sys.executable, STAGES, "score"],
    "gateway": [sys.executable, STAGES, "gateway", "--arm", "{arm}", "--port", "{port}"],
    "mirror": [sys.executable, STAGES, "mirror"],
    "benchmark": [sys.executable, STAGES, "benchmark", "--out", "{out}"],
}

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory) -> Iterator[str]:
    """Prefect's own test harness: a real server on a database of its own."""
    from deploy.orchestrator import environment

    os.environ.update(environment(Home(tmp_path_factory.mktemp("prefect"))))
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())


def scenario(home: Home, **words: object) -> None:
    home.root.mkdir(parents=True, exist_ok=True)
    (home.root / "scenario.json").write_text(json.dumps(words))


def cycle(home: Home) -> dict[str, Any]:
    from deploy import flows

    return flows.cycle(str(home.root), str(DEMO), FAST, COMMANDS)


def ran(home: Home, stage: str) -> int:
    path = home.root / "marks" / stage
    return path.stat().st_size if path.exists() else 0


@pytest.fixture
def home(release_home, pair) -> Home:
    return release_home


def test_a_good_candidate_ships_and_the_result_says_how(prefect_server, home, pair):
    scenario(home)
    found = cycle(home)
    assert (found["outcome"], found["verdict"], found["reasons"]) == ("shipped", "pass", [])
    assert (found["policy_before"], found["policy_after"]) == (1, 2)
    pointer = Ledger(home.ledger).serving()
    assert (pointer.checkpoint, pointer.previous) == (found["candidate"], pair[0])
    assert set(found["seconds"]) == {"freeze", "train", "evaluate", "ship"}
    assert "Smaller regressions can ship" in found["ship"]["weakness"]
    assert (home.root / "tombstoned.json").read_text() == "[]"
    assert launch.names(home) == [], "every process it started is gone"
    assert Ledger(home.ledger).leases() == []
    assert found["mirror"]["failed"] == 0


def test_a_policy_of_invalid_calls_is_kept_out_and_what_serves_stays(prefect_server, home, pair):
    scenario(home, candidate="invalid")
    found = cycle(home)
    assert (found["outcome"], found["verdict"], found["policy_after"]) == ("kept", "fail", 1)
    assert any("hacks.invalid_calls" in reason for reason in found["reasons"])
    assert Ledger(home.ledger).serving().checkpoint == pair[0]
    assert Ledger(home.ledger).ships()[0].state == "rejected"


def test_a_candidate_of_nan_is_refused_before_anything_loads_it(prefect_server, home, pair):
    scenario(home, candidate="nan")
    found = cycle(home)
    assert (found["outcome"], found["verdict"]) == ("kept", "fail")
    assert any("artifact.finite" in reason and "b.weight" in reason for reason in found["reasons"])
    assert (ran(home, "gateway"), ran(home, "benchmark")) == (0, 0)


def test_a_window_with_nothing_to_train_ends_well(prefect_server, home):
    scenario(home, candidate="none")
    found = cycle(home)
    assert (found["outcome"], found["candidate"], found["reasons"]) == ("nothing_to_train", None, ["too few rows"])


def test_a_stage_that_says_later_is_tried_again_and_one_that_says_no_is_not(prefect_server, home):
    scenario(home, fail={"train": 75}, fail_times=1)
    assert cycle(home)["outcome"] == "shipped"
    assert ran(home, "train") == 2
    scenario(home, fail={"signals": 1})
    before = ran(home, "signals")
    with pytest.raises(TerminalError, match="signals was told to fail"):
        cycle(home)
    assert ran(home, "signals") == before + 1
    assert not (home.root / "cycles" / "current.json").exists(), "a failed cycle does not hold its window for ever"


def test_a_mirror_that_cannot_be_written_is_counted_and_stops_no_ship(prefect_server, home):
    scenario(home, fail={"mirror": 1})
    found = cycle(home)
    assert (found["outcome"], found["mirror"]["failed"]) == ("shipped", 1)


def test_a_second_cycle_at_once_is_busy(prefect_server, home):
    scenario(home)
    Ledger(home.ledger).lease("cycle", "elsewhere:1:1", 60)
    with pytest.raises(Busy, match="cycle"):
        cycle(home)
    assert ran(home, "signals") == 0


def test_while_shipping_is_frozen_no_cycle_starts(prefect_server, home):
    scenario(home)
    Ledger(home.ledger).freeze("incident 12")
    with pytest.raises(Refused, match="incident 12"):
        cycle(home)
    assert ran(home, "signals") == 0


@pytest.mark.parametrize("stage", ["train", "benchmark"])
def test_a_cycle_killed_in_a_stage_goes_on_and_promotes_once(prefect_server, home, stage):
    scenario(home, hold=stage)
    script = f"from deploy import flows; flows.cycle({str(home.root)!r}, {str(DEMO)!r}, {FAST!r}, {COMMANDS!r})"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PREFECT_API_URL": prefect_server})
    deadline = time.monotonic() + 120
    while ran(home, stage) == 0:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    children = [launch.find(home, name) for name in launch.names(home)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(child and launch.start_time(child.pid) == child.started for child in children):
        assert time.monotonic() < deadline, "what was tethered to it ends with it"
        time.sleep(0.05)
    scenario(home)
    found = cycle(home)
    assert found["outcome"] == "shipped"
    kinds = [event.kind for event in Ledger(home.ledger).history(1000)]
    assert kinds.count("promoted") == 1
    assert ran(home, "signals") == 1, "the frozen window is kept"


def test_rolled_back_the_next_cycle_starts_from_the_restored_checkpoint(prefect_server, home, pair):
    scenario(home)
    shipped = cycle(home)["candidate"]
    Ledger(home.ledger).rollback("drift", holder="me")
    with pytest.raises(Refused, match="was rolled back"):
        cycle(home)  # the stage trains the very same candidate again
    assert Ledger(home.ledger).serving().checkpoint == pair[0]
    assert (home.root / "tombstoned.json").read_text() == "[2]"
    assert shipped in Ledger(home.ledger).tombstones()


def test_the_schedule_is_every_five_hours_from_a_fixed_instant(prefect_server):
    from prefect.schedules import Interval

    from deploy import flows
    from deploy.config import Config

    config = Config()
    schedule = Interval(timedelta(hours=config.schedule.interval_hours), anchor_date=config.schedule.anchor_at)
    deployment = flows.cycle.to_deployment(name="t", schedule=schedule, parameters={"home": "h"})
    (found,) = deployment.schedules
    assert (found.schedule.interval, found.schedule.anchor_date) == (timedelta(hours=5), datetime(2026, 1, 1, tzinfo=UTC))


def test_an_unknown_stage_command_is_a_sentence():
    with pytest.raises(ConfigError, match="evaluate: no such stage command"):
        tasks.StageCommands.of({"evaluate": ["x"]})
