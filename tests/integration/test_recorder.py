"""The recorder against a real broker: outages, kills, damage."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from pipelines import kafka
from pipelines.broker import EmbeddedBroker
from pipelines.config import KafkaConfig, PipelinesConfig, PrivacyConfig
from pipelines.recorder import Recorder
from pipelines.storage import Home
from tests.support.events_for_tests import CLIENT, feedback, message

pytestmark = pytest.mark.kafka


def settings(kafka_config: KafkaConfig) -> PipelinesConfig:
    return PipelinesConfig(kafka=kafka_config)


def arrived(config: PipelinesConfig, home: Home) -> list[dict]:
    return [json.loads(record.value) for record in kafka.read_all(config, home)]


def test_recorded_events_arrive_keyed_by_session_and_in_order(home: Home, kafka_config: KafkaConfig) -> None:
    config = settings(kafka_config)
    kafka.ensure_topics(config, home)
    events = [feedback(session=f"s{i % 3}", score=i / 100) for i in range(60)]
    with Recorder(config, home, client=CLIENT) as recorder:
        for event in events:
            recorder.record(event)
        assert recorder.flush(20)
        counts = recorder.counts()
    assert (counts.recorded, counts.delivered, counts.spooled, counts.dropped, counts.rejected) == (60, 60, 0, 0, {})
    records = kafka.read_all(config, home)
    for session in ("s0", "s1", "s2"):
        scores = [json.loads(r.value)["payload"]["score"] for r in records if r.key == session.encode()]
        assert scores == [e.payload.score for e in events if e.session_id == session]
    assert not list(home.spool.rglob("*.jsonl")), "delivered segments give their disk back"


def test_events_recorded_while_the_broker_is_down_arrive_exactly_once_by_id_when_it_is_back(tmp_path: Path) -> None:
    home = Home(tmp_path / "own")
    config = PipelinesConfig()
    broker = EmbeddedBroker(home)
    broker.start()
    recorder = Recorder(config, home, client=CLIENT)
    events = [feedback(session=f"s{i % 5}", score=(i % 100) / 100) for i in range(300)]
    try:
        kafka.ensure_topics(config, home)
        for event in events[:100]:
            recorder.record(event)
        assert recorder.flush(20)
        for event in events[100:150]:
            recorder.record(event)
        broker.stop()
        for event in events[150:]:
            recorder.record(event)
        assert not recorder.flush(1.0)
        counts = recorder.counts()
        assert counts.queued == 0
        assert counts.spooled >= 150
        assert counts.spooled + counts.delivered == 300
        broker.start()
        assert recorder.flush(60), recorder.counts()
        final = recorder.close()
        assert (final.delivered, final.dropped, final.spooled) == (300, 0, 0)
        by_id = Counter(event["event_id"] for event in arrived(config, home))
        assert set(by_id) == {event.event_id for event in events}
        assert all(count <= 2 for count in by_id.values()), "only what was in flight at the outage may repeat"
        assert all(by_id[event.event_id] == 1 for event in events[150:]), "what was never sent before goes out once"
    finally:
        recorder.close(0)
        broker.stop()


def test_an_event_on_disk_survives_kill_9_of_the_recording_process(home: Home, kafka_config: KafkaConfig) -> None:
    config = settings(kafka_config)
    kafka.ensure_topics(config, home)
    away = config.model_copy(update={"kafka": kafka_config.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})})
    program = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from pipelines.config import PipelinesConfig
        from pipelines.recorder import Recorder
        from pipelines.storage import Home
        from tests.support.events_for_tests import CLIENT, feedback
        config = PipelinesConfig.model_validate_json({away.model_dump_json()!r})
        recorder = Recorder(config, Home(Path({str(home.root)!r})), client=CLIENT)
        for i in range(40):
            recorder.record(feedback(score=i / 100))
        while recorder.counts().spooled < 40:
            time.sleep(0.01)
        print("spooled", flush=True)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"spooled\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (segment,) = home.spool.rglob("*.jsonl")
    with segment.open("ab") as file:
        file.write(b'{"event_id": "cut off in the mid')
    with Recorder(config, home, client=CLIENT) as recorder:
        assert recorder.counts().recovered == 40
        assert recorder.flush(20)
    assert [event["payload"]["score"] for event in arrived(config, home)] == [i / 100 for i in range(40)]
    assert not list(home.spool.rglob("*.jsonl"))


def test_oversized_malformed_and_future_events_go_to_quarantine_and_are_counted(home: Home, kafka_config: KafkaConfig) -> None:
    limits = {"max_event_bytes": 2_000, "max_claim_bytes": 0}
    config = PipelinesConfig(kafka=kafka_config.model_copy(update=limits), privacy=PrivacyConfig(keep_text=True))
    kafka.ensure_topics(config, home)
    far = feedback(at_ms=int(time.time() * 1000) + 10 * 3_600_000)
    broken = feedback().model_copy(update={"session_id": 7})
    with Recorder(config, home, client=CLIENT) as recorder:
        for event in (feedback(), message("x y " * 1_000), far, broken, "no event at all"):
            recorder.record(event)  # type: ignore[arg-type]
        assert recorder.flush(20)
        counts = recorder.counts()
    assert counts.delivered == 1
    assert counts.rejected == {"oversized": 1, "future_dated": 1, "invalid_field": 2}
    assert counts.recorded == counts.delivered + sum(counts.rejected.values())
    kept = {path.stem: len(path.read_bytes().splitlines()) for path in (home.spool / "quarantine").glob("*.jsonl")}
    assert kept == {"oversized": 1, "future_dated": 1, "invalid_field": 2}


def test_text_is_redacted_before_it_reaches_the_spool_or_the_topic(home: Home, kafka_config: KafkaConfig) -> None:
    config = settings(kafka_config)
    kafka.ensure_topics(config, home)
    with Recorder(config, home, client=CLIENT) as recorder:
        recorder.record(message("use AKIAABCDEFGHIJKLMNOP please"))
        assert recorder.flush(20)
    (event,) = arrived(config, home)
    assert event["payload"]["message"] == "use <redacted:aws_key> please"


def test_the_spool_is_bounded_and_what_does_not_fit_is_counted_as_dropped(home: Home) -> None:
    config = PipelinesConfig(kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1", spool_max_bytes=2_000))
    recorder = Recorder(config, home, client=CLIENT)
    for _ in range(50):
        recorder.record(feedback())
    started = time.monotonic()
    counts = recorder.close(0.2)
    assert time.monotonic() - started < 15
    assert counts.spooled + counts.dropped == 50
    assert 0 < counts.spooled < 10
    assert sum(path.stat().st_size for path in home.spool.rglob("*.jsonl")) <= 2_000


def test_recording_never_blocks_when_the_queue_is_full(home: Home) -> None:
    config = PipelinesConfig(kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1", buffer_events=10))
    recorder = Recorder(config, home, client=CLIENT)
    slowest = 0.0
    for _ in range(2_000):
        started = time.perf_counter()
        recorder.record(feedback())
        slowest = max(slowest, time.perf_counter() - started)
    counts = recorder.close(0.2)
    assert slowest < 0.5
    assert counts.recorded == 2_000 == counts.spooled + counts.dropped
    recorder.record(feedback())
    assert recorder.counts().dropped == counts.dropped + 1


def test_every_event_of_many_threads_is_accounted_for(home: Home) -> None:
    config = PipelinesConfig(kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1", spool_max_bytes=100_000))
    recorder = Recorder(config, home, client=CLIENT)

    def work(number: int) -> None:
        for i in range(100):
            recorder.record(feedback(session=f"s{number}", score=0.5) if i % 10 else message("x", session=f"s{number}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = recorder.close(0.2)
    assert counts.recorded == 800
    assert counts.recorded == counts.queued + counts.spooled + counts.delivered + counts.dropped + sum(counts.rejected.values())
    assert counts.queued == counts.delivered == 0
    on_disk = sum(len(path.read_bytes().splitlines()) for path in home.spool.rglob("recorder-*/*.jsonl"))
    assert on_disk == counts.spooled
