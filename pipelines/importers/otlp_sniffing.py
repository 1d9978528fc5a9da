"""Whether a file is OTLP/JSON, or telemetry objects of the OpenTelemetry JavaScript SDK. Pure, and light: the registry loads it.

Takes: a file's beginning. Gives: yes or no. Leaves out: reading (`otlp.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pipelines.importers.sniffing import Head

_REQUEST: Final = re.compile(r'\{"(?:resource_?[Ss]pans|resource_?[Ll]ogs)":\[')


def otlp(head: Head) -> bool:
    """OTLP: an object with `resourceSpans` or `resourceLogs`, or an SDK's span or log record with its times as pairs."""
    whole = head.whole
    if isinstance(whole, dict) and _is_request(whole):
        return True
    return any(_is_request(line) or _is_sdk_line(line) for line in head.lines) or bool(_REQUEST.match(head.opening))


def _is_request(value: Mapping[str, Any]) -> bool:
    return any(isinstance(value.get(name), list) for name in ("resourceSpans", "resourceLogs", "resource_spans", "resource_logs"))


def _is_sdk_line(value: Mapping[str, Any]) -> bool:
    scoped = isinstance(value.get("instrumentationScope"), dict) or isinstance(value.get("resource"), dict)
    times = value.get("hrTime") or (value.get("startTime") if "traceId" in value else None)
    return scoped and isinstance(times, list) and len(times) == 2
