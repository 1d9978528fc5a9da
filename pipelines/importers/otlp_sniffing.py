"""Whether a file is telemetry: OTLP/JSON, objects as the OpenTelemetry SDKs print them, Langfuse's or LangSmith's. Pure, and light:
the registry loads it.

Takes: a file's beginning. Gives: yes or no. Leaves out: reading (`otlp.py`, `langfuse.py`, `langsmith.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pipelines.importers.otlp_wire import ROOTS, is_sdk_object
from pipelines.importers.sniffing import Head

_REQUEST: Final = re.compile(
    r'\[?\{"(?:(?:resource_?[Ss]pans|resource_?[Ll]ogs)":\[|resource":\{.{0,3000}"scope_?(?:[Ss]pans|[Ll]ogs)":\['
    r'|name":"[^"]{0,300}","(?:context|spanContext)":\{"trace_?[iI]d":"|hrTime":\[\d{1,12},\d{1,9}\])'
)
_LANGFUSE: Final = re.compile(r'(?:\{"data":)?\[\{"id":"[^"]{1,80}","traceId":"|\{"trace":\{"id":"[^"]{1,80}",.{0,3000}"timestamp":"')
_LANGSMITH: Final = re.compile(
    r'(?:\{"(?:runs|post)":\[\{"|\{"(?:rule|trace)_id":"[^"]{1,80}",.{0,300}"runs":\[\{"|\[?\{"(?:id|run_id|name|trace_id|inputs)":)'
    r'.{0,3500}"run_type":"(?i:llm|chain|tool|retriever|embedding|prompt|parser)"'
)
"""Beginnings of documents that are longer than the head."""


def otlp(head: Head) -> bool:
    """OTLP: an object with `resourceSpans` or `resourceLogs`, one resource of these, or an SDK's span or log record."""
    whole = head.whole
    listed = whole[:8] if isinstance(whole, list) else ()
    found = [entry for entry in (*head.lines, *listed, whole) if isinstance(entry, dict)]
    return any(_is_request(entry) or _is_sdk_object(entry) for entry in found) or bool(_REQUEST.match(head.opening))


def langfuse(head: Head) -> bool:
    """Langfuse: an observation or a score with its `traceId`, or a trace that holds observations."""
    return any(map(_is_langfuse, _entries(head, "data"))) or bool(_LANGFUSE.match(head.opening))


def langsmith(head: Head) -> bool:
    """LangSmith: a run with its type, its order and its inputs, alone or in the batch that a client sends."""
    entries = _entries(head, "runs")
    sent = [run for entry in entries if isinstance(entry.get("post"), list) for run in entry["post"][:8] if isinstance(run, dict)]
    return any(map(_is_run, (*entries, *sent))) or bool(_LANGSMITH.match(head.opening))


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
    return any(isinstance(value.get(name), list) for name in (*ROOTS, "scopeSpans", "scopeLogs"))


def _is_sdk_object(value: Mapping[str, Any]) -> bool:
    """A span or log record with a mark that no other program's objects have: a time as a pair, a context with its trace, or a scope.

    Metrics that stand between them are told by their resource.
    """
    if "scopeMetrics" in value or value.get("type") == "metric":
        return isinstance(value.get("resource"), dict)
    times = _pair(value.get("hrTime")) or (_pair(value.get("startTime")) and ("spanId" in value or "spanContext" in value))
    told = isinstance(value.get("context"), dict) and "trace_id" in value["context"] and "start_time" in value
    nanos = any(name in value for name in ("startTimeUnixNano", "observedTimeUnixNano", "observed_timestamp"))
    plain = nanos and ("traceId" in value or "trace_id" in value)
    return is_sdk_object(value) and (times or told or plain)


def _pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2
