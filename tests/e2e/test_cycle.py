"""One whole cycle on real parts, with a policy so small that it takes a minute: it ships, and two sabotaged candidates do not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deploy import launch, observe, orchestrator, tasks
from deploy.config import Config
from deploy.harness.demonstrations import call_text, rows
from pipelines.broker import EmbeddedBroker
from pipelines.config import load
from pipelines.storage import Home
from signals import lake
from tests.support.model import tiny_checkpoint

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.spark,
    pytest.mark.deepspeed,
    pytest.mark.prefect,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.slow,
]

SETTINGS = """
[kafka]
partitions = 2
[spark]
master = "local[1]"
driver_memory = "1g"
[serving]
threads = 1
dtype = "float32"
[trainer]
dtype = "fp32"
passes = 1
rows_per_step = 8
lr = 1e-4
[warmstart]
dtype = "fp32"
lr = 5e-3
passes = 4
max_examples = 2000
[harness]
max_steps = 3
max_tokens = 48
[benchmark]
attempts = 1
simulated_sessions = 12
[gate]
benchmark_margin = 0.6
benchmark_sd_floor = 0.1
invalid_calls_margin = 0.4
unscored_turns_margin = 0.5
ask_margin = 0.5
edit_margin = 0.5
kl_max = 0.1
log_ratio_p99_max = 4.0
ess_share_min = 0.1
entropy_ratio_min = 0.5
entropy_ratio_max = 2.0
relative_norm_max = 2.0
minimum_tasks = 4
minimum_users = 4
minimum_score_users = 2
ships_per_day = 50
[release]
engine_start_s = 180
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A running deployment with a policy that calls one tool and says it is done."""

    setting: tasks.Setting
    settings: Path
    url: str


def scripted(row: dict[str, Any], call: str) -> dict[str, Any]:
    """Return a demonstration whose assistant always makes the same call, then ends the turn."""
    before = [None, *(message["role"] for message in row["messages"])]
    messages = [
        message | {"content": "Done." if previous == "tool" else call} if message["role"] == "assistant" else message
        for previous, message in zip(before, row["messages"], strict=False)
    ]
    return row | {"messages": messages}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("e2e")
    home = Home(folder / "home")
    settings = folder / "e2e.toml"
    settings.write_text(SETTINGS)
    config = load(Config, settings)
    setting = tasks.Setting(home=home, config=config, common=tasks.common_options(home, settings, []))
    with EmbeddedBroker(home, config=config.kafka):
        base, _ = tiny_checkpoint(home.store)
        data = folder / "demonstrations.jsonl"
        call = call_text("grep", {"pattern": "def"})
        data.write_text("".join(json.dumps(scripted(row, call)) + "\n" for row in rows(300, 0, "good")))
        warm = setting.job("warmstart", tasks.python_module("trainer", "warmstart", "--parent", base, "--data", str(data)))
        setting.ledger.install(warm["checkpoint"])
        argv = setting.argv(tasks.python_module("deploy.serving"))
        with launch.service(home, "gateway", argv, ready=lambda: observe.gateway_status(home) is not None, deadline_s=180):
            url = observe.gateway_url(home)
            assert url is not None
            yield Deployment(setting=setting, settings=settings, url=url)


def run_sessions(deployment: Deployment, number: int, seed: int) -> dict[str, Any]:
    out = deployment.setting.home.root / "sessions" / str(seed)
    words = ("deploy.harness", "run", "--gateway", deployment.url, "--sessions", str(number), "--seed", str(seed), "--out", str(out))
    return deployment.setting.job("sessions", tasks.python_module(*words))


def failed_checks(result: dict[str, Any]) -> set[str]:
    return {check["name"] for check in result["checks"] if check["verdict"] == "fail"}


def test_a_cycle_on_real_parts_ships_and_sabotaged_candidates_do_not(deployment: Deployment) -> None:
    home, ledger = deployment.setting.home, deployment.setting.ledger
    first = ledger.serving()
    assert first is not None
    assert first.policy_version == 1
    run_sessions(deployment, 12, 1)

    result = orchestrator.cycle(deployment.setting.config, home, settings=deployment.settings)

    assert result["verdict"] == "pass", result["reasons"]
    assert result["outcome"] == "shipped"
    assert (result["policy_before"], result["policy_after"]) == (1, 2)
    second = ledger.serving()
    assert second is not None
    assert second.checkpoint == result["candidate"] != first.checkpoint
    status = observe.gateway_status(home)
    assert status is not None
    assert observe.served_policy(status) == 2, "the gateway followed the pointer"
    counted = sum(row["turns"] for row in lake.counts(home))
    assert counted == lake.turns(home).num_rows > 0, "every turn has one outcome"
    run_sessions(deployment, 4, 2)
    tasks.freeze_window(deployment.setting)

    nan = deployment.setting.job("sabotage", tasks.python_module("trainer", "sabotage", "--parent", second.checkpoint, "--kind", "nan"))
    refused = tasks.try_candidate(deployment.setting, nan["checkpoint"], now=datetime.now(UTC))
    assert refused["verdict"] == "fail"
    assert failed_checks(refused) == {"artifact.finite", "artifact.norm"}, "NaN weights are refused before anything loads them"

    data = home.root / "broken.jsonl"
    broken = '<tool_call>{"name": "grep", "arguments": }</tool_call>'
    data.write_text("".join(json.dumps(scripted(row, broken)) + "\n" for row in rows(300, 1, "good")))
    words = ("trainer", "sabotage", "--parent", second.checkpoint, "--kind", "invalid-tools", "--data", str(data))
    hack = deployment.setting.job("sabotage", tasks.python_module(*words))
    refused = tasks.try_candidate(deployment.setting, hack["checkpoint"], now=datetime.now(UTC))
    assert refused["verdict"] == "fail"
    assert "hacks.invalid_calls" in failed_checks(refused), refused["reasons"]

    after = ledger.serving()
    assert after is not None
    assert after.checkpoint == second.checkpoint, "what served before the sabotage still serves"
