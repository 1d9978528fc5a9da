"""Spans and log events of the OpenTelemetry GenAI conventions -> session events.

Takes: `Signal`s. Gives: `completion` for a model call, `tool_call` and `tool_result` for an `execute_tool` span, `evaluation` for a
`gen_ai.evaluation.result` (a log record or a span event), and what opens their sessions and turns. Names of the conventions up to
1.36, of OpenLLMetry and of OpenInference are taken beside the current ones.
Leaves out: token ids (telemetry has none: these events feed rewards and monitoring, never on-policy training), what the model
wrote, embeddings and retrieval, metrics, and programs' own events (`copilot.py`).

A model call is told twice where log events are on (`gen_ai.client.inference.operation.details`, the older `gen_ai.*.message`): the
span is taken, the log record only for what the user said, and for the call itself where it names no span.

Source: OpenTelemetry semantic conventions for generative AI, gen-ai-spans, gen-ai-agent-spans, gen-ai-events (2026); for the older
names version 1.36, OpenLLMetry's and OpenInference's attribute lists.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers.engine import Mapped
from pipelines.importers.otlp_sessions import Sessions, Turn
from pipelines.importers.otlp_wire import Signal, number, whole_number
from pipelines.importers.records import BAD, parse

MODEL_CALLS: Final = frozenset({"chat", "text_completion", "generate_content", "completion", "responses"})
AGENTS: Final = frozenset({"invoke_agent", "invoke_workflow", "create_agent"})
_KINDS: Final = {
    "LLM": "chat", "TOOL": "execute_tool", "AGENT": "invoke_agent", "CHAIN": "invoke_workflow",  # OpenInference
    "tool": "execute_tool", "agent": "invoke_agent", "workflow": "invoke_workflow",  # OpenLLMetry
    "generation": "chat",  # Langfuse
}  # fmt: skip
EVALUATION: Final = "gen_ai.evaluation.result"
DETAILS: Final = "gen_ai.client.inference.operation.details"
_MESSAGES: Final = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message\Z|gen_ai\.choice\Z|gen_ai\.content\.(prompt|completion)\Z")
_INPUT: Final = ("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "input.value", "gen_ai.request.messages")
_FINISH: Final = {
    "end_turn": "stop", "stop_sequence": "stop", "eos": "stop", "completed": "stop", "tool_use": "tool_calls", "tool_call": "tool_calls",
    "function_call": "tool_calls", "max_tokens": "length", "max_output_tokens": "length", "incomplete": "length", "failed": "error",
}  # fmt: skip
_FAILURES: Final = (
    (ev.ResultClass.TIMEOUT, re.compile(r"time.?d?.?out|deadline", re.I)),
    (ev.ResultClass.USER_ABORTED, re.compile(r"cancel|abort|interrupt|denied|declin|reject|permission_?refused", re.I)),
    (
        ev.ResultClass.UNKNOWN_TOOL,
        re.compile(r"(?:unknown|no.?such|undefined).{0,20}(?:tool|function)|(?:tool|function).{0,20}(?:not.?found|unknown)", re.I),
    ),
    (
        ev.ResultClass.INVALID_ARGUMENTS,
        re.compile(
            r"(?:invalid|malformed|missing|bad|required).{0,20}(?:arg|param|input|json|schema|property)|validation.?error|jsondecode", re.I
        ),
    ),
    (ev.ResultClass.PROVIDER_ERROR, re.compile(r"rate.?limit|overload|\b(?:429|5\d\d)\b|unavailable|quota", re.I)),
)
"""What a failure's type and words say, asked in this order."""
_FLAT: Final = re.compile(r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d{1,4})\.(?:message\.)?(role|content)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The user's side of a model call."""

    text: str | None = None
    users: int = 0
    """User messages in the call's history."""
    images: int = 0


def operation(signal: Signal) -> str | None:
    """Return what a span did in the words of the conventions; None when it is no GenAI span."""
    if named := signal.text("gen_ai.operation.name"):
        return _KINDS.get(named, named)
    kind = signal.text("openinference.span.kind", "traceloop.span.kind", "langfuse.observation.type")
    if kind in _KINDS:
        return _KINDS[kind]
    if signal.text("gen_ai.tool.name"):
        return "execute_tool"
    if signal.text("gen_ai.request.model", "gen_ai.response.model", "llm.request.model", "llm.model_name"):
        return "embeddings" if "embed" in signal.name.lower() else "chat"
    return None


def learn(sessions: Sessions, signal: Signal) -> None:
    """Take from a message event what the user said, for the turn that its spans will open."""
    sessions.learn(signal)
    if signal.kind == "span":
        return
    if signal.name == "gen_ai.user.message":
        text, users = _content(signal.get("content", "gen_ai.event.content") or _body(signal).get("content")), 0
    elif signal.name in (DETAILS, "gen_ai.content.prompt"):
        said = user_said(signal)
        text, users = said.text, said.users
    else:
        return
    turn = sessions.turn(signal) if signal.trace_id and text else None
    if turn is not None and not turn.started:
        turn.text, turn.users = text, users


