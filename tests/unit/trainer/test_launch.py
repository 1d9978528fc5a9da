"""A rank must not outlive the torchrun that started it, not even one that dies while the rank still loads."""

import os

import psutil
import pytest

from trainer import launch


def test_a_rank_whose_grandparent_started_torchrun_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.LAUNCHER, str(psutil.Process(os.getppid()).ppid()))
    assert not launch.orphaned()


def test_a_rank_with_another_grandparent_was_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.LAUNCHER, str(os.getpid()))
    assert launch.orphaned()


def test_the_rank_of_another_launcher_knows_nothing_of_its_grandparent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.LAUNCHER, raising=False)
    assert not launch.orphaned()
