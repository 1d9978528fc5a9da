"""The append and distil jobs on a real broker and real Spark: exactly once, whatever is sent and wherever they are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import pyarrow.compute as pc
import pytest

from pipelines import kafka
from pipelines.config import KafkaConfig
from pipelines.errors import Busy, ContractViolation
from pipelines.events import Event
from pipelines.storage import Home, exclusive
from signals import distil, explain, job, lake, offsets, sessions, stream
from signals.config import JobsConfig, RewardsConfig, SignalsConfig, SparkConfig
from signals.samples import COMPONENTS, SAMPLES, Outcome
from tests.support.spark import T0, as_record, as_row, completion_payload, event, made_up_session

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

REWARDS = RewardsConfig(latency_medians_ms={"*": 900.0})
KEPT = ("turns", "edits", "rewards", "samples", "ledger_counts", "conflicts")


class Deployment:
    """One home and topic, driven in this process with the shared Spark session."""

    def __init__(self, spark: Any, home: Home, kafka_config: KafkaConfig, **jobs: Any) -> None:
        self.spark, self.home = spark, home
        self.config = SignalsConfig(kafka=kafka_config, spark=SparkConfig(driver_memory="1g"), signals=JobsConfig(**jobs), rewards=REWARDS)
        kafka.ensure_topics(self.config, home)

    def send(self, events: list[Event], *raw: tuple[bytes, bytes]) -> None:
        with kafka.Producer(self.config, self.home) as producer:
            for key, value in [*map(as_record, events), *raw]:
                producer.send(value, key.decode())

    def append(self, after: Any = None) -> stream.Totals:
        totals = stream.Totals()
        stream.prepare(self.config, self.home, resume=False, accept_gap=False)
        if after is None:
            job.append_once(self.spark, self.config, self.home, totals)
        else:
            stream.start(self.spark, self.config, self.home, totals, once=True, after=after).awaitTermination()
        return totals

    def distil(self, **flags: Any) -> distil.Summary:
        now = flags.pop("now", datetime.now(UTC))
        tombstoned = flags.get("tombstoned", frozenset())
        what = distil.touched(self.home, self.config, now=now, tombstoned=tombstoned)
        return distil.distil(self.spark, self.home, self.config, what, now=now, tombstoned=tombstoned)


def content(home: Home, name: str) -> list[str]:
    """Return a table's rows in an order of their own, without what is allowed to differ between two ways to the same lake."""
    rows = [{k: v for k, v in row.items() if k not in ("topic", "partition", "offset")} for row in lake.read(home, name).to_pylist()]
    return sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)


def world(seed: int, number: int) -> list[Event]:
    rng = random.Random(seed)
    return [item for index in range(number) for item in made_up_session(rng, f"w{seed}-{index}")]


@pytest.fixture(scope="module")
def told(spark: Any, broker: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, list[Event], distil.Summary]:
    """A lake after one run over forty sessions in order, without duplicates."""
    config = KafkaConfig(bootstrap_servers=broker.bootstrap, topic="signals-told", partitions=2)
    deployment = Deployment(spark, Home(tmp_path_factory.mktemp("told")), config)
    events = world(7, 40)
    deployment.send(events)
    deployment.append()
    return deployment, events, deployment.distil(now=datetime.fromtimestamp(T0 / 1000 + 5_000, UTC))


