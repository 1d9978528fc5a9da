"""The distil on real Spark, over a lake whose events arrive in batches: its costs, what readers see meanwhile, and where it is killed."""

import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import ContractViolation
from pipelines.events import Event
from pipelines.storage import Home
from signals import checks, counts, distil, lake, maintenance, parts
from signals.config import JobsConfig, RewardsConfig, SignalsConfig
from signals.tables import TABLES
from tests.support.lakes import arrive
from tests.support.spark import T0, completion_payload, event, made_up_session

pytestmark = pytest.mark.spark

CONFIG = SignalsConfig(rewards=RewardsConfig(latency_medians_ms={"*": 900.0}))
START = datetime.fromtimestamp(T0 / 1000, UTC)
LATER = START + timedelta(hours=3)
KEPT = ("edits", "rewards", "samples", "turns", "conflicts", "ledger_counts")
STEPS = (*distil.WRITTEN, "ledger_counts", "distilled")


def run(spark: Any, home: Home, *, now: datetime = LATER, config: SignalsConfig = CONFIG, after: Any = None, **more: Any) -> distil.Summary:
    tombstoned = more.pop("tombstoned", frozenset())
    what = distil.touched(home, config, now=now, tombstoned=tombstoned, **more)
    return distil.distil(spark, home, config, what, now=now, tombstoned=tombstoned, after=after or (lambda _step: None))


def content(home: Home, name: str, as_of: int | None = None) -> list[str]:
    return sorted(map(repr, lake.read(home, name, as_of=as_of).select(sorted(TABLES[name].schema.names)).to_pylist()))


def world(seed: int, number: int) -> list[Event]:
    rng = random.Random(seed)
    return [item for index in range(number) for item in made_up_session(rng, f"w{seed}-{index:02}")]


