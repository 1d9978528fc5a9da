"""The lake without Spark: readers, versions, and the line that people paste."""

import shlex
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pipelines.errors import ConfigError, ContractViolation
from pipelines.storage import Home
from signals import lake
from signals.samples import SAMPLES
from signals.tables import DAY
from tests.support.lakes import NOW, event_row, fitted, turn_row

MONDAY, TUESDAY = date(2026, 3, 2), date(2026, 3, 3)


def count_row(day: date, outcome: str, turns: int) -> dict[str, object]:
    return {
        "policy_version": 1,
        "arm": "serving",
        "origin": "live",
        "outcome": outcome,
        "outcome_reason": None,
        "turns": turns,
        DAY: day,
    }


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    rows = [count_row(MONDAY, "scored", 3), count_row(TUESDAY, "scored", 4), count_row(TUESDAY, "pending", 1)]
    lake.replace_days(made, "ledger_counts", rows, [MONDAY, TUESDAY])
    return made


def test_a_lake_that_does_not_exist_yet_reads_as_empty(tmp_path: Path) -> None:
    assert lake.samples(Home(tmp_path)).schema.equals(SAMPLES)
    assert lake.turns(Home(tmp_path)).num_rows == 0
    assert lake.frontier(Home(tmp_path)) == {}
    assert lake.consistent_versions(Home(tmp_path)) == {}


def test_replacing_a_day_leaves_the_others_and_older_versions_stay_readable(home: Home) -> None:
    lake.replace_days(home, "ledger_counts", [count_row(TUESDAY, "scored", 5)], [TUESDAY])
    assert [(row["outcome"], row["turns"]) for row in lake.counts(home)] == [("scored", 8)]
    assert [(row["outcome"], row["turns"]) for row in lake.counts(home, as_of=1)] == [("pending", 1), ("scored", 7)]
    assert lake.versions(home)["ledger_counts"] == 2


def test_the_same_rows_in_duckdb_polars_and_pandas(home: Home) -> None:
    counted = lake.read(home, "ledger_counts")
    assert duckdb.sql("SELECT sum(turns) FROM counted").fetchall() == [(8,)]
    assert polars.from_arrow(counted)["turns"].sum() == 8  # type: ignore[index]
    assert counted.to_pandas()["turns"].sum() == 8


