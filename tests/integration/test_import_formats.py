"""`tidegate import` on files whose format nobody named, as a person runs it."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import kafka
from pipelines.__main__ import app
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.events import EVENT
from pipelines.importers import registry
from pipelines.storage import Home
from pipelines.terminal import run
from tests.unit.pipelines.test_import_formats import FILES

SAMPLES = Path(registry.__file__).parent / "samples"
Import = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tidegate(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """`tidegate import ...` in this process: (exit code, stdout, stderr)."""
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)
    handlers, level = list(logging.root.handlers), logging.root.level

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(app, [*arguments, "--home", str(home.root)])
        out = capsys.readouterr()
        return code, out.out, out.err

    yield call
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_the_list_shows_every_format_with_where_its_files_are(tidegate: Import) -> None:
    code, out, _ = tidegate("--list")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["format", *registry.FORMATS]
    assert "~/.codex/sessions" in out
    _, out, _ = tidegate("--list", "--json")
    assert [row["name"] for row in json.loads(out)["formats"]] == list(registry.FORMATS)


def test_a_mixed_folder_is_sorted_by_content_and_what_is_unknown_is_counted_and_shown(tidegate: Import, tmp_path: Path) -> None:
    tmp_path /= "mixed"
    tmp_path.mkdir()
    for number, name in enumerate(FILES.values()):
        shutil.copy(SAMPLES / name, tmp_path / f"file-{number}{Path(name).suffix}")
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "data.json").write_text('{"rows": [1], "secret value as a key": 2}')
    (tmp_path / "picture.jsonl").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("[core]")
    code, out, err = tidegate(str(tmp_path), "--dry-run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result["formats"]) == set(FILES)
    assert result["unknown_files"] == 3
    assert result["files"] == 8
    assert result["lines"] == sum(each["lines"] for each in result["formats"].values()) == 43 + 32 + 14 + 12 + 18 + 14 + 40 + 14
    assert result["lines"] == result["accepted"] + result["duplicates"] + sum(result["rejected"].values())
    assert "notes.md: text that is no JSON" in err
    assert "data.json: a JSON object with keys rows, secret value as a key" in err
    assert "picture.jsonl: binary" in err
    _, text, _ = tidegate(str(tmp_path), "--dry-run")
    assert "3 files of no known format" in text
    assert "codex: 32 lines in 1 files, 20 accepted, 27 events" in text


def test_files_of_no_known_format_end_in_one_sentence_that_says_what_was_seen_and_what_is_known(tidegate: Import, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"x": 1}]')
    (tmp_path / "empty.jsonl").write_text("")
    code, _, err = tidegate(str(tmp_path), "--dry-run")
    assert code == 2
    (sentence,) = [line for line in err.splitlines() if line.startswith("tidegate:")]
    assert "a.json is a JSON list of 1 entries with keys x" in sentence
    assert "empty.jsonl is empty" in sentence
    assert "codex" in sentence
    assert "tidegate import FORMAT PATH" in sentence
    assert tidegate("--dry-run")[0] == 2
    assert "does not exist" in tidegate(str(tmp_path / "nowhere"), "--dry-run")[2]


def test_a_telling_name_decides_where_the_content_does_not(tidegate: Import, tmp_path: Path) -> None:
    cut = tmp_path / "rollout-2026-02-03T09-10-00-0199f0aa.jsonl"
    cut.write_bytes((SAMPLES / "codex.jsonl").read_bytes()[:60])
    code, out, err = tidegate(str(cut), "--json", "--dry-run")
    assert code == 1, "its only line is cut"
    assert json.loads(out)["formats"]["codex"]["rejected"] == {"truncated_last_line": 1}
    assert "none of the 1 lines" in err


def test_a_named_format_reads_its_files_in_a_folder_and_no_others(tidegate: Import, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "codex.jsonl", tmp_path / "rollout-1.jsonl")
    shutil.copy(SAMPLES / "continue.jsonl", tmp_path / "other.jsonl")
    code, out, _ = tidegate("codex", str(tmp_path), "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["lines"] == 32
    code, _, err = tidegate("swe-agent", str(tmp_path), "--dry-run")
    assert code == 2
    assert "no transcript (*.traj) is under" in err


@pytest.mark.kafka
def test_an_imported_folder_is_on_the_topic_and_a_second_import_repeats_the_same_records(
    tidegate: Import, home: Home, kafka_config: KafkaConfig, tmp_path: Path
) -> None:
    tmp_path /= "three"
    tmp_path.mkdir()
    for name in ("codex.jsonl", "gemini_cli.jsonl", "aider.chat.history.md"):
        shutil.copy(SAMPLES / name, tmp_path / name)
    settings = [f"--set=kafka.bootstrap_servers={kafka_config.bootstrap_servers}", f"--set=kafka.topic={kafka_config.topic}"]
    code, out, err = tidegate(str(tmp_path), "--json", "--user", "mira", *settings)
    assert code == 0, err
    assert tidegate(str(tmp_path), "--json", "--user", "mira", *settings)[1] == out
    records = kafka.read_all(PipelinesConfig(kafka=kafka_config), home)
    events = {EVENT.validate_json(record.value).event_id: record.value for record in records}
    assert len(events) == len({record.value for record in records}) == sum(json.loads(out)["events"].values()) == 27 + 25 + 28
    assert {EVENT.validate_json(value).client.name for value in events.values()} == {"import-codex", "import-gemini-cli", "import-aider"}
    everything = b"".join(events.values())
    assert b"k7Jd92mQx81LpZ0a" not in everything
    assert b"mira@example.org" not in everything
