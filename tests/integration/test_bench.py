"""The bench as a person runs it: its own broker, Spark, the continuous job; small, so that it is quick."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from pipelines import codec
from pipelines.errors import Rejected
from signals import generator, intake

pytestmark = [pytest.mark.kafka, pytest.mark.spark]


@pytest.mark.slow
def test_the_bench_measures_all_four_subjects_memory_and_the_time_to_a_reward(tmp_path: Path) -> None:
    options = ["--sizes", "500", "--repeats", "1", "--trigger-s", "1", "--live-s", "2", "--set", "spark.driver_memory=1g"]
    command = [sys.executable, "-m", "deploy", "bench", "signals", *options, "--work", str(tmp_path / "work"), "--json"]
    ran = subprocess.run([*command, "--plot", str(tmp_path / "bench.svg")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    done = json.loads(ran.stdout)
    assert set(done["events_per_s_core"]) == {"raw", "passthrough", "pipeline", "per_group_python"}
    assert all(rate > 0 for rate in done["events_per_s_core"].values())
    assert done["by_size"]["500"] == done["events_per_s_core"]["pipeline"]
    assert 200_000_000 < done["peak_rss_bytes"] < 4_000_000_000
    assert 0 < done["event_to_reward_s"]["p50"] <= done["event_to_reward_s"]["p95"]
    assert done["live"]["sessions"] > 0
    assert done["trigger_s"] == 1.0
    assert (tmp_path / "bench.svg").stat().st_size > 5_000
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "work" / "measuring").exists()


def test_what_the_codec_refuses_the_stream_refuses_with_a_reason(spark: Any) -> None:
    records = list(generator.fuzz_chunk(7, records=1_500))
    rows = [(record.key, record.value, "t", 0, number) for number, record in enumerate(records)]
    frame = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    stamped = frame.withColumn("timestamp", F.timestamp_millis(F.lit(generator.START_MS + generator.LIFETIME_MS)))
    judged = intake.judged(stamped, max_bytes=generator.MAX_EVENT_BYTES).select("offset", "reason", "raw").collect()
    assert len(judged) == len(records)
    accepted = [records[row["offset"]] for row in judged if row["reason"] is None]
    assert {row["reason"] for row in judged} <= codec.REASONS | {None}
    assert all(row["raw"] == records[row["offset"]].value for row in judged if row["reason"] is not None)
    # Spark reads a number or an object where a text belongs as text, and passes over what separates lines of base64; nothing else passes.
    assert len(accepted) <= len(records) * 0.03
    for record in accepted:
        found = codec.decode(record.value, generator.MAX_EVENT_BYTES)
        assert isinstance(found, Rejected)
        assert found.reason in ("invalid_field", "bad_packed_array"), (found.reason, found.detail, record.value)


def test_a_second_event_in_the_same_record_is_not_lost_silently(spark: Any) -> None:
    (_, record), (_, other), *_ = generator.honest_session("s", seed=1)
    braces = record.value.replace(b'"client":{', b'"note":"{}","client":{')
    values = [record.value, braces, record.value + b"\n", record.value + other.value, record.value + b"}", record.value.replace(b'"', b"'")]
    rows = [(record.key, value, "t", 0, number) for number, value in enumerate(values)]
    frame = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    stamped = frame.withColumn("timestamp", F.timestamp_millis(F.lit(generator.START_MS + generator.LIFETIME_MS)))
    reasons = intake.judged(stamped, max_bytes=generator.MAX_EVENT_BYTES).orderBy("offset").select("reason").collect()
    assert [row["reason"] for row in reasons] == [None, None, None, "malformed_json", "malformed_json", "malformed_json"]
