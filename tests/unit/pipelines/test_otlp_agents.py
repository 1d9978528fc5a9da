"""What coding agents log about themselves as session events."""

from typing import Any

import pytest

from pipelines import events as ev
from tests.support.otlp import START, faults, log, logs, made, one

CLAUDE = {"session.id": "s1", "prompt.id": "p1"}


def claude(name: str, at_ms: int = START, **fields: Any) -> dict[str, Any]:
    return log(name, CLAUDE | fields, at_ms=at_ms, eventName="", body={"stringValue": f"claude_code.{name}"}) | {
        "attributes": log(name, CLAUDE | {"event.name": name} | fields)["attributes"]
    }


def codex(name: str, at_ms: int = START, **fields: Any) -> dict[str, Any]:
    attributes = {"event.name": f"codex.{name}", "conversation.id": "c1"} | fields
    return log("event otel/src/events.rs:95", attributes, at_ms=at_ms, timeUnixNano="0", observedTimeUnixNano=str(at_ms * 10**6))


def gemini(name: str, at_ms: int = START, **fields: Any) -> dict[str, Any]:
    line = {"hrTime": [at_ms // 1_000, at_ms % 1_000 * 10**6], "resource": {"attributes": {"service.name": "gemini-cli"}}}
    return line | {"attributes": {"event.name": f"gemini_cli.{name}", "session.id": "g1", "prompt_id": "g1########0"} | fields}


def test_claude_codes_prompt_calls_and_tools_are_one_turn_with_all_of_the_prompts_tokens() -> None:
    usage = {"input_tokens": "12", "output_tokens": "340", "cache_read_tokens": "9000", "cache_creation_tokens": "500"}
    events = made(
        logs(
            claude("user_prompt", prompt="speed up the parser", prompt_length="19"),
            claude("api_request", START + 4_000, model="m-5", duration_ms="3500", request_id="req_1", **usage),
            claude("tool_decision", START + 4_010, tool_name="Bash", tool_use_id="t1", decision="accept", source="config"),
            claude("tool_result", START + 4_100, tool_name="Bash", tool_use_id="t1", success="true", duration_ms="90"),
        )
    )
    assert {(event.session_id, event.turn_id) for event in events[1:]} == {("s1", "s1/p1")}
    assert one(events, "turn_started").payload.message == "speed up the parser"
    assert one(events, "completion").payload == ev.CompletionPayload(
        completion_id="req_1", model="m-5", duration_ms=3_500.0, prompt_tokens=9_512, response_tokens=340, cached_tokens=9_000,
        capture_error="no_token_ids",
    )  # fmt: skip
    assert (one(events, "tool_call").occurred_at_ms, one(events, "tool_call").payload.tool_call_id) == (START + 4_010, "t1")
    assert one(events, "tool_result").payload == ev.ToolResultPayload(
        tool_call_id="t1", result_class=ev.ResultClass.OK, duration_ms=90.0
    )  # fmt: skip


@pytest.mark.parametrize(
    ("record", "verdict", "decision"),
    [
        (claude("tool_decision", tool_name="Write", tool_use_id="t", decision="reject", source="user_reject"), "user_aborted", "rejected"),
        (claude("tool_result", tool_name="Edit", tool_use_id="t", success="true", tool_input='{"file_path":"a.py"}'), "ok", "accepted"),
        (claude("tool_result", tool_name="Edit", tool_use_id="t", success="false", error="InvalidParams"), "invalid_arguments", None),
        (codex("tool_decision", tool_name="apply_patch", call_id="t", decision="denied", source="User"), "user_aborted", "rejected"),
        (codex("tool_result", tool_name="apply_patch", call_id="t", success="true", output="done"), "ok", "accepted"),
        (codex("tool_result", tool_name="shell", call_id="t", success="false", output="command timed out"), "unexpected_environment", None),
    ],
)
def test_a_tools_answer_and_a_refusal_decide_an_edit(record: dict[str, Any], verdict: str, decision: str | None) -> None:
    events = made(logs(record))
    assert one(events, "tool_result").payload.result_class == verdict
    decided = [(event.payload.edit_id, event.payload.decision) for event in events if event.type == "edit_decided"]
    assert decided == ([] if decision is None else [("t", decision)])
    assert sum(event.type == "edit_proposed" for event in events) == len(decided)


def test_a_refusal_that_a_result_repeats_is_one_call() -> None:
    refused = claude("tool_decision", tool_name="Bash", tool_use_id="t1", decision="reject", source="user_reject")
    again = claude("tool_result", START + 5, tool_name="Bash", tool_use_id="t1", success="false", decision_type="reject")
    events = made(logs(refused, again))
    assert one(events, "tool_result").payload.result_class == "user_aborted"
    assert one(events, "tool_call").occurred_at_ms == START


def test_codexs_records_belong_to_the_latest_prompt_and_only_the_last_event_of_a_stream_has_the_tokens() -> None:
    done = {"event.kind": "response.completed", "input_token_count": "900", "output_token_count": "40", "cached_token_count": "512"}
    events = made(
        logs(
            codex("user_prompt", prompt="[REDACTED]", prompt_length="12"),
            codex("sse_event", START + 10, **{"event.kind": "response.output_text.delta"}),
            codex("sse_event", START + 900, model="m", duration_ms="3", **done),
            codex("user_prompt", START + 60_000, prompt="now the docs"),
            codex("tool_result", START + 61_000, tool_name="shell", call_id="k", success="true", duration_ms="153", output="größe"),
        )
    )
    first, second = [event for event in events if event.type == "turn_started"]
    assert [(turn.payload.turn_index, turn.payload.message) for turn in (first, second)] == [(0, None), (1, "now the docs")]
    call = one(events, "completion")
    assert (call.turn_id, call.payload.duration_ms) == (first.turn_id, None)
    assert (call.payload.prompt_tokens, call.payload.response_tokens, call.payload.cached_tokens) == (900, 40, 512)
    assert (one(events, "tool_result").turn_id, one(events, "tool_result").payload.output_bytes) == (second.turn_id, 7)


def test_gemini_clis_lines_are_turns_calls_with_their_thoughts_and_tools() -> None:
    usage = {"input_token_count": 700, "output_token_count": 30, "cached_content_token_count": 100, "thoughts_token_count": 12}
    lines = (
        gemini("user_prompt", prompt="tidy up", prompt_length=7),
        gemini("api_response", START + 2_000, model="m", duration_ms=1_900, finish_reasons=["MAX_TOKENS"], **usage),
        gemini("tool_call", START + 2_500, function_name="replace", success=False, decision="reject", duration_ms=400),
    )
    events = made(*lines)
    assert {event.turn_id for event in events[1:]} == {"g1/g1########0"}
    call = one(events, "completion").payload
    assert (call.finish_reason, call.prompt_tokens, call.response_tokens, call.cached_tokens) == ("length", 700, 42, 100)
    assert one(events, "tool_result").payload.result_class == "user_aborted"
    assert one(events, "edit_decided").payload.decision == "rejected"


def test_an_agents_record_without_a_session_is_a_fault_and_other_records_are_nothing_of_ours() -> None:
    assert faults(logs(log("codex.user_prompt", {"prompt": "x"}))) == ["missing_field:session.id"]
    assert faults(logs(log("gemini_cli.config", {"session.id": "g1"}))) == [None]
