"""The tests' own question whether a process still runs."""

import os
import subprocess
import sys
import time

import psutil

from tests.support.processes import runs


def test_a_process_that_ended_but_was_not_collected_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert psutil.pid_exists(child.pid)
    assert not runs(child.pid)
    child.wait()
    assert not runs(child.pid)


def test_this_process_runs_and_an_earlier_one_with_its_id_does_not() -> None:
    started_s = psutil.Process().create_time()
    assert runs(os.getpid())
    assert runs(os.getpid(), started_s=started_s)
    assert not runs(os.getpid(), started_s=started_s - 60)
