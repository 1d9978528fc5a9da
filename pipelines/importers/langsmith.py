"""LangSmith exports: runs, one a line, in a list, or nested in their root (`child_runs`).

Takes and gives: see `registry.py`. Each run becomes a signal of the GenAI conventions, whose mapping decides what it means
(`otlp_genai.py`): an `llm` run is a model call, a `tool` run a tool's span, a root `chain` opens a turn; feedback statistics become
evaluations of their run. A thread (`thread_id`, `session_id` or `conversation_id` in the metadata) is a session.
Leaves out: token ids (there are none), prices, retrievers, parsers, prompts, datasets; single votes (an export holds their mean).

Source: LangSmith documentation, "Run (span) data format" (2026).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipelines.importers.otlp import Mapper, spread
from pipelines.importers.otlp_genai import EVALUATION
from pipelines.importers.otlp_wire import Fault, Signal
from pipelines.importers.records import Advance, Record
from pipelines.importers.texts import items, mapping, time_ms

__all__ = ["SAMPLE", "VERSION", "Mapper", "read"]

SAMPLE: Final = Path(__file__).parent / "samples" / "langsmith.jsonl"
"""Invented runs in the true shape, flat and nested."""
VERSION: Final = "2"
_DID: Final = {"llm": "chat", "tool": "execute_tool", "chain": "invoke_agent", "embedding": "embeddings"}
_THREAD: Final = ("thread_id", "session_id", "conversation_id")
_ROLES: Final = {"human": "user", "HumanMessage": "user", "HumanMessageChunk": "user", "user": "user"}
_DEPTH: Final = 64
"""Runs nested deeper are not followed."""


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the signals of an export: JSON lines, a list, or an answer of the API (`runs`)."""
    del path
    return spread(file, advance, lists=("runs",), found=lambda record: signals(record.value))


def signals(run: object, depth: int = 0) -> Iterator[Signal | Fault]:
    """Yield what a run and the runs in it say."""
    if not isinstance(run, dict):
        yield Fault("not_an_object")
        return
    if depth == 0 and isinstance(run.get("runs"), list):  # an answer of the API on one line
        for each in run["runs"]:
            yield from signals(each, 1)
        return
    if not isinstance(run.get("run_type"), str) or not isinstance(run.get("id"), str):
        yield Fault("not_langsmith")
        return
    signal = _signal(run)
    yield signal
    for position, (name, stats) in enumerate(mapping(run.get("feedback_stats")).items()):
        yield _feedback(signal, str(name), mapping(stats), position)
    for child in items(run.get("child_runs")) if depth < _DEPTH else ():
        yield from signals(child, depth + 1)


def _signal(run: Mapping[str, Any]) -> Signal:
    extra = mapping(run.get("extra"))
    metadata, wishes = mapping(extra.get("metadata")), mapping(extra.get("invocation_params"))
    start, end, first = _time_ms(run.get("start_time")), _time_ms(run.get("end_time")), _time_ms(run.get("first_token_time"))
    inputs = mapping(run.get("inputs"))
    attributes = {
        "gen_ai.operation.name": _DID.get(run["run_type"], f"langsmith_{run['run_type'][:30]}"),
        "gen_ai.request.model": metadata.get("ls_model_name") or wishes.get("model") or wishes.get("model_name"),
        "gen_ai.request.temperature": metadata.get("ls_temperature", wishes.get("temperature")),
        "gen_ai.response.id": run["id"],
        "gen_ai.usage.input_tokens": run.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": run.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": mapping(run.get("prompt_token_details")).get("cache_read"),
        "gen_ai.input.messages": _messages(inputs),
        "gen_ai.tool.name": run.get("name"),
        "gen_ai.tool.call.id": run["id"],
        "gen_ai.tool.call.arguments": run.get("inputs"),
        "gen_ai.tool.call.result": run.get("outputs"),
        "gen_ai.response.time_to_first_chunk": (first - start) / 1000 if first is not None and start is not None else None,
        "gen_ai.conversation.id": next((metadata[name] for name in _THREAD if isinstance(metadata.get(name), str)), None),
        "user.id": metadata.get("user_id"),
    }
    error = run.get("error")
    return Signal(
        kind="span", name=str(run.get("name") or "")[:200], start_ms=start, at_ms=end if end is not None else start,
        trace_id=str(run.get("trace_id") or run["id"])[:64], span_id=run["id"][:64], parent_id=str(run.get("parent_run_id") or "")[:64],
        attributes=attributes, failed=bool(error), message=error[:500] if isinstance(error, str) else "",
    )  # fmt: skip


def _feedback(signal: Signal, name: str, stats: Mapping[str, Any], position: int) -> Signal:
    attributes = {
        "gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": stats.get("avg"), "gen_ai.response.id": signal.span_id,
    }  # fmt: skip
    return Signal(
        kind="log", name=EVALUATION, start_ms=signal.at_ms, at_ms=signal.at_ms, trace_id=signal.trace_id, span_id=signal.span_id,
        attributes=attributes, context=signal.attributes, position=position,
    )  # fmt: skip


def _messages(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a run's messages by role: plain ones, LangChain's own objects, and batches of one."""
    raw = inputs.get("messages")
    raw = raw[0] if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], list) else raw
    if raw is None and (
        asked := next((inputs[name] for name in ("input", "question", "query") if isinstance(inputs.get(name), str)), None)
    ):
        return [{"role": "user", "content": asked}]
    found = []
    for message in items(raw):
        if isinstance(message, dict):
            kwargs, kind = mapping(message.get("kwargs")), items(message.get("id"))[-1:]
            role = message.get("role") or kwargs.get("type") or message.get("type") or (kind[0] if kind else "")
            found.append({"role": _ROLES.get(str(role), str(role)), "content": message.get("content", kwargs.get("content"))})
    return found


def _time_ms(value: object) -> int | None:
    """Return a time given as ISO 8601 (UTC where it names no zone) or as epoch milliseconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if 0 < value < 2**53 else None
    return time_ms(value)
