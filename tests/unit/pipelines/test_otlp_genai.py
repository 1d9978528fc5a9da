"""The GenAI conventions, old and new, as session events."""

import json
from typing import Any

import pytest

from pipelines import events as ev
from pipelines.importers import otlp
from tests.support.otlp import CHAT, SPAN, START, TRACE, faults, log, logs, made, one, pairs, source, span, traces


def test_a_model_call_is_a_completion_without_token_ids_in_its_conversation_and_trace() -> None:
    attributes = CHAT | {
        "gen_ai.response.model": "m-0312", "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.top_k": 40.0,
        "gen_ai.response.finish_reasons": ["max_tokens"], "gen_ai.usage.input_tokens": 812, "gen_ai.usage.output_tokens": 64,
        "gen_ai.usage.cache_read.input_tokens": 512, "gen_ai.response.time_to_first_chunk": 0.25, "enduser.id": "mira",
    }  # fmt: skip
    found = one(made(traces(span(attributes), resource={"service.name": "harbour"})), "completion")
    assert (found.session_id, found.turn_id, found.occurred_at_ms, found.user_key) == ("c1", TRACE, START + 1_000, "user<mira>")
    assert found.payload == ev.CompletionPayload(
        completion_id="r1", step=0, model="m-0312", temperature=0.5, top_p=0.9, top_k=40, finish_reason="length", ttft_ms=250.0,
        duration_ms=1_000.0, prompt_tokens=812, response_tokens=64, cached_tokens=512, capture_error="no_token_ids",
    )  # fmt: skip


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.system": "openai", "gen_ai.request.model": "m", "gen_ai.usage.prompt_tokens": 20, "gen_ai.usage.completion_tokens": 7},
        {"llm.request.type": "chat", "gen_ai.request.model": "m", "gen_ai.usage.prompt_tokens": 20, "gen_ai.usage.completion_tokens": 7},
        {"openinference.span.kind": "LLM", "llm.model_name": "m", "llm.token_count.prompt": 20, "llm.token_count.completion": 7},
        {
            "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 20,
            "gen_ai.usage.output_tokens": 7,
        },
    ],
)  # fmt: skip
def test_older_names_and_other_dialects_give_the_same_completion(attributes: dict[str, Any]) -> None:
    found = one(made(traces(span(attributes))), "completion")
    assert (found.payload.model, found.payload.prompt_tokens, found.payload.response_tokens) == ("m", 20, 7)
    assert (found.session_id, found.payload.completion_id) == (f"trace-{TRACE}", f"{TRACE}:{SPAN}")


PROMPT = "<context>\nIt is Monday.\n</context>\n<userRequest>\nstill red\n</userRequest>"
NOTICE = "<system_notification>\nA command has ended.\n</system_notification>"


@pytest.mark.parametrize(
    ("attributes", "events"),
    [
        ({"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "still red"}]}])}, []),
        ({"gen_ai.prompt": json.dumps([{"role": "user", "content": "still red"}])}, []),
        ({"gen_ai.prompt": "still red"}, []),
        (
            {
                "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "be kind", "gen_ai.prompt.1.role": "user",
                "gen_ai.prompt.1.content": "still red",
            },
            [],
        ),
        ({"llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "still red"}, []),
        ({"copilot_chat.user_request": "still red"}, []),
        ({"copilot_chat.user_request": json.dumps([{"type": "input_text", "text": PROMPT}])}, []),
        ({"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": PROMPT}]}])}, []),
        ({"gen_ai.input.messages": json.dumps([{"role": "user", "content": "still red"}, {"role": "user", "content": NOTICE}])}, []),
        ({"ai.prompt.messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": "still red"}]}])}, []),
        ({}, [{"name": "gen_ai.user.message", "attributes": pairs({"content": "still red"})}]),
        ({}, [{"name": "gen_ai.content.prompt", "attributes": pairs({"gen_ai.prompt": '[{"role":"user","content":"still red"}]'})}]),
    ],
)  # fmt: skip
def test_what_the_user_said_is_found_wherever_it_stands(attributes: dict[str, Any], events: list[object]) -> None:
    opening = one(made(traces(span(CHAT | attributes, events=events))), "turn_started")
    assert (opening.payload.message, opening.payload.message_chars, opening.occurred_at_ms) == ("still red", 9, START)


def test_text_is_redacted_and_kept_only_where_it_may_be() -> None:
    said = json.dumps([{"role": "user", "content": "use AKIAABCDEFGHIJKLMNOP"}])
    request = traces(span(CHAT | {"gen_ai.input.messages": said}))
    judged = {
        "gen_ai.evaluation.name": "n", "gen_ai.evaluation.score.label": "l", "gen_ai.response.id": "r1",
        "gen_ai.evaluation.explanation": "key AKIAABCDEFGHIJKLMNOP",
    }  # fmt: skip
    result = logs(log("gen_ai.evaluation.result", judged))
    for own, text, why in (
        (source(), "use <redacted:aws_key>", "key <redacted:aws_key>"),
        (source(keep_text=False), None, None),
        (source(consent=lambda _claimed: "none"), None, None),
    ):
        events = made(request, result, own=own)
        assert one(events, "turn_started").payload.message == text
        assert one(events, "turn_started").payload.message_chars == 24
        assert one(events, "evaluation").payload.explanation == why