def mixed(events: list[Event], seed: int) -> list[Event]:
    rng = random.Random(seed)
    found = [*events, *rng.choices(events, k=len(events) // 5)]
    rng.shuffle(found)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    return made


@pytest.fixture(scope="module")
def told(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, list[Event]]:
    """A lake after one distil of twenty sessions that arrived in order."""
    home, events = Home(tmp_path_factory.mktemp("told")), world(3, 20)
    lake.create_missing(home)
    arrive(home, events, at=START)
    run(spark, home)
    return home, events


def turn_keys(home: Home, version: int) -> list[tuple[str, str]]:
    return [(row["session_id"], row["turn_id"]) for row in lake.turns(home, as_of=version).to_pylist()]


def test_after_every_batch_readers_see_every_turn_once_and_the_end_is_the_same(
    spark: Any, home: Home, told: tuple[Home, list[Event]]
) -> None:
    """Batches cut sessions anywhere, so each distil replaces rows of sessions that it had before, beside sessions that it had not."""
    first, events = told
    arriving = mixed(events, 1)
    for begin in range(0, len(arriving), 90):
        arrive(home, arriving[begin : begin + 90], at=START + timedelta(minutes=begin))
        run(spark, home, now=START + timedelta(minutes=begin))
        assert sum(counts.outcomes(home).values()) == len(set(turn_keys(home, lake.versions(home)["turns"])))
    run(spark, home)
    before: set[tuple[str, str]] = set()
    for version in range(1, lake.versions(home)["turns"] + 1):
        keys = turn_keys(home, version)
        assert len(keys) == len(set(keys)), "a turn is there twice"
        assert before <= set(keys), "a turn is missing that was there"
        before = set(keys)
    for name in KEPT:
        assert content(home, name) == content(first, name), name


@pytest.mark.parametrize("step", STEPS)
def test_killed_after_any_commit_the_next_run_gives_the_same_tables(
    step: str, spark: Any, home: Home, told: tuple[Home, list[Event]]
) -> None:
    def die(done: str) -> None:
        if done == step:
            raise ContractViolation("the process dies here")

    first, events = told
    arriving = mixed(events, 2)
    arrive(home, arriving[:300], at=START)
    run(spark, home, now=START + timedelta(minutes=20))
    arrive(home, arriving[300:], at=LATER)
    with pytest.raises(ContractViolation, match="dies here"):
        run(spark, home, after=die)
    again = run(spark, home, now=LATER + timedelta(seconds=1)) if step == "distilled" else run(spark, home)
    assert sum(again.outcomes.values()) == lake.count(home, "turns")
    for name in KEPT:
        assert content(home, name) == content(first, name), name
    assert not distil.touched(home, CONFIG, now=LATER + timedelta(seconds=1), tombstoned=frozenset()).sessions


def test_what_one_session_costs_does_not_grow_with_the_day_or_the_lake(spark: Any, home: Home) -> None:
    """A new event of one session: only the file that holds its rows is written again, only files of its events are read."""
    for number in range(12):
        at = START + timedelta(hours=4 * number)
        own = [item.model_copy(update={"session_id": f"w{number:02}-{item.session_id}"}) for item in world(number, 3)]
        arrive(home, own, at=at)
        run(spark, home, now=at)
    before = {name: {own.path for own in parts.held(lake.open_table(home, name))} for name in ("turns", "rewards", "edits", "samples")}
    late = next(item for item in world(5, 3) if item.type == "completion")
    changed = late.model_copy(update={"event_id": "late", "session_id": f"w05-{late.session_id}", "type": late.type})
    arrive(home, [changed], at=START + timedelta(hours=60))
    summary = run(spark, home, now=START + timedelta(hours=60))
    assert summary.sessions == 1
    for name, files in before.items():
        after = {own.path for own in parts.held(lake.open_table(home, name))}
        assert len(files) >= 12, name
        assert len(files - after) <= 1, name
        assert len(after - files) <= 2, name
    checks.quick(home)


def test_nothing_new_is_no_commit_and_no_task(spark: Any, home: Home) -> None:
    arrive(home, world(1, 4), at=START)
    run(spark, home)
    before = lake.versions(home)
    found = distil.touched(home, CONFIG, now=LATER, tombstoned=frozenset())
    assert (found.sessions, found.news) == (frozenset(), False)
    run(spark, home)
    assert {name for name, version in lake.versions(home).items() if version != before[name]} == {"distilled"}


def test_turns_from_before_the_look_back_stay_when_something_comes_for_their_session_later(spark: Any, home: Home) -> None:
    """Their events are not looked at any more, so they can neither be computed again nor be taken away."""
    config = CONFIG.model_copy(update={"signals": JobsConfig(lookback_days=5)})

    def at(days: int) -> datetime:
        return START + timedelta(days=days)

    def completion(number: int, days: int, turn: str) -> Event:
        return event("completion", number, days * 86_400_000, completion_payload(f"c{number}"), turn_id=turn)

    arrive(home, [completion(1, 0, "t0"), event("feedback", 2, 1000, {"source": "thumb", "score": 1.0}, turn_id="t0")], at=at(0))
    run(spark, home, now=at(0) + timedelta(hours=1), config=config)
    scored = content(home, "rewards")
    arrive(home, [completion(3, 8, "t8")], at=at(8))
    run(spark, home, now=at(8) + timedelta(hours=1), config=config)
    assert [row["turn_id"] for row in lake.turns(home).sort_by("turn_id").to_pylist()] == ["t0", "t8"]
    assert scored[0] in content(home, "rewards")
    assert sum(counts.outcomes(home).values()) == 2
    # A turn that began before the look-back and went on in it is there once.
    arrive(home, [completion(4, 9, "t9")], at=at(9))
    run(spark, home, now=at(9), config=config)
    arrive(home, [completion(5, 10, "t9")], at=at(10))
    run(spark, home, now=at(11), config=config)
    assert ("t9", at(9).date()) in [(row["turn_id"], row["date"]) for row in lake.turns(home).to_pylist()]
    arrive(home, [completion(6, 15, "t15")], at=at(15))
    run(spark, home, now=at(15) + timedelta(hours=1), config=config)
    assert [(row["turn_id"], row["date"]) for row in lake.turns(home).sort_by("turn_id").to_pylist()] == [
        ("t0", at(0).date()), ("t15", at(15).date()), ("t8", at(8).date()), ("t9", at(10).date()),
    ]  # fmt: skip
    assert sum(counts.outcomes(home).values()) == 4
    assert isinstance(lake.turns(home)["date"].to_pylist()[0], date)


def test_a_restored_release_and_changed_settings_reach_all_their_turns(spark: Any, home: Home) -> None:
    arrive(home, world(4, 12), at=START)
    run(spark, home)
    plain = {name: content(home, name) for name in KEPT}
    run(spark, home, tombstoned=frozenset({1}))
    own = [row for row in lake.turns(home).to_pylist() if row["policy_version"] == 1 and row["consent"] == "train"]
    assert own
    assert {row["outcome_reason"] for row in own} == {"quarantined_release"}
    run(spark, home)
    assert {name: content(home, name) for name in KEPT} == plain
    other = CONFIG.model_copy(update={"rewards": RewardsConfig(weights={"effort": 0.5})})
    assert not distil.touched(home, other, now=LATER, tombstoned=frozenset()).sessions
    run(spark, home, config=other, everything=True)
    assert len(set(lake.rewards(home)["reward_version"].to_pylist())) == 1
    assert lake.rewards(home)["reward_version"][0].as_py() not in plain["rewards"][0]
    run(spark, home, everything=True)
    assert {name: content(home, name) for name in KEPT} == plain


def test_logs_are_merged_by_the_job_once_they_are_many(spark: Any, home: Home) -> None:
    arrive(home, world(6, 2), at=START)
    for number in range(maintenance.FILES_BEFORE_JOBS_MERGE):
        at = START + timedelta(seconds=number)
        lake.append(home, "gaps", [{"topic": "x", "partition": 0, "start": number, "end": number, "accepted_at": at}])
    run(spark, home)
    assert len(lake.open_table(home, "gaps").file_uris()) == maintenance.FILES_BEFORE_JOBS_MERGE
    lake.append(home, "gaps", [{"topic": "x", "partition": 0, "start": 99, "end": 99, "accepted_at": START}])
    run(spark, home)
    assert len(lake.open_table(home, "gaps").file_uris()) == 1
    assert lake.count(home, "gaps") == maintenance.FILES_BEFORE_JOBS_MERGE + 1
