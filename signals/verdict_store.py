"""Verdicts of the optional judge that rewards are computed with: found in the lake, asked for, frozen.

A reward must not depend on a server's mood on the day it is computed. So the judge is asked by a command, its verdicts are frozen in one
file of the deployment, and distil, backfill and `explain` use what is frozen. Other verdicts make another reward version. A verdict is
kept under the digest of the two texts; the texts stay in the lake.

Takes: the home, settings, a judge. Gives: `Judged`. Leaves out: asking (`judge.py`), the joined probability (`components.py`,
`followup_columns.py`).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from pipelines.errors import ContractViolation
from pipelines.storage import Home, write_atomic
from signals import lake
from signals.config import FollowupsConfig
from signals.judge import NOT_JUDGED, Judge, Judged, Verdicts, verdict_key, version
from signals.sessions import OPENING, follow_ups

ASKED: Final = "followup-verdicts.jsonl"
"""Every answer of every judge, so that nothing is asked twice."""
FROZEN: Final = "followup-verdicts-frozen.json"
"""What is in force."""
SESSIONS_A_PASS: Final = 1_000
_ENVELOPE: Final = ("event_id", "fingerprint", "recorded_at_ms", "occurred_at_ms", "type", "session_id", "turn_id")
_PAYLOAD: Final = ("turn_index", "message", "stack_traces", "reply_delay_ms", "by")


def asked(home: Home, config: FollowupsConfig) -> Verdicts:
    """Return the answers that this deployment's judge has given so far."""
    return Verdicts(home.root / ASKED, model=config.judge_model, votes=config.judge_votes)


def in_force(home: Home) -> Judged:
    """Return what was frozen last; `NOT_JUDGED` before the first and after a withdrawal.

    Raises:
        ContractViolation: The file is damaged. Rewards without their verdicts would silently be others.
    """
    path = home.root / FROZEN
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return Judged(
            verdicts={str(key): float(value) for key, value in found["verdicts"].items()},
            share=float(found["share"]),
            version=str(found["version"]),
        )
    except FileNotFoundError:
        return NOT_JUDGED
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractViolation(
            f"{path} cannot be read ({error}); freeze the verdicts again: tidegate signals followup judge, or: --withdraw"
        ) from error


def freeze(home: Home, config: FollowupsConfig, verdicts: dict[str, float], *, now: datetime) -> Judged:
    """Put verdicts in force, in the place of those before.

    Raises:
        StorageFull: No space left.
    """
    if not verdicts:
        withdraw(home)
        return NOT_JUDGED
    judged = Judged(verdicts=verdicts, share=config.judge_share, version=version(config, verdicts))
    head = {"version": judged.version, "frozen_at": now.isoformat(), "model": config.judge_model, "votes": config.judge_votes}
    content = head | {"share": judged.share, "verdicts": dict(sorted(verdicts.items()))}
    write_atomic(home.root / FROZEN, json.dumps(content, indent=0).encode())
    return judged


def withdraw(home: Home) -> None:
    """Take all verdicts out of force; what was asked stays known."""
    Path(home.root / FROZEN).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A follow-up of the lake."""

    message: str
    previous: str | None
    p: float
    """P(dissatisfied) as the lake has it."""


def pairs(home: Home) -> Iterator[Pair]:
    """Yield the follow-ups of all turns with that component, in the order of their sessions' ids.

    Raises:
        ContractViolation: A table is damaged.
    """
    judged = lake.scan(home, "rewards", ["session_id", "turn_id", "follow_up"], ds.field("follow_up").is_valid())
    p_of = {(row["session_id"], row["turn_id"]): (1.0 - row["follow_up"]) / 2.0 for row in judged.to_pylist()}
    ordered = sorted({session_id for session_id, _ in p_of})
    for begin in range(0, len(ordered), SESSIONS_A_PASS):
        for session_id, rows in _events(home, ordered[begin : begin + SESSIONS_A_PASS]).items():
            for turn_id, found in follow_ups(rows).items():
                p = p_of.get((session_id, turn_id))
                if p is not None:
                    yield Pair(message=found.message, previous=found.previous, p=p)


def _events(home: Home, sessions: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that follow-ups come from, by session; of the payload only what they need."""
    chosen = ds.field("session_id").isin(pa.array(sessions, pa.string())) & ds.field("type").isin(list(OPENING))
    columns: dict[str, ds.Expression] = {name: ds.field(name) for name in _ENVELOPE}
    columns |= {f"payload.{name}": ds.field("payload", name) for name in _PAYLOAD}
    with lake.boundary(lake.path(home, "events")):
        table = lake.dataset(home, "events").scanner(columns=columns, filter=chosen).to_table()
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        payload = {name: row.pop(f"payload.{name}") for name in _PAYLOAD}
        found.setdefault(row["session_id"], []).append({**row, "payload": payload})
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one run of the judge came to."""

    follow_ups: int
    unsure: int
    """Those where the classifier's P lies within `judge_margin` of 0.5, or that have a verdict from before."""
    judged: Judged


def ask(
    home: Home, config: FollowupsConfig, judge: Judge, *, now: datetime, step: Callable[[int], object] = lambda _n: None
) -> Asked:  # fmt: skip
    """Ask the judge about every follow-up of the lake that the classifier is unsure of, and freeze all verdicts on the lake's follow-ups.

    Args:
        home: The deployment.
        config: Margin and share.
        judge: Answers from its memory where it can.
        now: When they are frozen.
        step: Told of each follow-up.

    Raises:
        ContractViolation: A table is damaged.
    """
    known = asked(home, config).frozen()
    verdicts: dict[str, float] = {}
    seen: set[str] = set()
    number = unsure = 0
    for pair in pairs(home):
        number += 1
        step(1)
        key = verdict_key(pair.message, pair.previous)
        if key in seen or not (key in known or abs(pair.p - 0.5) <= config.judge_margin):
            continue
        seen.add(key)
        unsure += 1
        verdict = judge.verdict(pair.message, pair.previous)
        if verdict is not None:
            verdicts[key] = verdict
    return Asked(follow_ups=number, unsure=unsure, judged=freeze(home, config, verdicts, now=now))
