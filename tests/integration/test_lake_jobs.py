"""The lake's jobs against a real broker and real Spark: losses, large events, replays, other weights, and a user who is to be forgotten."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from kafka.admin import KafkaAdminClient, NewPartitions

from pipelines import claims, codec, kafka
from pipelines.config import KafkaConfig
from pipelines.errors import ContractViolation, Rejected
from pipelines.events import Event
from pipelines.recorder import Recorder
from pipelines.storage import Home
from signals import backfill, checks, distil, forget, intake, job, lake, maintenance, replay, stream
from signals.claims import redeem
from signals.config import JobsConfig, LakeConfig, RewardsConfig, SignalsConfig, SparkConfig
from signals.samples import COMPONENTS
from tests.support.events_for_tests import CLIENT, message
from tests.support.lakes import naming
from tests.support.spark import T0, as_record, as_row, completion_payload, event, made_up_session

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

NOW = datetime.fromtimestamp(T0 / 1000 + 50_000, UTC)
RECORD = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp"
SAMPLES = Path(__file__).parents[1] / "support" / "events"


class Deployment:
    """One home and topic, driven in this process with the shared Spark session."""

    def __init__(self, spark: Any, home: Home, kafka_config: KafkaConfig, **jobs: Any) -> None:
        self.spark, self.home = spark, home
        self.config = SignalsConfig(kafka=kafka_config, spark=SparkConfig(driver_memory="1g"), signals=JobsConfig(**jobs))
        kafka.ensure_topics(self.config, home)

    def send(self, events: list[Event], *raw: tuple[bytes, bytes]) -> None:
        with kafka.Producer(self.config, self.home) as producer:
            for key, value in [*map(as_record, events), *raw]:
                producer.send(value, key.decode())

    def append(self, *, accept_gap: bool = False, after: Any = None) -> stream.Totals:
        totals = stream.Totals()
        stream.prepare(self.config, self.home, resume=False, accept_gap=accept_gap)
        if after is None:
            job.append_once(self.spark, self.config, self.home, totals)
        else:
            stream.start(self.spark, self.config, self.home, totals, once=True, after=after).awaitTermination()
        return totals

    def distil(self, now: datetime = NOW) -> distil.Summary:
        what = distil.touched(self.home, self.config, now=now, tombstoned=frozenset())
        return distil.distil(self.spark, self.home, self.config, what, now=now)

    def check(self) -> dict[str, Any]:
        return checks.check(self.home, self.config, now=NOW)


@pytest.fixture
def made(spark: Any, home: Home, kafka_config: KafkaConfig) -> Deployment:
    return Deployment(spark, home, kafka_config)


def world(seed: int, number: int) -> list[Event]:
    rng = random.Random(seed)
    return [item for index in range(number) for item in made_up_session(rng, f"w{seed}-{index}")]


def stop_after(step: str) -> Any:
    def die(done: str) -> None:
        if done == step:
            raise ContractViolation("the process dies here")

    return die


def test_events_that_kafka_deleted_unread_stop_the_job_until_a_person_accepts_the_loss(made: Deployment) -> None:
    first, second, third = world(1, 3), world(2, 3), world(3, 3)
    made.send(first)
    made.append()
    read = kafka.end_offsets(made.config, made.home)
    made.send(second)
    lost = kafka.end_offsets(made.config, made.home)
    made.send(third)
    kafka.delete_records(made.config, made.home, lost)
    with pytest.raises(ContractViolation, match=r"Kafka deleted events before they were read .*--accept-gap"):
        made.append()
    assert [problem["check"] for problem in made.check()["problems"]] == ["gap"] * sum(lost[p] > read[p] for p in lost)
    totals = made.append(accept_gap=True)
    assert totals.rows == len(third)
    gaps = {(row["partition"], row["start"], row["end"]) for row in lake.read(made.home, "gaps").to_pylist()}
    assert gaps == {(p, read[p], lost[p]) for p in lost if lost[p] > read[p]}
    kept = sorted(lake.events(made.home)["event_id"].to_pylist())
    assert kept == sorted(item.event_id for item in first + third)
    found = made.check()
    assert found["ok"], found["problems"]
    assert sum(own["lost"] for own in found["partitions"]) == len(second)
    made.send(world(4, 1))
    made.append()
    checks.quick(made.home)


def test_a_batch_whose_events_are_not_in_the_table_writes_them_before_it_is_booked(made: Deployment) -> None:
    """Delta passes over a commit whose number it has seen, without a word: what counts is what the table holds."""
    events = world(13, 3)
    made.send(events)
    with pytest.raises(Exception, match="dies here"):
        made.append(after=stop_after("events"))
    lake.open_table(made.home, "events").delete()
    made.append()
    assert sorted(lake.events(made.home)["event_id"].to_pylist()) == sorted(item.event_id for item in events)
    assert made.check()["ok"]


def test_a_batch_whose_events_are_twice_in_the_table_is_not_booked(made: Deployment) -> None:
    events = world(13, 3)
    made.send(events)
    with pytest.raises(Exception, match="dies here"):
        made.append(after=stop_after("events"))
    table = lake.open_table(made.home, "events")
    write_deltalake(table, table.to_pyarrow_table(), mode="append")
    with pytest.raises(ContractViolation, match=r"are \d+ rows of the lake, \d+ of them distinct.*--resume-from-ledger"):
        made.append()
    assert lake.read(made.home, "offset_ledger").num_rows == 0
    stream.prepare(made.config, made.home, resume=True, accept_gap=False)
    job.append_once(made.spark, made.config, made.home, stream.Totals())
    assert sorted(lake.events(made.home)["event_id"].to_pylist()) == sorted(item.event_id for item in events)
    assert made.check()["ok"]


def test_partitions_that_are_added_while_a_batch_is_unfinished_are_read_exactly_once(made: Deployment) -> None:
    """Spark crashed for ever here (SPARK-53560) before it was fixed: the unfinished batch was planned with fewer partitions."""
    first, second = world(5, 3), world(6, 6)
    made.send(first)
    with pytest.raises(Exception, match="dies here"):
        made.append(after=stop_after("events"))
    admin = KafkaAdminClient(bootstrap_servers=made.config.kafka.bootstrap_servers)
    admin.create_partitions({made.config.kafka.topic: NewPartitions(4)})
    admin.close()
    made.send(second)
    made.append()
    made.append()
    assert sorted(lake.events(made.home)["event_id"].to_pylist()) == sorted(item.event_id for item in first + second)
    assert len(set(lake.events(made.home)["partition"].to_pylist())) > 2
    assert made.check()["ok"]


def test_committed_events_of_every_schema_version_load_and_unknown_fields_survive(made: Deployment) -> None:
    lines = [line for path in sorted(SAMPLES.glob("v*/*.jsonl")) for line in path.read_bytes().splitlines()]
    made.send([], *[(json.loads(line)["session_id"].encode(), line) for line in lines])
    totals = made.append()
    assert (totals.rows, totals.quarantined) == (len(lines), 0)
    kept = {row["event_id"]: row["original"] for row in lake.events(made.home, columns=["event_id", "original"]).to_pylist()}
    newer = {json.loads(line)["event_id"]: line for line in (SAMPLES / "v1" / "added_fields.jsonl").read_bytes().splitlines()}
    assert {name: raw for name, raw in kept.items() if raw is not None} == newer


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({}, False), ({"turn_id": None}, False), ({"payload": {"message": 'a "quoted": word', "turn_index": 0, "message_chars": 3}}, False),
        ({"later": 1}, True), ({"later": None}, True), ({"client": {"name": "c", "region": "x"}}, True),
        ({"payload": {"turn_index": 0, "message_chars": 3, "mood": {"a": 1}}}, True),
    ],
)  # fmt: skip
def test_only_events_with_unknown_fields_keep_their_bytes(spark: Any, change: dict[str, Any], unknown: bool) -> None:
    row = as_row(event("turn_started", 1, 0, {"turn_index": 0, "message": "hi", "message_chars": 2})) | change
    raw = json.dumps(row).encode()
    stamp = datetime.fromtimestamp(T0 / 1000, UTC)
    frame = spark.createDataFrame([(b"s1", raw, "t", 0, 0, stamp)], RECORD)
    (found,) = intake.judged(frame, intake.Limits(max_bytes=10_000)).select("reason", "original").collect()
    assert found["reason"] is None
    assert (bytes(found["original"]) if found["original"] is not None else None) == (raw if unknown else None)


def test_an_event_of_no_possible_policy_is_set_aside_by_client_and_stream_alike(spark: Any) -> None:
    """Whether a version was ever registered only the ship ledger knows; what no ledger can have given out is a fault of transport."""
    raw = json.dumps(as_row(event("turn_started", 1, 0, {"turn_index": 0, "message_chars": 2})) | {"policy_version": -1}).encode()
    verdict = codec.decode(raw, 10_000)
    assert isinstance(verdict, Rejected)
    assert (verdict.reason, verdict.detail.split(".")[-1]) == ("invalid_field", "policy_version")
    frame = spark.createDataFrame([(b"s1", raw, "t", 0, 0, NOW)], RECORD)
    (found,) = intake.judged(frame, intake.Limits(max_bytes=10_000)).select("reason", "detail").collect()
    assert tuple(found) == ("invalid_field", "policy_version")


def test_a_large_event_travels_as_a_claim_and_a_missing_file_can_be_replayed_later(made: Deployment) -> None:
    limits = made.config.kafka.model_copy(update={"max_event_bytes": 2_000})
    made.config = made.config.model_copy(update={"kafka": limits})
    texts = [f"{name} " + "word " * 600 for name in ("whole", "gone", "altered")]
    with Recorder(made.config, made.home, client=CLIENT) as recorder:
        for number, text in enumerate(texts):
            recorder.record(message(text, session=f"s{number}", at_ms=T0))
        assert recorder.flush(20)
        assert recorder.counts().delivered == 3
    files = {
        next(name for name in ("whole", "gone", "altered") if f'"{name} ' in path.read_text()): path
        for path in claims.local_files(made.home)
    }
    gone = files["gone"].read_bytes()
    files["gone"].unlink()
    files["altered"].write_bytes(files["altered"].read_bytes().replace(b"word", b"sword"))
    outside = claims.Claim(uri="file:///etc/hostname", sha256="0" * 64, size_bytes=1, session_id="s9")
    made.send([message("small", session="s5", at_ms=T0)], (b"s9", claims.encode(outside)), (b"s9", b"{"))
    totals = made.append()
    assert (totals.rows, totals.quarantined) == (2, 4)
    whole = lake.events(made.home, session_id="s0").to_pylist()[0]
    assert whole["payload"]["message"] == texts[0].strip() or whole["payload"]["message"].startswith("whole word")
    refused = {row["reason"]: row for row in lake.read(made.home, "quarantine").to_pylist()}
    assert set(refused) == {"claim_missing", "claim_mismatch", "claim_foreign", "malformed_json"}
    files["gone"].write_bytes(gone)
    done = replay.replay(made.spark, made.home, made.config, reason=None, now=NOW)
    assert (done.looked_at, done.accepted, done.sessions) == (4, 1, 1)
    assert done.reasons == {"claim_foreign": 1, "claim_mismatch": 1, "malformed_json": 1}
    moved = lake.events(made.home, session_id="s1").to_pylist()[0]
    assert (moved["partition"], moved["offset"]) == (refused["claim_missing"]["partition"], refused["claim_missing"]["offset"])
    assert "s1" in lake.turns(made.home)["session_id"].to_pylist()
    assert made.check()["ok"]


def test_a_batch_of_events_faults_and_claims_is_written_once_wherever_it_is_killed(made: Deployment) -> None:
    large = message("large", session="s1", at_ms=T0)
    kept = claims.put(made.config.kafka, made.home, codec.encode(large), session_id="s1", now=NOW)
    gone = claims.Claim(uri=f"{claims.root(made.config.kafka, made.home)}/gone", sha256="0" * 64, size_bytes=1, session_id="s2")
    events = world(13, 3)
    made.send(events, (b"s1", claims.encode(kept)), (b"s2", claims.encode(gone)), (b"s2", b"{"))
    commits: list[str] = []

    def die(step: str) -> None:
        commits.append(step)
        if len(commits) in {1, 2, 3, 5}:  # the fourth is the third again, of which nothing is left to do
            raise ContractViolation("the process dies here")

    for _ in range(4):
        with pytest.raises(Exception, match="dies here"):
            made.append(after=die)
    made.append(after=die)
    assert commits == ["events", "quarantine", "events", "events", "quarantine", "offset_ledger"]
    assert sorted(lake.events(made.home)["event_id"].to_pylist()) == sorted(item.event_id for item in [*events, large])
    assert sorted(lake.read(made.home, "quarantine")["reason"].to_pylist()) == ["claim_missing", "malformed_json"]
    assert made.check()["ok"]


def test_no_claim_is_looked_for_outside_its_folder(spark: Any, home: Home) -> None:
    root = claims.root(KafkaConfig(), home)
    inside = claims.put(KafkaConfig(), home, b"{}", session_id="s", now=NOW)
    sneaky = claims.Claim(uri=f"{root}/../secret", sha256=inside.sha256, size_bytes=2, session_id="s")
    rows = [(b"s", claims.encode(claim), "t", 0, n, NOW) for n, claim in enumerate((inside, sneaky))]
    records = spark.createDataFrame(rows, RECORD)
    whole, lost = redeem(spark, records, root=root)
    assert [bytes(row["value"]) for row in whole.collect()] == [b"{}"]
    assert {name: frame.count() for name, frame in lost.items()} == {"claim_missing": 0, "claim_mismatch": 0, "claim_foreign": 1}


@pytest.mark.parametrize("step", ["events", "distil"])
def test_a_replay_that_dies_between_two_steps_is_finished_by_the_same_command(step: str, made: Deployment) -> None:
    """A record of a newer schema is set aside; the upgrade that knows it is played by giving the kept record the known version."""
    own = as_row(event("completion", 1, 10, completion_payload("c")))
    newer = json.dumps(own | {"schema_version": 99}).encode()
    made.send([event("session_ended", 3, 30, {"reason": "done"}, turn_id=None)], (b"s1", newer))
    made.append()
    (row,) = lake.read(made.home, "quarantine").to_pylist()
    assert row["reason"] == "unknown_version"
    lake.open_table(made.home, "quarantine").delete()
    lake.append(made.home, "quarantine", [row | {"raw": json.dumps(own).encode()}])
    with pytest.raises(ContractViolation, match="dies here"):
        replay.replay(made.spark, made.home, made.config, reason=row["reason"], now=NOW, after=stop_after(step))
    assert [problem["check"] for problem in made.check()["problems"]] == ["duplicates"]
    done = replay.replay(made.spark, made.home, made.config, reason=None, now=NOW)
    assert (done.accepted, done.sessions, done.reasons) == (1, 1, {})
    assert lake.events(made.home).num_rows == 2
    assert lake.turns(made.home).num_rows == 1
    assert made.check()["ok"]


def test_other_weights_are_tried_beside_the_trained_rewards(made: Deployment) -> None:
    made.send(world(8, 6))
    made.append()
    made.distil()
    before = {name: lake.versions(made.home)[name] for name in ("turns", "edits", "rewards", "samples", "distilled")}
    day = datetime.fromtimestamp(T0 / 1000, UTC).date()
    other = made.config.model_copy(update={"rewards": RewardsConfig(weights=dict.fromkeys(COMPONENTS, 0.0) | {"tool_calls": 1.0})})
    done = backfill.backfill(made.spark, made.home, other, "calls-only", start=day, end=day + timedelta(days=2), now=NOW)
    trained = lake.rewards(made.home)
    assert {name: lake.versions(made.home)[name] for name in before} == before
    assert done.rows == trained.num_rows
    assert done.reward_version not in done.trained_versions
    side = {(row["session_id"], row["turn_id"]): row for row in lake.read(made.home, "rewards_backfill").to_pylist()}
    scored = [row for row in trained.to_pylist() if row["reward"] is not None]
    both = [row for row in scored if side[row["session_id"], row["turn_id"]]["reward"] is not None]
    assert done.compared.turns == len(both) > 0
    span = {"start": day, "end": day + timedelta(days=2), "now": NOW}
    again = backfill.backfill(made.spark, made.home, made.config, "calls-only", **span, sessions_a_task=4)
    assert lake.read(made.home, "rewards_backfill").num_rows == trained.num_rows, "the same name replaces its range"
    assert (again.compared.correlation, again.compared.sign_changes) == (pytest.approx(1.0), 0.0)
    assert again.compared.kendall_tau in (None, 1.0)


def test_a_user_is_forgotten_and_the_stream_goes_on_over_the_same_tables(made: Deployment) -> None:
    events = world(9, 10)
    made.send(events, (b"s", b'{"user_key":"u0","broken'))
    made.append()
    made.distil()
    own = sorted({item.session_id for item in events if item.user_key == "u0"})
    assert own
    turns = lake.turns(made.home).num_rows
    gone = sum(row["user_key"] == "u0" for row in lake.turns(made.home).to_pylist())
    done = forget.forget(made.home, made.config, "u0", raw=None, now=NOW, delete_records=True)
    assert done["sessions"] == len(own)
    assert done["rows"]["events"] == sum(item.user_key == "u0" for item in events)
    assert naming(made.home.lake, *[f"'{name}'" for name in own], *own) == []
    assert kafka.begin_offsets(made.config, made.home) == kafka.end_offsets(made.config, made.home)
    assert done["topic"]["records"] == 0
    more = world(10, 3)
    made.send(more)
    made.append()
    made.distil()
    assert lake.turns(made.home).num_rows == turns - gone + len(
        {item.turn_id for item in more if item.type in ("turn_started", "completion", "tool_call")} - {None}
    )
    assert made.check()["ok"]


def test_compaction_and_retention_beside_a_running_stream_lose_and_double_nothing(made: Deployment) -> None:
    made.config = made.config.model_copy(update={"signals": JobsConfig(trigger_s=0.2, max_offsets_per_trigger=60)})
    events = world(11, 24)
    stream.prepare(made.config, made.home, resume=False, accept_gap=False)
    totals = stream.Totals()
    query = stream.start(made.spark, made.config, made.home, totals, once=False)
    tomorrow = datetime.now(UTC) + timedelta(days=2)

    done = threading.Event()

    def merge() -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            maintenance.compact(made.home, LakeConfig(), now=tomorrow)
            maintenance.retain(made.home, made.config, now=datetime.now(UTC), apply=True)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(max_workers=1) as pool:
        beside = pool.submit(merge)
        try:
            for start in range(0, len(events), 100):
                made.send(events[start : start + 100])
            query.processAllAvailable()
        finally:
            done.set()
            query.stop()
        assert beside.result() >= 1
    assert totals.rows == len(events)
    assert sorted(lake.events(made.home)["event_id"].to_pylist()) == sorted(item.event_id for item in events)
    before = maintenance.files(made.home, "events")[0].number
    maintenance.compact(made.home, LakeConfig(), now=tomorrow)
    assert maintenance.files(made.home, "events")[0].number <= before
    assert made.check()["ok"]


def test_the_list_of_rolled_back_policies_is_read_again_before_each_distil(made: Deployment, tmp_path: Path) -> None:
    made.send([event("completion", 1, 10, completion_payload("c")), event("session_ended", 3, 30, {"reason": "done"}, turn_id=None)])
    made.append()
    path = tmp_path / "tombstoned.json"
    flags = job.Flags(once=False, tombstoned=path)
    seen = []
    for listed in ("[]", "[1]", "[1]"):
        path.write_text(listed)
        summary = job._distil(made.spark, made.config, made.home, flags)
        seen.append(None if summary is None else lake.counts(made.home)[0]["outcome_reason"])
    assert seen == [seen[0], "quarantined_release", None]
    assert seen[0] != "quarantined_release"


def test_a_late_event_moves_a_turn_to_its_day_and_leaves_no_copy_behind(made: Deployment) -> None:
    made.send([event("completion", 1, 86_400_000, completion_payload("c"))])
    made.append()
    made.distil(now=NOW + timedelta(days=3))
    first = lake.turns(made.home)["date"].to_pylist()
    made.send([event("turn_started", 2, 0, {"turn_index": 0, "message": "hi", "message_chars": 2})])
    made.append()
    made.distil(now=NOW + timedelta(days=3))
    for name in ("turns", "rewards", "samples"):
        assert lake.read(made.home, name)["date"].to_pylist() == [first[0] - timedelta(days=1)], name
    assert sum(row["turns"] for row in lake.counts(made.home)) == 1
    assert isinstance(first[0], date)
