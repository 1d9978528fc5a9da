"""The judge from the lake to rewards: distilled, asked, distilled again, explained."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipelines.storage import Home
from signals import distil, explain, lake, verdict_store
from signals.config import RewardsConfig, SignalsConfig, SparkConfig
from signals.followup_commands import app
from signals.judge import mixed
from tests.support.chat_server import Server, answer

pytestmark = pytest.mark.spark

AT = datetime(2026, 5, 4, 9, tzinfo=UTC)
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
SAID = ["Rename the helper", "hm, the other one", "Thanks. Now add a test for it"]


def events() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, message in enumerate(SAID):
        at = round(AT.timestamp() * 1000) + index * 60_000
        common = {
            "session_id": "s", "turn_id": f"t{index}", "user_key": "u", "origin": "live", "arm": "serving", "consent": "train",
            "date": AT.date(), "policy_version": 1, "client": {"name": "c", "version": "1"}, "schema_version": 1,
            "topic": "e", "partition": 0,
        }  # fmt: skip
        opening = {"turn_index": index, "message": message, "message_chars": len(message)}
        reply = {"completion_id": f"c{index}", "step": 0, "finish_reason": "stop", "prompt_tokens": 5, "response_tokens": 2}
        for kind, offset, payload in (("turn_started", 0, opening), ("completion", 500, reply)):
            made.append({
                **common, "event_id": f"{kind}{index}", "fingerprint": f"f{kind}{index}", "type": kind, "occurred_at_ms": at + offset,
                "recorded_at_ms": at + offset, "offset": len(made), "payload": payload,
            })  # fmt: skip
    return made


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def distilled(spark: Any, home: Home) -> dict[str, dict[str, Any]]:
    config = SignalsConfig(rewards=RewardsConfig(), spark=SparkConfig(driver_memory="1g"))
    what = distil.Touched(sessions=frozenset({"s"}), since=AT.date(), frontier={})
    distil.distil(spark, home, config, what, now=NOW)
    return {row["turn_id"]: row for row in lake.read(home, "rewards").to_pylist()}


def test_frozen_verdicts_change_the_rewards_of_their_turns_and_the_reward_version_and_withdrawing_them_changes_both_back(
    spark: Any, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    lake.create_missing(home)
    lake.append(home, "events", events())
    before = distilled(spark, home)
    server.reply = lambda number: (200, answer("YES" if number <= 3 else "NO"))
    options = ["--home", str(home.root), "--json", "--set", f'followups.judge_url="{server.url}"', "--set", 'followups.judge_model="m"']
    app(["judge", *options, "--set", "followups.judge_margin=0.5"], result_action="return_value")
    assert json.loads(capsys.readouterr().out)["verdicts"] == 2
    after = distilled(spark, home)
    for turn, verdict in (("t0", 0.875), ("t1", 0.125)):
        p = (1 - before[turn]["follow_up"]) / 2
        assert (1 - after[turn]["follow_up"]) / 2 == pytest.approx(mixed(p, verdict, 0.5), abs=1e-9)
        assert (after[turn]["reward"] < before[turn]["reward"]) is (verdict > p)
    assert {row["reward_version"] for row in before.values()}.isdisjoint(row["reward_version"] for row in after.values())
    assert all(explain.turn(home, RewardsConfig(), turn)["agrees"] for turn in after)
    verdict_store.withdraw(home)
    assert distilled(spark, home) == before
