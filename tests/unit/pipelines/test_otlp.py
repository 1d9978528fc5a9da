"""OTLP/JSON telemetry as session events: encodings, the GenAI conventions old and new, Copilot's edits, and whatever else is sent."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import events as ev
from pipelines.codec import decode, encode
from pipelines.importers import otlp, otlp_genai, otlp_sniffing, registry, sniffing
from pipelines.importers.engine import Importer
from pipelines.importers.otlp_sessions import Recent, Source
from pipelines.importers.otlp_wire import Fault, Signal, number, signals, value_of, whole_number
from pipelines.importers.sessions import Stamp

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = ev.Client(name="test", version="1")
START = 1_764_000_000_000


def keyed(kind: str, raw: str) -> str:
    return f"{kind}<{raw}>"


def source(**fields: Any) -> Source:
    given_fields = {
        "origin": "live", "user_key": lambda named: keyed("user", named or "nobody"), "consent": lambda _claimed: "measure",
        "keep_text": True, "client": CLIENT, "keyed": keyed,
    } | fields  # fmt: skip
    return Source(**given_fields)


def wrapped(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [wrapped(item) for item in value]}}
        case _:
            return {"stringValue": value}


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": wrapped(value)} for name, value in attributes.items()]


def span(attributes: dict[str, Any], *, start_ms: int = START, end_ms: int = START + 1_000, **fields: Any) -> dict[str, Any]:
    return {
        "traceId": TRACE, "spanId": SPAN, "name": "x", "startTimeUnixNano": str(start_ms * 10**6), "endTimeUnixNano": str(end_ms * 10**6),
        "attributes": pairs(attributes),
    } | fields  # fmt: skip


def log(name: str, attributes: dict[str, Any], *, at_ms: int = START, **fields: Any) -> dict[str, Any]:
    return {"timeUnixNano": str(at_ms * 10**6), "eventName": name, "attributes": pairs(attributes)} | fields


def traces(*spans: object, resource: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"attributes": pairs(resource or {})}, "scopeSpans": [{"spans": list(spans)}]}]}


def logs(*records: object, resource: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"resourceLogs": [{"resource": {"attributes": pairs(resource or {})}, "scopeLogs": [{"logRecords": list(records)}]}]}


def made(*requests: object, own: Source | None = None) -> list[Any]:
    """Return the events of requests that come one after the other."""
    translator = otlp.Translator(own or source())
    return [event for request in requests for answer in translator.request(request) for event in answer.events]


def faults(request: object) -> list[str | None]:
    return [answer.fault for answer in otlp.Translator(source()).request(request)]


def one(events: Iterable[Any], kind: str) -> Any:
    (found,) = [event for event in events if event.type == kind]
    return found


CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.conversation.id": "c1", "gen_ai.response.id": "r1"}


# -- the wire ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "span_id"),
    [
        (TRACE, SPAN),
        (TRACE.upper(), SPAN.upper()),
        (base64.b64encode(bytes.fromhex(TRACE)).decode(), base64.b64encode(bytes.fromhex(SPAN)).decode()),
    ],
)
def test_ids_in_either_case_and_in_base64_are_the_same_ids(trace: str, span_id: str) -> None:
    (found,) = signals(traces(span({}, traceId=trace, spanId=span_id)))
    assert isinstance(found, Signal)
    assert (found.trace_id, found.span_id) == (TRACE, SPAN)


def test_an_id_of_zeros_is_none() -> None:
    (found,) = signals(traces(span({}, traceId="0" * 32, parentSpanId="0" * 16)))
    assert isinstance(found, Signal)
    assert (found.trace_id, found.parent_id) == ("", "")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"stringValue": "a"}, "a"),
        ({"intValue": "9007199254740993"}, 9_007_199_254_740_993),
        ({"intValue": 5}, 5),
        ({"intValue": "5.0"}, None),
        ({"intValue": str(2**63)}, None),
        ({"doubleValue": "1.5"}, 1.5),
        ({"doubleValue": "NaN"}, None),
        ({"doubleValue": "-Infinity"}, None),
        ({"boolValue": False}, False),
        ({"boolValue": "false"}, None),
        ({"bytesValue": "AAE="}, b"\x00\x01"),
        ({"bytesValue": "?"}, None),
        ({"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "b"}, {}]}}, [1, "b", None]),
        ({"arrayValue": {}}, []),
        ({"kvlistValue": {"values": [{"key": "k", "value": {"boolValue": True}}, {"value": {}}]}}, {"k": True}),
        ({"int_value": 7}, 7),
        ({}, None),
        (None, None),
        ("bare", "bare"),
    ],
)
def test_attribute_values_of_protobuf_json(value: object, expected: object) -> None:
    assert value_of(value) == expected


def test_values_nested_without_end_are_cut_not_followed() -> None:
    value: dict[str, Any] = {"intValue": 1}
    for _ in range(100):
        value = {"arrayValue": {"values": [value]}}
    found, depth = value_of(value), 0
    while isinstance(found, list) and found:
        found, depth = found[0], depth + 1
    assert (found, depth) == (None, 17)


def test_numbers_that_are_none_are_none() -> None:
    assert [whole_number(v) for v in (True, 1.5, 1e300, "1e3", " 1", "-7", 3.0, 10**400, None)] == [None] * 5 + [-7, 3, None, None]
    assert [number(v) for v in (True, "1e999", 10**400, "x", float("nan"), "0.5", 2)] == [None] * 5 + [0.5, 2.0]


def test_older_and_looser_forms_of_a_request_are_read() -> None:
    snake = {
        "resource_spans": [{"scope_spans": [{"spans": [{"trace_id": TRACE, "span_id": SPAN, "start_time_unix_nano": START * 10**6}]}]}]
    }
    old = {"resourceSpans": [{"instrumentationLibrarySpans": [{"spans": [{"traceId": TRACE, "startTimeUnixNano": START * 10**6}]}]}]}
    iso = traces({"traceId": TRACE, "startTimeUnixNano": "2025-11-24T16:00:00Z", "attributes": {"a": 1}})
    for request in (snake, old, iso):
        (found,) = signals(request)
        assert isinstance(found, Signal)
        assert (found.trace_id, found.start_ms, found.at_ms) == (TRACE, START, START)


def test_the_javascript_sdks_own_lines_are_read() -> None:
    line = {
        "resource": {"attributes": {"service.name": "copilot-chat"}}, "instrumentationScope": {"name": "s"},
        "traceId": TRACE, "spanId": SPAN,
        "name": "chat", "startTime": [1_764_000_000, 5_000_000], "endTime": [1_764_000_001, 0], "attributes": CHAT, "status": {"code": 2},
    }  # fmt: skip
    (found,) = signals(line)
    assert isinstance(found, Signal)
    assert (found.start_ms, found.at_ms, found.failed, found.around("service.name")) == (START + 5, START + 1_000, True, "copilot-chat")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "not_an_object"),
        ({"resourceMetrics": []}, "not_a_session_event:metrics"),
        ({"a": 1}, "not_otlp"),
        ({"resourceSpans": [7]}, "not_an_object"),
        (traces("x"), "not_an_object"),
        (logs(None), "not_an_object"),
    ],
)
def test_what_is_no_signal_is_a_fault_with_its_reason(document: object, reason: str) -> None:
    assert list(signals(document)) == [Fault(reason)]


# -- the conventions -----------------------------------------------------------------------------------------------------------------


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


# -- Copilot -------------------------------------------------------------------------------------------------------------------------

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


# -- anything ------------------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from([
    "gen_ai.operation.name", "gen_ai.conversation.id", "gen_ai.request.model", "gen_ai.response.id", "gen_ai.usage.input_tokens",
    "gen_ai.response.finish_reasons", "gen_ai.input.messages", "gen_ai.prompt", "gen_ai.prompt.0.role", "gen_ai.tool.name", "error.type",
    "gen_ai.tool.call.id", "gen_ai.tool.call.arguments", "gen_ai.evaluation.name", "gen_ai.evaluation.score.value", "session.id", "user.id",
    "request_id", "survival_rate_four_gram", "survival_rate_no_revert", "time_delay_ms", "outcome", "accepted", "rating", "event.name",
    "gen_ai.request.temperature", "gen_ai.request.top_k", "lines_added", "copilot_chat.time_to_first_token", "openinference.span.kind",
])  # fmt: skip
WORDS = st.sampled_from(
    ["chat", "execute_tool", "invoke_agent", "LLM", "accepted", "rejected", "positive", "[]", '[{"role":"user"}]', "0.5", "5000"]
)
VALUES = st.one_of(WORDS.map(wrapped), st.integers().map(lambda n: {"intValue": n}), st.floats().map(lambda x: {"doubleValue": x}), JSON)
ATTRIBUTES = st.lists(st.fixed_dictionaries({"key": NAMES, "value": VALUES}), max_size=8)
IDS = st.sampled_from([TRACE, "", SPAN, "x"]) | JSON
TIMES = st.integers(0, 2**63).map(str) | st.sampled_from([0, str(START * 10**6), [1, 2], None]) | JSON
EVENT_NAMES = st.sampled_from([
    "gen_ai.evaluation.result", "gen_ai.user.message", "gen_ai.client.inference.operation.details", "copilot_chat.edit.survival",
    "copilot_chat.edit.feedback", "copilot_chat.edit.hunk.action", "copilot_chat.inline.done", "copilot_chat.user.feedback",
    "copilot_chat.session.start", "", "x",
])  # fmt: skip
ODD_LOG = st.fixed_dictionaries(
    {"eventName": EVENT_NAMES, "timeUnixNano": TIMES, "traceId": IDS, "spanId": IDS, "attributes": ATTRIBUTES, "body": JSON}
)
ODD_SPAN = st.fixed_dictionaries(
    {"traceId": IDS, "spanId": IDS, "startTimeUnixNano": TIMES, "endTimeUnixNano": TIMES, "attributes": ATTRIBUTES, "status": JSON,
     "events": st.lists(st.fixed_dictionaries({"name": EVENT_NAMES, "attributes": ATTRIBUTES}), max_size=2)}
)  # fmt: skip


@given(
    JSON
    | st.lists(ODD_SPAN | JSON, max_size=4).map(lambda spans: traces(*spans))
    | st.lists(ODD_LOG | JSON, max_size=4).map(lambda all_: logs(*all_))
)
def test_whatever_is_sent_each_signal_gets_one_answer_and_every_event_is_valid(document: object) -> None:
    found = list(signals(document))
    answers = list(otlp.Translator(source()).request(document))
    assert len(answers) == len(found)
    for answer in answers:
        assert bool(answer.events) + (answer.fault is not None) + answer.ignored == 1
        for event in answer.events:
            line = encode(event)
            assert decode(line, 10**7) == event


@given(st.permutations(range(5)), st.integers(0, 5))
def test_facts_do_not_depend_on_the_order_within_a_request_nor_on_repeats(order: list[int], repeat: int) -> None:
    request = json.loads(otlp.SAMPLE.read_text().splitlines()[0])
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    shuffled = [spans[i] for i in order] + spans[:repeat]
    usual, other = made(traces(*spans[:5])), made(traces(*shuffled))
    ours = {event.event_id: event for event in usual}
    theirs = {event.event_id: event for event in other}
    assert theirs.keys() == ours.keys()
    assert {event.type for event in other} == {event.type for event in usual}


def test_memory_is_bounded_and_forgets_the_oldest_first() -> None:
    recent: Recent[int] = Recent(limit=3)
    for i in range(3):
        recent.put(str(i), i)
    assert recent.get("0") == 0
    recent.put("3", 3)
    assert [recent.get(key) for key in "0123"] == [0, None, 2, 3]
    assert (recent.first("3", 9), recent.first("4", 4)) == (False, True)


# -- files ---------------------------------------------------------------------------------------------------------------------------


def imported(path: Path) -> tuple[list[Any], dict[str, Any]]:
    stamp = Stamp(user_key="u", consent="measure", keep_text=True, client=CLIENT, keyed=keyed, format="otlp")
    importer = Importer(otlp.read, otlp.Mapper(stamp))
    events = list(importer.events([path]))
    return events, importer.counts.as_dict()


def test_the_sample_gives_hand_counted_events_and_accounts_for_every_record() -> None:
    events, counts = imported(otlp.SAMPLE)
    assert counts["events"] == {
        "completion": 4, "edit_decided": 3, "edit_proposed": 3, "edit_survival": 3, "evaluation": 2, "feedback": 1, "session_started": 4,
        "tool_call": 2, "tool_result": 2, "turn_started": 6,
    }  # fmt: skip
    assert (counts["lines"], counts["accepted"], sum(counts["rejected"].values())) == (26, 16, 10)
    assert (counts["tool_calls"], counts["tool_errors"], counts["user_messages"], counts["edits"]) == (2, 1, 1, 1)
    assert {event.origin for event in events} == {"imported"}
    assert all(event.recorded_at_ms == event.occurred_at_ms for event in events)


def test_a_request_over_many_lines_and_a_list_of_requests_are_read_like_one_a_line(tmp_path: Path) -> None:
    usual, counts = imported(otlp.SAMPLE)
    requests = [json.loads(line) for line in otlp.SAMPLE.read_text().splitlines()]
    for name, text in {
        "pretty.json": json.dumps(requests[0], indent=2),
        "compact.json": json.dumps(requests[0], separators=(",", ":")),
        "documents.json": "\n".join(json.dumps(request, indent=1) for request in requests[:2]),
    }.items():
        (tmp_path / name).write_text(text)
        events, _ = imported(tmp_path / name)
        assert {event.event_id for event in events} <= {event.event_id for event in usual}
        assert sum(event.type == "completion" for event in events) == 2
        assert registry.recognise(sniffing.look(tmp_path / name)) == "otlp"
    assert counts["lines"] == 26


def test_a_file_read_twice_gives_duplicates_only(tmp_path: Path) -> None:
    lines = otlp.SAMPLE.read_bytes()
    (tmp_path / "twice.jsonl").write_bytes(lines + lines + lines[:400])
    _, counts = imported(tmp_path / "twice.jsonl")
    assert counts["events"] == imported(otlp.SAMPLE)[1]["events"]
    assert counts["rejected"]["truncated_last_line"] == 1
    assert counts["lines"] == counts["accepted"] + counts["duplicates"] + sum(counts["rejected"].values())


@pytest.mark.parametrize("text", ['{"resourceMetrics": []}', '{"traceId": "x"}', "[1, 2]", "", '{"type": "summary", "leafUuid": "x"}'])
def test_other_files_are_not_taken_for_telemetry(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.jsonl").write_text(text)
    assert not otlp_sniffing.otlp(sniffing.look(tmp_path / "file.jsonl"))


def test_operations_are_told_apart_in_every_dialect() -> None:
    told = {
        "chat": {"gen_ai.operation.name": "chat"}, "execute_tool": {"openinference.span.kind": "TOOL"},
        "invoke_agent": {"traceloop.span.kind": "agent"}, "invoke_workflow": {"traceloop.span.kind": "workflow"},
    }  # fmt: skip
    for expected, attributes in told.items():
        (signal,) = signals(traces(span(attributes)))
        assert isinstance(signal, Signal)
        assert otlp_genai.operation(signal) == expected
