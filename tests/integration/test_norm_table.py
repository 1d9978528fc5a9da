"""Norms and rates from a lake on disk: frozen, in force, and shown by the commands."""

import json
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import lake, norm_table
from signals.config import RewardsConfig
from signals.norms import NO_NORMS

CONFIG = RewardsConfig(norm_min_turns=4)
BEGAN = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def filled(tmp_path: Path) -> Home:
    """A lake with two policies: the second asks instead of editing every other time."""
    home = Home(tmp_path / "norms")
    lake.create_missing(home)
    turns: list[dict[str, Any]] = []
    rewards: list[dict[str, Any]] = []
    for at in range(40):
        version, asks = 1 + at // 20, at >= 20 and at % 2 == 1
        ids = {"session_id": f"s{at}", "turn_id": f"t{at}", "turn_index": 0, "user_key": f"u{at % 5}", "origin": "simulated",
               "arm": "serving", "policy_version": version, "task_bucket": "edit", "date": date(2026, 6, 1)}  # fmt: skip
        turns.append(ids | {
            "surface": "cli", "language": "en", "acted_at": BEGAN + timedelta(seconds=at), "final": True, "sampling_ms": 500.0 + at,
            "edits": int(not asks), "followed_up": True, "replied_after_ms": 1_000 * at, "asked": asks, "eligible": True, "deferred": asks,
        })  # fmt: skip
        kept = None if asks else 1.0 if at % 4 else -1.0
        rewards.append(ids | {"edits_kept": kept, "follow_up": 0.5, "dissatisfied": 0.25, "deferral": -0.5 if asks else None,
                              "reward": -0.5 if asks else kept, "reward_version": "r1"})  # fmt: skip
    lake.append(home, "turns", turns)
    lake.append(home, "rewards", rewards)
    return home


def run(home: Home, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "signals", *words, "--home", str(home.root), "--json", "--set", "rewards.norm_min_turns=4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_norms_are_those_of_the_accepted_policies_and_the_last_frozen_are_in_force(filled: Home) -> None:
    assert norm_table.in_force(filled, CONFIG) is NO_NORMS
    norm_table.freeze_now(filled, CONFIG, now=BEGAN, policy_versions=(1,))
    first = norm_table.in_force(filled, CONFIG)
    assert first.scale_of("cli", "en", "edit")["edits_kept"][0] == pytest.approx(0.5)
    assert first.median_ms("edit", CONFIG) == 509.5
    norm_table.freeze_now(filled, CONFIG, now=BEGAN + timedelta(hours=5))
    assert norm_table.in_force(filled, CONFIG).version not in ("", first.version)
    with pytest.raises(ConfigError, match="policies 9"):
        norm_table.freeze_now(filled, CONFIG, now=BEGAN, policy_versions=(9,))


def test_the_commands_show_what_is_usual_and_what_each_policy_earns(filled: Home) -> None:
    shown = run(filled, "baselines")
    assert shown["latency_medians_ms"] == {"*": 519.5, "edit": 519.5}
    assert (shown["replies"], shown["reply_s_p95"], shown["reply_share_in_window"]) == (40, 37.0, 1.0)
    frozen = run(filled, "baselines", "--freeze", "--policy-version", "1")
    assert frozen["norms_version"] not in (None, shown["norms_version"])
    first, second = run(filled, "rates")["rates"]
    assert (first["policy_version"], first["turns"], first["deferred"]) == (1, 20, 0.0)
    assert (second["asked"], second["deferred"]) == (0.5, 0.5)
    assert second["kept"]["mean"] < first["kept"]["mean"] == pytest.approx(0.75)
    assert first["scored_share"] == second["scored_share"] == 1.0
