"""Task folders: read whole, refused when a part is missing or wrong, and each of ours measures something."""

import shutil
from pathlib import Path

import pytest

from deploy.benchmark.attempts import null, oracle, prepare, try_task, unsound, verify
from deploy.benchmark.folders import TASKS, FolderTask, load_task, load_tasks
from deploy.harness.config import HarnessConfig
from deploy.harness.sandbox import Bubblewrap
from pipelines.errors import ConfigError

HARNESS = HarnessConfig()
ALL = load_tasks()


def test_there_are_enough_tasks_in_three_suites_and_all_stay_off_the_network() -> None:
    assert len(ALL) >= 8
    assert {task.suite for task in ALL} == {"solve", "intent", "eager_editing"}
    for task in ALL:
        assert "allow_internet = false" in (task.folder / "task.toml").read_text()
        assert (task.folder / "environment" / "Dockerfile").exists()
        assert not list(task.folder.rglob(".git"))


@pytest.mark.sandbox
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_the_oracle_passes_and_doing_nothing_fails(task: FolderTask, sandbox: Bubblewrap) -> None:
    assert try_task(task, oracle(sandbox, HARNESS), sandbox, HARNESS) == ("pass", "")
    assert try_task(task, null, sandbox, HARNESS) == ("fail", "")


@pytest.mark.sandbox
@pytest.mark.parametrize("task", [task for task in ALL if task.suite == "eager_editing"], ids=lambda task: task.name)
def test_an_edit_where_none_was_asked_for_fails_even_with_the_right_answer(task: FolderTask, sandbox: Bubblewrap) -> None:
    def meddle(each: FolderTask, stage) -> None:
        oracle(sandbox, HARNESS)(each, stage)
        for path in stage.workspace.glob("*.py"):
            path.write_text(path.read_text() + "# tidy\n")

    assert try_task(task, meddle, sandbox, HARNESS) == ("fail", "")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TASKS / "retry-limit", tmp_path / "retry-limit"))


@pytest.mark.sandbox
def test_a_workspace_that_ends_its_reader_does_not_pass(copy: Path, sandbox: Bubblewrap) -> None:
    def cheat(_task: FolderTask, stage) -> None:
        (stage.workspace / "settings.py").write_text("import os\nos._exit(0)\n")

    assert try_task(load_task(copy), cheat, sandbox, HARNESS)[0] == "fail"


@pytest.mark.sandbox
def test_tests_are_not_there_while_a_policy_acts_and_cannot_be_changed_by_it(copy: Path, sandbox: Bubblewrap, tmp_path: Path) -> None:
    task = load_task(copy)
    stage = prepare(task, tmp_path / "attempt")
    seen = sandbox.run(["sh", "-c", "ls -a / /workspace /tests /logs; mkdir -p /tests"], stage.workspace).output
    assert "test.sh" not in seen
    assert "check.py" not in seen
    (stage.workspace / "tests").mkdir()
    assert verify(task, stage, sandbox, HARNESS)[0] == "fail"


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("exit 1", "wrote no reward (exit code 1)"),
        ("echo maybe > /logs/verifier/reward.txt", "wrote the reward 'maybe'"),
        ("sleep 30", "passed their limit of wall time"),
    ],
)
def test_tests_that_say_nothing_are_an_infra_error_not_a_zero(script: str, detail: str, copy: Path, sandbox: Bubblewrap) -> None:
    (copy / "tests" / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    settings = (copy / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 0.5")
    (copy / "task.toml").write_text(settings)
    outcome, why = try_task(load_task(copy), null, sandbox, HARNESS)
    assert outcome == "infra_error"
    assert detail in why


@pytest.mark.sandbox
def test_a_task_that_doing_nothing_passes_is_called_unsound(copy: Path, sandbox: Bubblewrap) -> None:
    (copy / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    assert unsound([load_task(copy)], sandbox, HARNESS) == ["retry-limit: doing nothing ends in pass"]
    (copy / "tests" / "test.sh").write_text("#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n")
    assert unsound([load_task(copy)], sandbox, HARNESS) == ["retry-limit: its own solution ends in fail"]


@pytest.mark.parametrize("part", ["instruction.md", "task.toml", "solution/solve.sh", "tests/test.sh"])
def test_a_missing_part_is_named(part: str, copy: Path) -> None:
    (copy / part).unlink()
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        load_task(copy)


def test_a_task_that_wants_the_network_is_refused(copy: Path) -> None:
    text = (copy / "task.toml").read_text()
    (copy / "task.toml").write_text(text.replace("allow_internet = false", "allow_internet = true"))
    with pytest.raises(ConfigError, match="without a network"):
        load_task(copy)
    (copy / "task.toml").write_text("suite = ")
    with pytest.raises(ConfigError, match=r"task\.toml"):
        load_task(copy)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no benchmark tasks"):
        load_tasks(tmp_path)
