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
from signals import fuzz, generator, intake
from tests.support.events_for_tests import generated_session

LIMITS = intake.Limits(max_bytes=generator.MAX_EVENT_BYTES)
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


@pytest.mark.slow
def test_the_fuzz_bench_accounts_for_every_record_by_what_was_done_to_it(tmp_path: Path) -> None:
    options = ["--records", "800", "--work", str(tmp_path / "work"), "--set", "spark.driver_memory=1g", "--json"]
    ran = subprocess.run([sys.executable, "-m", "deploy", "bench", "fuzz", *options], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    done = json.loads(ran.stdout)
    assert (done["quarantined"], done["judged_otherwise"]) == (800, 0)
    assert done["records"] == 800 + done["accepted"] == sum(kind["events"] + kind["refused"] for kind in done["kinds"].values())
    assert sum(done["reasons"].values()) == 800
    assert done["kinds"]["honest"]["events"] > 0
    assert done["kinds"]["honest"]["refused"] == 0


def test_spark_gives_what_the_judge_says_of_each_record(spark: Any) -> None:
    records = [item.record for item in fuzz.fuzz_chunk(7, records=300)] + [*generator.chunk(1, sessions=3)]
    rows = [(record.key, record.value, "t", 0, number) for number, record in enumerate(records)]
    frame = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    now_ms = generator.START_MS + generator.LIFETIME_MS
    stamped = frame.withColumn("timestamp", F.timestamp_millis(F.lit(now_ms)))
    judged = intake.judged(stamped, LIMITS).orderBy("offset")
    verdicts = [codec.decode(record.value, LIMITS.max_bytes, now_ms=now_ms, key=record.key or b"") for record in records]
    said = [found.reason if isinstance(found, Rejected) else None for found in verdicts]
    assert [row["reason"] for row in judged.collect()] == said
    assert judged.columns == intake.JUDGED.names
    assert (intake.accepted(judged).count(), intake.refused(judged).count()) == (said.count(None), len(said) - said.count(None))


def test_a_second_event_in_the_same_record_is_not_lost_silently(spark: Any) -> None:
    record, other, *_ = generated_session("s", seed=1)
    braces = record.value.replace(b'"client":{', b'"note":"{}","client":{')
    values = [record.value, braces, record.value + b"\n", record.value + other.value, record.value + b"}", record.value.replace(b'"', b"'")]
    rows = [(record.key, value, "t", 0, number) for number, value in enumerate(values)]
    frame = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    stamped = frame.withColumn("timestamp", F.timestamp_millis(F.lit(generator.START_MS + generator.LIFETIME_MS)))
    reasons = intake.judged(stamped, LIMITS).orderBy("offset").select("reason").collect()
    assert [row["reason"] for row in reasons] == [None, None, None, "malformed_json", "malformed_json", "malformed_json"]