def test_the_columns_say_what_the_plain_rules_say(told: tuple[Deployment, list[Event], distil.Summary]) -> None:
    deployment, events, _ = told
    rows: dict[str, list[dict[str, Any]]] = {}
    for item in events:
        rows.setdefault(item.session_id, []).append(as_row(item))
    expected = [turn for own in rows.values() for turn in sessions.distil(own, REWARDS, now_ms=T0 + 5_000_000)]
    rewards = {(row["session_id"], row["turn_id"]): row for row in lake.rewards(deployment.home).to_pylist()}
    turns = {(row["session_id"], row["turn_id"]): row for row in lake.turns(deployment.home).to_pylist()}
    assert len(expected) == len(rewards) == len(turns) > 60
    assert len({turn.outcome for turn in expected}) == len(Outcome)
    for turn in expected:
        row, facts = rewards[turn.session_id, turn.turn_id], turns[turn.session_id, turn.turn_id]
        assert (row["outcome"], row["outcome_reason"]) == (turn.outcome.value, turn.outcome_reason)
        present = {name: row[name] for name in COMPONENTS if row[name] is not None}
        assert present == pytest.approx(turn.components, abs=1e-12)
        assert row["reward"] == (None if turn.reward is None else pytest.approx(turn.reward, abs=1e-12))
        own = (turn.turn_index, turn.user_key, turn.arm, turn.policy_version, turn.late, turn.evidence.calls, turn.evidence.invalid_calls)
        assert own == tuple(facts[k] for k in ("turn_index", "user_key", "arm", "policy_version", "late", "calls", "invalid_calls"))
        assert (facts["final"], facts["followed_up"]) == (turn.course.final, turn.followed_up)


def test_every_turn_is_counted_once(told: tuple[Deployment, list[Event], distil.Summary]) -> None:
    deployment, events, summary = told
    turns = {item.turn_id for item in events if item.type in sessions.OPENING}
    assert sum(summary.outcomes.values()) == len(turns) == sum(row["turns"] for row in lake.counts(deployment.home))


def test_samples_keep_the_contract_and_hold_a_reward_only_where_the_turn_is_scored(
    told: tuple[Deployment, list[Event], distil.Summary],
) -> None:
    deployment, events, _ = told
    table = lake.samples(deployment.home)
    assert table.schema.equals(SAMPLES)
    completions = {item.payload.completion_id: item for item in events if item.type == "completion"}
    assert sorted(table["completion_id"].to_pylist()) == sorted(completions)
    for row in table.to_pylist():
        assert (row["reward"] is not None) == (row["outcome"] == "scored")
        if row["prompt_ids"] is not None:
            assert row["prompt_ids"] == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    first = table.filter(pc.equal(table["attempt"], 0))
    assert first.num_rows == len({row.turn_id for row in completions.values()})


def test_an_explanation_ends_in_the_stored_number(told: tuple[Deployment, list[Event], distil.Summary]) -> None:
    deployment, _, _ = told
    for session_id in ("w7-0", "w7-3", "w7-11"):
        for item in explain.session(deployment.home, REWARDS, session_id):
            assert item["agrees"], item
            assert f"turn {item['turn_id']}" in explain.text(item)
            assert item["events"]


