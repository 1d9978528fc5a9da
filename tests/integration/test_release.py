"""Ships by real processes: killed at every point, two at once, stalled past the lease, rolled back by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from deploy.release.ledger import Ledger
from pipelines.storage import Home
from tests.support.release import base_weights, make_checkpoint

ROOT = Path(__file__).parents[2]


def shipper(*words: object) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "tests.support.shipper", *map(str, words)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def second_candidate(home: Home, parent: str) -> str:
    return make_checkpoint(home, base_weights() | {"a.weight": np.array([3.0, 4.01], dtype=np.float32)}, parent=parent)


def wait_until(true, *, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.slow
def test_a_ship_killed_at_any_point_and_run_again_promotes_exactly_once(release_home, pair):
    process = shipper("points", release_home.root, *pair)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = json.loads(output)
    assert found[0]["first"] == "exit 0"
    assert len(found) > 30, "too few points to mean anything"
    killed = [item for item in found[1:] if item["first"] == "killed"]
    assert len(killed) == len(found) - 1
    for item in found:
        assert item["second"] == "exit 0", item
        assert (item["serving"], item["promotions"], item["states"]) == (pair[1], 1, ["confirmed"]), item
        assert item["steps_done"] == 3, item


def test_of_two_shippers_at_once_one_promotes_and_the_other_says_why_not(release_home, pair, tmp_path):
    serving, first = pair
    second = second_candidate(release_home, serving)
    free = tmp_path / "not-there"
    processes = [shipper("ship", release_home.root, serving, candidate, 60, free) for candidate in (first, second)]
    ends = [(process.communicate(timeout=120), process.returncode) for process in processes]
    codes = sorted(code for _, code in ends)
    assert codes[0] == 0
    assert codes[1] in (3, 6), ends
    ledger = Ledger(release_home.ledger)
    assert [event.kind for event in ledger.history(1000)].count("promoted") == 1
    assert ledger.serving().checkpoint in (first, second)


def test_a_shipper_that_was_stopped_past_its_lease_wakes_up_fenced(release_home, pair, tmp_path):
    serving, first = pair
    second = second_candidate(release_home, serving)
    hold = tmp_path / "hold"
    hold.touch()
    ledger = Ledger(release_home.ledger)
    stalled = shipper("ship", release_home.root, serving, first, 1.0, hold)
    wait_until(lambda: any(ship.state == "staged" for ship in ledger.ships()), what="the first shipper stages")
    os.kill(stalled.pid, signal.SIGSTOP)
    wait_until(lambda: not ledger.leases(), what="its lease runs out")
    quick = shipper("ship", release_home.root, serving, second, 60, tmp_path / "not-there")
    assert quick.communicate(timeout=120)[0].strip() == "confirmed"
    hold.unlink()
    os.kill(stalled.pid, signal.SIGCONT)
    output, _ = stalled.communicate(timeout=60)
    assert stalled.returncode == 6
    assert "fenced off" in output or "took over" in output
    assert ledger.serving().checkpoint == second


def test_rollback_during_a_gate_wins_over_the_pending_promotion(release_home, pair, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    ledger = Ledger(release_home.ledger)
    busy = shipper("ship", release_home.root, *pair, 60, hold)
    wait_until(lambda: any(ship.state == "staged" for ship in ledger.ships()), what="the shipper stages")
    argv = [sys.executable, "-m", "deploy.release.rollback", "--home", str(release_home.root), "--reason", "stop it", "--json"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["removed"] == [pair[1]]
    hold.unlink()
    output, _ = busy.communicate(timeout=60)
    assert (busy.returncode, ledger.serving().checkpoint) == (6, pair[0])
    assert "fenced off" in output or "tombstoned" in output


def test_a_good_candidate_ships_and_rollback_by_hand_restores_the_parent(release_home, pair, tmp_path):
    process = shipper("ship", release_home.root, *pair, 60, tmp_path / "not-there")
    assert process.communicate(timeout=60)[0].strip() == "confirmed"
    argv = [sys.executable, "-m", "deploy.release", "rollback", "--home", str(release_home.root), "--reason", "reward drift"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert pair[0][:12] in done.stdout
    ledger = Ledger(release_home.ledger)
    assert (ledger.serving().checkpoint, ledger.quarantined()) == (pair[0], [2])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["rollback", "--reason", "x"], 6, "nothing to roll back"),
        (["freeze", "--reason", "x"], 2, "--yes"),
        (["freeze", "--reason", " ", "--yes"], 2, "--reason is empty"),
        (["gate", "explain"], 6, "no ship was ever proposed"),
        (["ship", "show", "zz"], 1, "0 ships"),
        (["freeze"], 2, ""),
    ],
)
def test_commands_end_with_their_exit_code_and_one_sentence(release_home, pair, words, code, sentence):
    argv = [sys.executable, "-m", "deploy.release", *words, "--home", str(release_home.root)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_checkpoint_is_installed_by_a_command_and_another_one_is_not(release_home):
    first, other = (
        make_checkpoint(release_home, base_weights(), kind="warmstart"),
        make_checkpoint(release_home, base_weights(), template="other"),
    )
    argv = [sys.executable, "-m", "deploy.release", "ckpt", "install"]
    options = ["--home", str(release_home.root), "--json"]
    done = subprocess.run([*argv, first[:12], *options], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"checkpoint": first, "policy_version": 1, "serving": first}
    pointer = Ledger(release_home.ledger).serving()
    assert pointer is not None
    assert (pointer.checkpoint, pointer.anchor, pointer.policy_version) == (first, first, 1)
    refused = subprocess.run([*argv, other, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 6
    assert "is installed" in refused.stderr
