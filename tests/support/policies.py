"""Made-up policies as turns that monitors look at: healthy, and with one habit changed."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from signals.monitors_facts import DERIVED, TRUTH
from signals.monitors_metrics import prepared
from signals.samples import COMPONENTS

START = datetime(2026, 3, 2, 8, tzinfo=UTC)
KINDS: dict[str, Any] = {
    **dict.fromkeys(("session_id", "turn_id", "user_key", "origin", "arm", "task_bucket", "language", "outcome"), pl.String),
    **dict.fromkeys(("outcome_reason", "reward_version"), pl.String), "turn_index": pl.Int32, "policy_version": pl.Int64,
    "started_at": pl.Datetime("us", "UTC"),
    **dict.fromkeys(("completions", "response_tokens", "calls", "invalid_calls", "edits"), pl.Int64),
    **dict.fromkeys(("interrupted", "final", "question", "refused", "eligible", "deferred"), pl.Boolean),
    **dict.fromkeys((*COMPONENTS, *TRUTH, "reward", *(name for name in DERIVED if name not in ("question", "refused"))), pl.Float64),
}  # fmt: skip


def policy_turns(
    version: int,
    sessions: int,
    *,
    seed: int,
    at: datetime = START,
    hours: float = 4.0,
    users: int = 40,
    hard: float = 0.3,
    invalid: float = 0.05,
    asks: float = 0.05,
    unscored: float = 0.1,
    refuses: float = 0.02,
    destroys: float = 0.02,
    turns: int = 2,
) -> list[dict[str, Any]]:
    """Make the turns of one policy version.

    Args:
        version: Policy version.
        sessions: Number of sessions, of `turns` turns each.
        seed: Of everything.
        at: Start of its life.
        hours: Length of its life.
        users: Number of users; each has a mood of their own.
        hard: Share of sessions with a hard task: a long message, half the edits kept.
        invalid: Chance that a call is invalid.
        asks: Chance that a turn asks instead of editing.
        unscored: Chance that a closed turn has no evidence.
        refuses: Chance that a turn declines.
        destroys: Chance that a command destroys something; one command a turn.
        turns: Turns a session.
    """
    rng, habits = random.Random(seed), random.Random(f"habits/{seed}")
    mood = [random.Random(user).gauss(0, 0.1) for user in range(users)]
    rows: list[dict[str, Any]] = []
    for index in range(sessions):
        user, is_hard = rng.randrange(users), rng.random() < hard
        begun = at + timedelta(hours=hours * index / sessions)
        for turn in range(turns):
            ask, calls = rng.random() < asks, rng.randrange(1, 4)
            bad = sum(rng.random() < invalid for _ in range(calls))
            kept = max(-1.0, min(1.0, (-0.3 if is_hard else 0.5) + mood[user] + rng.gauss(0, 0.4)))
            scored = rng.random() >= unscored
            reward = None if not scored else max(-1.0, 0.2 - 0.6 * bad) if ask else max(-1.0, kept - 0.5 * bad)
            rows.append({
                "session_id": f"v{version}-{seed}-{index}", "turn_id": f"v{version}-{seed}-{index}-{turn}", "turn_index": turn,
                "user_key": f"u{user}", "origin": "live", "arm": "serving", "policy_version": version,
                "task_bucket": "edit.hard" if is_hard else "edit.easy", "language": "en", "started_at": begun + timedelta(minutes=turn),
                "completions": 2, "response_tokens": rng.randrange(80, 160), "calls": calls, "invalid_calls": bad, "edits": 0 if ask else 1,
                "eligible": True, "deferred": ask,
                "interrupted": False, "final": True, "outcome": "scored" if scored else "no_evidence", "reward": reward,
                "reward_version": "r1", "edits_kept": None if ask or not scored else kept, "tool_calls": -1.0 if bad else 1.0,
                "message_chars": float(rng.randrange(400, 800) if is_hard else rng.randrange(20, 120)),
                "first_prompt_tokens": float(rng.randrange(500, 700)), "question": ask,
                "refused": habits.random() < refuses, "commands": 1.0, "destructive": float(habits.random() < destroys),
                "hashed_calls": float(calls), "repeated_calls": 0.0,
                "nats": rng.uniform(80, 120), "nat_tokens": 200.0,
            })  # fmt: skip
    return rows


def frame(*policies: list[dict[str, Any]]) -> pl.DataFrame:
    """Return the turns of several policies, prepared as monitors take them."""
    rows = [row for own in policies for row in own]
    return prepared(pl.DataFrame(rows, schema=KINDS).sort("started_at", "session_id", "turn_id"))
