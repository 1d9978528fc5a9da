"""The lake without Spark: readers, versions, and the line that people paste."""

import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import duckdb
import polars
import pytest

from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import lake
from signals.samples import SAMPLES
from signals.tables import BUCKET, DAY

MONDAY, TUESDAY = date(2026, 3, 2), date(2026, 3, 3)


def count_row(day: date, outcome: str, turns: int) -> dict[str, object]:
    return {
        "policy_version": 1,
        "arm": "serving",
        "origin": "live",
        "outcome": outcome,
        "outcome_reason": None,
        "turns": turns,
        BUCKET: 0,
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
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(lake.duckdb_line(home, 'ledger_counts'))}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "scored" in done.stdout


def test_an_unknown_table_or_version_is_one_sentence(home: Home) -> None:
    with pytest.raises(ContractViolation, match="it has events, quarantine"):
        lake.read(home, "nonsense")
    with pytest.raises(ContractViolation, match="cannot be read"):
        lake.read(home, "turns", as_of=99)
    with pytest.raises(ContractViolation, match="signals run --once"):
        lake.open_table(Home(home.root / "elsewhere"), "turns")
