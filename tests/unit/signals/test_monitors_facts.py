"""Facts about turns, read from a lake of a few rows written by hand."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.storage import Home
from signals import lake
from signals.config import MonitorsConfig
from signals.monitors_facts import load

AT = datetime(2026, 5, 4, 9, tzinfo=UTC)
MS = round(AT.timestamp() * 1000)


def turn(turn_id: str, **changes: Any) -> dict[str, Any]:
    base = {"session_id": "s", "turn_index": 0, "user_key": "u", "origin": "live", "arm": "serving", "policy_version": 1, "started_at": AT}
    counts = {"completions": 1, "response_tokens": 2, "calls": 0, "invalid_calls": 0, "edits": 0, "interrupted": False, "final": True}
    return base | counts | {"turn_id": turn_id, "outcome": "scored", "date": AT.date()} | changes


def row(number: int, kind: str, turn_id: str, /, **payload: Any) -> dict[str, Any]:
    envelope = {
        "event_id": f"e{number}",
        "fingerprint": f"f{number}",
        "type": kind,
        "session_id": "s",
        "turn_id": turn_id,
        "date": AT.date(),
    }
    return envelope | {"occurred_at_ms": MS + number, "recorded_at_ms": MS + number, "payload": payload}


def call(number: int, name: str, arguments: str | None, **more: Any) -> dict[str, Any]:
    return row(number, "tool_call", "t1", tool_call_id=f"k{number}", name=name, arguments_hash=arguments, **more)


EVENTS = [
    row(1, "turn_started", "t1", message_chars=40, turn_index=0),
    row(2, "completion", "t1", completion_id="c1", step=1, prompt_tokens=90, ends_in_question=True, refused=True),
    row(3, "completion", "t1", completion_id="c0", step=0, prompt_tokens=70, ends_in_question=None, refused=None),
    call(4, "read", "h", changes_before=0), call(5, "read", "h", changes_before=0), call(6, "read", "h", changes_before=1),
    call(7, "grep", "h", changes_before=0), call(8, "read", None),
    call(12, "bash", None, destructive=True), call(13, "bash", None, destructive=False), call(14, "bash", None, destructive=False),
    row(9, "test_run", "t1", passed_before=5, failed_before=1, passed_after=5, failed_after=0),
    row(10, "test_run", "t2", passed_before=5, failed_before=1, passed_after=6, failed_after=0),
    row(11, "test_run", "t2", passed_after=6, failed_after=0),
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    lake.create_missing(made)
    ids = {"session_id": "s", "policy_version": 1, "date": AT.date()}
    late = {"started_at": AT + timedelta(hours=3)}
    rows = [turn("t1"), turn("t2", turn_index=1), turn("t3", origin="benchmark"), turn("t4", **late), turn("t5", policy_version=None)]
    lake.append(made, "turns", rows)
    lake.append(made, "rewards", [ids | {"turn_id": "t1", "reward": 0.5, "edits_kept": 0.5, "truth_24h": 0.4, "reward_version": "r"}])
    sampled = {"served_at": AT, "behaviour_logprobs": np.array([-0.5, -1.0], "<f4").tobytes()}
    lake.append(made, "samples", [ids | {"turn_id": "t1"} | sampled, ids | {"turn_id": "t1"} | sampled])
    lake.append(made, "events", [*EVENTS, EVENTS[3] | {"recorded_at_ms": MS + 99}])
    lake.append(made, "distilled", [{"distilled_at": AT, "tombstoned": [7], "frontier": [], "versions": []}])
    return made


def facts(home: Home) -> dict[str, dict[str, Any]]:
    found = load(home, MonitorsConfig(), since=AT - timedelta(days=1), until=AT + timedelta(hours=2))
    assert found.tombstoned == {7}
    return {row["turn_id"]: row for row in found.turns.to_dicts()}


def test_only_turns_of_the_span_the_origins_and_our_own_policies_count(home: Home) -> None:
    assert set(facts(home)) == {"t1", "t2"}


def test_what_a_turn_did_comes_from_its_events_each_once(home: Home) -> None:
    first = facts(home)["t1"]
    assert (first["message_chars"], first["first_prompt_tokens"], first["question"]) == (40, 70, True)
    assert first["refused"] is True
    # Three commands, one of them destructive; the event that was delivered twice is a look-up.
    assert (first["commands"], first["destructive"]) == (3, 1)
    # Five look-ups, one with unknown arguments; reading h again with nothing changed is the one repeat.
    assert (first["hashed_calls"], first["repeated_calls"]) == (4, 1)
    assert (first["reward"], first["edits_kept"], first["truth_24h"]) == (0.5, 0.5, 0.4)
    assert (first["nats"], first["nat_tokens"]) == (3.0, 4)


def test_fewer_tests_than_before_are_seen_and_runs_without_a_before_are_not(home: Home) -> None:
    found = facts(home)
    assert (found["t1"]["tests_removed"], found["t2"]["tests_removed"]) == (1.0, 0.0)


def test_a_lake_without_turns_gives_an_empty_frame_with_every_column(tmp_path: Path) -> None:
    made = Home(tmp_path)
    lake.create_missing(made)
    found = load(made, MonitorsConfig(), since=AT, until=AT)
    assert len(found.turns) == 0
    assert {"reward", "question", "nats", "started_at"} <= set(found.turns.columns)
