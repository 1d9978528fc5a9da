"""OTLP/JSON requests written in a few words, and what the translator makes of them."""

from collections.abc import Iterable
from typing import Any

from pipelines import events as ev
from pipelines.importers import otlp
from pipelines.importers.otlp_sessions import Source

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
