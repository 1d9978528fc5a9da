"""VS Code Copilot's edits, decisions and votes as session events."""

from dataclasses import replace
from typing import Any

import pytest

from pipelines import events as ev
from pipelines.importers import otlp
from pipelines.importers.otlp_wire import Signal, signals
from tests.support.otlp import SPAN, START, TRACE, faults, log, logs, made, one, pairs, source, span, traces

WHERE = {"request_id": "q1", "copilot_chat.file.relative_path": "src/io.py", "edit_source": "apply_patch"}
WINDOW = {"service.name": "copilot-chat", "session.id": "w1"}


def survival(delay_ms: int, four_gram: float = 1.0, no_revert: float = 1.0, **fields: Any) -> dict[str, Any]:
    attributes = WHERE | {"survival_rate_four_gram": four_gram, "survival_rate_no_revert": no_revert, "time_delay_ms": delay_ms} | fields
    return log("copilot_chat.edit.survival", attributes, at_ms=START + delay_ms)


def test_copilots_edit_survival_is_one_proposed_edit_and_a_measurement_a_delay() -> None:
    events = made(logs(survival(5_000), survival(30_000, 0.75, 0.5, did_branch_change=True), resource=WINDOW))
    assert [event.type for event in events] == ["session_started", "turn_started", "edit_proposed", "edit_survival", "edit_survival"]
    proposed = events[2]
    assert (proposed.occurred_at_ms, proposed.payload.path_hash, proposed.session_id, proposed.turn_id) == (
        START,
        "path<src/io.py>",
        "w1",
        "q1",
    )
    assert [event.payload for event in events[3:]] == [
        ev.EditSurvivalPayload(edit_id=proposed.payload.edit_id, horizon_s=5, survival_four_gram=1, survival_no_revert=1),
        ev.EditSurvivalPayload(
            edit_id=proposed.payload.edit_id, horizon_s=30, survival_four_gram=0.75, survival_no_revert=0.5, branch_changed=True
        ),
    ]


def test_copilots_decisions_are_about_the_same_edit_and_a_rejected_part_leaves_the_rest() -> None:
    events = made(
        logs(
            survival(5_000),
            log("copilot_chat.edit.hunk.action", WHERE | {"outcome": "rejected", "lines_added": 3}, at_ms=START + 6_000),
            log("copilot_chat.edit.feedback", WHERE | {"outcome": "accepted"}, at_ms=START + 7_000),
            log("copilot_chat.edit.feedback", WHERE | {"outcome": "saved"}, at_ms=START + 8_000),
            resource=WINDOW,
        )
    )
    edit = one(events, "edit_proposed").payload.edit_id
    decided = [event.payload for event in events if event.type == "edit_decided"]
    assert [(item.edit_id, item.decision) for item in decided] == [(edit, "partly"), (edit, "accepted")]


def test_copilots_votes_and_inline_edits() -> None:
    events = made(
        logs(
            log("copilot_chat.user.feedback", {"rating": "negative", "conversation_id": "c9", "request_id": "q2"}),
            log("copilot_chat.inline.done", {"accepted": False, "copilot_chat.file.relative_path": "README.md"}),
            resource=WINDOW,
        )
    )
    vote, decided = one(events, "feedback"), one(events, "edit_decided")
    assert (vote.session_id, vote.turn_id, vote.payload.score) == ("c9", "q2", -1.0)
    assert (decided.session_id, decided.payload.decision) == ("w1", "rejected")
    assert decided.payload.edit_id == one(events, "edit_proposed").payload.edit_id


@pytest.mark.parametrize(
    "fields",
    [
        {"survival_rate_four_gram": 1.5},
        {"survival_rate_no_revert": "x"},
        {"time_delay_ms": -1},
        {"time_delay_ms": 1e300},
        {"request_id": ""},
    ],
)
def test_a_survival_that_cannot_be_is_a_fault(fields: dict[str, Any]) -> None:
    attributes = WHERE | {"survival_rate_four_gram": 1.0, "survival_rate_no_revert": 1.0, "time_delay_ms": 5_000} | fields
    (fault,) = faults(logs(survival(5_000) | {"attributes": pairs(attributes)}))
    assert fault in ("unmappable", "missing_field:survival_rate", "missing_field:request_id")


