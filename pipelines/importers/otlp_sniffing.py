"""Whether a file is telemetry: OTLP/JSON, objects of the OpenTelemetry JavaScript SDK, Langfuse's or LangSmith's. Pure, and light:
the registry loads it.

Takes: a file's beginning. Gives: yes or no. Leaves out: reading (`otlp.py`, `langfuse.py`, `langsmith.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pipelines.importers.sniffing import Head

_REQUEST: Final = re.compile(r'\{"(?:resource_?[Ss]pans|resource_?[Ll]ogs)":\[')
_LANGFUSE: Final = re.compile(r'(?:\{"data":)?\[\{"id":"[^"]{1,80}","traceId":"|\{"trace":\{"id":"[^"]{1,80}",.{0,3000}"timestamp":"')
_LANGSMITH: Final = re.compile(r'(?:\{"runs":)?\[?\{"id":"[^"]{1,80}","name":"[^"]{0,200}",.{0,3000}"run_type":"')
"""Beginnings of documents that are longer than the head."""


def otlp(head: Head) -> bool:
    """OTLP: an object with `resourceSpans` or `resourceLogs`, or an SDK's span or log record with its times as pairs."""
    whole = head.whole
    if isinstance(whole, dict) and _is_request(whole):
        return True
    return any(_is_request(line) or _is_sdk_line(line) for line in head.lines) or bool(_REQUEST.match(head.opening))


def langfuse(head: Head) -> bool:
    """Langfuse: an observation or a score with its `traceId`, or a trace that holds observations."""
    return any(map(_is_langfuse, _entries(head, "data"))) or bool(_LANGFUSE.match(head.opening))


def langsmith(head: Head) -> bool:
    """LangSmith: a run with its type, its order and its inputs."""
    return any(map(_is_run, _entries(head, "runs"))) or bool(_LANGSMITH.match(head.opening))


def _entries(head: Head, member: str) -> list[Mapping[str, Any]]:
    """Return the objects at the beginning of JSON lines, of a list, or of the member of an object."""
    whole = head.whole
    listed = whole.get(member) if isinstance(whole, dict) else whole
    found = [*head.lines, *(listed[:8] if isinstance(listed, list) else ()), whole]
    return [entry for entry in found if isinstance(entry, dict)]


def _is_langfuse(entry: Mapping[str, Any]) -> bool:
    kinds = ("GENERATION", "SPAN", "EVENT", "TOOL", "AGENT", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")
    observed = "traceId" in entry and "startTime" in entry and entry.get("type") in kinds
    scored = "traceId" in entry and "name" in entry and "dataType" in entry and ("value" in entry or "stringValue" in entry)
    if isinstance(entry.get("trace"), dict) and isinstance(entry.get("observations"), list):  # a trace that was downloaded
        return _is_langfuse({**entry["trace"], "observations": entry["observations"]})
    return observed or scored or (isinstance(entry.get("observations"), list) and "timestamp" in entry and "id" in entry)


def _is_run(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("run_type"), str) and "start_time" in entry and ("inputs" in entry or "trace_id" in entry)


def _is_request(value: Mapping[str, Any]) -> bool:
    return any(isinstance(value.get(name), list) for name in ("resourceSpans", "resourceLogs", "resource_spans", "resource_logs"))


def _is_sdk_line(value: Mapping[str, Any]) -> bool:
    scoped = isinstance(value.get("instrumentationScope"), dict) or isinstance(value.get("resource"), dict)
    times = value.get("hrTime") or (value.get("startTime") if "traceId" in value else None)
    return scoped and isinstance(times, list) and len(times) == 2
