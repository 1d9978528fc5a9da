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
        ({"resourceSpans": [7]}, "not_an_object"),
        (traces("x"), "not_an_object"),
        (logs(None), "not_an_object"),
    ],
)
def test_what_is_no_signal_is_a_fault_with_its_reason(document: object, reason: str) -> None:
    assert list(signals(document)) == [Fault(reason)]