def whole(*requests: object) -> list[Any]:
    """Return the events of what an SDK wrote into a file, all of which was learned from before the first is mapped."""
    translator = otlp.Translator(source(), whole=True)
    found = [replace(item, printed=True) for request in requests for item in signals(request) if isinstance(item, Signal)]
    for item in found:
        translator.learn(item)
    return [event for item in found for event in translator.taken(item).events]


def tool(name: str, took_ms: int, **fields: Any) -> dict[str, Any]:
    attributes = {"gen_ai.tool.name": name, "duration_ms": took_ms, "success": True} | fields
    return log("copilot_chat.tool.call", attributes, at_ms=START + 500, traceId=TRACE, spanId=SPAN)


def test_tools_of_a_file_whose_spans_were_not_written_are_known_from_their_log_records() -> None:
    start = log("copilot_chat.session.start", {"session.id": "talk"}, traceId=TRACE, spanId=SPAN)
    events = whole(logs(start, tool("read_file", 32), tool("run", 400, success=False, **{"error.type": "TimeoutError"}), resource=WINDOW))
    assert {event.session_id for event in events} == {"talk"}
    assert [(event.payload.name, event.occurred_at_ms) for event in events if event.type == "tool_call"] == [
        ("read_file", START + 468), ("run", START + 100),
    ]  # fmt: skip
    results = [event.payload for event in events if event.type == "tool_result"]
    assert [(result.result_class, result.duration_ms) for result in results] == [("ok", 32.0), ("timeout", 400.0)]


def test_a_tool_that_a_span_tells_is_not_told_again_by_its_log_record() -> None:
    told = span({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "read_file"})
    for events in (whole(logs(tool("read_file", 32)), traces(told)), made(logs(tool("read_file", 32)), traces(told))):
        assert one(events, "tool_result").payload.duration_ms == 1_000.0


def call(request: str, tokens: int, **fields: Any) -> dict[str, Any]:
    attributes = {"gen_ai.response.id": request, "gen_ai.usage.input_tokens": tokens, "gen_ai.usage.output_tokens": 9}
    return log("gen_ai.client.inference.operation.details", {"gen_ai.operation.name": "chat"} | attributes, **fields)


def test_calls_that_name_no_trace_are_placed_by_the_record_of_their_round() -> None:
    used = {"gen_ai.usage.input_tokens": 800, "gen_ai.usage.output_tokens": 9}
    turn = log("copilot_chat.agent.turn", used | {"turn.index": 0}, at_ms=START + 20, traceId=TRACE, spanId=SPAN)
    events = whole(logs(call("q1", 800), call("q2", 50), turn, resource=WINDOW))
    assert [(event.payload.prompt_tokens, event.turn_id) for event in events if event.type == "completion"] == [(800, TRACE), (50, "w1")]


def test_edits_belong_to_the_turn_of_the_calls_that_made_them() -> None:
    made_by = traces(span({"gen_ai.operation.name": "chat", "gen_ai.response.id": "q1", "copilot_chat.session_id": "talk"}))
    vote = log("copilot_chat.user.feedback", {"rating": "positive", "conversation_id": "talk", "request_id": "q1"}, at_ms=START + 9_000)
    events = made(made_by, logs(survival(5_000), vote, resource=WINDOW))
    assert {(event.session_id, event.turn_id) for event in events[1:]} == {("talk", TRACE)}
    assert one(events, "edit_survival").payload.edit_id.startswith("q1/")
    later = made(logs(survival(5_000), resource=WINDOW), made_by, logs(survival(30_000), resource=WINDOW))
    assert {event.turn_id for event in later if event.type == "edit_survival"} == {"q1"}


def test_an_inline_edits_survival_is_of_the_edit_that_was_just_decided_in_that_file() -> None:
    done = log("copilot_chat.inline.done", {"accepted": True, "copilot_chat.file.relative_path": "src/io.py"}, at_ms=START + 4_980)
    seen = {"edit_source": "inline_chat", "time_delay_ms": 0}
    events = made(logs(done, survival(5_000, **seen), survival(9_000, 0.5, 0.5, **seen), resource=WINDOW))
    first, second = [event.payload.edit_id for event in events if event.type == "edit_survival"]
    assert one(events, "edit_decided").payload.edit_id == first
    assert [event.payload.edit_id for event in events if event.type == "edit_proposed"] == [first, second]
    assert first != second