def test_a_log_record_of_a_call_tells_the_text_and_never_counts_the_call_twice() -> None:
    said = json.dumps([{"role": "user", "content": "first"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "again"}])
    details = log("gen_ai.client.inference.operation.details", CHAT | {"gen_ai.input.messages": said}, traceId=TRACE, spanId=SPAN)
    events = made(logs(details), traces(span(CHAT)), traces(span(CHAT)))
    assert one(events, "completion").payload.duration_ms == 1_000.0
    assert (one(events, "turn_started").payload.message, one(events, "turn_started").payload.turn_index) == ("again", 1)
    alone = made(logs(details | {"traceId": "", "spanId": ""}))
    assert one(alone, "completion").payload.duration_ms is None


def test_a_tools_span_is_a_call_and_its_result_in_the_conversation_of_its_trace() -> None:
    tool = {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "edit", "gen_ai.tool.call.id": "k1",
        "gen_ai.tool.call.arguments": '{"a":1}', "gen_ai.tool.call.result": "größe",
    }  # fmt: skip
    request = traces(
        span(tool, spanId="b" * 16, start_ms=START + 1_000, end_ms=START + 1_250), span(CHAT), resource={"session.id": "window"}
    )
    events = made(request)
    assert [event.type for event in events] == ["session_started", "turn_started", "completion", "tool_call", "tool_result"]
    assert {(event.session_id, event.turn_id) for event in events[1:]} == {("c1", TRACE)}
    call, result = events[3], events[4]
    assert call.payload == ev.ToolCallPayload(
        tool_call_id="k1", name="edit", arguments_valid=True, arguments_hash='arguments<{"a":1}>'
    )  # fmt: skip
    assert result.payload == ev.ToolResultPayload(tool_call_id="k1", result_class=ev.ResultClass.OK, duration_ms=250.0, output_bytes=7)
    assert (call.occurred_at_ms, result.occurred_at_ms) == (START + 1_000, START + 1_250)


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("TimeoutError", "", "timeout"),
        ("", "context deadline exceeded", "timeout"),
        ("CancelledError", "", "user_aborted"),
        ("permission_denied", "", "user_aborted"),
        ("ToolNotFoundError", "", "unknown_tool"),
        ("", "no such tool: frobnicate", "unknown_tool"),
        ("InvalidArgumentsError", "", "invalid_arguments"),
        ("ValidationError", "", "invalid_arguments"),
        ("", "missing required parameter path", "invalid_arguments"),
        ("RateLimitError", "", "provider_error"),
        ("503", "", "provider_error"),
        ("FileNotFoundError", "", "unexpected_environment"),
        ("_OTHER", "", "unexpected_environment"),
    ],
)
def test_a_failed_tool_says_whose_fault_it_was(kind: str, message: str, expected: str) -> None:
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "edit"} | ({"error.type": kind} if kind else {})
    events = made(traces(span(attributes, status={"code": 2, "message": message})))
    assert one(events, "tool_result").payload.result_class == expected
    assert one(events, "tool_call").payload.arguments_valid is (expected != "invalid_arguments")


def test_an_evaluation_finds_the_turn_of_its_response_however_late_and_wherever_it_stands() -> None:
    attributes = {"gen_ai.evaluation.name": "relevance", "gen_ai.evaluation.score.value": "0.75", "gen_ai.evaluation.score.label": "good"}
    late = logs(log("gen_ai.evaluation.result", attributes | {"gen_ai.response.id": "r1"}, at_ms=START + 86_400_000))
    found = one(made(traces(span(CHAT)), late), "evaluation")
    assert (found.session_id, found.turn_id, found.payload.response_id) == ("c1", TRACE, "r1")
    assert (found.payload.score_value, found.payload.score_label) == (0.75, "good")
    inside = span(CHAT, events=[{"name": "gen_ai.evaluation.result", "timeUnixNano": str(START * 10**6), "attributes": pairs(attributes)}])
    assert one(made(traces(inside)), "evaluation").payload.response_id == "r1"
    named = logs(log("", attributes | {"event.name": "gen_ai.evaluation.result"}, traceId=TRACE))
    assert one(made(traces(span(CHAT)), named), "evaluation").session_id == "c1"
    alone = one(made(late), "evaluation")
    assert (alone.session_id, alone.turn_id) == ("response-r1", None)


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"gen_ai.evaluation.score.value": 1.0}, "missing_field:gen_ai.evaluation.name"),
        ({"gen_ai.evaluation.name": "n"}, "missing_field:gen_ai.evaluation.score"),
        ({"gen_ai.evaluation.name": "n", "gen_ai.evaluation.score.value": "NaN"}, "missing_field:gen_ai.evaluation.score"),
        ({"gen_ai.evaluation.name": "n", "error.type": "timeout"}, None),
    ],
)
def test_an_evaluation_that_says_nothing_is_no_event(attributes: dict[str, Any], fault: str | None) -> None:
    request = logs(log("gen_ai.evaluation.result", attributes, traceId=TRACE))
    assert faults(request) == [fault]
    assert made(request) == []


