"""`tidegate signals drift` on a lake written by hand."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipelines.storage import Home
from pipelines.terminal import run
from signals import lake
from signals.__main__ import app
from tests.support.policies import policy_turns


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A healthy policy until two hours ago, one of broken calls since."""
    made, now = Home(tmp_path_factory.mktemp("drift")), datetime.now(UTC)
    lake.create_missing(made)
    rows = policy_turns(1, 150, seed=1, at=now - timedelta(hours=5), hours=3)
    rows += policy_turns(2, 120, seed=2, at=now - timedelta(hours=2), hours=1.9, invalid=0.6)
    dated = [row | {"date": row["started_at"].date()} for row in rows]
    lake.append(made, "turns", dated)
    lake.append(made, "rewards", dated)
    return made


def told(home: Home, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(app, ["drift", "--home", str(home.root), *options]) == 0
    return capsys.readouterr().out


def test_the_newest_hour_ends_in_a_sentence_and_what_to_do(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(home, capsys)
    assert "policy 2, against policy 1" in out
    assert out.splitlines()[-2].startswith("policy 2 behaves differently on the same traffic: reward ")
    assert "roll back" in out.splitlines()[-1]


def test_machines_get_the_same_as_json_and_the_table_keeps_it(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(home, capsys, "--json", "--since", "6h"))
    assert (found["state"], found["written"]) == ("policy", True)
    assert {row["metric"] for row in found["rows"] if row["alarm"]} >= {"reward", "invalid_calls", "tool_calls"}
    assert lake.read(home, "drift", columns=["metric"]).num_rows > len(found["rows"])


def test_another_reference_is_shown_and_not_written(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    told(home, capsys)
    version = lake.open_table(home, "drift").version()
    found = json.loads(told(home, capsys, "--json", "--reference", "7"))
    assert (found["state"], found["written"]) == ("unknown", False)
    assert {row["reference_version"] for row in found["rows"]} == {None}
    assert lake.open_table(home, "drift").version() == version


def test_a_plot_is_drawn_where_asked_and_another_ending_is_refused(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(home, capsys, "--plot", str(tmp_path / "reward.png"))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert run(app, ["drift", "--home", str(home.root), "--plot", str(tmp_path / "reward.docx")]) == 2
    assert "end it in .svg or .png" in capsys.readouterr().err