def record(sessions: Sessions, signal: Signal) -> Mapped:
    """Map one signal."""
    if signal.name == EVALUATION:
        return _evaluation(sessions, signal)
    if signal.kind == "span":
        did = operation(signal)
        if did in MODEL_CALLS:
            return _model_call(sessions, signal)
        if did == "execute_tool":
            return _tool(sessions, signal)
        if did in AGENTS:
            return _agent(sessions, signal)
        return Mapped(reason=f"not_a_session_event:{'span' if did is None else did[:40]}")
    if signal.name == DETAILS and not signal.span_id:
        return _model_call(sessions, signal)
    told = signal.name == DETAILS or _MESSAGES.match(signal.name)
    return Mapped(reason=f"not_a_session_event:{'told_by_its_span' if told else signal.kind}")


def _placed(sessions: Sessions, signal: Signal) -> tuple[Turn, int, int] | str:
    """Return a signal's turn, start and end, or the reason why it has none."""
    if signal.at_ms is None or signal.start_ms is None:
        return "missing_field:timeUnixNano"
    turn = sessions.turn(signal)
    return "missing_field:traceId" if turn is None else (turn, signal.start_ms, signal.at_ms)


def _agent(sessions: Sessions, signal: Signal) -> Mapped:
    """An agent's span opens its turn where it is the first to arrive and tells what the user said; it is no event of its own."""
    said, placed = user_said(signal), _placed(sessions, signal)
    if isinstance(placed, str) or signal.parent_id or said.text is None or placed[0].started:
        return Mapped(reason="not_a_session_event:invoke_agent")
    return Mapped(events=sessions.openings(signal, placed[0], placed[1], text=said.text, users=said.users, images=said.images))


