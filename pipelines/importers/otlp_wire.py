"""OTLP/JSON requests as a flat run of signals: spans, their span events, and log records. Pure.

Takes: a parsed `ExportTraceServiceRequest` or `ExportLogsServiceRequest`, one resource of these without the request around it, or one
object as the OpenTelemetry SDKs print it: JavaScript's (what Copilot's file exporters write) and Python's (`to_json`, the console
exporter). Gives: `Signal`s with plain Python values, and a `Fault` for an entry that is none; nothing raises.

Encodings met in the wild and taken: 64-bit integers as strings or numbers, hex ids in either case and base64 ids (plain protobuf
JSON), enums as numbers or names, bytes as base64, camelCase and snake_case names, `instrumentationLibrarySpans` of before 2022,
attributes as a list of pairs or as an object, times as nanoseconds, as [seconds, nanoseconds], and as ISO 8601, ids after `0x`.
Leaves out: metrics, spans that were written down before they ended, what an attribute means (`otlp_genai.py`, `copilot.py`).

Source: OpenTelemetry protocol 1.9, "JSON Protobuf Encoding"; opentelemetry-proto 1.9.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

ROOTS: Final = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
"""Members of a request that hold signals."""
_DEPTH: Final = 16
"""Nesting of an attribute value that is looked into; deeper is cut, as no convention goes past four."""
_HEX: Final = re.compile(r"[0-9a-fA-F]{16}(?:[0-9a-fA-F]{16})?\Z")
_MAX_NANOS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One thing that telemetry says happened."""

    kind: Literal["span", "log", "span_event"]
    name: str
    """A span's name; an event's name, whichever of the three places it stands in (`eventName`, `event.name`, the body)."""
    start_ms: int | None
    """None where the sender gave no time."""
    at_ms: int | None
    """When it was over; the moment itself for logs and events."""
    trace_id: str = ""
    """Lower-case hex; empty when there is none."""
    span_id: str = ""
    """The span itself, or the one that a log record or an event belongs to."""
    parent_id: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the resource, and for a span event those of its span over them."""
    body: Any = None
    ended: bool = True
    """Whether the sender gave an end; without one there is no duration."""
    failed: bool = False
    message: str = ""
    """A span's status in words, for telling failures apart; never kept."""
    printed: bool = False
    """An SDK wrote it into a file: its program's spans are in that file or nowhere, where senders keep them apart from log records."""
    position: int = 0
    """Place among the events of one span, so that equal events stay two."""

    def get(self, *names: str) -> Any:
        """Return the first of these attributes that is there; None when none is."""
        for name in names:
            if (value := self.attributes.get(name)) is not None:
                return value
        return None

    def text(self, *names: str) -> str | None:
        """Return the first of these attributes that is a text and not empty."""
        for name in names:
            if isinstance(value := self.attributes.get(name), str) and value:
                return value
        return None

    def count(self, *names: str) -> int:
        """Return the first of these attributes as a count; 0 when it is none that an int32 column holds."""
        found = whole_number(self.get(*names))
        return found if found is not None and 0 <= found < 2**31 else 0

    def around(self, *names: str) -> str | None:
        """Return the first of these texts in the attributes or the context."""
        for name in names:
            for place in (self.attributes, self.context):
                if isinstance(value := place.get(name), str) and value:
                    return value
        return None


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry that is no signal."""

    reason: str


def signals(document: object) -> Iterator[Signal | Fault]:
    """Yield what one request (or one line of the JavaScript SDK) holds, in its order; a span's events follow it."""
    if not isinstance(document, dict):
        yield Fault("not_an_object")
    elif any(name in document for name in ROOTS):
        for group in _items(document, "resourceSpans", "resource_spans"):
            yield from _resource_spans(group)
        for group in _items(document, "resourceLogs", "resource_logs"):
            yield from _resource_logs(group)
    elif _field(document, "scopeSpans", "scope_spans", "instrumentationLibrarySpans") is not None:
        yield from _resource_spans(document)
    elif _field(document, "scopeLogs", "scope_logs", "instrumentationLibraryLogs") is not None:
        yield from _resource_logs(document)
    elif is_sdk_object(document):
        yield from _sdk_object(document)
    elif not document:
        yield Fault("not_a_session_event:empty")  # what is left of a span that VS Code's exporter cannot write
    else:
        yield Fault("not_a_session_event:metrics" if _is_metrics(document) else "not_otlp")


def is_sdk_object(value: Mapping[str, Any]) -> bool:
    """Whether this is a span or a log record as an SDK prints it, or one that stands alone."""
    if _is_sdk_log(value) or "observedTimeUnixNano" in value:
        return True
    named = any(isinstance(value.get(name), str) for name in ("traceId", "trace_id")) or isinstance(_context(value), dict)
    return named and any(name in value for name in ("startTime", "start_time", "startTimeUnixNano", "start_time_unix_nano"))


def _is_sdk_log(value: Mapping[str, Any]) -> bool:
    return "hrTime" in value or "observed_timestamp" in value


