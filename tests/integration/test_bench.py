"""The bench as a person runs it: its own broker, Spark, the continuous job; small, so that it is quick."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812

from pipelines import codec
from pipelines.errors import Rejected
from signals import fuzz, generator, intake
from signals.generator import Record
from signals.tables import EVENTS
from tests.support.events_for_tests import generated_session

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


def unfit() -> Iterator[tuple[bytes | None, bytes]]:
    """Yield every field of every event type with values that may not fit it, and events that are written in other ways."""
    seen: dict[str, Record] = {}
    for number in range(30):
        for record in generated_session(f"s{number}", seed=1):
            seen.setdefault(json.loads(record.value)["type"], record)
    numbers = (b"5", b"-1", b"-0", b"1.0", b"1e999", b"1e-3", b"9" * 30, b"NaN")
    others = (b"null", b"true", b'""', b'"x"', b"[1]", b"{}", b'"\\u00e9"', b'"\\ud800"')
    for record in seen.values():
        event = json.loads(record.value)
        inner = [("payload", name) for name in (*event["payload"], "sketch")]
        for path in [*[(name,) for name in event], *inner, ("client", "name")]:
            for value in numbers + others:
                changed = json.loads(record.value)
                (changed if len(path) == 1 else changed[path[0]])[path[-1]] = "@@"
                yield record.key, json.dumps(changed, separators=(",", ":")).encode().replace(b'"@@"', value)
            changed = json.loads(record.value)
            (changed if len(path) == 1 else changed[path[0]]).pop(path[-1], None)
            yield record.key, json.dumps(changed).encode()
        yield record.key, json.dumps(event, indent=1).encode()


def judged_three_times(spark: Any, records: list[tuple[bytes | None, bytes]]) -> tuple[dict[int, Row], dict[int, Row], list[str | None]]:
    """Return what the columns, the stream and the codec say of records."""
    rows = [(key, value, "t", 0, number) for number, (key, value) in enumerate(records)]
    frame = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    now_ms = generator.START_MS + generator.LIFETIME_MS
    stamped = frame.withColumn("timestamp", F.timestamp_millis(F.lit(now_ms)))
    plain = {row["offset"]: row for row in intake.plain(stamped, max_bytes=generator.MAX_EVENT_BYTES).collect()}
    judged = {row["offset"]: row for row in intake.judged(stamped, max_bytes=generator.MAX_EVENT_BYTES).collect()}
    decoded = [codec.decode(value, generator.MAX_EVENT_BYTES, now_ms=now_ms, key=key or b"") for key, value in records]
    return plain, judged, [found.reason if isinstance(found, Rejected) else None for found in decoded]


def test_columns_stream_and_codec_agree_on_what_an_event_is(spark: Any) -> None:
    fuzzed = [(item.record.key, item.record.value) for item in fuzz.fuzz_chunk(7, records=1_500)]
    records = [*fuzzed, *unfit(), *[(record.key, record.value) for record in generator.chunk(1, sessions=10)]]
    plain, judged, reasons = judged_three_times(spark, records)
    assert [judged[number]["reason"] for number in range(len(records))] == reasons
    assert [records[number] for number in plain if reasons[number] is not None] == []
    for number, row in plain.items():
        assert {name: judged[number][name] for name in EVENTS.schema.names} == row.asDict()
    assert all(bytes(row["raw"]) == records[number][1] for number, row in judged.items() if row["reason"] is not None)
    assert {row["reason"] for row in judged.values()} == codec.REASONS | {None}


def test_events_of_todays_clients_are_read_in_one_pass(spark: Any) -> None:
    """What is not plain is read twice and judged in Python: right, but slow."""
    records = [(record.key, record.value) for record in generator.chunk(2, sessions=20, mix=generator.Mix(hostile=0))]
    events = [(key, codec.decode(value, generator.MAX_EVENT_BYTES)) for key, value in records]
    written = [(key, codec.encode(event)) for key, event in events if not isinstance(event, Rejected)]
    plain, _, reasons = judged_three_times(spark, [*records, *written])
    assert len(plain) == len(reasons) == 2 * len(records)


def test_a_second_event_in_the_same_record_is_not_lost_silently(spark: Any) -> None:
    record, other, *_ = generated_session("s", seed=1)
    braces = record.value.replace(b'"client":{', b'"note":"{}","client":{')
    values = [record.value, braces, record.value + b"\n", record.value + other.value, record.value + b"}", record.value.replace(b'"', b"'")]
    rows = [(record.key, value, "t", 0, number) for number, value in enumerate(values)]
    frame = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    stamped = frame.withColumn("timestamp", F.timestamp_millis(F.lit(generator.START_MS + generator.LIFETIME_MS)))
    reasons = intake.judged(stamped, max_bytes=generator.MAX_EVENT_BYTES).orderBy("offset").select("reason").collect()
    assert [row["reason"] for row in reasons] == [None, None, None, "malformed_json", "malformed_json", "malformed_json"]
