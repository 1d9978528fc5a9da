"""LangSmith exports: runs, one a line, in a list, or nested in their root (`child_runs`), as its API, its SDK and its command line
write them; the batches that its clients send.

Takes and gives: see `registry.py`. Each run becomes a signal of the GenAI conventions, whose mapping decides what it means
(`otlp_genai.py`): an `llm` run is a model call, a `tool` run a tool's span, a root `chain` opens a turn; feedback and its statistics become
evaluations of their run. A thread (`thread_id`, `session_id` or `conversation_id` in the metadata, `thread_id` of the run) is a session.
A graph's tool node answers a failure with a message of status `error` in a run that did not fail: that is a failed call.
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
VERSION: Final = "3"
_DID: Final = {"llm": "chat", "tool": "execute_tool", "chain": "invoke_agent", "agent": "invoke_agent", "embedding": "embeddings"}
_THREAD: Final = ("thread_id", "session_id", "conversation_id")
_ROLES: Final = {"human": "user", "HumanMessage": "user", "HumanMessageChunk": "user", "user": "user"}
_UUID_CHARS: Final = 36
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
    if depth == 0 and isinstance(run.get("post"), list) and "run_type" not in run:
        for each in _batch(run):
            yield from signals(each, 1)
        return
    run = {**run, "id": run.get("id", run.get("run_id"))}
    if not isinstance(run.get("run_type"), str) or not isinstance(run["id"], str):
        yield Fault("not_langsmith")
        return
    signal = _signal(run)
    yield signal
    for position, (name, stats) in enumerate(mapping(run.get("feedback_stats")).items()):
        yield from _feedback(signal, str(name), mapping(stats), position)
    for position, vote in enumerate(items(run.get("feedback"))):
        yield from _vote(signal, mapping(vote), position)
    for child in items(run.get("child_runs")) if depth < _DEPTH else ():
        yield from signals(child, depth + 1)


def _batch(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the runs that a client sends: begun by `post`, finished by `patch`, which may name its run only as the end of its order."""
    runs: dict[object, dict[str, Any]] = {}
    for part in (*items(batch.get("post")), *items(batch.get("patch"))):
        if isinstance(part, dict):
            own = part.get("id") or str(part.get("dotted_order"))[-_UUID_CHARS:]
            run = runs.setdefault(own if isinstance(own, str) else repr(own), {"id": own})
            run.update({name: value for name, value in part.items() if value is not None})
    yield from runs.values()


