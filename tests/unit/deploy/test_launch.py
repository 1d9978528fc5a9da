"""How the end of a stage's process is told."""

import sys
from pathlib import Path

import pytest

from deploy.launch import run_job
from pipelines.errors import StageError
from pipelines.storage import Home


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; print('no room', file=sys.stderr); sys.exit(1)", "job ended with exit code 1; .*no room"),
        ("import os; os.kill(os.getpid(), 9)", "job was killed by signal 9; the same command goes on where it stopped"),
    ],
)
def test_a_stage_that_failed_is_told_from_one_that_was_killed(tmp_path: Path, program: str, words: str) -> None:
    with pytest.raises(StageError, match=f"(?s){words}"):
        run_job(Home(tmp_path), "job", [sys.executable, "-c", program], timeout_s=60)
