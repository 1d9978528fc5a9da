"""OTLP/JSON on the wire: encodings of ids, values and times, and what is no signal."""

import base64
from typing import Any

import pytest

from pipelines.importers.otlp_wire import Fault, Signal, number, signals, value_of, whole_number
from tests.support.otlp import CHAT, SPAN, START, TRACE, logs, span, traces


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
        ({}, "not_a_session_event:empty"),
        ({"type": "metric", "name": "m"}, "not_a_session_event:metrics"),
        ({"resourceSpans": [7]}, "not_an_object"),
        (traces("x"), "not_an_object"),
        (logs(None), "not_an_object"),
    ],
)
def test_what_is_no_signal_is_a_fault_with_its_reason(document: object, reason: str) -> None:
    assert list(signals(document)) == [Fault(reason)]


PYTHON_SPAN = {
    "name": "chat m", "context": {"trace_id": f"0x{TRACE}", "span_id": f"0x{SPAN}", "trace_state": "[]"}, "kind": "SpanKind.CLIENT",
    "parent_id": "0x00f067aa0ba90200", "start_time": "2025-11-24T16:00:00.250000Z", "end_time": "2025-11-24T16:00:02.000000Z",
    "status": {"status_code": "ERROR", "description": "429 slow down"}, "attributes": CHAT,
    "events": [{"name": "exception", "timestamp": "2025-11-24T16:00:01.000000Z", "attributes": {"exception.type": "RateLimitError"}}],
    "links": [], "resource": {"attributes": {"service.name": "planner"}, "schema_url": ""},
}  # fmt: skip


def test_the_python_sdks_spans_are_read_and_those_printed_before_their_end_are_not() -> None:
    found, event = signals(PYTHON_SPAN)
    assert isinstance(found, Signal)
    assert isinstance(event, Signal)
    assert (found.trace_id, found.span_id, found.parent_id) == (TRACE, SPAN, "00f067aa0ba90200")
    assert (found.start_ms, found.at_ms, found.failed, found.message) == (START + 250, START + 2_000, True, "429 slow down")
    assert (found.around("service.name"), event.at_ms, event.around("service.name")) == ("planner", START + 1_000, "planner")
    assert list(signals(PYTHON_SPAN | {"end_time": None})) == [Fault("not_a_session_event:unfinished")]


def test_the_python_sdks_log_records_are_read() -> None:
    line = {
        "body": "judged", "severity_number": 9, "attributes": {"event.name": "gen_ai.evaluation.result"}, "trace_id": f"0x{TRACE}",
        "timestamp": "2025-11-24T16:00:00Z", "observed_timestamp": "2025-11-24T16:00:09Z", "span_id": f"0x{SPAN}", "trace_flags": 1,
    }  # fmt: skip
    (found,) = signals(line)
    assert isinstance(found, Signal)
    assert (found.kind, found.name, found.at_ms, found.trace_id, found.body) == ("log", "gen_ai.evaluation.result", START, TRACE, "judged")


@pytest.mark.parametrize(
    "line",
    [
        {"type": "span", "traceId": TRACE, "spanId": SPAN, "parentSpanContext": {"traceId": TRACE, "spanId": "00f067aa0ba90200"}},
        {"spanContext": {"traceId": TRACE, "spanId": SPAN}, "parentSpanId": "00f067aa0ba90200"},
    ],
)
def test_the_javascript_sdks_spans_are_read_wherever_their_ids_stand(line: dict[str, Any]) -> None:
    (found,) = signals(line | {"name": "chat", "startTime": [1_764_000_000, 0], "endTime": [1_764_000_001, 0], "attributes": CHAT})
    assert isinstance(found, Signal)
    assert (found.trace_id, found.span_id, found.parent_id, found.at_ms) == (TRACE, SPAN, "00f067aa0ba90200", START + 1_000)


def test_one_resource_without_the_request_around_it_is_read() -> None:
    for request, member in ((traces(span({}), resource={"service.name": "s"}), "resourceSpans"), (logs({"body": "b"}), "resourceLogs")):
        assert list(signals(request[member][0])) == list(signals(request))


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"eventName": "event src/telemetry.rs:95", "attributes": {"event.name": "codex.tool_result"}}, "codex.tool_result"),
        ({"body": {"stringValue": "claude_code.api_request"}, "attributes": {"event.name": "api_request"}}, "claude_code.api_request"),
        ({"body": {"stringValue": "it works"}, "eventName": "a.b"}, "a.b"),
        ({"body": {"stringValue": "a.b"}}, "a.b"),
    ],
)
def test_an_events_name_is_the_programs_with_its_space_before_it(record: dict[str, Any], name: str) -> None:
    (found,) = signals(logs(record))
    assert isinstance(found, Signal)
    assert found.name == name


def test_a_span_without_an_end_has_no_duration() -> None:
    (found,) = signals(traces(span({}, endTimeUnixNano=None)))
    assert isinstance(found, Signal)
    assert (found.at_ms, found.ended) == (START, False)
