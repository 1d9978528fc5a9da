"""Langfuse exports: traces, observations and scores, as the interface exports or downloads them or the public API returns them.

Takes and gives: see `registry.py`. Each entry becomes signals of the GenAI conventions, whose mapping decides what they mean
(`otlp_genai.py`): a generation is a model call, a tool observation a tool's span, a score an evaluation of its generation.
Leaves out: token ids (there are none), prices, prompts, datasets; spans and events that are no model call, tool or agent.

Source: Langfuse public API reference, Trace, Observation, Score (2026).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipelines.importers.otlp import Mapper, spread
from pipelines.importers.otlp_genai import EVALUATION
from pipelines.importers.otlp_wire import Fault, Signal
from pipelines.importers.records import BAD, Advance, Record, parse
from pipelines.importers.texts import items, mapping, time_ms

__all__ = ["SAMPLE", "VERSION", "Mapper", "read"]

SAMPLE: Final = Path(__file__).parent / "samples" / "langfuse.jsonl"
"""Invented entries in the true shape: a trace with its observations and scores, and single ones."""
VERSION: Final = "3"
_LAYERS: Final = 3
_ASKED: Final = ("prompt", "contents", "input", "question", "query")
"""Arguments that hold what the user asked, in the order in which they are looked for."""
_DID: Final = {"GENERATION": "chat", "TOOL": "execute_tool", "AGENT": "invoke_agent", "EMBEDDING": "embeddings"}


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the signals of an export: JSON lines, a list, or a page of the API (`data`)."""
    del path
    return spread(file, advance, lists=("data",), found=lambda record: signals(record.value))


def signals(entry: object) -> Iterator[Signal | Fault]:
    """Yield what one entry says: a trace (with what it holds), an observation, or a score."""
    if not isinstance(entry, dict):
        yield Fault("not_an_object")
    elif isinstance(entry.get("trace"), dict) and isinstance(entry.get("observations"), list):  # a trace that was downloaded
        yield from signals({**entry["trace"], "observations": entry["observations"]})
    elif "traceId" not in entry and "id" not in entry and isinstance(entry.get("data"), list):  # a page of the API on one line
        for each in entry["data"]:
            yield from signals(each if not isinstance(each, dict) or "data" not in each else None)
    elif isinstance(entry.get("traceId"), str) and "startTime" in entry:
        yield _observation(entry, {})
    elif isinstance(entry.get("traceId"), str) and ("value" in entry or "stringValue" in entry):
        yield _score(entry, {})
    elif isinstance(entry.get("id"), str) and "timestamp" in entry:
        around = {"langfuse.session.id": entry.get("sessionId"), "langfuse.user.id": entry.get("userId")}
        yield _trace(entry, around)
        inside = [_observation(each, around) for each in items(entry.get("observations")) if isinstance(each, dict)]
        yield from inside
        yield from (_score(each, around) for each in items(entry.get("scores")) if isinstance(each, dict))
    else:
        yield Fault("not_langfuse")


def _trace(entry: Mapping[str, Any], around: Mapping[str, Any]) -> Signal:
    at = time_ms(entry.get("timestamp"))
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": _messages(entry.get("input"))}
    return Signal(
        kind="span", name=str(entry.get("name") or "")[:200], start_ms=at, at_ms=at, trace_id=str(entry["id"])[:64], attributes=attributes,
        context=around,
    )  # fmt: skip


def _observation(entry: Mapping[str, Any], around: Mapping[str, Any]) -> Signal:
    start, end = time_ms(entry.get("startTime")), time_ms(entry.get("endTime"))
    first = time_ms(entry.get("completionStartTime"))
    usage, details, wishes = mapping(entry.get("usage")), mapping(entry.get("usageDetails")), mapping(entry.get("modelParameters"))
    own = entry.get("id") if isinstance(entry.get("id"), str) else ""
    attributes = {
        "gen_ai.operation.name": _DID.get(str(entry.get("type")).upper(), "langfuse_span"),
        "gen_ai.request.model": entry.get("model") or entry.get("providedModelName"),
        "gen_ai.response.id": own,
        "gen_ai.request.temperature": wishes.get("temperature"),
        "gen_ai.request.top_p": wishes.get("top_p"),
        "gen_ai.usage.input_tokens": details.get("input", usage.get("input")),
        "gen_ai.usage.output_tokens": details.get("output", usage.get("output")),
        "gen_ai.usage.cache_read.input_tokens": details.get("input_cached_tokens", details.get("cache_read_input_tokens")),
        "gen_ai.input.messages": _messages(entry.get("input")),
        "gen_ai.tool.name": entry.get("name"),
        "gen_ai.tool.call.id": own,
        "gen_ai.tool.call.arguments": entry.get("input"),
        "gen_ai.tool.call.result": entry.get("output"),
        "gen_ai.response.time_to_first_chunk": (first - start) / 1000 if first is not None and start is not None else None,
    }
    return Signal(
        kind="span", name=str(entry.get("name") or "")[:200], start_ms=start, at_ms=end if end is not None else start,
        trace_id=str(entry.get("traceId") or "")[:64], span_id=str(own)[:64], parent_id=str(entry.get("parentObservationId") or "")[:64],
        attributes=attributes, context=around, ended=end is not None, failed=entry.get("level") == "ERROR",
        message=str(entry.get("statusMessage") or "")[:500],
    )  # fmt: skip


def _messages(given: object) -> object:
    """Return an input as messages: a text, or the text of a call's one question, is the user's. A download holds JSON within JSON text."""
    for _ in range(_LAYERS):
        parsed = parse(given) if isinstance(given, str) and given.lstrip()[:1] in ("[", "{", '"') else BAD
        given = given if parsed is BAD else parsed
    if isinstance(given, dict) and not isinstance(given.get("messages", given.get("contents")), list):
        given = next((given[name] for name in _ASKED if isinstance(given.get(name), str)), given)
    return [{"role": "user", "content": given}] if isinstance(given, str) and given.strip() else given


def _score(entry: Mapping[str, Any], around: Mapping[str, Any]) -> Signal:
    at = time_ms(entry.get("timestamp") or entry.get("createdAt"))
    value = entry.get("value")
    attributes = {
        "gen_ai.evaluation.name": entry.get("name"),
        "gen_ai.evaluation.score.value": float(value) if isinstance(value, bool) else value,
        "gen_ai.evaluation.score.label": entry.get("stringValue") or (value if isinstance(value, str) else None),
        "gen_ai.evaluation.explanation": entry.get("comment"),
        "gen_ai.response.id": entry.get("observationId"),
    }
    return Signal(
        kind="log", name=EVALUATION, start_ms=at, at_ms=at, trace_id=str(entry.get("traceId") or "")[:64],
        span_id=str(entry.get("id") or "")[:64], attributes=attributes, context=around,
    )  # fmt: skip
