"""From the events of one session to its turns: the rules of distilling, in plain Python.

The jobs do the same in columns (`transforms.py`); this mirror is what tests compare them with and what `explain` prints from. The
result is a function of the set of events: their order, duplicates and batch cuts cannot change it.

Takes: event rows as mappings (wire names, `payload` a mapping), settings, norms, `now`. Gives: turns with evidence, outcome and reward.
Leaves out: what single rows say (`facts.py`), I/O.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from signals import credit, facts, rewards
from signals.components import Evidence, FollowUp, components, dissatisfied, explicit, is_deferred
from signals.config import RewardsConfig
from signals.facts import Row, moment, of
from signals.filters import Capture
from signals.judge import NOT_JUDGED, Judged
from signals.maturity import Maturity, Truth, states, truth_of_turn
from signals.norms import NO_NORMS, Norms
from signals.outcomes import Course, outcome
from signals.samples import Outcome

ACTING: Final = ("turn_started", "completion", "tool_call", "tool_result", "edit_proposed")
"""Events that keep a turn going; its window starts after the last one."""
OPENING: Final = (*ACTING, "interrupted")
"""Events that make a turn exist."""
CHECKED: Final = ("lint_delta", "test_run")
SAID: Final = ("feedback", "evaluation")


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
    pieces: rewards.Pieces
    """Mass and value of each component in the mean; empty without evidence or before the window closes."""
    maturity: dict[str, Maturity]
    dissatisfied: float | None
    explicit_mass: float
    followed_up: bool
    replied_after_ms: int | None
    """From the turn's last action to the next user message, however late; None when there was none."""
    asked: bool
    """Whether the turn's last words were a question."""
    deferred: bool
    late: int
    truth: Truth
    truth_evaluation: float | None
    """What the last external evaluation of this turn said, however late, in [-1, 1]."""
    outcome: Outcome
    outcome_reason: str | None
    reward: float | None
    """Mean of the pieces once final; None without evidence or before."""
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
    return sorted(kept, key=moment), conflicts


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """When a turn happened."""

    started_at_ms: int
    acted_at_ms: int
    closes_at_ms: int
    closed_early: bool


