"""`tidegate import claude-code` as a person runs it, with the real broker."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines import kafka
from pipelines.__main__ import app
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.events import EVENT
from pipelines.importers.claude_code import SAMPLE
from pipelines.storage import Home
from pipelines.terminal import run

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Tidegate = Callable[..., Done]


@pytest.fixture
def tidegate(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Tidegate]:
    """The command in this process, as the console script calls it: starting Python for every bad path would cost seconds each."""
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)
    handlers, level = list(logging.root.handlers), logging.root.level

    def call(*arguments: str, config: KafkaConfig | None = None) -> Done:
        settings = [f"--set=kafka.bootstrap_servers={config.bootstrap_servers}", f"--set=kafka.topic={config.topic}"] if config else []
        code = run(app, ["claude-code", *arguments, "--home", str(home.root), *settings])
        out = capsys.readouterr()
        return Done(returncode=code, stdout=out.out, stderr=out.err)

    yield call
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def sentence(done: Done, code: int) -> str:
    """Return the one line a foreseen failure prints."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("tidegate:")]
    return line


@pytest.mark.kafka
def test_a_transcript_becomes_events_on_the_topic_and_a_second_import_repeats_the_same_ids(
    tidegate: Tidegate, home: Home, kafka_config: KafkaConfig
) -> None:
    config = PipelinesConfig(kafka=kafka_config)
    first = tidegate(str(SAMPLE), "--json", "--user", "mira", "--consent", "train", config=kafka_config)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    events = [EVENT.validate_json(record.value) for record in kafka.read_all(config, home)]
    assert Counter(event.type for event in events) == result["events"]
    assert {event.consent for event in events} == {"train"}
    assert len({event.user_key for event in events}) == 1
    assert b"mira@example.org" not in b"".join(record.value for record in kafka.read_all(config, home))
    again = tidegate(str(SAMPLE), "--json", "--user", "mira", "--consent", "train", config=kafka_config)
    assert json.loads(again.stdout) == result
    records = kafka.read_all(config, home)
    assert len(records) == 2 * len(events)
    assert len({record.value for record in records}) == len(events), "byte for byte the same"


@pytest.mark.kafka
def test_a_dry_run_counts_the_same_and_sends_nothing(tidegate: Tidegate, home: Home, kafka_config: KafkaConfig, tmp_path: Path) -> None:
    kafka.ensure_topics(PipelinesConfig(kafka=kafka_config), home)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "session.jsonl").write_bytes(SAMPLE.read_bytes())
    done = tidegate(str(tmp_path), "--dry-run", config=kafka_config)
    assert done.returncode == 0
    assert "43 lines in 1 files: 32 accepted, 1 duplicates, 10 rejected" in done.stdout
    assert "none sent" in done.stdout
    assert sum(kafka.end_offsets(PipelinesConfig(kafka=kafka_config), home).values()) == 0


def test_the_json_result_has_the_keys_that_others_count_on(tidegate: Tidegate) -> None:
    done = tidegate(str(SAMPLE), "--dry-run", "--json")
    assert list(json.loads(done.stdout)) == [
        "files", "lines", "accepted", "events", "duplicates", "rejected", "edits", "tool_calls", "tool_errors", "tool_rejections",
        "interrupts", "user_messages",
    ]  # fmt: skip


def test_bad_paths_end_in_one_sentence_that_says_what_to_do(tidegate: Tidegate, tmp_path: Path) -> None:
    assert "does not exist" in sentence(tidegate(str(tmp_path / "nowhere"), "--dry-run"), 2)
    (tmp_path / "empty").mkdir()
    assert "no transcript (*.jsonl) is under" in sentence(tidegate(str(tmp_path / "empty"), "--dry-run"), 2)
    assert "name at least one transcript" in sentence(tidegate("--dry-run"), 2)
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in sentence(tidegate(str(tmp_path / "pipe"), "--dry-run"), 2)
    assert tidegate(str(SAMPLE), "--consent", "perhaps", "--dry-run").returncode == 2


def test_a_binary_file_is_counted_line_by_line_and_named(tidegate: Tidegate, tmp_path: Path) -> None:
    binary = tmp_path / "picture.jsonl"
    binary.write_bytes(bytes(range(256)) * 50)
    done = tidegate(str(binary), "--dry-run", "--json")
    assert "none of the" in sentence(done, 1)
    result = json.loads(done.stdout)
    assert result["lines"] == sum(result["rejected"].values())
    assert f"{binary}:1: malformed_json" in done.stderr


def test_an_unreadable_file_is_named_and_the_others_are_imported(tidegate: Tidegate, tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "target that was deleted")
    (tmp_path / "good.jsonl").write_bytes(SAMPLE.read_bytes())
    done = tidegate(str(tmp_path), "--dry-run", "--json")
    assert done.returncode == 1
    assert "not read:" in done.stderr
    assert "No such file" in done.stderr
    assert json.loads(done.stdout)["accepted"] == 32


def test_a_truncated_last_line_is_counted_and_shown_and_the_rest_imported(tidegate: Tidegate, tmp_path: Path) -> None:
    cut = tmp_path / "live.jsonl"
    cut.write_bytes(SAMPLE.read_bytes()[:-100])
    done = tidegate(str(cut), "--dry-run", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["rejected"]["truncated_last_line"] == 1
    assert (result["lines"], result["accepted"]) == (43, 31)
    assert f"{cut}:43: truncated_last_line" in done.stderr


def test_a_broker_that_is_away_is_one_sentence_and_exit_75(tidegate: Tidegate) -> None:
    assert "no Kafka broker is running" in sentence(tidegate(str(SAMPLE)), 75)
    away = KafkaConfig(bootstrap_servers="127.0.0.1:1")
    assert "does not answer" in sentence(tidegate(str(SAMPLE), config=away), 75)


def test_the_module_runs_as_a_program(home: Home) -> None:
    command = [sys.executable, "-m", "pipelines", "claude-code", str(SAMPLE), "--dry-run", "--json", "--home", str(home.root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    assert json.loads(done.stdout)["accepted"] == 32
    assert "importing 1 transcripts" in done.stderr
