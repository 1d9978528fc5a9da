"""Both published reward hacks, and a change of traffic, from events through Kafka, append and distil to what the monitors say."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipelines import kafka
from pipelines.config import KafkaConfig
from pipelines.events import Event, pack_ids, pack_logprobs
from pipelines.storage import Home
from signals import distil, job, lake, monitors, monitors_alarms, stream
from signals.config import RewardsConfig, SignalsConfig, SparkConfig
from signals.monitors_plot import draw
from tests.support.spark import as_record, event

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

DAY = datetime(2026, 5, 4, 9, tzinfo=UTC)
HOUR = timedelta(hours=1)
SESSIONS = 60
HEALTHY, BROKEN, ASKING, HIDING, HARDER, RECKLESS = range(1, 7)
"""Policy versions, one after the other, an hour each. Each is compared with the healthy one."""


class Scribe:
    """Writes down the sessions of one policy."""

    def __init__(self, version: int) -> None:
        self.rng = random.Random(version)
        self.version = version
        self.events: list[Event] = []

    def session(self, index: int, *, hard: float) -> None:
        self.name, self.number = f"p{self.version}-{index}", 0
        self.at = DAY + HOUR * self.version + timedelta(seconds=3000 * index / SESSIONS)
        self.user, is_hard = f"u{self.rng.randrange(30)}", self.rng.random() < hard
        self.add(
            "session_started", {"surface": "cli", "task_bucket": "edit.hard" if is_hard else "edit.easy", "edits_observed": True}, turn=None
        )
        for turn in range(2):
            self.turn(turn, is_hard=is_hard)
        self.add("session_ended", {"reason": "done"}, turn=None)

    def turn(self, turn: int, *, is_hard: bool) -> None:
        chars = self.rng.randrange(400, 900) if is_hard else self.rng.randrange(30, 90)
        words = "Now rename total to amount in the other file too" if turn else "Rename total to amount in cart.py"
        opening = {"turn_index": turn, "message": words, "message_chars": chars, "language": "en", "edit_expected": 0.95}
        self.add("turn_started", opening, turn=turn)
        broken = self.version == BROKEN and self.rng.random() < 0.6
        asks = self.version == ASKING and self.rng.random() < 0.6
        hides = self.version == HIDING and self.rng.random() < 0.4
        completion = f"{self.name}-c{turn}"
        declines = self.version == RECKLESS and self.rng.random() < 0.4
        said = {"ends_in_question": asks, "refused": declines}
        self.add("completion", self.completion(completion, said, fault="garbled" if hides else None), turn=turn)
        if asks or declines:
            return
        call = f"{completion}-k"
        arguments = {"name": "edit_file", "arguments_valid": not broken, "arguments_hash": f"h{call}"}
        arguments |= {"destructive": self.version == RECKLESS and self.rng.random() < 0.4}
        self.add("tool_call", {"tool_call_id": call, "completion_id": completion, **arguments}, turn=turn)
        self.add("tool_result", {"tool_call_id": call, "result_class": "invalid_arguments" if broken else "ok"}, turn=turn)
        if broken:
            return
        edit = f"{completion}-e"
        self.add("edit_proposed", {"edit_id": edit, "tool_call_id": call, "path_hash": "p", "chars_added": 80}, turn=turn)
        kept = min(1.0, max(0.0, self.rng.gauss(0.35 if is_hard else 0.85, 0.15)))
        for horizon in (300, 86_400):
            stands = min(1.0, max(0.0, kept + self.rng.gauss(0, 0.02)))
            survival = {"edit_id": edit, "horizon_s": horizon, "survival_four_gram": stands, "survival_no_revert": stands}
            self.add("edit_survival", survival, turn=turn)

    def completion(self, identity: str, said: dict[str, bool], *, fault: str | None) -> dict[str, Any]:
        return {
            "completion_id": identity, "prompt_ids": pack_ids([1, 2, 3]), "response_ids": pack_ids([4, 5]), "finish_reason": "stop",
            "behaviour_logprobs": pack_logprobs([-self.rng.random(), -self.rng.random()]), "temperature": 1.0, "top_p": 1.0,
            "tokenizer_sha": "tok", "template_sha": "tpl", "duration_ms": 800.0, "prompt_tokens": self.rng.randrange(300, 400),
            "response_tokens": 2, "capture_error": fault, **said,
        }  # fmt: skip

    def add(self, kind: str, payload: dict[str, Any], *, turn: int | None) -> None:
        self.at += timedelta(milliseconds=400)
        at = round(self.at.timestamp() * 1000)
        envelope = {
            "session_id": self.name, "turn_id": None if turn is None else f"{self.name}-t{turn}", "event_id": f"{self.name}-{self.number}",
            "user_key": self.user, "policy_version": self.version, "origin": "live", "occurred_at_ms": at, "recorded_at_ms": at + 5,
        }  # fmt: skip
        self.number += 1
        self.events.append(event(kind, 0, 0, payload, **envelope))


def told(version: int) -> Iterator[Event]:
    scribe = Scribe(version)
    for index in range(SESSIONS):
        scribe.session(index, hard=0.95 if version == HARDER else 0.2)
    yield from scribe.events


@pytest.fixture(scope="module")
def lived(spark: Any, broker: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, SignalsConfig]:
    """A lake with six policies in it, distilled once."""
    home = Home(tmp_path_factory.mktemp("monitors"))
    config = SignalsConfig(
        kafka=KafkaConfig(bootstrap_servers=broker.bootstrap, topic="signals-monitors", partitions=2),
        spark=SparkConfig(driver_memory="1g"), rewards=RewardsConfig(latency_medians_ms={"*": 900.0}),
    )  # fmt: skip
    kafka.ensure_topics(config, home)
    with kafka.Producer(config, home) as producer:
        for version in range(HEALTHY, RECKLESS + 1):
            for item in told(version):
                key, value = as_record(item)
                producer.send(value, key.decode())
    stream.prepare(config, home, resume=False, accept_gap=False)
    job.append_once(spark, config, home, stream.Totals())
    now = DAY + timedelta(hours=9)
    distil.distil(spark, home, config, distil.touched(home, config, now=now, tombstoned=frozenset()), now=now)
    return home, config


@pytest.fixture(scope="module")
def seen(lived: tuple[Home, SignalsConfig]) -> list[monitors.Row]:
    """Rows of all six, each against the healthy policy."""
    home, config = lived
    against = config.model_copy(update={"monitors": config.monitors.model_copy(update={"reference_version": HEALTHY})})
    return monitors.examine(home, against, now=DAY + timedelta(hours=9), since=DAY).rows


def alarms(rows: list[monitors.Row], version: int) -> dict[str, str]:
    return {row["metric"]: row["cause"] for row in rows if row["alarm"] and row["policy_version"] == version}


def mean(rows: list[monitors.Row], version: int, metric: str) -> monitors.Row:
    return next(row for row in rows if (row["policy_version"], row["metric"], row["kind"]) == (version, metric, "mean"))


def test_broken_calls_lower_the_reward_and_move_the_monitor_of_invalid_calls(seen: list[monitors.Row]) -> None:
    found = alarms(seen, BROKEN)
    assert found["invalid_calls"] == found["reward"] == "policy"
    assert mean(seen, BROKEN, "reward")["value"] < mean(seen, BROKEN, "reward")["expected"] - 0.2
    assert mean(seen, BROKEN, "invalid_calls")["value"] == pytest.approx(0.6, abs=0.12)


def test_asking_instead_of_editing_lowers_the_reward_and_moves_asks_and_edits(seen: list[monitors.Row]) -> None:
    found = alarms(seen, ASKING)
    assert found["asks"] == found["deferred"] == found["edit_turns"] == "policy"
    assert "invalid_calls" not in found
    reward = mean(seen, ASKING, "reward")
    assert reward["value"] < reward["expected"]


def test_declining_and_destructive_commands_move_the_monitors_of_their_names(seen: list[monitors.Row]) -> None:
    found = alarms(seen, RECKLESS)
    assert found["refusals"] == found["destructive_commands"] == "policy"
    assert mean(seen, RECKLESS, "refusals")["value"] == pytest.approx(0.4, abs=0.12)
    assert mean(seen, RECKLESS, "destructive_commands")["value"] == pytest.approx(0.4, abs=0.15)
    assert not {"refusals", "destructive_commands"} & set(alarms(seen, BROKEN))


def test_turns_that_leave_scored_move_the_coverage_monitor_although_the_rest_is_as_good_as_before(seen: list[monitors.Row]) -> None:
    found = alarms(seen, HIDING)
    assert found["scored"] == found["not_captured"] == "policy"
    assert "reward" not in found
    assert mean(seen, HIDING, "scored")["value"] == pytest.approx(0.6, abs=0.12)


def test_harder_tasks_alone_are_called_traffic(seen: list[monitors.Row], lived: tuple[Home, SignalsConfig]) -> None:
    found = alarms(seen, HARDER)
    assert found["reward"] == found["task_bucket"] == found["message_chars"] == "traffic"
    assert set(found.values()) == {"traffic"}


def test_figures_agree_with_the_tables(seen: list[monitors.Row], lived: tuple[Home, SignalsConfig]) -> None:
    home, _ = lived
    rewards = [row for row in lake.read(home, "rewards").to_pylist() if row["policy_version"] == HEALTHY and row["reward"] is not None]
    healthy = next(row for row in seen if (row["policy_version"], row["metric"], row["kind"]) == (HEALTHY, "reward", "mean"))
    assert healthy["value"] == pytest.approx(sum(row["reward"] for row in rewards) / len(rewards))
    assert healthy["n"] == len(rewards)
    assert mean(seen, HEALTHY, "entropy")["value"] == pytest.approx(0.5, abs=0.1)
    assert mean(seen, HEALTHY, "session_turns")["value"] == 2.0
    truth = next(row for row in seen if (row["policy_version"], row["metric"]) == (HEALTHY, "proxy_truth"))
    assert truth["value"] > 0.5


def test_a_second_run_writes_the_same_rows_and_no_new_version(lived: tuple[Home, SignalsConfig]) -> None:
    home, config = lived
    now = DAY + timedelta(hours=9)
    first = monitors.run(home, config, now=now, since=DAY)
    version = lake.open_table(home, "drift").version()
    stored = lake.read(home, "drift").to_pylist()
    assert len(stored) == len(first.rows) > 200
    assert {row["policy_version"] for row in stored} == set(range(HEALTHY, RECKLESS + 1))
    monitors.run(home, config, now=now, since=DAY)
    assert lake.open_table(home, "drift").version() == version
    # The last hours again: they are replaced, the others stay.
    monitors.run(home, config, now=now)
    assert lake.read(home, "drift").num_rows == len(stored)
    latest = monitors_alarms.latest(home)
    assert latest is not None
    assert latest.computed_at == now


def test_a_look_in_the_middle_of_an_hour_is_replaced_by_the_look_at_its_end(lived: tuple[Home, SignalsConfig]) -> None:
    home, config = lived
    middle = DAY + HOUR * BROKEN + timedelta(minutes=30)
    monitors.run(home, config, now=middle, since=DAY)
    half = [row for row in lake.read(home, "drift").to_pylist() if row["policy_version"] == BROKEN and row["kind"] == "mean"]
    assert {row["window_end"] for row in half} == {middle}
    monitors.run(home, config, now=DAY + timedelta(hours=9))
    whole = [row for row in lake.read(home, "drift").to_pylist() if row["policy_version"] == BROKEN and row["kind"] == "mean"]
    assert {row["window_end"] for row in whole} == {DAY + HOUR * (BROKEN + 1)}
    assert sum(row["n"] for row in whole) > sum(row["n"] for row in half)


def test_the_continuous_job_looks_once_an_hour(lived: tuple[Home, SignalsConfig]) -> None:
    home, config = lived
    now = DAY + timedelta(hours=9)
    monitors.after_distil(home, config, now=now, hourly=True)
    for minutes, expected in ((59, now), (61, now + timedelta(minutes=61))):
        monitors.after_distil(home, config, now=now + timedelta(minutes=minutes), hourly=True)
        latest = monitors_alarms.latest(home)
        assert latest is not None
        assert latest.computed_at == expected
    monitors.after_distil(home, config, now=now, hourly=False)


def test_the_plot_is_a_picture(lived: tuple[Home, SignalsConfig]) -> None:
    home, config = lived
    file = home.root / "plots" / "reward.svg"
    draw(home, config, file, now=DAY + timedelta(hours=9))
    text = file.read_text(encoding="utf-8")
    assert text.lstrip().startswith("<?xml")
    assert len(text) > 5_000
