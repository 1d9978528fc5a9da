"""Fixtures and builders: one Spark session for the whole test run, and made-up sessions as real events."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipelines import codec
from pipelines.events import EVENT, Event, pack_ids, pack_logprobs
from pipelines.storage import Home

T0 = 1_780_000_000_000
"""Start of all made-up sessions, epoch milliseconds; in the past."""
MESSAGES = (
    "Rename total to amount in cart.py",
    "Thanks! Now add a test for it",
    "That is not what I wanted, undo that",
    "still doesn't work",
    "Füge einen Test hinzu",
    "Das geht nicht, immer noch ein Fehler",
    "次にテストを追加して",
    "не работает",
    None,
    "Rename total to amount in cart.py please",
)


def event(kind: str, number: int, at_ms: int, payload: dict[str, Any], **envelope: Any) -> Event:
    """Make one event; `number` becomes its id."""
    base = {
        "event_id": f"e{number}",
        "session_id": "s1",
        "turn_id": "t1",
        "occurred_at_ms": T0 + at_ms,
        "recorded_at_ms": T0 + at_ms + 5,
        "origin": "simulated",
        "policy_version": 1,
        "arm": "serving",
        "user_key": "u1",
        "consent": "train",
        "client": {"name": "test"},
    }
    return EVENT.validate_python(base | {"type": kind, "payload": payload} | envelope)


def completion_payload(identity: str, **changes: Any) -> dict[str, Any]:
    """Return the payload of a completion that was captured whole."""
    return {
        "completion_id": identity,
        "prompt_ids": pack_ids([1, 2, 3]),
        "response_ids": pack_ids([4, 5]),
        "behaviour_logprobs": pack_logprobs([-0.5, -0.25]),
        "temperature": 1.0,
        "top_p": 1.0,
        "tokenizer_sha": "tok",
        "template_sha": "tpl",
        "finish_reason": "stop",
        "duration_ms": 800.25,
        "prompt_tokens": 3,
        "response_tokens": 2,
    } | changes


def made_up_session(rng: random.Random, name: str) -> list[Event]:
    """Make a session with everything that can happen in one, by chance."""
    ids = iter(range(10_000))
    at = rng.randrange(0, 3_600_000)
    events: list[Event] = []
    envelope = {
        "session_id": name,
        "user_key": f"u{rng.randrange(5)}",
        "consent": rng.choice(["train", "train", "train", "measure", "none"]),
        "policy_version": rng.choice([1, 2, 3, None]),
        "arm": rng.choice(["serving", "candidate"]),
    }

    def add(kind: str, payload: dict[str, Any], *, turn: int | None, step_ms: int = 400) -> None:
        nonlocal at
        at += rng.randrange(1, step_ms)
        own = envelope | {"turn_id": None if turn is None else f"{name}-t{turn}"}
        events.append(event(kind, 0, at, payload, **(own | {"event_id": f"{name}-{next(ids)}"})))

    start = {
        "surface": "simulator",
        "task_bucket": rng.choice(["edit", "explain", None]),
        "edits_observed": rng.choice([True, False, None]),
    }
    add("session_started", start, turn=None)
    for turn in range(rng.randrange(1, 5)):
        add_opening(rng, add, turn)
        for step in range(rng.choice([0, 1, 1, 2])):
            add_completion(rng, add, turn, identity=f"{name}-c{turn}-{step}", step=step)
        for edit in range(rng.randrange(0, 3)):
            add_edit(rng, add, turn, identity=f"{name}-d{turn}-{edit}")
        if rng.random() < 0.1:
            add("interrupted", {"by": rng.choice(["user", "system", "policy"])}, turn=turn)
        if rng.random() < 0.1:
            add("feedback", {"source": "thumb", "score": 1.0}, turn=turn)
        add_checks(rng, add, turn)
    if rng.random() < 0.2:
        add("feedback", {"source": "survey", "score": rng.choice([-1.0, 0.5])}, turn=None)
    if rng.random() < 0.1:
        add("evaluation", {"name": "session", "score_value": rng.random()}, turn=None)
    if rng.random() < 0.6:
        add("session_ended", {"reason": "done"}, turn=None)
    return events


def add_opening(rng: random.Random, add: Callable[..., None], turn: int) -> None:
    """Add the user message that opens a turn, unless it was lost, soon or late."""
    message = rng.choice(MESSAGES)
    if rng.random() < 0.95:
        opening = {
            "turn_index": turn,
            "message": message,
            "message_chars": len(message or "x"),
            "language": rng.choice(["en", "de", None]),
            "stack_traces": rng.choice([0, 0, 1]),
            "reply_delay_ms": rng.choice([None, 2_000, 90_000]),
            "edit_expected": rng.choice([None, 0.1, 0.5, 0.9]),
        }
        add("turn_started", opening, turn=turn, step_ms=rng.choice([5_000, 3_000_000]))


def add_completion(rng: random.Random, add: Callable[..., None], turn: int, *, identity: str, step: int) -> None:
    """Add a completion, whole or with something amiss, and its tool calls with their results."""
    changes = rng.choice(
        [
            {},
            {},
            {},
            {"duration_ms": None},
            {"prompt_ids": None},
            {"top_p": 0.9},
            {"capture_error": "cut"},
            {"finish_reason": "error"},
            {"ends_in_question": True, "claims": 0, "claims_unread": 0},
            {"ends_in_question": False, "claims": 3, "claims_unread": rng.randrange(4), "response_tokens": 4_000},
        ]
    )
    add("completion", completion_payload(identity, step=step) | changes, turn=turn)
    for number in range(rng.randrange(0, 3)):
        call = {
            "tool_call_id": f"{identity}-k{number}",
            "completion_id": identity,
            "name": "edit_file",
            "arguments_valid": rng.random() < 0.8,
            "arguments_hash": rng.choice([None, "h1", "h2"]),
            "changes_before": rng.choice([None, 0, 0, 1]),
            "kind": rng.choice([None, "read", "edit"]),
            "independent": rng.choice([None, False, True]),
        }
        add("tool_call", call, turn=turn)
        classes = ["ok", "ok", "ok", "invalid_arguments", "timeout", "provider_error"]
        result = {"tool_call_id": call["tool_call_id"], "result_class": rng.choice(classes) if rng.random() < 0.4 else "ok"}
        add("tool_result", result, turn=turn)


def add_edit(rng: random.Random, add: Callable[..., None], turn: int, *, identity: str) -> None:
    """Add an edit, unless its proposal was lost, and what was decided and measured of it, soon or late."""
    if rng.random() < 0.95:
        add("edit_proposed", {"edit_id": identity, "path_hash": "p", "chars_added": rng.randrange(0, 500)}, turn=turn)
    for _ in range(rng.randrange(0, 3)):
        decided = {"edit_id": identity, "decision": rng.choice(["accepted", "rejected", "partly", "undone"])}
        add("edit_decided", decided, turn=turn, step_ms=rng.choice([900, 2_500_000]))
    for horizon in rng.sample([0, 5, 300, 900, 86_400, 604_800], rng.randrange(0, 4)):
        measured = {
            "edit_id": identity,
            "horizon_s": horizon,
            "survival_four_gram": 0.5,
            "survival_no_revert": rng.random(),
            "branch_changed": rng.random() < 0.2,
            "milestone": rng.choice([None, None, "commit"]),
        }
        add("edit_survival", measured, turn=turn)


def add_checks(rng: random.Random, add: Callable[..., None], turn: int) -> None:
    """Add what lint, tests and evaluators said of a turn, by chance, soon or late."""
    step_ms = rng.choice([400, 2_500_000])
    for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
        rules = rng.choice([{}, {"rules_checked": 0}, {"rules_checked": 4, "rules_broken": rng.randrange(5)}])
        add("lint_delta", {"issues_before": 3, "issues_after": rng.randrange(8)} | rules, turn=turn, step_ms=step_ms)
    for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
        before = rng.choice([{}, {"passed_before": 4, "failed_before": 1}])
        add("test_run", {"passed_after": rng.randrange(5), "failed_after": rng.randrange(3)} | before, turn=turn, step_ms=step_ms)
    if rng.random() < 0.2:
        label = rng.choice([{"score_value": rng.choice([-2.0, 0.25, 1.0])}, {"score_label": rng.choice(["Pass", " failed ", "meh"])}])
        add("evaluation", {"name": "judge"} | label, turn=turn, step_ms=step_ms)


def as_row(item: Event) -> dict[str, Any]:
    """Return an event as the row that the pure rules take."""
    return item.model_dump(mode="json")


def as_record(item: Event) -> tuple[bytes, bytes]:
    """Return an event as a Kafka key and value."""
    return item.session_id.encode(), codec.encode(item)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one Spark session of the test run, as the jobs configure it."""
    from signals.config import SparkConfig
    from signals.spark import session

    with session(SparkConfig(master="local[2]", driver_memory="1g"), Home(tmp_path_factory.mktemp("spark"))) as running:
        yield running