def test_order_duplicates_and_batch_cuts_cannot_change_the_tables(
    told: tuple[Deployment, list[Event], distil.Summary], spark: Any, home: Home, kafka_config: KafkaConfig
) -> None:
    first, events, _ = told
    now = datetime.fromtimestamp(T0 / 1000 + 5_000, UTC)
    rng = random.Random(3)
    mixed = events + rng.choices(events, k=200)
    rng.shuffle(mixed)
    other = Deployment(spark, home, kafka_config, max_offsets_per_trigger=400)
    other.send(mixed[: len(mixed) // 3])
    other.append()
    other.distil(now=now)
    other.send(mixed[len(mixed) // 3 :])
    assert other.append().batches > 1
    other.distil(now=now)
    assert lake.read(home, "events", columns=["event_id"]).num_rows == len(mixed)
    for name in KEPT:
        assert content(home, name) == content(first.home, name), name


def test_bad_records_are_kept_whole_with_a_reason_and_stop_nothing(spark: Any, home: Home, kafka_config: KafkaConfig) -> None:
    big = kafka_config.model_copy(update={"max_event_bytes": 12_000_000})
    deployment = Deployment(spark, home, big)
    deployment.config = deployment.config.model_copy(update={"kafka": big.model_copy(update={"max_event_bytes": 1_000_000})})
    good = event("turn_started", 1, 0, {"turn_index": 0, "message": "hi", "message_chars": 2})
    forged = event("turn_started", 1, 0, {"turn_index": 0, "message": "other", "message_chars": 5}, recorded_at_ms=T0 + 999)
    huge = json.dumps(as_row(good) | {"extra": "x" * 10_000_000}).encode()
    future = event("session_ended", 2, 10**12, {"reason": "done"}, turn_id=None)
    with kafka.Producer(deployment.config.model_copy(update={"kafka": big}), home) as producer:
        producer.send(huge, "s1")
    deployment.send(
        [good, good, forged, future],
        (b"s1", b""), (b"s1", b"\xff\xfe"), (b"s1", b'{"cut'), (b"elsewhere", as_record(good)[1]),
        (b"s1", json.dumps(as_row(good) | {"type": "telepathy"}).encode()),
        (b"s1", json.dumps(as_row(good) | {"schema_version": 99}).encode()),
        (b"s1", json.dumps(as_row(good) | {"payload": {}}).encode()), (b"s1", json.dumps(as_row(good) | {"origin": "mars"}).encode()),
    )  # fmt: skip
    totals = deployment.append()
    summary = deployment.distil()
    reasons = sorted(lake.read(home, "quarantine")["reason"].to_pylist())
    assert reasons == [
        "future_dated", "invalid_field", "malformed_json", "malformed_json", "malformed_json", "missing_field", "oversized", "unknown_type",
        "unknown_version", "wrong_key",
    ]  # fmt: skip
    assert (totals.rows, totals.quarantined, summary.conflicts) == (3, 10, 1)
    assert huge in lake.read(home, "quarantine")["raw"].to_pylist()
    assert lake.read(home, "conflicts")["event_id"].to_pylist() == ["e1"]


def test_an_empty_topic_is_an_empty_lake_and_needs_no_spark(home: Home, kafka_config: KafkaConfig) -> None:
    result = job.run(SignalsConfig(kafka=kafka_config), home, job.Flags())
    assert result["append"] == {"rows": 0, "quarantined": 0, "batches": 0}
    assert result["distil"]["outcomes"] == {}
    assert "spark" not in result["seconds"]


def test_a_second_run_for_the_same_home_is_refused_as_busy(home: Home, kafka_config: KafkaConfig) -> None:
    with exclusive(home.run / "signals.lock", what="the signals job"), pytest.raises(Busy, match="already running"):
        job.run(SignalsConfig(kafka=kafka_config), home, job.Flags())


def test_a_rolled_back_policys_turns_leave_training_and_come_back(spark: Any, home: Home, kafka_config: KafkaConfig) -> None:
    deployment = Deployment(spark, home, kafka_config)
    call = event("tool_call", 2, 20, {"tool_call_id": "k", "completion_id": "c", "name": "x", "arguments_valid": False})
    deployment.send(
        [event("completion", 1, 10, completion_payload("c")), call, event("session_ended", 3, 30, {"reason": "done"}, turn_id=None)]
    )
    deployment.append()
    assert deployment.distil().outcomes == {"scored": 1}
    assert deployment.distil(tombstoned=frozenset({1})).outcomes == {"not_trainable": 1}
    assert lake.counts(home)[0]["outcome_reason"] == "quarantined_release"
    assert deployment.distil().outcomes == {"scored": 1}


def test_a_turn_is_judged_when_its_window_closes_although_nothing_new_arrives(spark: Any, home: Home, kafka_config: KafkaConfig) -> None:
    deployment = Deployment(spark, home, kafka_config)
    deployment.send([event("completion", 1, 0, completion_payload("c"))])
    deployment.append()
    open_at = datetime.fromtimestamp(T0 / 1000 + 60, UTC)
    assert deployment.distil(now=open_at).outcomes == {"pending": 1}
    closed_at = datetime.fromtimestamp(T0 / 1000 + 1_801, UTC)
    assert deployment.distil(now=closed_at).outcomes == {"no_evidence": 1}


@pytest.mark.parametrize("step", ["events", "quarantine", "offset_ledger"])
def test_a_batch_that_dies_between_two_commits_is_written_once(step: str, spark: Any, home: Home, kafka_config: KafkaConfig) -> None:
    deployment = Deployment(spark, home, kafka_config)
    events = world(11, 6)
    deployment.send(events, (b"s", b"nonsense"))

    def die(done: str) -> None:
        if done == step:
            raise ContractViolation("the process dies here")

    with pytest.raises(Exception, match="dies here"):
        deployment.append(after=die)
    deployment.append()
    table = lake.read(home, "events", columns=["partition", "offset"])
    assert table.num_rows == len(events) == len(set(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)))
    assert lake.read(home, "quarantine").num_rows == 1
    assert sum(lake.read(home, "offset_ledger")["kept"].to_pylist()) == len(events)


def test_a_lost_stream_state_is_refused_and_resumed_from_the_ledger_exactly(spark: Any, home: Home, kafka_config: KafkaConfig) -> None:
    deployment = Deployment(spark, home, kafka_config)
    deployment.send(world(21, 3))
    deployment.append()
    before = lake.read(home, "events").num_rows
    offsets.checkpoint(home).rename(home.streams / "lost")
    more = world(22, 3)
    deployment.send(more)
    with pytest.raises(ContractViolation, match="--resume-from-ledger"):
        deployment.append()
    stream.prepare(deployment.config, home, resume=True, accept_gap=False)
    job.append_once(spark, deployment.config, home, stream.Totals())
    assert lake.read(home, "events").num_rows == before + len(more)
    offsets.verify(home, kafka_config.topic)


def run_command(home: Home, config: KafkaConfig, *, batch: int) -> subprocess.Popen[bytes]:
    settings = {"kafka.bootstrap_servers": config.bootstrap_servers, "kafka.topic": config.topic, "kafka.partitions": 2,
                "signals.max_offsets_per_trigger": batch, "spark.driver_memory": "1g"}  # fmt: skip
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "signals", "run", "--once", "--home", str(home.root), "--json", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.slow
def test_killed_in_the_middle_the_same_command_again_leaves_the_same_lake(
    told: tuple[Deployment, list[Event], distil.Summary], home: Home, kafka_config: KafkaConfig
) -> None:
    first, events, _ = told
    other = Deployment(None, home, kafka_config)
    other.send(events)
    running = run_command(home, kafka_config, batch=100)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and running.poll() is None and not _some_batches(home):
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    written = lake.read(home, "events", columns=["event_id"]).num_rows
    assert 0 < written < len(events)
    again = run_command(home, kafka_config, batch=100_000)
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err.decode()[-2000:]
    assert json.loads(out)["distil"]["sessions"] == 40
    assert sorted(lake.read(home, "events")["event_id"].to_pylist()) == sorted(item.event_id for item in events)
    # The command's settings have no latency medians and all windows have closed by now: compare facts, not rewards.
    for name in ("edits",):
        assert content(home, name) == content(first.home, name)
    assert lake.read(home, "turns").num_rows == lake.read(first.home, "turns").num_rows


def _some_batches(home: Home) -> bool:
    folder = home.lake / "events" / "_delta_log"
    return folder.exists() and len(list(folder.glob("*.json"))) >= 3


def test_a_broker_that_is_away_is_one_sentence_and_exit_code_75(home: Home) -> None:
    config = KafkaConfig(bootstrap_servers="127.0.0.1:1", topic="t")
    running = run_command(home, config, batch=10)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 75
    assert b"Traceback" not in err
    assert err.decode().strip().splitlines()[-1].startswith("tidegate: Kafka at 127.0.0.1:1 does not answer")
