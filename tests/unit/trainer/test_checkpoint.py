"""A trainer checkpoint is there as a whole or not at all."""

import json
import os
import signal
import subprocess
import sys

import pytest

from trainer import checkpoint


def fill(text):
    return lambda folder: (folder / "weights.txt").write_text(text)


def test_the_newest_intact_checkpoint_is_found_with_its_state(tmp_path):
    checkpoint.save(tmp_path, 1, {"step": 1}, keep=3, fill=fill("one"))
    checkpoint.save(tmp_path, 2, {"step": 2, "ids": ["a"]}, keep=3, fill=fill("two"))
    folder, state = checkpoint.latest(tmp_path)
    assert (folder / "weights.txt").read_text() == "two"
    assert state == {"step": 2, "ids": ["a"]}


def test_old_checkpoints_rotate_out(tmp_path):
    for step in range(5):
        checkpoint.save(tmp_path, step, {}, keep=2, fill=fill(str(step)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name(3), checkpoint.name(4)]


@pytest.mark.parametrize("damage", ["altered", "missing", "unfinished"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    checkpoint.save(tmp_path, 1, {"step": 1}, keep=3, fill=fill("one"))
    folder = checkpoint.save(tmp_path, 2, {"step": 2}, keep=3, fill=fill("two"))
    if damage == "altered":
        (folder / "weights.txt").write_text("bad")
    else:
        (folder / ("weights.txt" if damage == "missing" else checkpoint.COMPLETE)).unlink()
    assert checkpoint.latest(tmp_path)[1] == {"step": 1}


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.latest(tmp_path / "nothing") is None


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from trainer import checkpoint
count = 0
def audit(event, arguments):
    # every rename, removal and creation of a file under the folder is a place to die
    global count
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and sys.argv[1] in str(arguments[0]):
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
root = Path(sys.argv[1])
sys.addaudithook(audit)
checkpoint.save(root, 2, {"step": 2}, keep=1, fill=lambda folder: (folder / "weights.txt").write_text("two"))
print(count)
"""


def test_killed_at_any_file_operation_the_old_or_the_new_checkpoint_is_whole(tmp_path):
    def attempt(point):
        root = tmp_path / f"at-{point}"
        checkpoint.save(root, 1, {"step": 1}, keep=1, fill=fill("one"))
        return root, subprocess.run(
            [sys.executable, "-c", KILLED_AT, str(root), str(point)], capture_output=True, text=True, check=False, env=dict(os.environ)
        )

    _, whole = attempt(10**6)
    places = int(whole.stdout)
    assert places > 8
    for point in range(1, places + 1):
        root, done = attempt(point)
        assert done.returncode == -signal.SIGKILL
        folder, state = checkpoint.latest(root)
        assert (folder / "weights.txt").read_text() == {1: "one", 2: "two"}[state["step"]]
        checkpoint.save(root, 3, {"step": 3}, keep=1, fill=fill("three"))
        assert json.loads((checkpoint.latest(root)[0] / checkpoint.STATE).read_text()) == {"step": 3}