def _context(value: Mapping[str, Any]) -> object:
    found = _field(value, "spanContext", "context")
    return found if isinstance(found, dict) and ("traceId" in found or "trace_id" in found) else None


def group(member: str, value: object) -> Iterator[Signal | Fault]:
    """Yield what one entry of a request's member holds, for readers that take a large request apart."""
    yield from _resource_spans(value) if member in ROOTS[:2] else _resource_logs(value)


def _is_metrics(document: Mapping[str, Any]) -> bool:
    return document.get("type") == "metric" or any(name in document for name in ("resourceMetrics", "resource_metrics", "scopeMetrics"))


def _resource_spans(value: object) -> Iterator[Signal | Fault]:
    if not isinstance(value, dict):
        yield Fault("not_an_object")
        return
    resource = _resource(value)
    for scope in _items(value, "scopeSpans", "scope_spans", "instrumentationLibrarySpans"):
        for span in _items(scope, "spans") if isinstance(scope, dict) else ():
            yield from _span(span, resource)


def _resource_logs(value: object) -> Iterator[Signal | Fault]:
    if not isinstance(value, dict):
        yield Fault("not_an_object")
        return
    resource = _resource(value)
    for scope in _items(value, "scopeLogs", "scope_logs", "instrumentationLibraryLogs"):
        for record in _items(scope, "logRecords", "log_records", "logs") if isinstance(scope, dict) else ():
            yield _log(record, resource)


def _span(span: object, resource: Mapping[str, Any]) -> Iterator[Signal | Fault]:
    if not isinstance(span, dict):
        yield Fault("not_an_object")
        return
    attributes = _attributes(span.get("attributes"))
    status = _field(span, "status")
    code = status.get("code") if isinstance(status, dict) else None
    start = _time_ms(_field(span, "startTimeUnixNano", "start_time_unix_nano", "startTime"))
    end = _time_ms(_field(span, "endTimeUnixNano", "end_time_unix_nano", "endTime"))
    trace_id, span_id = _id(_field(span, "traceId", "trace_id")), _id(_field(span, "spanId", "span_id"))
    yield Signal(
        kind="span", name=_text(span.get("name")), start_ms=start if start is not None else end, at_ms=end if end is not None else start,
        trace_id=trace_id, span_id=span_id, parent_id=_id(_field(span, "parentSpanId", "parent_span_id")), attributes=attributes,
        context=resource, ended=end is not None, failed=code in (2, "2", "STATUS_CODE_ERROR", "ERROR"),
        message=_text(status.get("message"))[:500] if isinstance(status, dict) else "",
    )  # fmt: skip
    around = {**resource, **attributes}
    for position, event in enumerate(_items(span, "events")):
        if not isinstance(event, dict):
            yield Fault("not_an_object")
            continue
        own = _attributes(event.get("attributes"))
        at = _time_ms(_field(event, "timeUnixNano", "time_unix_nano", "time", "timestamp"))
        at = at if at is not None else end
        yield Signal(
            kind="span_event", name=_text(event.get("name")) or _text(own.get("event.name")), start_ms=at, at_ms=at, trace_id=trace_id,
            span_id=span_id, attributes=own, context=around, position=position,
        )  # fmt: skip


def _log(record: object, resource: Mapping[str, Any]) -> Signal | Fault:
    if not isinstance(record, dict):
        return Fault("not_an_object")
    attributes = _attributes(record.get("attributes"))
    raw = record.get("body")
    body = value_of(raw) if isinstance(raw, dict) else raw
    at = _time_ms(_field(record, "timeUnixNano", "time_unix_nano"))
    if at is None:
        at = _time_ms(_field(record, "observedTimeUnixNano", "observed_time_unix_nano"))
    return Signal(
        kind="log", name=_event_name(_field(record, "eventName", "event_name"), attributes, body), start_ms=at, at_ms=at,
        trace_id=_id(_field(record, "traceId", "trace_id")), span_id=_id(_field(record, "spanId", "span_id")), attributes=attributes,
        context=resource, body=body,
    )  # fmt: skip


def _event_name(given: object, attributes: Mapping[str, Any], body: object) -> str:
    """Return an event's name. The attribute is the program's word, where the field may be a logging library's place in the source; the
    body's is taken where it is the same name with its space before it.
    """
    text, name = _text(body)[:200], _text(attributes.get("event.name")) or _text(given)
    return text if not name or text.endswith(f".{name}") else name