def test_spans_of_other_things_are_nothing_of_ours_and_no_fault() -> None:
    request = traces(
        span({"http.request.method": "GET"}), span({"gen_ai.operation.name": "embeddings"}), span({"gen_ai.operation.name": "x" * 500})
    )
    answers = list(otlp.Translator(source()).request(request))
    assert [(answer.ignored, answer.fault, answer.events) for answer in answers] == [(True, None, ())] * 3


def test_a_resend_gives_the_same_ids_and_another_user_others() -> None:
    requests = [json.loads(line) for line in otlp.SAMPLE.read_text().splitlines()]
    first, again = {event.event_id: event for event in made(*requests)}, {event.event_id: event for event in made(*requests)}
    assert first == again
    assert len(first) == len(made(*requests))
    theirs = {event.event_id for event in made(*requests, own=source(user_key=lambda _named: "someone else"))}
    assert not theirs & first.keys()


def rounds(*calls: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Return model calls that carry one response id: (start, end, tokens of the prompt)."""
    return [
        span(CHAT | {"gen_ai.usage.input_tokens": tokens}, spanId=f"{i:016x}", start_ms=START + begin, end_ms=START + end)
        for i, (begin, end, tokens) in enumerate(calls, 1)
    ]


def test_rounds_of_a_turn_that_share_a_response_id_are_calls_of_their_own() -> None:
    events = made(traces(*rounds((0, 900, 5_000), (1_000, 1_900, 5_400), (2_000, 2_900, 6_100))))
    calls = [event.payload for event in events if event.type == "completion"]
    assert [(call.step, call.prompt_tokens) for call in calls] == [(0, 5_000), (1, 5_400), (2, 6_100)]
    assert [call.completion_id for call in calls] == ["r1", f"r1/{START + 1_900}", f"r1/{START + 2_900}"]
    assert len({event.event_id for event in events}) == len(events)
    hidden = made(traces(*rounds((0, 900, 0), (1_000, 1_900, 0))))  # a collector may hide the tokens and write one word for every id
    assert sum(event.type == "completion" for event in hidden) == 2


@pytest.mark.parametrize("inner", [(10, 890, 5_000), (10, 890, 0), (2_000, 2_900, 5_000)])
def test_a_call_that_two_layers_or_two_senders_tell_is_one(inner: tuple[int, int, int]) -> None:
    events = made(traces(*rounds((0, 900, 5_000), inner)))
    assert one(events, "completion").payload.prompt_tokens == 5_000


def test_what_a_program_calls_a_conversation_but_is_its_request_is_none() -> None:
    call = CHAT | {"gen_ai.conversation.id": "q1", "gen_ai.response.id": "q1"}
    assert one(made(traces(span(call))), "completion").session_id == f"trace-{TRACE}"
    assert one(made(traces(span(call | {"copilot_chat.session_id": "talk"}))), "completion").session_id == "talk"


def test_the_vercel_sdks_tool_spans_are_tools_and_its_calls_have_their_cache_and_first_chunk() -> None:
    tool = {"ai.operationId": "ai.toolCall", "ai.toolCall.name": "clock", "ai.toolCall.id": "k2", "ai.toolCall.args": "{}"}
    call = CHAT | {"ai.usage.cachedInputTokens": 40, "ai.response.msToFirstChunk": 310.5, "ai.operationId": "ai.streamText.doStream"}
    events = made(traces(span(call), span(tool | {"ai.toolCall.result": '"noon"'}, spanId="b" * 16)))
    assert (one(events, "completion").payload.cached_tokens, one(events, "completion").payload.ttft_ms) == (40, 310.5)
    assert (one(events, "tool_call").payload.name, one(events, "tool_call").payload.tool_call_id) == ("clock", "k2")
    assert one(events, "tool_result").payload.output_bytes == 6


def test_records_that_name_only_a_session_share_one_turn() -> None:
    details = [
        log("gen_ai.client.inference.operation.details", {"gen_ai.request.model": "m", "gen_ai.response.id": name}, at_ms=START + i)
        for i, name in enumerate(("r1", "r2"))
    ]
    events = made(logs(*details, resource={"session.id": "window"}))
    assert [event.payload.step for event in events if event.type == "completion"] == [0, 1]
    assert one(events, "turn_started").turn_id == "window"


def test_a_span_without_an_end_tells_no_duration() -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "grep"}
    events = made(traces(span(CHAT, endTimeUnixNano=None), span(tool, spanId="b" * 16, endTimeUnixNano=None)))
    assert (one(events, "completion").payload.duration_ms, one(events, "tool_result").payload.duration_ms) == (None, None)