def _first_by(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return first


def _in_order(rows: list[Row]) -> tuple[dict[str, list[Row]], list[str], dict[str, Row]]:
    """Return the rows of each turn, the turns in order, and what opened them."""
    turns: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("turn_id") is not None:
            turns.setdefault(row["turn_id"], []).append(row)
    turns = {turn_id: own for turn_id, own in turns.items() if of(own, *OPENING)}
    openings = _first_by((row for row in of(rows, "turn_started") if row.get("turn_id") in turns), lambda row: row["turn_id"])

    def place(turn_id: str) -> tuple[float, int, str]:
        opening = openings.get(turn_id)
        started = min(row["occurred_at_ms"] for row in of(turns[turn_id], *OPENING))
        return math.inf if opening is None else opening["payload"]["turn_index"], started, turn_id

    return turns, sorted(turns, key=place), openings


def _group(rows: list[Row]) -> _Session:
    turns, order, openings = _in_order(rows)
    completions: dict[str, list[Row]] = {}
    for row in _first_by(of(rows, "completion"), lambda row: row["payload"]["completion_id"]).values():
        completions.setdefault(row.get("turn_id") or "", []).append(row)
    proposals = _first_by(of(rows, "edit_proposed"), lambda row: row["payload"]["edit_id"])
    seen: dict[str, list[Row]] = {}
    for row in of(rows, "edit_decided", "edit_survival"):
        seen.setdefault(row["payload"]["edit_id"], []).append(row)
    credited, _ = credit.by_proposal({edit_id: row.get("turn_id") for edit_id, row in proposals.items()}, seen)
    opened = of(rows, "session_started")
    return _Session(rows, turns, order, openings, completions, proposals, credited, opened[0] if opened else None)


def _frame(session: _Session, own: Sequence[Row], window_ms: int) -> _Frame:
    """Say when a turn began, last acted, and closes: after its time, or early when the session ends or the user scores it."""
    started = min(row["occurred_at_ms"] for row in of(own, *OPENING))
    acted = max((row["occurred_at_ms"] for row in of(own, *ACTING)), default=started)
    ends = [row["occurred_at_ms"] for row in (*of(session.rows, "session_ended"), *of(own, "feedback"))]
    early = [at for at in ends if at >= acted]
    return _Frame(
        started_at_ms=started, acted_at_ms=acted, closes_at_ms=min([acted + window_ms, *early]), closed_early=bool(early)
    )  # fmt: skip


def _follow_up(own: Sequence[Row], opening: Row | None, reply: Row | None, judged: Judged) -> FollowUp | None:
    if reply is None or reply["payload"].get("message") is None:
        return None
    message, previous = reply["payload"]["message"], opening["payload"].get("message") if opening else None
    return FollowUp(
        message=message,
        previous=previous,
        verdict=judged.of(message, previous),
        share=judged.share,
        stack_traces=reply["payload"].get("stack_traces") or 0,
        reply_delay_ms=reply["payload"].get("reply_delay_ms"),
        interrupted=any(row["payload"]["by"] == "user" for row in of(own, "interrupted")),
    )


def follow_ups(rows: Iterable[Row]) -> dict[str, FollowUp]:
    """Return the next user message of each turn of a session that has one with text.

    Args:
        rows: Events of the session; of the payload only the fields of openings and interruptions are looked at.
    """
    turns, order, openings = _in_order(deduplicate(rows)[0])
    replies = credit.by_reply(order, openings)
    found = {turn_id: _follow_up(turns[turn_id], openings.get(turn_id), replies.get(turn_id), NOT_JUDGED) for turn_id in order}
    return {turn_id: follow_up for turn_id, follow_up in found.items() if follow_up is not None}


def _shared(session: _Session, frames: Mapping[str, _Frame], discount: float) -> dict[str, tuple[tuple[float, float], ...]]:
    """Give what was said about the session as a whole to its turns: share and score, in the order in which it was said."""
    windows = [
        credit.Window(turn_id=turn_id, started_at_ms=frames[turn_id].started_at_ms, closes_at_ms=frames[turn_id].closes_at_ms)
        for turn_id in session.order
    ]
    given: dict[str, list[tuple[float, float]]] = {}
    for row in of(session.rows, *SAID):
        score = facts.score(row)
        if row.get("turn_id") is None and score is not None:
            for turn_id, share in credit.shares(windows, row["occurred_at_ms"], discount=discount).items():
                given.setdefault(turn_id, []).append((share, score))
    return {turn_id: tuple(items) for turn_id, items in given.items()}


def distil(
    rows: Iterable[Row],
    config: RewardsConfig,
    *,
    now_ms: int,
    tombstoned: frozenset[int] = frozenset(),
    norms: Norms = NO_NORMS,
    judged: Judged = NOT_JUDGED,
) -> list[TurnResult]:
    """Distil the events of one session.

    Args:
        rows: Its events in any order, with any duplicates.
        config: Window and weights.
        now_ms: The instant that windows are closed against.
        tombstoned: Policy versions whose release was rolled back.
        norms: What was usual.
        judged: The judge's verdicts in force.

    Returns:
        Its turns in order.
    """
    kept, _ = deduplicate(rows)
    session = _group(kept)
    frames = {turn_id: _frame(session, own, config.window_s * 1000) for turn_id, own in session.turns.items()}
    replies = credit.by_reply(session.order, session.openings)
    shared = _shared(session, frames, config.session_discount)
    return [
        _turn(
            session, turn_id, _Context(
                position=position, frame=frames[turn_id], reply=replies.get(turn_id), shared=shared.get(turn_id, ()), now_ms=now_ms,
                tombstoned=tombstoned, norms=norms, judged=judged,
            ), config,
        )
        for position, turn_id in enumerate(session.order)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What a turn needs to know besides its own rows."""

    position: int
    frame: _Frame
    reply: Row | None
    shared: tuple[tuple[float, float], ...]
    now_ms: int
    tombstoned: frozenset[int]
    norms: Norms
    judged: Judged


def _course(own: Sequence[Row], completions: Sequence[Row], *, final: bool) -> Course:
    stoppers = {row["payload"]["by"] for row in of(own, "interrupted")}
    failures = sum(row["payload"]["result_class"] == "provider_error" for row in of(own, "tool_result"))
    failures += sum(row["payload"].get("finish_reason") == "error" for row in completions)
    return Course(
        final=final, completions=len(completions), provider_errors=failures, stopped_by_system="system" in stoppers,
        stopped_by_user="user" in stoppers,
    )  # fmt: skip


def _turn(session: _Session, turn_id: str, context: _Context, config: RewardsConfig) -> TurnResult:
    own, frame, reply = session.turns[turn_id], context.frame, context.reply
    opening_rows, opening = of(own, *OPENING), session.openings.get(turn_id)
    completions = session.completions.get(turn_id, [])
    capture = facts.capture(opening_rows, completions)
    course = _course(own, completions, final=frame.closed_early or context.now_ms >= frame.closes_at_ms)
    judged = [
        facts.judged(edit_id, session.proposals[edit_id], seen, closes_at_ms=frame.closes_at_ms, window_s=config.window_s)
        for edit_id, seen in sorted(session.credited.get(turn_id, {}).items())
    ]
    stated = [row for row in of(own, *CHECKED, *SAID) if row["type"] not in SAID or facts.score(row) is not None]
    in_time = [row for row in stated if row["occurred_at_ms"] <= frame.closes_at_ms]
    followed_up = reply is not None and reply["occurred_at_ms"] <= frame.closes_at_ms
    start = session.first["payload"] if session.first else {}
    calls = facts.calls(own)
    evidence = Evidence(
        user_key=opening_rows[0]["user_key"], surface=start.get("surface"), task_bucket=start.get("task_bucket"),
        language=opening["payload"].get("language") if opening else None, edits=tuple(edit for edit, _, _ in judged),
        edits_observed=bool(start.get("edits_observed")), edit_expected=opening["payload"].get("edit_expected") if opening else None,
        follow_up=_follow_up(own, opening, reply, context.judged) if followed_up else None, followed_up=followed_up, final=course.final,
        completions=len(completions), response_tokens=facts.tokens(completions, "response_tokens"),
        sampling_ms=facts.sampling_ms(completions), calls=calls.calls, invalid_calls=calls.invalid, repeats=calls.repeats,
        serial_calls=calls.serial, claims=facts.tokens(completions, "claims"), claims_unread=facts.tokens(completions, "claims_unread"),
        checks=facts.checks(in_time), said=facts.said(in_time), shared=context.shared,
    )  # fmt: skip
    allowed = capture.consent != "none"
    present = components(evidence, config, context.norms) if allowed else {}
    decided, reason = outcome(course, capture, evident=rewards.is_evidence(present), tombstoned=context.tombstoned)
    mass = said[1] if (said := explicit(evidence)) is not None else 0.0
    scale = context.norms.scale_of(evidence.surface, evidence.language, evidence.task_bucket)
    found = rewards.pieces(present, config, scale=scale, explicit_mass=mass) if course.final else {}
    used = [row for _, _, inside in judged for row in inside] + in_time + ([reply] if followed_up and reply is not None else [])
    used += of(own, "turn_started", "tool_call", "tool_result", "completion", "edit_proposed", "interrupted")
    used += [row for row in of(session.rows, *SAID) if row.get("turn_id") is None and context.shared]
    late = sum(len(seen) for seen in session.credited.get(turn_id, {}).values()) - sum(len(inside) for _, _, inside in judged)
    evaluations = [s for row in of(stated, "evaluation") if (s := facts.score(row)) is not None]
    return TurnResult(
        session_id=opening_rows[0]["session_id"], turn_id=turn_id,
        turn_index=context.position if opening is None else opening["payload"]["turn_index"],
        user_key=evidence.user_key, origin=opening_rows[0]["origin"], arm=(completions or opening_rows)[0]["arm"],
        policy_version=capture.policy_version, task_bucket=evidence.task_bucket, started_at_ms=frame.started_at_ms,
        closes_at_ms=frame.closes_at_ms, course=course, capture=capture, evidence=evidence, components=present, pieces=found,
        maturity=states(present, evidence, config, closed_early=frame.closed_early) if allowed else {},
        dissatisfied=dissatisfied(evidence.follow_up) if allowed else None, explicit_mass=mass, followed_up=followed_up,
        replied_after_ms=None if reply is None else reply["occurred_at_ms"] - frame.acted_at_ms, asked=facts.asked(completions),
        deferred=is_deferred(evidence, config), late=late + len(stated) - len(in_time) + int(reply is not None and not followed_up),
        truth=truth_of_turn([(edit, truth) for edit, truth, _ in judged]), truth_evaluation=evaluations[-1] if evaluations else None,
        outcome=decided, outcome_reason=reason,
        reward=rewards.scalar(present, config, scale=scale, explicit_mass=mass) if course.final else None,
        sources=tuple(dict.fromkeys(row["event_id"] for row in sorted(used, key=moment))),
    )  # fmt: skip
