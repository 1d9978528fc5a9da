"""Sending again what lies on disk."""

import json
import time
from pathlib import Path

import pytest

from pipelines import codec, kafka
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.recorder import Recorder, quarantine
from pipelines.replay import quarantined, records, replay
from pipelines.spool import waiting_files
from pipelines.storage import Home
from tests.support.events_for_tests import CLIENT, feedback, message

NOW = int(time.time() * 1000)


@pytest.mark.kafka
def test_a_dead_recorders_spool_and_a_repaired_quarantine_go_out_again_under_their_own_ids(home: Home, kafka_config: KafkaConfig) -> None:
    config = PipelinesConfig(kafka=kafka_config)
    kafka.ensure_topics(config, home)
    away = PipelinesConfig(
        kafka=kafka_config.model_copy(update={"bootstrap_servers": "127.0.0.1:1", "max_event_bytes": 1_000, "max_claim_bytes": 1_000})
    )
    small, large = [feedback(score=i / 10) for i in range(5)], message("word " * 400)
    with Recorder(away, home, client=CLIENT) as recorder:
        for event in [*small, large]:
            recorder.record(event)
        recorder.flush(0.5)
        recorder.close(0.1)
    still_bad = codec.encode(feedback()).replace(b'"feedback"', b'"poem"')
    quarantine(home, reason="unknown_type", raw=still_bad, detail="", at_ms=NOW)
    spooled, held = list(waiting_files(home)), quarantined(home)
    assert [path.stem for path in held] == ["oversized", "unknown_type"]
    result = replay(config, home, [*spooled, *held], now_ms=NOW)
    assert (result.sent, result.rejected) == (6, {"unknown_type": 1})
    arrived = [json.loads(record.value)["event_id"] for record in kafka.read_all(config, home)]
    assert sorted(arrived) == sorted(event.event_id for event in [*small, large])


def test_reading_a_spool_leaves_a_truncated_last_line_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n\n{"b":2}\r\n{"cut')
    assert list(records(path)) == [b'{"a":1}', b'{"b":2}']
