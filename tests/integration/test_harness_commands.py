"""The commands as a person types them, against a scripted gateway."""

import json
import shutil
from pathlib import Path

import pytest

from deploy.benchmark.__main__ import app as benchmark
from deploy.benchmark.folders import TASKS
from deploy.harness.__main__ import app as sessions
from deploy.harness.runner import read_lines
from pipelines.events import EVENT
from pipelines.redaction import user_key
from pipelines.storage import Home
from pipelines.terminal import run
from tests.support.harness import knowing_policy

pytestmark = pytest.mark.sandbox


def typed(app, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run(app, [str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_sessions_are_run_sampled_and_shown(scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = scripted(knowing_policy("see", split="simulated", seed=2))
    home, out = tmp_path / "home", tmp_path / "out"
    words = (
        "run",
        "--gateway",
        gateway.url,
        "--sessions",
        2,
        "--seed",
        2,
        "--concurrency",
        2,
        "--out",
        out,
        "--home",
        home,
        "--events",
        "file",
    )
    code, printed, _ = typed(sessions, capsys, *words, "--json")
    result = json.loads(printed)
    assert (code, result["sessions"], result["kept_edits"]["rate"]) == (0, 2, 0.0)
    assert json.loads((out / "summary.json").read_text()) == result
    events = [EVENT.validate_json(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    assert {event.user_key for event in events} == {user_key(Home(home), f"simulated-2-{number}") for number in (0, 1)}
    assert gateway.requests[0][0]["authorization"].startswith("Bearer tg-")

    code, printed, _ = typed(sessions, capsys, "sample", "--out", out, "--which", "undone", "--home", home)
    assert code == 0
    session = printed.split()[0]
    assert session in {row["session_id"] for row in read_lines(out / "sessions.jsonl")}
    code, printed, _ = typed(sessions, capsys, "show", session[-12:], "--out", out)
    assert code == 0
    assert f"session {session}" in printed
    assert "policy  | <tool_call>" in printed
    assert "verdict | not kept (convention); check passed, ticket cited with see" in printed


def test_what_is_not_there_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = typed(sessions, capsys, "sample", "--out", tmp_path)
    assert code == 2
    assert "holds no sessions; run some" in told
    assert "Traceback" not in told
    code, _, told = typed(sessions, capsys, "run", "--gateway", "http://127.0.0.1:9", "--sessions", 1, "--out", tmp_path / "o",
                          "--home", tmp_path / "home", "--events", "file", "--set", "harness.request_tries=1")  # fmt: skip
    assert code == 75
    assert "none of 1 sessions got an answer" in told


def test_demonstrations_are_written_as_training_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ((), ("--broken",)):
        out = tmp_path / f"demo{len(extra)}.jsonl"
        code, printed, _ = typed(sessions, capsys, "demonstrations", "--number", 7, "--seed", 1, "--out", out, "--json", *extra)
        assert (code, json.loads(printed)) == (0, {"rows": 7, "path": str(out)})
        for row in read_lines(out):
            assert set(row) == {"messages", "tools"}


def test_task_folders_prove_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TASKS / "retry-limit", tmp_path / "retry-limit")
    code, printed, _ = typed(benchmark, capsys, "check", "--tasks", tmp_path, "--json")
    assert (code, json.loads(printed)) == (0, {"tasks": {"retry-limit": {"oracle": "pass", "null": "fail"}}, "unsound": []})
    (tmp_path / "retry-limit" / "solution" / "solve.sh").write_text("true\n")
    code, _, told = typed(benchmark, capsys, "check", "--tasks", tmp_path)
    assert code == 1
    assert "benchmark tasks measure nothing: retry-limit" in told


def test_a_sandbox_that_is_missing_ends_the_command_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, told = typed(sessions, capsys, "run", "--gateway", "http://127.0.0.1:9", "--out", tmp_path / "o", "--home", tmp_path / "home")
    assert code == 2
    assert "apt-get install bubblewrap" in told
    assert not (tmp_path / "o").exists()
