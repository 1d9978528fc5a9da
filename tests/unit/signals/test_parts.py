"""Rows of some sessions are replaced in one commit: what a table holds is what a dictionary would, at every version of it."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake.exceptions import CommitFailedError
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import ContractViolation, TransientError
from pipelines.storage import Home
from signals import lake, maintenance, parts
from signals.config import LakeConfig
from signals.tables import TABLES

DAYS = (date(2026, 5, 30), date(2026, 5, 31))
AT = datetime(2026, 5, 30, 23, 59, 59, 123_456, tzinfo=UTC)


def rows(name: str, found: Iterable[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(found), schema=lake.nullable(TABLES[name].schema))


def turn(session: str, number: int, day: date = DAYS[0], **more: Any) -> dict[str, Any]:
    base = {"session_id": session, "turn_id": f"{session}-{number}", "turn_index": number, "date": day, "closes_at": AT, "final": True}
    return base | more


def put(home: Home, found: list[dict[str, Any]], gone: dict[date, list[str]] | None = None, name: str = "turns") -> None:
    fresh = parts.write(lake.path(home, name), rows(name, found)) if found else []
    parts.replace(home, name, fresh, gone=gone or {})


def held(home: Home, as_of: int | None = None) -> list[tuple[str, str, int, date]]:
    found = lake.scan(home, "turns", ["session_id", "turn_id", "turn_index", "date"], as_of=as_of).to_pylist()
    return sorted((row["session_id"], row["turn_id"], row["turn_index"], row["date"]) for row in found)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    return made


STEP = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 3), st.sampled_from(DAYS)), min_size=1, max_size=5)


@settings(max_examples=12, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=6))
def test_after_any_replacements_each_version_holds_what_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, tuple[int, date]]]
) -> None:
    home = Home(tmp_path_factory.mktemp("lake"))
    lake.create_missing(home)
    model: dict[str, list[tuple[str, str, int, date]]] = {}
    expected = {lake.versions(home)["turns"]: held(home)}
    for number, step in enumerate(steps):
        gone = {day: sorted(step) for day in DAYS}
        fresh = [turn(name, index, day) | {"turn_index": number} for name, (count, day) in step.items() for index in range(count)]
        put(home, fresh, gone)
        for name, (count, day) in step.items():
            model[name] = [(name, f"{name}-{index}", number, day) for index in range(count)]
        expected[lake.versions(home)["turns"]] = sorted(row for own in model.values() for row in own)
        assert lake.count(home, "turns") == len(held(home)), "the log counts what the files hold"
    for version, content in expected.items():
        assert held(home, version) == content
    assert max(expected) == min(expected) + len(expected) - 1, "no version in between"


def test_a_commit_touches_the_files_of_its_sessions_and_no_other(home: Home) -> None:
    for name in "abcd":
        put(home, [turn(name, 0), turn(f"{name}x", 0)])
    table = lake.open_table(home, "turns")
    before = {own.low: own.path for own in parts.held(table)}
    put(home, [turn("bx", 1)], {DAYS[0]: ["bx"], DAYS[1]: ["a"]})
    after = {own.path for own in parts.held(lake.open_table(home, "turns"))}
    assert set(before.values()) - after == {before["b"]}
    assert [row[1] for row in held(home)] == ["a-0", "ax-0", "b-0", "bx-1", "c-0", "cx-0", "d-0", "dx-0"]


def test_what_is_left_of_small_files_is_put_together(home: Home) -> None:
    for name in "abcd":
        put(home, [turn(f"{name}{number}", 0) for number in range(3)])
    put(home, [turn("z", 0)], {DAYS[0]: ["a0", "b0", "c0", "d0"]})
    files = parts.held(lake.open_table(home, "turns"))
    assert sorted(own.rows for own in files) == [1, 8]
    assert {(own.low, own.high) for own in files} == {("a1", "d2"), ("z", "z")}


def test_what_is_left_of_a_large_file_stays_by_itself(home: Home) -> None:
    def sample(session: str) -> dict[str, Any]:
        return {"session_id": session, "turn_id": "t", "prompt_ids": os.urandom(400_000), "date": DAYS[0]}

    for name in "ab":
        put(home, [sample(f"{name}{number}") for number in range(8)], name="samples")
    before = {row["session_id"]: row["prompt_ids"] for row in lake.read(home, "samples").to_pylist()}
    put(home, [], {DAYS[0]: ["a0", "b0"]}, name="samples")
    assert sorted((own.rows, own.low) for own in parts.held(lake.open_table(home, "samples"))) == [(7, "a1"), (7, "b1")]
    after = {row["session_id"]: row["prompt_ids"] for row in lake.read(home, "samples").to_pylist()}
    assert after == {key: value for key, value in before.items() if key not in ("a0", "b0")}


def test_rows_that_go_are_told_with_their_day(home: Home) -> None:
    put(home, [turn("a", 0), turn("a", 1, DAYS[1]), turn("b", 0)])
    told: list[pa.Table] = []
    parts.replace(home, "turns", [], gone={day: ["a"] for day in DAYS}, told=told.append)
    assert sorted((row["turn_id"], row["date"]) for own in told for row in own.to_pylist()) == [("a-0", DAYS[0]), ("a-1", DAYS[1])]
    assert [row[0] for row in held(home)] == ["b"]


def test_nothing_to_do_is_no_commit(home: Home) -> None:
    put(home, [turn("a", 0)])
    before = lake.versions(home)["turns"]
    put(home, [], {DAYS[0]: ["b", "x"], DAYS[1]: ["a"]})
    assert lake.versions(home)["turns"] == before


def test_many_rows_lie_in_files_that_are_cheap_to_write_again(home: Home) -> None:
    found = [
        {"session_id": f"s{number:03}", "turn_id": "t", "prompt_ids": bytes(2**20), "date": DAYS[0]} for number in range(100)
    ]  # fmt: skip
    written = parts.write(lake.path(home, "samples"), rows("samples", found))
    assert [own.rows for own in written] == [31, 31, 31, 7]
    parts.replace(home, "samples", written, gone={})
    lows = sorted((own.low, own.high) for own in parts.held(lake.open_table(home, "samples")))
    assert lows[:2] == [("s000", "s030"), ("s031", "s061")]


def test_statistics_are_those_of_the_rows_to_the_microsecond(home: Home) -> None:
    put(home, [turn("b", 0, user_key="u", policy_version=7), turn("a", 0, closes_at=AT + timedelta(seconds=1), final=False)])
    listed = pa.table(lake.open_table(home, "turns").get_add_actions(flatten=True)).to_pylist()[0]
    assert (listed["num_records"], listed["min.session_id"], listed["max.session_id"]) == (2, "a", "b")
    assert (listed["min.closes_at"], listed["max.closes_at"]) == (AT, AT + timedelta(seconds=1))
    assert (listed["min.final"], listed["max.final"], listed["null_count.policy_version"]) == (False, True, 1)
    assert lake.dataset(home, "turns", files=f"closes_at > '{AT + timedelta(seconds=2):%Y-%m-%d %H:%M:%S.%f}Z'").count_rows() == 0
    assert lake.dataset(home, "turns", files=f"closes_at > '{AT:%Y-%m-%d %H:%M:%S.%f}Z'").count_rows() == 2


def test_rows_are_found_by_any_of_their_columns(home: Home) -> None:
    """Readers pass over files by what the log says of them; a column of which it said nothing would hide its rows from every condition."""
    long = "x" * parts.BOUND_CHARS
    some = [
        turn("a", 0, origin="live", task_bucket=long + "a", sampling_ms=1e300, calls=3, asked=True, started_at=AT, language="de"),
        turn("b", 0, origin="imported", task_bucket=long + "z", sampling_ms=0.5, calls=None, asked=False, started_at=AT, language=None),
    ]
    put(home, some)
    put(home, [turn("c", 0, origin="live", task_bucket="edit", sampling_ms=None, calls=7, asked=None)])
    put(home, [turn("c", 0, origin="live", task_bucket="edit", sampling_ms=None, calls=7, asked=None)], {DAYS[0]: ["a", "c"]})
    put(home, some[:1])
    held_rows = lake.read(home, "turns").to_pylist()
    assert len(held_rows) == 3
    for field in TABLES["turns"].schema:
        for value in {row[field.name] for row in held_rows}:
            chosen = ds.field(field.name).is_null() if value is None else ds.field(field.name) == value
            wanted = sorted(row["session_id"] for row in held_rows if row[field.name] == value)
            assert sorted(lake.scan(home, "turns", ["session_id"], chosen)["session_id"].to_pylist()) == wanted, (field.name, value)
            if value is not None and not isinstance(value, bool):
                least = lake.scan(home, "turns", ["session_id"], ds.field(field.name) >= value)["session_id"].to_pylist()
                assert sorted(least) == sorted(r["session_id"] for r in held_rows if r[field.name] is not None and r[field.name] >= value)


def test_a_write_that_fails_leaves_nothing_behind(home: Home) -> None:
    folder = lake.path(home, "turns")
    (folder / f"date={DAYS[1]}").write_bytes(b"in the way")
    with pytest.raises(OSError, match="date=2026-05-31"):
        parts.write(folder, rows("turns", [turn("a", 0), turn("a", 1, DAYS[1])]))
    assert list(folder.rglob("*.parquet")) == []
    (folder / f"date={DAYS[1]}").unlink()
    put(home, [turn("a", 1, DAYS[1]), turn("b", 1, DAYS[1])])
    only = next(folder.rglob("*.parquet"))
    only.write_bytes(b"damaged")
    with pytest.raises(ContractViolation, match="cannot be read or written"):
        put(home, [], {DAYS[1]: ["a"]})
    assert list(folder.rglob("*.parquet")) == [only]


def test_files_of_several_partition_columns_take_the_place_of_those_before(home: Home) -> None:
    folder = lake.path(home, "rewards_backfill")

    def write(name: str, reward: float, day: date) -> None:
        own = [{"session_id": "s", "turn_id": "t", "reward": reward, "date": day, "computed_at": AT}]
        schema = pa.schema([field for field in lake.nullable(TABLES["rewards_backfill"].schema) if field.name != "backfill"])
        made = parts.write(folder, pa.Table.from_pylist(own, schema=schema), values={"backfill": name})
        parts.overwrite(home, "rewards_backfill", made, [("backfill", "=", name), ("date", ">=", str(day)), ("date", "<", str(DAYS[1]))])

    for reward, name in enumerate(("a b/ü=1", "plain", "a b/ü=1")):
        write(name, float(reward), DAYS[0])
    found = lake.read(home, "rewards_backfill", columns=["backfill", "reward", "date"]).to_pylist()
    assert sorted((row["backfill"], row["reward"], row["date"]) for row in found) == [("a b/ü=1", 2.0, DAYS[0]), ("plain", 1.0, DAYS[0])]


def test_files_that_are_merged_between_reading_and_committing_make_it_begin_again(home: Home) -> None:
    for name in ("s1", "s2", "s3"):
        put(home, [turn(name, 0)])

    class Meanwhile(dict[date, list[str]]):
        """Sessions that go; when they are first asked for, another process merges the files."""

        done = False

        def get(self, day: date, default: Any = None) -> Any:
            if not self.done:
                self.done = True
                lake.open_table(home, "turns").optimize.compact()
            return super().get(day, default)

    put(home, [turn("s1", 0) | {"turn_index": 7}], Meanwhile({DAYS[0]: ["s1"]}))
    assert [(row[0], row[2]) for row in held(home)] == [("s1", 7), ("s2", 0), ("s3", 0)]


def test_a_merge_that_read_before_rows_were_replaced_is_refused(home: Home) -> None:
    for name in ("s1", "s2"):
        put(home, [turn(name, 0)])
    before = lake.open_table(home, "turns")
    put(home, [turn("s1", 0) | {"turn_index": 7}], {DAYS[0]: ["s1"]})
    for merge in (before.optimize.compact, lambda: before.optimize.z_order(["session_id"])):
        with pytest.raises(CommitFailedError):
            merge()
    assert [(row[0], row[2]) for row in held(home)] == [("s1", 7), ("s2", 0)]


def test_replacing_beside_compaction_loses_and_doubles_nothing(home: Home) -> None:
    names = [f"s{number:02}" for number in range(12)]
    for _ in range(2):
        for name in names:
            put(home, [turn(name, 0)], {DAYS[0]: []})
        put(home, [turn(name, 0) for name in names], {DAYS[0]: names})
    stop = threading.Event()

    def merge_once() -> None:
        lake.open_table(home, "turns").optimize.compact()

    def merge() -> int:
        rounds = 0
        while not stop.is_set() or not rounds:
            with suppress(TransientError):
                lake.committed("merging", merge_once)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(max_workers=1) as pool:
        beside = pool.submit(merge)
        try:
            for number in range(1, 16):
                own = [names[number % 12], names[(5 * number) % 12]]
                put(home, [turn(name, 0) | {"turn_index": number} for name in sorted(set(own))], {DAYS[0]: sorted(set(own))})
        finally:
            stop.set()
        assert beside.result() >= 1
    assert [row[0] for row in held(home)] == names


def test_a_day_that_is_over_is_merged_and_sorted_for_the_sessions_that_come_late(home: Home) -> None:
    for number in (3, 1, 2, 0, 9, 7, 8, 6, 5, 4):
        put(home, [turn(f"s{number}", 0)])
    before = held(home)
    done = maintenance.compact(home, LakeConfig(), now=AT + timedelta(days=2))
    assert [(item["table"], item["files_before"], item["files_after"]) for item in done] == [("turns", 10, 1)]
    assert held(home) == before
    assert lake.scan(home, "turns", ["session_id"])["session_id"].to_pylist() == [row[0] for row in before]
    put(home, [turn("s5", 0), turn("s5", 1)], {DAYS[0]: ["s5"]})
    assert len(held(home)) == 11
    assert maintenance.compact(home, LakeConfig(), now=AT + timedelta(days=2)) == [], "what came late adds a file, which costs nothing"
    assert lake.scan(home, "turns", None, ds.field("session_id") == "s5").num_rows == 2


def test_what_a_killed_run_left_is_deleted_with_old_versions_once_it_is_as_old(home: Home) -> None:
    put(home, [turn("a", 0)])
    old, new = (parts.write(lake.path(home, "turns"), rows("turns", [turn("b", 0)]))[0].path for _ in range(2))
    week_ago = datetime.now(UTC).timestamp() - 8 * 86_400
    os.utime(lake.path(home, "turns") / old, (week_ago, week_ago))
    assert maintenance.stale(home, LakeConfig()) == {"turns": [old]}
    assert (lake.path(home, "turns") / new).exists()
    assert [row[0] for row in held(home)] == ["a"]


def test_added_files_carry_their_transaction_and_a_transaction_without_files_is_known_too(home: Home) -> None:
    own = "append:x"
    assert not parts.is_added(home, "turns", (own, 0))
    parts.add(home, "turns", [], transaction=(own, 0))
    assert parts.is_added(home, "turns", (own, 0))
    assert not parts.is_added(home, "turns", (own, 1))
    fresh = parts.write(lake.path(home, "turns"), rows("turns", [turn("a", 1), turn("b", 1, DAYS[1])]))
    parts.add(home, "turns", fresh, transaction=(own, 4))
    assert [parts.is_added(home, "turns", (own, number)) for number in (3, 4, 5)] == [True, True, False]
    assert not parts.is_added(home, "turns", ("append:y", 0))
    assert held(home) == [("a", "a-1", 1, DAYS[0]), ("b", "b-1", 1, DAYS[1])]