def _model_call(sessions: Sessions, signal: Signal) -> Mapped:
    placed = _placed(sessions, signal)
    if isinstance(placed, str):
        return Mapped(reason=placed)
    turn, start, end = placed
    own = signal.text("gen_ai.response.id", "llm.response.id")
    completion = (own or f"{signal.trace_id}:{signal.span_id}")[:128]
    if own and not sessions.completions.first(own, turn):
        return Mapped(reason="not_a_session_event:told_before")
    said = user_said(signal)
    events = sessions.openings(signal, turn, start, text=said.text, users=said.users, images=said.images)
    first = number(signal.get("gen_ai.response.time_to_first_chunk"))
    first = first * 1000 if first is not None else number(signal.get("copilot_chat.time_to_first_token"))
    payload = ev.CompletionPayload(
        completion_id=completion,
        step=turn.steps,
        model=(signal.text("gen_ai.response.model", "gen_ai.request.model", "llm.request.model", "llm.model_name") or "")[:128],
        temperature=number(signal.get("gen_ai.request.temperature", "llm.request.temperature")),
        top_p=number(signal.get("gen_ai.request.top_p", "llm.request.top_p")),
        top_k=whole_number(signal.get("gen_ai.request.top_k")),
        finish_reason=_finish(signal),
        ttft_ms=first,
        duration_ms=float(end - start) if signal.kind == "span" and end >= start else None,
        prompt_tokens=_tokens(signal, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
        response_tokens=_tokens(signal, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
        cached_tokens=_tokens(signal, "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
        capture_error="no_token_ids",
    )
    turn.steps += 1
    events.append(ev.Completion(**sessions.envelope(signal, turn, end, f"{completion}/completion"), payload=payload))
    return Mapped(events=events)


def _tokens(signal: Signal, *names: str) -> int:
    """Return a token count, 0 when there is none that an int32 column holds."""
    found = whole_number(signal.get(*names))
    return found if found is not None and 0 <= found < 2**31 else 0


def _finish(signal: Signal) -> str | None:
    reasons = signal.get("gen_ai.response.finish_reasons", "gen_ai.response.finish_reason", "gen_ai.completion.0.finish_reason")
    first = reasons[0] if isinstance(reasons, list) and reasons else reasons
    if isinstance(first, str) and first.startswith("["):  # a list that was turned into text
        listed = parse(first)
        first = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(first, str) and first:
        return _FINISH.get(first.lower(), first.lower()[:40])
    return "error" if signal.failed or signal.text("error.type") else None


def _tool(sessions: Sessions, signal: Signal) -> Mapped:
    placed = _placed(sessions, signal)
    if isinstance(placed, str):
        return Mapped(reason=placed)
    turn, start, end = placed
    keyed = sessions.source.keyed
    verdict = failure(signal) or ev.ResultClass.OK
    call_id = (signal.text("gen_ai.tool.call.id", "tool.call.id", "tool_call.id") or f"{signal.trace_id}:{signal.span_id}")[:128]
    arguments = signal.get("gen_ai.tool.call.arguments", "traceloop.entity.input", "input.value")
    result = signal.get("gen_ai.tool.call.result", "gen_ai.tool.message", "traceloop.entity.output", "output.value")
    named = signal.text("gen_ai.tool.name", "tool.name", "traceloop.entity.name")
    call = ev.ToolCallPayload(
        tool_call_id=call_id,
        name=(named or signal.name.removeprefix("execute_tool ").strip())[:128],
        arguments_valid=verdict is not ev.ResultClass.INVALID_ARGUMENTS,
        arguments_hash=keyed("arguments", arguments if isinstance(arguments, str) else repr(arguments)) if arguments is not None else None,
        destructive=destroys_by_call(named or signal.name, arguments),
    )
    size = None if result is None else len((result if isinstance(result, str) else repr(result)).encode("utf-8", "replace"))
    answer = ev.ToolResultPayload(
        tool_call_id=call_id, result_class=verdict, duration_ms=float(end - start) if end >= start else None, output_bytes=size
    )
    events = sessions.openings(signal, turn, start)
    seed = f"{signal.trace_id}:{signal.span_id}:{call_id}"
    events.append(ev.ToolCall(**sessions.envelope(signal, turn, start, f"{seed}/call"), payload=call))
    events.append(ev.ToolResult(**sessions.envelope(signal, turn, end, f"{seed}/result"), payload=answer))
    return Mapped(events=events)


def failure(signal: Signal) -> ev.ResultClass | None:
    """Say how a tool's span failed; None when it did not. An error that says nothing is taken for the environment's."""
    kind = signal.text("error.type")
    if not signal.failed and kind is None:
        return None
    words = f"{kind or ''} {signal.message} {signal.text('error.message', 'exception.message') or ''}"[:1_000]
    return next((found for found, pattern in _FAILURES if pattern.search(words)), ev.ResultClass.UNEXPECTED_ENVIRONMENT)


def _evaluation(sessions: Sessions, signal: Signal) -> Mapped:
    name = signal.text("gen_ai.evaluation.name")
    value, label = number(signal.get("gen_ai.evaluation.score.value")), signal.text("gen_ai.evaluation.score.label")
    if name is None:
        return Mapped(reason="missing_field:gen_ai.evaluation.name")
    if value is None and label is None:
        failed = signal.text("error.type") is not None
        return Mapped(reason="not_a_session_event:failed_evaluation" if failed else "missing_field:gen_ai.evaluation.score")
    if signal.at_ms is None:
        return Mapped(reason="missing_field:timeUnixNano")
    response = signal.around("gen_ai.response.id")
    turn = sessions.completions.get(response) if response else None
    turn = turn or sessions.turn(signal)
    if turn is None and response:
        turn = Turn(session_id=f"response-{response}"[:120], turn_id="")
    if turn is None:
        return Mapped(reason="missing_field:traceId")
    seed = f"{signal.trace_id}:{signal.span_id}:{response}:{name}:{signal.position}/evaluation"
    envelope = sessions.envelope(signal, turn, signal.at_ms, seed)
    envelope["turn_id"] = turn.turn_id or None
    payload = ev.EvaluationPayload(
        name=name[:128],
        score_value=value,
        score_label=label[:128] if label else None,
        explanation=sessions.kept(signal.text("gen_ai.evaluation.explanation"), envelope["consent"]),
        response_id=response[:128] if response else None,
    )
    return Mapped(events=[ev.Evaluation(**envelope, payload=payload)])


def user_said(signal: Signal) -> Said:
    """Return what the user's last message in a model call's history says, as far as the content was captured."""
    typed = signal.text("copilot_chat.user_request")
    messages = _messages(signal)
    asked = [message for message in messages if message.get("role") in ("user", "human")]
    if not asked:
        return Said(text=typed, users=0)
    content = asked[-1].get("parts", asked[-1].get("content"))
    return Said(text=typed or _content(content), users=len(asked), images=_images(content))


def _messages(signal: Signal) -> list[Mapping[str, Any]]:
    raw = signal.get(*_INPUT)
    if isinstance(raw, str):
        parsed = parse(raw) if raw.lstrip()[:1] in ("[", "{") else BAD
        raw = [{"role": "user", "content": raw}] if parsed is BAD and "gen_ai.prompt" in signal.attributes else parsed
    if isinstance(raw, dict):
        raw = raw.get("messages", raw.get("contents"))
    if isinstance(raw, list):
        return [message for message in raw if isinstance(message, dict)]
    flat: dict[int, dict[str, Any]] = {}
    for name, value in signal.attributes.items():
        if found := _FLAT.match(name):
            flat.setdefault(int(found[1]), {})[found[2]] = value
    return [flat[index] for index in sorted(flat)]


def _content(content: object) -> str | None:
    """Return the text of a message: a text, or the text parts of a list."""
    if isinstance(content, str):
        if content[:2] == "[{" and isinstance(parts := parse(content), list):
            return _content(parts)
        return content
    if not isinstance(content, list):
        return None
    found = [text for part in content if (text := _part(part)) is not None]
    return "\n".join(found) if found else None


def _part(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type", "text") not in ("text", "input_text"):
        return None
    text = part.get("content", part.get("text"))
    return text if isinstance(text, str) else None


def _images(content: object) -> int:
    parts = content if isinstance(content, list) else ()
    return sum(
        isinstance(part, dict) and (part.get("modality") == "image" or part.get("type") in ("image", "image_url", "input_image"))
        for part in parts
    )


def _body(signal: Signal) -> Mapping[str, Any]:
    return signal.body if isinstance(signal.body, dict) else {}
