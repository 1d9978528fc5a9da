"""`tidegate signals survival` as a person runs it: a repository, an edits file, the real broker."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import kafka
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.events import EVENT, EditSurvival
from pipelines.storage import Home
from pipelines.terminal import run
from signals.__main__ import app
from tests.support.repository import T0, Repo

BEFORE, AFTER = "a = 1\n", "a = 1\nb = compute(a)\n"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)
    handlers, level = list(logging.root.handlers), logging.root.level

    def called(*words: str | Path) -> tuple[int, str, str]:
        code = run(app, ["survival", *map(str, words), "--home", str(home.root)])
        out = capsys.readouterr()
        return code, out.out, out.err

    yield called
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    made = Repo(tmp_path / "repo")
    made.commit({"a.py": BEFORE}, at_s=T0)
    made.commit({"a.py": AFTER}, at_s=T0 + 600, message="Co-Authored-By: an agent")
    made.commit({"a.py": BEFORE}, at_s=T0 + 2 * 86_400)
    return made


@pytest.fixture
def edits(tmp_path: Path) -> Path:
    file = tmp_path / "edits.jsonl"
    common = {"path": "a.py", "before": BEFORE, "after": AFTER, "made_at_ms": (T0 + 60) * 1000}
    file.write_text(
        json.dumps(common | {"edit_id": "e1", "session_id": "s1", "user_key": "u"}) + "\n" + json.dumps(common | {"edit_id": "e2"})
    )
    return file


@pytest.mark.kafka
def test_edits_of_a_file_are_measured_and_recorded_and_recording_again_adds_nothing_new(
    call: Call, repo: Repo, edits: Path, home: Home, kafka_config: KafkaConfig
) -> None:
    settings = [f"--set=kafka.bootstrap_servers={kafka_config.bootstrap_servers}", f"--set=kafka.topic={kafka_config.topic}"]
    for _ in range(2):
        code, out, _ = call("--repo", repo.root, "--edits", edits, "--record", "--json", *settings)
        assert code == 0
    result = json.loads(out)
    assert result["edits"] == 2
    assert {name: (row["edits"], row["four_gram"], row["no_revert"]) for name, row in result["by_horizon"].items()} == {
        "commit": (2, 1.0, 1.0), "1d": (2, 1.0, 1.0), "7d": (2, 0.0, 0.0),
    }  # fmt: skip
    assert (result["recorded"], len(result["rows"])) == (3, 6)
    events = [EVENT.validate_json(record.value) for record in kafka.read_all(PipelinesConfig(kafka=kafka_config), home)]
    told = {event.event_id: event.payload for event in events if isinstance(event, EditSurvival)}
    assert len(events) == 6
    assert sorted((payload.horizon_s, payload.milestone, payload.survival_no_revert) for payload in told.values()) == [
        (540, "commit", 1.0), (86_400, None, 1.0), (604_800, None, 0.0),
    ]  # fmt: skip


def test_commits_of_an_agent_are_measured_and_told_as_a_table(call: Call, repo: Repo) -> None:
    code, out, err = call("--repo", repo.root, "--commits", "an agent", "--since", "2025-11-01", "--set", "survival.days=[1, 7]")
    assert code == 0
    first, header, day, week = out.splitlines()
    assert first.startswith(f"1 edits in {repo.root} at ")
    assert header.split()[:2] == ["horizon", "edits"]
    assert day.split() == ["1d", "1", "1.000", "1.000", "0.0%", "0.0%", "0"]
    assert week.split() == ["7d", "1", "0.000", "0.000", "100.0%", "0.0%", "0"]
    assert "measuring edits" in err


def test_a_folder_of_snapshots_is_measured(call: Call, tmp_path: Path, edits: Path) -> None:
    for name, text in ((str(T0), BEFORE), (str(T0 + 86_400), AFTER), (str(T0 + 8 * 86_400), "a = 1\n")):
        (tmp_path / "copies" / name).mkdir(parents=True)
        (tmp_path / "copies" / name / "a.py").write_text(text)
    code, out, _ = call("--snapshots", tmp_path / "copies", "--edits", edits, "--json")
    assert code == 0
    assert {name: row["four_gram"] for name, row in json.loads(out)["by_horizon"].items()} == {"1d": 1.0, "7d": 1.0}


def test_a_repository_without_any_edits_known_says_so(call: Call, repo: Repo) -> None:
    code, out, _ = call("--repo", repo.root)
    assert code == 0
    assert out.splitlines() == [f"0 edits in {repo.root} at {repo.git('rev-parse', 'HEAD')[:12]}, known until {out.split()[-1]}"]


def test_what_a_person_can_get_wrong_is_one_sentence(call: Call, repo: Repo, edits: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    wrong = [
        ((), "name either --repo or --snapshots"),
        (("--repo", repo.root, "--snapshots", tmp_path), "name either --repo or --snapshots"),
        (("--repo", tmp_path / "plain"), "no git repository"),
        (("--repo", repo.root, "--ref", "nope"), "no commit 'nope'"),
        (("--repo", repo.root, "--edits", tmp_path / "none"), "cannot be read"),
        (("--repo", repo.root, "--edits", edits, "--commits", "x"), "either --edits or --commits"),
        (("--repo", repo.root, "--since", "yesterday"), "--since 'yesterday' is no instant"),
        (("--snapshots", tmp_path / "plain"), "named by an instant"),
        (("--snapshots", tmp_path / "plain", "--commits", "x"), "needs --repo"),
    ]
    for words, sentence in wrong:
        code, _, err = call(*words)
        (line,) = [text for text in err.splitlines() if text.startswith("tidegate:")]
        assert (code, sentence in line) == (2, True), line
