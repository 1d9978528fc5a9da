"""OTLP as protobuf, which most OpenTelemetry SDKs send unless told otherwise: into the JSON form, and answers back. Pure.

Takes: a body. Gives: the request as its protobuf JSON (ids in base64, int64 as text: `importers/otlp_wire.py` takes both), responses
and `google.rpc.Status` messages in bytes.
Leaves out: meaning. The messages' classes are loaded at the first such request.

Source: OpenTelemetry protocol 1.9, OTLP/HTTP, "Binary Protobuf Encoding" and "Failures".
"""

from typing import Any

from pipelines.collector_bodies import Unreadable


def request(body: bytes, *, traces: bool, max_records: int) -> dict[str, Any]:
    """Parse an `ExportTraceServiceRequest` or `ExportLogsServiceRequest`.

    Raises:
        Unreadable: 400: it is none. 413: it holds more than `max_records` spans or log records; a record may be two bytes here, so they
            are counted before they become something larger.
    """
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError

    try:
        message = _service(traces=traces)[0].FromString(body)
    except DecodeError as error:
        raise Unreadable(400, "malformed_protobuf", "the body is not an OTLP request, though its Content-Type says protobuf") from error
    if _more_than(max_records, message, traces=traces):
        raise Unreadable(413, "too_many_records", f"more than {max_records} records in one request; send fewer at once")
    try:
        return MessageToDict(message)
    except (ValueError, RecursionError) as error:  # a text that is not UTF-8, or values nested too deep
        raise Unreadable(400, "malformed_protobuf", "the body holds values that no telemetry holds") from error


def response(rejected: int, message: str, *, traces: bool) -> bytes:
    """Return an `Export...ServiceResponse`; without rejected records an empty one, as the protocol wants."""
    kind = _service(traces=traces)[1]
    if not rejected:
        return kind().SerializeToString()
    partial = {"rejected_spans" if traces else "rejected_log_records": rejected, "error_message": message}
    return kind(partial_success=partial).SerializeToString()


def status(code: int, message: str) -> bytes:
    """Return a `google.rpc.Status`: field 1 is the code (below 128), field 2 the message."""
    text = message.encode("utf-8", "replace")
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(text)) + text


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _service(*, traces: bool) -> tuple[Any, Any]:
    """Return the request's and the response's class."""
    if traces:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as spans

        return spans.ExportTraceServiceRequest, spans.ExportTraceServiceResponse
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs

    return logs.ExportLogsServiceRequest, logs.ExportLogsServiceResponse


def _more_than(limit: int, message: Any, *, traces: bool) -> bool:
    """Whether a request holds more than `limit` of what becomes an object of its own, and of what holds it; stops counting there."""
    groups = message.resource_spans if traces else message.resource_logs
    left = limit - len(groups)
    if left < 0:
        return True
    for group in groups:
        scopes = group.scope_spans if traces else group.scope_logs
        left -= len(scopes) + sum(len(scope.spans if traces else scope.log_records) for scope in scopes[:limit])
        if left < 0:
            return True
        if traces:
            left -= sum(len(span.events) for scope in scopes for span in scope.spans)
    return left < 0
