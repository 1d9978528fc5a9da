"""From the events of one session to its turns: the rules of distilling, in plain Python.

The jobs do the same in Spark columns (`transforms.py`); this mirror is what tests compare them with and what `explain` prints from. The
result is a function of the set of events: their order, duplicates and batch cuts cannot change it.

Takes: event rows as mappings (wire names, `payload` a mapping), settings, `now`. Gives: turns with evidence, outcome and reward.
Leaves out: I/O.
"""

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from signals.config import RewardsConfig
from signals.credit import by_proposal, by_reply
from signals.filters import Capture
from signals.outcomes import Course, outcome
from signals.rewards import SEVERITY, Edit, Evidence, FollowUp, components, dissatisfied, is_evidence, scalar
from signals.samples import Outcome

Row = Mapping[str, Any]

ACTING: Final = ("turn_started", "completion", "tool_call", "tool_result", "edit_proposed")
"""Events that keep a turn going; its window starts after the last one."""
OPENING: Final = (*ACTING, "interrupted")
"""Events that make a turn exist."""
INVALID: Final = ("unknown_tool", "invalid_arguments")
"""Tool results that are the policy's doing."""
CONSENT: Final = ("none", "measure", "train")
"""From strictest to freest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """One distilled turn."""

    session_id: str
    turn_id: str
    turn_index: int
    user_key: str
    origin: str
    arm: str
    policy_version: int | None
    task_bucket: str | None
    started_at_ms: int
    closes_at_ms: int
    """Evidence after this instant is late."""
    course: Course
    capture: Capture
    evidence: Evidence
    components: dict[str, float]
    dissatisfied: float | None
    followed_up: bool
    late: int
    outcome: Outcome
    outcome_reason: str | None
    reward: float | None
    """Weighted mean of the components once final; None without evidence or before."""
    sources: tuple[str, ...]
    """Ids of the events behind the components."""


def fingerprint(row: Row) -> str:
    """Return the identity of an event's content; taken from the row where the stream computed it."""
    if found := row.get("fingerprint"):
        return str(found)
    content = {key: value for key, value in row.items() if key != "recorded_at_ms"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def deduplicate(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Keep one row an event id: the one recorded first, ties by content.

    Returns:
        Rows kept, in time order, and rows whose id was seen with other content.
    """
    groups: dict[str, list[tuple[int, str, Row]]] = {}
    for row in rows:
        groups.setdefault(row["event_id"], []).append((row["recorded_at_ms"], fingerprint(row), row))
    kept: list[Row] = []
    conflicts: list[Row] = []
    for group in groups.values():
        group.sort(key=lambda item: item[:2])
        kept.append(group[0][2])
        conflicts += [row for _, digest, row in group[1:] if digest != group[0][1]]
    return sorted(kept, key=_moment), conflicts


def _moment(row: Row) -> tuple[int, str]:
    return row["occurred_at_ms"], row["event_id"]


def _of(rows: Iterable[Row], *types: str) -> list[Row]:
    return [row for row in rows if row["type"] in types]


def _packed_length(text: str) -> int | None:
    try:
        length = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return None
    return length // 4 if length % 4 == 0 else None


def _broken(payload: Mapping[str, Any]) -> bool:
    if payload.get("capture_error") is not None:
        return True
    arrays = [payload.get(name) for name in ("prompt_ids", "response_ids", "behaviour_logprobs")]
    if any(array is None for array in arrays):
        return False
    prompt, response, logprobs = [_packed_length(str(array)) for array in arrays]
    return prompt is None or response is None or response != logprobs


def _capture(opening: Sequence[Row], completions: Sequence[Row]) -> Capture:
    served = completions or opening
    versions = [row["policy_version"] for row in served if row.get("policy_version") is not None]
    if not versions:
        versions = [row["policy_version"] for row in opening if row.get("policy_version") is not None]
    payloads = [row["payload"] for row in completions]
    return Capture(
        consent=min((row["consent"] for row in opening), key=CONSENT.index),
        policy_version=max(versions, default=None),
        without_ids=sum(any(p.get(name) is None for name in ("prompt_ids", "response_ids", "behaviour_logprobs")) for p in payloads),
        broken=sum(map(_broken, payloads)),
        truncated=sum((p.get("top_p") is not None and p["top_p"] < 1) or (p.get("top_k") or 0) > 0 for p in payloads),
    )


def _sampling_ms(completions: Sequence[Row]) -> float | None:
    """Sum durations as whole microseconds, so that the sum has no order."""
    durations = [row["payload"].get("duration_ms") for row in completions]
    known = [math.floor(duration * 1000.0 + 0.5) for duration in durations if duration is not None]
    return sum(known) / 1000.0 if known else None


def _closes(acted_at_ms: int, ends: Iterable[int], feedback: Iterable[int], window_ms: int) -> tuple[int, bool]:
    """Return when a turn's window closes and whether something closed it early."""
    early = [at for at in [*ends, *feedback] if at >= acted_at_ms]
    return min([acted_at_ms + window_ms, *early]), bool(early)


def _edit(edit_id: str, proposal: Row, seen: Sequence[Row], *, closes_at_ms: int, window_s: int) -> tuple[Edit, list[Row], int]:
    """Judge one edit by what was seen of it inside the window: the edit, the rows used, the number of late ones."""
    inside = [
        row for row in seen if row["occurred_at_ms"] <= closes_at_ms and (row["payload"].get("horizon_s") or 0) <= window_s
    ]  # fmt: skip
    decisions = [(row["occurred_at_ms"], SEVERITY.index(row["payload"]["decision"])) for row in _of(inside, "edit_decided")]
    survivals = [
        (row["payload"]["horizon_s"], -row["payload"]["survival_no_revert"])
        for row in _of(inside, "edit_survival")
        if not row["payload"].get("branch_changed")
    ]
    edit = Edit(
        edit_id=edit_id,
        chars_added=proposal["payload"].get("chars_added") or 0,
        decision=SEVERITY[max(decisions)[1]] if decisions else None,
        survival=-max(survivals)[1] if survivals else None,
    )
    return edit, inside, len(seen) - len(inside)


def _calls(rows: Sequence[Row]) -> tuple[set[str], set[str]]:
    """Return the ids of a turn's tool calls and of those that were invalid."""
    calls = {row["payload"]["tool_call_id"] for row in _of(rows, "tool_call")}
    invalid = {row["payload"]["tool_call_id"] for row in _of(rows, "tool_call") if not row["payload"]["arguments_valid"]}
    invalid |= {row["payload"]["tool_call_id"] for row in _of(rows, "tool_result") if row["payload"]["result_class"] in INVALID}
    return calls | invalid, invalid


@dataclass(frozen=True, slots=True)
class _Session:
    """A session's rows, grouped once."""

    rows: list[Row]
    turns: dict[str, list[Row]]
    order: list[str]
    openings: dict[str, Row]
    completions: dict[str, list[Row]]
    proposals: dict[str, Row]
    credited: dict[str, dict[str, list[Row]]]
    first: Row | None


def _first_by(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return first


def _group(rows: list[Row]) -> _Session:
    turns: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("turn_id") is not None:
            turns.setdefault(row["turn_id"], []).append(row)
    turns = {turn_id: own for turn_id, own in turns.items() if _of(own, *OPENING)}
    openings = _first_by((row for row in _of(rows, "turn_started") if row.get("turn_id") in turns), lambda row: row["turn_id"])
    completions: dict[str, list[Row]] = {}
    for row in _first_by(_of(rows, "completion"), lambda row: row["payload"]["completion_id"]).values():
        completions.setdefault(row.get("turn_id") or "", []).append(row)
    proposals = _first_by(_of(rows, "edit_proposed"), lambda row: row["payload"]["edit_id"])
    seen: dict[str, list[Row]] = {}
    for row in _of(rows, "edit_decided", "edit_survival"):
        seen.setdefault(row["payload"]["edit_id"], []).append(row)
    credited, _ = by_proposal({edit_id: row.get("turn_id") for edit_id, row in proposals.items()}, seen)

    def place(turn_id: str) -> tuple[float, int, str]:
        opening = openings.get(turn_id)
        started = min(row["occurred_at_ms"] for row in _of(turns[turn_id], *OPENING))
        return math.inf if opening is None else opening["payload"]["turn_index"], started, turn_id

    sessions_started = _of(rows, "session_started")
    return _Session(
        rows, turns, sorted(turns, key=place), openings, completions, proposals, credited, sessions_started[0] if sessions_started else None
    )


def _follow_up(own: Sequence[Row], opening: Row | None, reply: Row | None) -> FollowUp | None:
    if reply is None or reply["payload"].get("message") is None:
        return None
    return FollowUp(
        message=reply["payload"]["message"],
        previous=opening["payload"].get("message") if opening else None,
        stack_traces=reply["payload"].get("stack_traces") or 0,
        reply_delay_ms=reply["payload"].get("reply_delay_ms"),
        interrupted=any(row["payload"]["by"] == "user" for row in _of(own, "interrupted")),
    )


def distil(rows: Iterable[Row], config: RewardsConfig, *, now_ms: int, tombstoned: frozenset[int] = frozenset()) -> list[TurnResult]:
    """Distil the events of one session.

    Args:
        rows: Its events in any order, with any duplicates.
        config: Window and weights.
        now_ms: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.

    Returns:
        Its turns in order.
    """
    kept, _ = deduplicate(rows)
    session = _group(kept)
    replies = by_reply(session.order, session.openings)
    return [
        _turn(session, turn_id, position, replies.get(turn_id), config, now_ms=now_ms, tombstoned=tombstoned)
        for position, turn_id in enumerate(session.order)
    ]


def _turn(
    session: _Session, turn_id: str, position: int, reply: Row | None, config: RewardsConfig, *, now_ms: int, tombstoned: frozenset[int]
) -> TurnResult:
    own = session.turns[turn_id]
    opening_rows = _of(own, *OPENING)
    opening = session.openings.get(turn_id)
    completions = session.completions.get(turn_id, [])
    started_at = min(row["occurred_at_ms"] for row in opening_rows)
    acted_at = max((row["occurred_at_ms"] for row in _of(own, *ACTING)), default=started_at)
    ends = [row["occurred_at_ms"] for row in _of(session.rows, "session_ended")]
    feedback = [row["occurred_at_ms"] for row in _of(own, "feedback")]
    closes_at, early = _closes(acted_at, ends, feedback, config.window_s * 1000)
    capture = _capture(opening_rows, completions)
    stoppers = {row["payload"]["by"] for row in _of(own, "interrupted")}
    failures = sum(row["payload"]["result_class"] == "provider_error" for row in _of(own, "tool_result"))
    failures += sum(row["payload"].get("finish_reason") == "error" for row in completions)
    course = Course(
        final=early or now_ms >= closes_at, completions=len(completions), provider_errors=failures,
        stopped_by_system="system" in stoppers, stopped_by_user="user" in stoppers,
    )  # fmt: skip
    judged = [
        _edit(edit_id, session.proposals[edit_id], seen, closes_at_ms=closes_at, window_s=config.window_s)
        for edit_id, seen in sorted(session.credited.get(turn_id, {}).items())
    ]
    in_time = reply is not None and reply["occurred_at_ms"] <= closes_at
    calls, invalid = _calls(own)
    task_bucket = session.first["payload"].get("task_bucket") if session.first else None
    evidence = Evidence(
        edits=tuple(edit for edit, _, _ in judged), follow_up=_follow_up(own, opening, reply) if in_time else None,
        sampling_ms=_sampling_ms(completions), task_bucket=task_bucket, calls=len(calls), invalid_calls=len(invalid),
    )  # fmt: skip
    present = {} if capture.consent == "none" else components(evidence, config)
    decided, reason = outcome(course, capture, evident=is_evidence(present), tombstoned=tombstoned)
    used = [row for _, inside, _ in judged for row in inside] + ([reply] if in_time and reply is not None else [])
    used += _of(own, "tool_call", "tool_result", "completion", "edit_proposed", "interrupted")
    return TurnResult(
        session_id=opening_rows[0]["session_id"], turn_id=turn_id,
        turn_index=position if opening is None else opening["payload"]["turn_index"],
        user_key=opening_rows[0]["user_key"], origin=opening_rows[0]["origin"], arm=(completions or opening_rows)[0]["arm"],
        policy_version=capture.policy_version, task_bucket=task_bucket, started_at_ms=started_at, closes_at_ms=closes_at,
        course=course, capture=capture, evidence=evidence, components=present,
        dissatisfied=None if capture.consent == "none" else dissatisfied(evidence.follow_up),
        followed_up=in_time, late=sum(late for _, _, late in judged) + int(reply is not None and not in_time),
        outcome=decided, outcome_reason=reason, reward=scalar(present, config) if course.final else None,
        sources=tuple(row["event_id"] for row in sorted(used, key=_moment)),
    )  # fmt: skip