def _usage(run: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[object, object, object]:
    """Return a run's tokens (of the prompt, of the answer, read from a cache): the export's own, else what the program noted itself."""
    outputs = mapping(run.get("outputs"))
    first = _first(outputs)
    message, reply = mapping(mapping(first).get("message")), mapping(mapping(outputs.get("llm_output")).get("token_usage"))
    places = (
        run.get("token_usage"), mapping(extra.get("metadata")).get("usage_metadata"), outputs.get("usage_metadata"),
        mapping(message.get("kwargs")).get("usage_metadata"), message.get("usage_metadata"), reply, outputs.get("usage"),
    )  # fmt: skip
    noted = next((place for place in places if isinstance(place, dict) and place), {})
    details, cached = mapping(run.get("prompt_token_details")), mapping(noted.get("input_token_details"))
    return (
        run.get("prompt_tokens") or noted.get("input_tokens", noted.get("prompt_tokens")),
        run.get("completion_tokens") or noted.get("output_tokens", noted.get("completion_tokens")),
        details.get("cache_read", cached.get("cache_read")),
    )


def _first(outputs: Mapping[str, Any]) -> object:
    """Return the first answer of a model run, as LangChain (`generations`) or a provider's client (`choices`) has it."""
    found = outputs.get("generations") or outputs.get("choices")
    while isinstance(found, list) and found:
        found = found[0]
    return found


def _finish(run: Mapping[str, Any]) -> object:
    first = mapping(_first(mapping(run.get("outputs"))))
    reason = first.get("finish_reason", mapping(first.get("generation_info")).get("finish_reason"))
    return mapping(reason).get("finish_reason") if isinstance(reason, dict) else reason  # a stream's last chunk in its place


def _answer(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message that a graph's tool node made of a tool's answer; empty when it made none."""
    output = mapping(mapping(run.get("outputs")).get("output"))
    return mapping(output.get("kwargs")) or output


def _signal(run: Mapping[str, Any]) -> Signal:
    extra = mapping(run.get("extra")) or {"metadata": run.get("custom_metadata")}
    metadata, wishes = mapping(extra.get("metadata")), mapping(extra.get("invocation_params"))
    start, end, first = _time_ms(run.get("start_time")), _time_ms(run.get("end_time")), _time_ms(run.get("first_token_time"))
    inputs, answer = mapping(run.get("inputs")), _answer(run)
    kind, (prompted, answered, cached) = run["run_type"].lower(), _usage(run, extra)
    attributes = {
        "gen_ai.operation.name": _DID.get(kind, f"langsmith_{kind[:30]}"),
        "gen_ai.request.model": metadata.get("ls_model_name") or wishes.get("model") or wishes.get("model_name"),
        "gen_ai.request.temperature": metadata.get("ls_temperature", wishes.get("temperature")),
        "gen_ai.response.id": run["id"],
        "gen_ai.response.finish_reasons": _finish(run) if kind == "llm" else None,
        "gen_ai.usage.input_tokens": prompted,
        "gen_ai.usage.output_tokens": answered,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.input.messages": _messages(inputs),
        "gen_ai.tool.name": run.get("name"),
        "gen_ai.tool.call.id": answer.get("tool_call_id") or run["id"],
        "gen_ai.tool.call.arguments": run.get("inputs"),
        "gen_ai.tool.call.result": run.get("outputs"),
        "gen_ai.response.time_to_first_chunk": (first - start) / 1000 if first is not None and start is not None else None,
        "gen_ai.conversation.id": next((metadata[name] for name in _THREAD if isinstance(metadata.get(name), str)), run.get("thread_id")),
        "user.id": metadata.get("user_id"),
    }
    error = run.get("error") or (answer.get("content") or "error" if kind == "tool" and answer.get("status") == "error" else None)
    return Signal(
        kind="span", name=str(run.get("name") or "")[:200], start_ms=start, at_ms=end if end is not None else start,
        trace_id=str(run.get("trace_id") or run["id"])[:64], span_id=run["id"][:64], parent_id=str(run.get("parent_run_id") or "")[:64],
        attributes=attributes, ended=end is not None, failed=bool(error), message=error[:500] if isinstance(error, str) else "",
    )  # fmt: skip


def _feedback(signal: Signal, name: str, stats: Mapping[str, Any], position: int) -> Iterator[Signal]:
    """Yield a key's mean as an evaluation, and its commonest word where it has words; nothing for a key that nobody has answered."""
    words = {word: times for word, times in mapping(stats.get("values")).items() if isinstance(times, int)}
    label = max(sorted(words), key=words.__getitem__, default=None)
    if stats.get("avg") is None and label is None and not stats.get("n"):
        return
    attributes = {
        "gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": stats.get("avg"), "gen_ai.evaluation.score.label": label,
        "gen_ai.response.id": signal.span_id,
    }  # fmt: skip
    yield _evaluation(signal, attributes, position)


def _vote(signal: Signal, vote: Mapping[str, Any], position: int) -> Iterator[Signal]:
    """Yield one record of feedback, which gives a score, a word, or neither."""
    score, value = vote.get("score"), vote.get("value")
    if score is None and value is None:
        return
    attributes = {
        "gen_ai.evaluation.name": vote.get("key"), "gen_ai.evaluation.score.value": float(score) if isinstance(score, bool) else score,
        "gen_ai.evaluation.score.label": value, "gen_ai.evaluation.explanation": vote.get("comment"), "gen_ai.response.id": signal.span_id,
    }  # fmt: skip
    yield _evaluation(signal, attributes, position)


def _evaluation(signal: Signal, attributes: Mapping[str, Any], position: int) -> Signal:
    return Signal(
        kind="log", name=EVALUATION, start_ms=signal.at_ms, at_ms=signal.at_ms, trace_id=signal.trace_id, span_id=signal.span_id,
        attributes=attributes, context=signal.attributes, position=position,
    )  # fmt: skip


def _messages(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a run's messages by role: plain ones, LangChain's own objects, and batches of one."""
    raw = inputs.get("messages", mapping(inputs.get("input")).get("messages"))
    raw = [raw] if isinstance(raw, dict) else raw
    raw = raw[0] if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], list) else raw
    if raw is None and (
        asked := next((inputs[name] for name in ("input", "question", "query") if isinstance(inputs.get(name), str)), None)
    ):
        return [{"role": "user", "content": asked}]
    found = []
    for message in items(raw):
        if isinstance(message, dict):
            kwargs, kind = mapping(message.get("kwargs")) or mapping(message.get("data")), items(message.get("id"))[-1:]
            role = message.get("role") or kwargs.get("type") or message.get("type") or (kind[0] if kind else "")
            found.append({"role": _ROLES.get(str(role), str(role)), "content": message.get("content", kwargs.get("content"))})
        elif isinstance(message, list) and len(message) == 2:  # [role, text]
            found.append({"role": _ROLES.get(str(message[0]), str(message[0])), "content": message[1]})
    return found


def _time_ms(value: object) -> int | None:
    """Return a time given as ISO 8601 (UTC where it names no zone) or as epoch milliseconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if 0 < value < 2**53 else None
    return time_ms(value)
