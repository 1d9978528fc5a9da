"""The bench's arithmetic, meter and report; the measuring itself is in tests/integration."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.errors import ConfigError, ContractViolation, StorageFull
from pipelines.storage import Home
from signals import bench, bench_fuzz, bench_live, bench_meter, bench_python, bench_report, bench_topics, generator, lake, stream
from signals.bench import Measure, Plan
from signals.bench_commands import parse_sizes
from signals.bench_topics import Filled
from signals.config import RewardsConfig, SignalsConfig
from tests.support.events_for_tests import generated_session
from tests.support.lakes import event_row, refused_row


def measure(subject: str, size: int, seconds: float, repeat: int = 0) -> Measure:
    return Measure(
        subject=subject, size=size, repeat=repeat, records=size, seconds=seconds, cpu_s=seconds, peak_rss_bytes=1,
        parts_s={"append": seconds / 2, "distil": seconds / 2},
    )  # fmt: skip


@pytest.fixture
def done() -> dict[str, Any]:
    measures = [
        measure("raw", 1000, 0.1), measure("passthrough", 1000, 0.5), measure("pipeline", 1000, 1.0),
        measure("raw", 1000, 0.2, 1), measure("passthrough", 1000, 1.0, 1), measure("pipeline", 1000, 1.25, 1),
        measure("per_group_python", 1000, 8.0),
        measure("raw", 10_000, 1.0), measure("passthrough", 10_000, 4.0), measure("pipeline", 10_000, 10.0),
        measure("pipeline", 3_000_000, 2_500.0),
    ]  # fmt: skip
    filled = {size: Filled(topic="t", size=size, chunks=1, records=size) for size in (1000, 10_000, 3_000_000)}
    live = bench_live.Live(trigger_s=10.0, seconds=[float(second) for second in range(1, 21)], sent=20)
    plan = Plan(sizes=(1000, 10_000, 3_000_000), repeats=2)
    return bench.result(plan, SignalsConfig(), measures, filled, live, peak_rss_bytes=3_000_000_000)


def test_speeds_are_records_a_second_of_the_headline_size_and_python_of_the_smallest(done: dict[str, Any]) -> None:
    assert done["headline_size"] == 10_000
    assert done["events_per_s_core"] == {"raw": 10_000.0, "passthrough": 2_500.0, "pipeline": 1_000.0, "per_group_python": 125.0}
    assert done["by_size"] == {"1000": 900.0, "10000": 1_000.0, "3000000": 1_200.0}


def test_ratios_compare_what_ran_in_the_same_round(done: dict[str, Any]) -> None:
    # 0.5 and 0.8 at the small size: the median of the two rounds, not the ratio of the medians (0.72).
    assert done["ratios"]["pipeline_to_passthrough"] == {"1000": 0.65, "10000": 0.4}
    assert done["ratios"]["pipeline_to_per_group_python"] == 8.0
    assert done["ratios"]["distil_to_per_group_python"] == 16.0
    assert done["ratios"]["slowest_to_fastest_size"] == 0.75


def test_the_time_to_a_reward_is_told_by_its_quantiles_and_in_triggers(done: dict[str, Any]) -> None:
    assert done["event_to_reward_s"] == {"p50": 11.0, "p95": 20.0}
    assert (done["trigger_s"], done["ratios"]["p95_in_triggers"]) == (10.0, 2.0)


def test_goals_say_what_was_met(done: dict[str, Any]) -> None:
    assert list(done["goals"].values()) == [False, False, False, True, True]


def test_the_report_names_every_subject_and_goal(done: dict[str, Any], tmp_path: Path) -> None:
    said = bench_report.text(done)
    assert "per_group_python         125   125 to 125" in said
    assert "pipeline / passthrough: 1000: 0.65, 10000: 0.40" in said
    assert said.count("missed") == 3
    bench_report.plot(done, tmp_path / "deep" / "bench.svg")
    assert (tmp_path / "deep" / "bench.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_smallest_size_runs_in_rounds_after_a_warm_up_and_the_largest_with_the_pipeline_alone() -> None:
    rounds = bench._rounds(Plan(sizes=(3_000_000, 1000), repeats=2))
    assert rounds[:-1] == [(subject, 1000, repeat) for repeat in (-1, 0, 1) for subject in bench.SUBJECTS]
    assert rounds[-1] == ("pipeline", 3_000_000, 0)


@pytest.mark.parametrize("plan", [Plan(sizes=()), Plan(sizes=(0,)), Plan(sizes=(5,), repeats=0)])
def test_a_plan_that_means_nothing_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="at least"):
        bench.check(plan)


def test_sizes_are_read_from_one_text() -> None:
    assert parse_sizes("100_000,1000000") == (100_000, 1_000_000)
    with pytest.raises(ConfigError, match="whole numbers"):
        parse_sizes("1e5")


def test_a_run_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    bench_topics.require_space(tmp_path, 10, 1_000)
    with pytest.raises(StorageFull, match="smaller --sizes"):
        bench_topics.require_space(tmp_path, 10**12, 1_000)


def test_the_meter_sees_a_childs_memory_and_processor_time_and_leaves_out_what_it_is_told_to() -> None:
    code = "x = bytearray(80_000_000); sum(i * i for i in range(3_000_000)); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    everything, without = (bench_meter.used(os.getpid(), frozenset(left_out)) for left_out in ((), (child.pid,)))
    (own,) = everything.keys() - without.keys()
    assert own[0] == child.pid
    assert everything[own].rss_bytes > 70_000_000
    assert everything[own].cpu_s > 0.02
    child.communicate(b"\n")


def test_a_reading_covers_its_block() -> None:
    with bench_meter.Meter(os.getpid()) as meter:
        with meter.reading() as reading:
            time.sleep(0.25)
        assert 0.25 <= reading.seconds < 5
        assert 0 < reading.peak_rss_bytes <= meter.peak


def test_processor_time_of_a_process_that_ends_is_counted_once_and_not_taken_back() -> None:
    busy = "import time\nwhile time.process_time() < 0.65: pass\ntime.sleep(0.5)"
    with bench_meter.Meter(os.getpid()) as meter:
        with meter.reading() as first:
            subprocess.run([sys.executable, "-c", busy], check=True)
        with meter.reading() as second:
            time.sleep(0.25)
    assert 0.6 <= first.cpu_s < 1.5
    assert 0 <= second.cpu_s < 0.3


def test_per_group_python_gives_the_turns_of_the_plain_rules_and_passes_over_what_is_no_event() -> None:
    values = [record.value for record in generated_session("s", seed=3)]
    found = bench_python.turns([*values, b"{", *values], RewardsConfig(), max_bytes=64_000, now_ms=generator.START_MS * 2)
    assert found
    assert {row["session_id"] for row in found} == {"s"}
    assert len({row["turn_id"] for row in found}) == len(found)


def test_a_live_session_is_six_events_that_end_judged() -> None:
    from signals.sessions import distil

    events = bench_live.session_events("live", 1_780_000_000_000)
    (turn,) = distil([event.model_dump(mode="json") for event in events], RewardsConfig(), now_ms=1_780_000_000_000)
    assert len(events) == 6
    assert (turn.outcome.value, turn.course.final, turn.evidence.edits[0].decision) == ("scored", True, "accepted")


@pytest.mark.parametrize(
    ("offset", "partition", "expected", "words"),
    [
        (0, 0, "wrong_key", "0:0 is \\['malformed_json'\\], the codec says wrong_key"),
        (0, 0, None, "0:0 is \\['malformed_json'\\], the codec says None"),
        (1, 0, "wrong_key", "0:1 is \\[None\\], the codec says wrong_key"),
        (2, 0, None, "0:2 is \\[\\], the codec says None"),
    ],
)
def test_a_verdict_that_is_not_the_codecs_fails_the_fuzz_bench(
    offset: int, partition: int, expected: str | None, words: str, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    lake.create_missing(home)
    lake.append(home, "quarantine", [refused_row(0, b"{")])
    lake.append(home, "events", [event_row(1, session="s")])
    right = {(0, 0): ("cut", "malformed_json"), (0, 1): ("honest", None)}

    def asked(rows: dict[tuple[int, int], tuple[str, str | None]]) -> pa.Table:
        return pa.Table.from_pylist(
            [{"partition": p, "offset": o, "kind": kind, "expected": said} for (p, o), (kind, said) in rows.items()]
        )

    done = bench_fuzz.result(home, stream.Totals(batches=1), asked(right), seconds=1.0)
    assert (done["records"], done["quarantined"], done["accepted"], done["judged_otherwise"]) == (2, 1, 1, 0)
    assert done["kinds"] == {"cut": {"events": 0, "refused": 1}, "honest": {"events": 1, "refused": 0}}
    with pytest.raises(ContractViolation, match=words):
        bench_fuzz.result(home, stream.Totals(), asked(right | {(partition, offset): ("cut", expected)}), seconds=1.0)