def test_the_line_for_duckdb_works_when_it_is_pasted(home: Home) -> None:
    command = [sys.executable, "-m", "signals", "tables", "--home", str(home.root)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (line,) = [line.strip() for line in said.splitlines() if "python -c" in line and "ledger_counts LIMIT" in line]
    pasted = line.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(pasted, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "scored" in done.stdout


def test_an_unknown_table_or_version_is_one_sentence(home: Home) -> None:
    with pytest.raises(ContractViolation, match="it has events, quarantine"):
        lake.read(home, "nonsense")
    with pytest.raises(ContractViolation, match="cannot be read"):
        lake.read(home, "turns", as_of=99)
    with pytest.raises(ContractViolation, match="signals run --once"):
        lake.open_table(Home(home.root / "elsewhere"), "turns")


def test_a_lake_whose_columns_are_described_in_other_words_is_written_on(tmp_path: Path) -> None:
    """Made by an earlier release: another description of every column, and some columns missing."""
    home = Home(tmp_path)
    for name in ("ledger_counts", "gaps", "events"):
        table = lake.TABLES[name]
        older = [field.with_metadata({"doc": "as it was said before"}) for field in lake.nullable(table.schema)]
        kept = [field for field in older if field.name not in ("origin", "accepted_at")]
        DeltaTable.create(lake.path(home, name), schema=pa.schema(kept), partition_by=list(table.partition_by) or None)
    lake.create_missing(home)
    lake.replace_days(home, "ledger_counts", [count_row(MONDAY, "scored", 3)], [MONDAY])
    lake.append(home, "gaps", [{"topic": "t", "partition": 0, "start": 1, "end": 2, "accepted_at": NOW}])
    lake.append(home, "events", [event_row(0, session="s")])
    assert lake.counts(home)[0]["origin"] == "live"
    assert lake.read(home, "gaps")["accepted_at"].to_pylist() == [NOW]
    assert lake.events(home).num_rows == 1


# Readers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> Home:
    """Turns and rewards of three policies on three days, the last day written twice."""
    made = Home(tmp_path)
    lake.create_missing(made)
    rows = [turn_row(f"s{n}", user=f"u{n % 2}", days_ago=n % 3, policy=1 + n % 3, reward=n / 10) for n in range(9)]
    days = sorted({row["date"] for row in rows})
    for name in ("turns", "rewards"):
        lake.replace_days(made, name, fitted(name, rows), days)
    late = [row | {"outcome": "no_evidence", "reward": None} for row in rows if row["date"] == NOW.date()]
    for name in ("turns", "rewards"):
        lake.replace_days(made, name, fitted(name, late), [NOW.date()])
    return made


def test_turns_are_chosen_by_day_policy_and_column(filled: Home) -> None:
    today = NOW.date()
    rows = lake.turns(filled, today - timedelta(days=1), today, columns=["turn_id", "policy_version"])
    assert rows.column_names == ["turn_id", "policy_version"]
    assert sorted(rows["turn_id"].to_pylist()) == ["s1-t", "s4-t", "s7-t"]
    assert sorted(lake.turns(filled, policy_version=[1, 3])["session_id"].to_pylist()) == ["s0", "s2", "s3", "s5", "s6", "s8"]
    assert lake.turns(filled, today, policy_version=2).num_rows == 0
    assert lake.rewards(filled, end=today - timedelta(days=1), columns=["reward"])["reward"].to_pylist() == [0.2, 0.5, 0.8]
    assert lake.edits(filled, today).num_rows == 0


def test_only_files_of_the_days_asked_for_are_opened(filled: Home) -> None:
    """A day outside the range could be gone from disk altogether."""
    for path in lake.path(filled, "turns").glob(f"date={NOW.date() - timedelta(days=2)}/*.parquet"):
        path.unlink()
    assert lake.turns(filled, NOW.date() - timedelta(days=1)).num_rows == 6
    with pytest.raises(ContractViolation, match="cannot be read"):
        lake.turns(filled)


def test_an_earlier_version_reads_as_it_was(filled: Home) -> None:
    assert sorted(set(lake.turns(filled)["outcome"].to_pylist())) == ["no_evidence", "scored"]
    assert set(lake.turns(filled, as_of=1)["outcome"].to_pylist()) == {"scored"}


def test_sessions_are_summed_up_by_id(filled: Home) -> None:
    rows = lake.sessions(filled, ["s1", "s0", "nobody"]).to_pylist()
    assert [(row["session_id"], row["turns"], row["scored"], row["reward"]) for row in rows] == [("s0", 1, 0, None), ("s1", 1, 1, 0.1)]
    assert lake.sessions(filled).num_rows == 9


def test_instants_where_days_are_meant_and_unknown_columns_are_refused(filled: Home) -> None:
    with pytest.raises(ConfigError, match="whole UTC days"):
        lake.turns(filled, NOW)
    with pytest.raises(ContractViolation, match="has no column rewrad; it has session_id"):
        lake.rewards(filled, columns=["rewrad"])
    with pytest.raises(ContractViolation, match="no operator"):
        lake.read(filled, "turns", filters=[("final", "~", True)])


def test_polars_and_duckdb_read_a_table_lazily_and_pandas_whole(filled: Home) -> None:
    turns = lake.dataset(filled, "turns")
    lazily = polars.scan_pyarrow_dataset(turns).filter(polars.col("policy_version") == 2).select("turn_id").collect()
    assert sorted(lazily["turn_id"].to_list()) == ["s1-t", "s4-t", "s7-t"]
    found = duckdb.sql("SELECT policy_version, count(*) FROM turns WHERE outcome = 'scored' GROUP BY ALL ORDER BY ALL").fetchall()
    assert found == [(2, 3), (3, 3)]
    frame = lake.rewards(filled).to_pandas()
    assert frame.groupby("policy_version")["reward"].mean().round(3).dropna().to_dict() == {2: 0.4, 3: 0.5}


# Tables of earlier releases ---------------------------------------------------------------------------------------------


def older(home: Home, name: str, *, without: set[str], rows: list[dict[str, object]]) -> None:
    """Write a table as a release wrote it that did not have some columns yet (`a.b`: a field inside a struct)."""

    def cut(fields: list[pa.Field], prefix: str = "") -> list[pa.Field]:
        kept = [field for field in fields if prefix + field.name not in without]
        return [
            pa.field(f.name, pa.struct(cut(list(f.type), f"{prefix}{f.name}."))) if pa.types.is_struct(f.type) else pa.field(f.name, f.type)
            for f in kept
        ]

    schema = pa.schema(cut(list(lake.TABLES[name].schema)))
    table = DeltaTable.create(lake.path(home, name), schema=schema, partition_by=list(lake.TABLES[name].partition_by) or None)
    write_deltalake(table, pa.Table.from_pylist(rows, schema=schema), mode="append")


def test_columns_added_later_are_null_in_old_rows_and_filled_in_new_ones(tmp_path: Path) -> None:
    home = Home(tmp_path)
    row = fitted("turns", [turn_row("old")])[0]
    older(home, "turns", without={"late", "interrupted"}, rows=[row])
    assert lake.turns(home)["late"].to_pylist() == [None], "also before the table is brought up to date"
    lake.create_missing(home)
    lake.append(home, "turns", fitted("turns", [turn_row("new", late=3)]))
    assert sorted((item["session_id"], item["late"]) for item in lake.turns(home).to_pylist()) == [("new", 3), ("old", None)]
    version = lake.versions(home)["turns"]
    lake.create_missing(home)
    assert lake.versions(home)["turns"] == version, "a table that is up to date is left alone"


def test_a_column_that_is_no_longer_written_is_null_from_then_on(tmp_path: Path) -> None:
    home = Home(tmp_path)
    schema = lake.nullable(lake.TABLES["ledger_counts"].schema).append(pa.field("session_bucket", pa.int32()))
    table = DeltaTable.create(lake.path(home, "ledger_counts"), schema=schema, partition_by=[DAY])
    old = [count_row(MONDAY, "scored", 3) | {"session_bucket": 1}, count_row(TUESDAY, "scored", 4) | {"session_bucket": 2}]
    write_deltalake(table, pa.Table.from_pylist(old, schema=schema), mode="append")
    lake.create_missing(home)
    lake.replace_days(home, "ledger_counts", [count_row(TUESDAY, "scored", 5)], [TUESDAY])
    lake.append(home, "ledger_counts", [count_row(TUESDAY, "pending", 1)])
    assert [(row["outcome"], row["turns"]) for row in lake.counts(home)] == [("pending", 1), ("scored", 8)]
    assert lake.open_table(home, "ledger_counts").schema().to_arrow().names[-1] == "session_bucket"


def test_fields_added_inside_a_payload_are_null_in_old_events(tmp_path: Path) -> None:
    home = Home(tmp_path)
    old = event_row(0, session="old", payload={"message": "hi"})
    older(home, "events", without={"payload.capture_error", "fingerprint"}, rows=[old])
    assert lake.events(home)["payload"].to_pylist()[0]["capture_error"] is None
    lake.create_missing(home)
    lake.append(home, "events", [event_row(1, session="new", payload={"capture_error": "cut"})])
    found = {row["session_id"]: row["payload"] for row in lake.events(home).to_pylist()}
    assert (found["old"]["message"], found["old"]["capture_error"], found["new"]["capture_error"]) == ("hi", None, "cut")


def test_a_table_laid_out_by_an_earlier_release_is_refused_with_the_way_out(tmp_path: Path) -> None:
    home = Home(tmp_path)
    schema = lake.nullable(lake.TABLES["turns"].schema).append(pa.field("session_bucket", pa.int32()))
    DeltaTable.create(lake.path(home, "turns"), schema=schema, partition_by=["session_bucket"])
    with pytest.raises(ContractViolation, match="--once --everything"):
        lake.create_missing(home)


def test_no_table_needs_deletion_vectors_or_column_mapping(filled: Home) -> None:
    for name in lake.TABLES:
        protocol = lake.open_table(filled, name).protocol()
        assert (protocol.min_reader_version, protocol.reader_features) == (1, None), name


def test_a_lake_in_a_folder_with_blanks_and_signs_is_read_by_arrow_itself(tmp_path: Path) -> None:
    home = Home(tmp_path / "a b ü")
    lake.create_missing(home)
    lake.append(home, "gaps", [{"topic": "t", "partition": 0, "start": 3, "end": 5, "accepted_at": NOW}])
    found = lake.dataset(home, "gaps")
    assert found.to_table(columns=["start", "end"]).to_pylist() == [{"start": 3, "end": 5}]
    assert found.filesystem.base_fs.type_name == "local"