def _sdk_object(line: Mapping[str, Any]) -> Iterator[Signal | Fault]:
    """Take one of an SDK's own objects: attributes are objects; JavaScript's times are pairs, Python's texts."""
    resource, context = _field(line, "resource"), _context(line)
    raw = _field(resource, "attributes", "_rawAttributes", "_attributes") if isinstance(resource, dict) else None
    around, ids = _attributes(raw), context if isinstance(context, dict) else line
    trace_id, span_id = _field(ids, "traceId", "trace_id"), _field(ids, "spanId", "span_id")
    if _is_sdk_log(line) or "observedTimeUnixNano" in line:
        attributes, body = _attributes(line.get("attributes")), _field(line, "_body", "body")
        at = _time_ms(_field(line, "hrTime", "timestamp", "timeUnixNano"))
        at = at if at is not None else _time_ms(_field(line, "hrTimeObserved", "observed_timestamp", "observedTimeUnixNano"))
        name = _event_name(_field(line, "_eventName", "eventName", "event_name", "name"), attributes, body)
        yield Signal(
            kind="log", name=name, start_ms=at, at_ms=at, trace_id=_id(trace_id), span_id=_id(span_id), attributes=attributes,
            context=around, body=body, printed=_is_sdk_log(line),
        )  # fmt: skip
        return
    if "end_time" in line and line["end_time"] is None:  # Python's processors may print a span when it starts
        yield Fault("not_a_session_event:unfinished")
        return
    parent, status = line.get("parentSpanContext"), line.get("status")
    span = {
        **line, "traceId": trace_id, "spanId": span_id,
        "parentSpanId": _field(line, "parentSpanId", "parent_span_id", "parent_id") or (parent or {}).get("spanId")
        if isinstance(parent, dict | None) else None,
        "startTime": _field(line, "startTime", "start_time"), "endTime": _field(line, "endTime", "end_time"),
        "status": {"code": _field(status, "code", "status_code"), "message": _field(status, "message", "description")}
        if isinstance(status, dict) else None,
    }  # fmt: skip
    yield from _span(span, around)


def _resource(value: Mapping[str, Any]) -> dict[str, Any]:
    resource = value.get("resource")
    return _attributes(resource.get("attributes")) if isinstance(resource, dict) else {}


def _attributes(raw: object) -> dict[str, Any]:
    """Return attributes by name: from a list of {key, value}, a list of [key, value], or an object. The last of a name wins."""
    if isinstance(raw, dict):
        return {str(name): value for name, value in raw.items()}
    found: dict[str, Any] = {}
    for entry in raw if isinstance(raw, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            found[entry["key"]] = value_of(entry.get("value"))
        elif isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
            found[entry[0]] = entry[1]
    return found


def value_of(value: object, depth: int = 0) -> Any:
    """Return an `AnyValue` as a Python value; None for what is none, or lies deeper than any convention goes."""
    if not isinstance(value, dict):
        return value if isinstance(value, str | int | float | bool) else None  # some senders leave the wrapper out
    if depth > _DEPTH:
        return None
    for name, inner in value.items():
        match name:
            case "stringValue" | "string_value":
                return inner if isinstance(inner, str) else None
            case "boolValue" | "bool_value":
                return inner if isinstance(inner, bool) else None
            case "intValue" | "int_value":
                return whole_number(inner)
            case "doubleValue" | "double_value":
                return number(inner)
            case "bytesValue" | "bytes_value":
                return _bytes(inner)
            case "arrayValue" | "array_value":
                items = inner.get("values") if isinstance(inner, dict) else None
                return [value_of(item, depth + 1) for item in items] if isinstance(items, list) else []
            case "kvlistValue" | "kvlist_value":
                return {
                    item["key"]: value_of(item.get("value"), depth + 1)
                    for item in _items(inner, "values") if isinstance(item, dict) and isinstance(item.get("key"), str)
                }  # fmt: skip
            case _:
                continue
    return None


def whole_number(value: object) -> int | None:
    """Return an int64 given as number or text; None for anything else, and for what does not fit in 64 bits."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if not re.fullmatch(r"[+-]?\d{1,19}", value):
            return None
        value = int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return value if isinstance(value, int) and abs(value) <= _MAX_NANOS else None


def number(value: object) -> float | None:
    """Return a finite number given as number or text; None for anything else: a score that is not a number says nothing."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < float("inf") else None


def _bytes(value: object) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else None
    except (binascii.Error, ValueError):
        return None


def _id(value: object) -> str:
    """Return a trace or span id in lower-case hex; what is neither hex nor base64 stays as it is, cut."""
    if not isinstance(value, str):
        return ""
    value = value.removeprefix("0x")
    if not value.strip("0"):
        return ""
    if _HEX.match(value):
        return value.lower()
    raw = _bytes(value)
    return raw.hex() if raw is not None and len(raw) in (8, 16) else value[:64]


def _time_ms(value: object) -> int | None:
    """Return epoch milliseconds from nanoseconds, from [seconds, nanoseconds], or from ISO 8601; None for 0 and for anything else."""
    if isinstance(value, list) and len(value) == 2:
        seconds, nanos = whole_number(value[0]), whole_number(value[1])
        if seconds is None or nanos is None:
            return None
        return max(seconds * 1000 + nanos // 1_000_000, 0) or None
    found = whole_number(value)
    if found is not None:
        return max(found // 1_000_000, 0) or None
    if isinstance(value, float) and 0 < value <= _MAX_NANOS:
        return int(value) // 1_000_000
    if isinstance(value, str):
        try:
            return max(int(datetime.fromisoformat(value).timestamp() * 1000), 0) or None
        except (ValueError, OverflowError, OSError):
            return None
    return None


def _field(value: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if value.get(name) is not None:
            return value[name]
    return None


def _items(value: object, *names: str) -> list[Any]:
    found = _field(value, *names) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
