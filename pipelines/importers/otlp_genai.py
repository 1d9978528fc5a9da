"""Spans and log events of the OpenTelemetry GenAI conventions -> session events.

Takes: `Signal`s. Gives: `completion` for a model call, `tool_call` and `tool_result` for an `execute_tool` span, `evaluation` for a
`gen_ai.evaluation.result` (a log record or a span event), and what opens their sessions and turns. Names of the conventions up to
1.36, of OpenLLMetry and of OpenInference are taken beside the current ones.
Leaves out: token ids (telemetry has none: these events feed rewards and monitoring, never on-policy training), what the model
wrote, embeddings and retrieval, metrics, and programs' own events (`copilot.py`).

A model call is told twice where log events are on (`gen_ai.client.inference.operation.details`, the older `gen_ai.*.message`): the
span is taken, the log record only for what the user said, and for the call itself where it names no span or the file has none.

Source: OpenTelemetry semantic conventions for generative AI, gen-ai-spans, gen-ai-agent-spans, gen-ai-events (2026); for the older
names version 1.36, OpenLLMetry's and OpenInference's attribute lists.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers.engine import Mapped
from pipelines.importers.otlp_said import Said, content_text, user_said
from pipelines.importers.otlp_sessions import TOLD_CHARS, Call, Sessions, Turn, round_key
from pipelines.importers.otlp_wire import Signal, number, whole_number
from pipelines.importers.records import parse

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
_FINISH: Final = {
    "end_turn": "stop", "stop_sequence": "stop", "eos": "stop", "completed": "stop", "tool_use": "tool_calls", "tool_call": "tool_calls",
    "function_call": "tool_calls", "max_tokens": "length", "max_output_tokens": "length", "incomplete": "length", "failed": "error",
}  # fmt: skip
_FAILURES: Final = (
    (ev.ResultClass.TIMEOUT, re.compile(r"time.?d?.?out|deadline", re.I)),
    (ev.ResultClass.USER_ABORTED, re.compile(r"cancel|abort|interrupt|denied|declin|reject|permission_?refused", re.I)),
    (
        ev.ResultClass.UNKNOWN_TOOL,
        re.compile(
            r"(?:unknown|no.?such|undefined|not.?a.?valid).{0,20}(?:tool|function)|(?:tool|function).{0,20}(?:not.?found|unknown)", re.I
        ),
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
_ROUNDS: Final = 64
"""Calls remembered of one completion id."""


def operation(signal: Signal) -> str | None:
    """Return what a span did in the words of the conventions; None when it is no GenAI span."""
    if named := signal.text("gen_ai.operation.name"):
        return _KINDS.get(named, named)
    kind = signal.text("openinference.span.kind", "traceloop.span.kind", "langfuse.observation.type")
    if kind in _KINDS:
        return _KINDS[kind]
    if signal.text("gen_ai.tool.name") or signal.text("ai.operationId") == "ai.toolCall":  # the latter: Vercel's AI SDK
        return "execute_tool"
    if signal.text("gen_ai.request.model", "gen_ai.response.model", "llm.request.model", "llm.model_name"):
        return "embeddings" if "embed" in signal.name.lower() else "chat"
    return None


def learn(sessions: Sessions, signal: Signal) -> None:
    """Take in what a signal tells about its turn, before any signal of its request or file is mapped."""
    sessions.learn(signal)
    if signal.kind == "span":
        _learn_span(sessions, signal)
        return
    if signal.name == "gen_ai.user.message":
        text, users = content_text(signal.get("content", "gen_ai.event.content") or _body(signal).get("content")), 0
    elif signal.name in (DETAILS, "gen_ai.content.prompt"):
        said = user_said(signal)
        text, users = said.text, said.users
        _answers(sessions, signal)
    else:
        return
    turn = sessions.turn(signal) if signal.trace_id and text else None
    if turn is not None and not turn.started and not turn.asked:
        turn.text, turn.users = text, users


def _learn_span(sessions: Sessions, signal: Signal) -> None:
    did = operation(signal)
    agent = did in AGENTS and not signal.parent_id
    if did not in MODEL_CALLS and did != "execute_tool" and not agent:
        return
    said = user_said(signal) if agent else Said()
    turn = sessions.turn(signal) if not agent or said.text is not None else None
    if turn is None:
        return
    sessions.expect(turn, signal.start_ms)
    if agent and not turn.started and len(said.text or "") <= TOLD_CHARS:
        turn.text, turn.users, turn.asked = said.text, said.users, True
    elif did in MODEL_CALLS:
        turn.calls_told = True
        _answers(sessions, signal)
    elif did == "execute_tool":
        turn.tools_told = True


def _answers(sessions: Sessions, signal: Signal) -> None:
    """Remember whose turn a completion is, for what names it: in files an evaluation may come before its model call."""
    own = signal.text("gen_ai.response.id", "llm.response.id")
    turn = sessions.turn(signal) if own and signal.trace_id else None
    if own and turn is not None:
        sessions.completions.first(own, turn)


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
    if signal.name == DETAILS and not _told_by_span(sessions, signal):
        return _model_call(sessions, signal)
    told = signal.name == DETAILS or _MESSAGES.match(signal.name)
    return Mapped(reason=f"not_a_session_event:{'told_by_its_span' if told else signal.kind}")


def _told_by_span(sessions: Sessions, signal: Signal) -> bool:
    """Whether a span tells the model call of a log record: it names one, and it is not known that there is none (VS Code's exporter
    writes empty objects for spans).
    """
    turn = sessions.turn(signal) if signal.span_id else None
    return bool(signal.span_id) and not (sessions.whole and signal.printed and turn is not None and not turn.calls_told)


def _placed(sessions: Sessions, signal: Signal) -> tuple[Turn, int, int] | str:
    """Return a signal's turn, start and end, or the reason why it has none."""
    if signal.at_ms is None or signal.start_ms is None:
        return "missing_field:timeUnixNano"
    turn = sessions.rounds.get(round_key(signal)) if signal.name == DETAILS and not signal.trace_id else None
    turn = turn or sessions.turn(signal)
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
    own = signal.text("gen_ai.response.id", "llm.response.id", "ai.response.id")
    prompted = signal.count("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
    answered = signal.count("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
    completion = own or f"{signal.trace_id}:{signal.span_id}"
    if own:
        completion_of = _round(sessions, own, Call(start_ms=start, end_ms=end, tokens=(prompted, answered)))
        if completion_of is None:
            return Mapped(reason="not_a_session_event:told_before")
        sessions.completions.first(own, turn)
        completion = completion_of
    said = user_said(signal)
    events = sessions.openings(signal, turn, start, text=said.text, users=said.users, images=said.images)
    first = number(signal.get("gen_ai.response.time_to_first_chunk"))
    first = first * 1000 if first is not None else number(signal.get("copilot_chat.time_to_first_token", "ai.response.msToFirstChunk"))
    payload = ev.CompletionPayload(
        completion_id=completion[:128],
        step=turn.steps,
        model=(signal.text("gen_ai.response.model", "gen_ai.request.model", "llm.request.model", "llm.model_name") or "")[:128],
        temperature=number(signal.get("gen_ai.request.temperature", "llm.request.temperature")),
        top_p=number(signal.get("gen_ai.request.top_p", "llm.request.top_p")),
        top_k=whole_number(signal.get("gen_ai.request.top_k")),
        finish_reason=_finish(signal),
        ttft_ms=first,
        duration_ms=float(end - start) if signal.kind == "span" and signal.ended and end >= start else None,
        prompt_tokens=prompted,
        response_tokens=answered,
        cached_tokens=signal.count(
            "gen_ai.usage.cache_read.input_tokens",
            "gen_ai.usage.cache_read_input_tokens",
            "ai.usage.cachedInputTokens",
            "llm.token_count.prompt_details.cache_read",
        ),
        capture_error="no_token_ids",
    )
    turn.steps += 1
    events.append(ev.Completion(**sessions.envelope(signal, turn, end, f"{completion}/completion"), payload=payload))
    return Mapped(events=events)


def _round(sessions: Sessions, own: str, call: Call) -> str | None:
    """Return a new call's completion id; None where the call was told before, by a log record or by another layer of the program.

    All rounds of a turn may carry one id: they are calls of their own where they have other tokens and do not lie within each other.
    """
    told = sessions.calls.get(own) or []
    for other in told:
        spans = other.end_ms > other.start_ms and call.end_ms > call.start_ms
        within = other.start_ms < call.end_ms and call.start_ms < other.end_ms
        if (spans and within) or (other.tokens == call.tokens and (not spans or any(call.tokens))):
            return None
    sessions.calls.put(own, [*told, call][-_ROUNDS:])
    return own if not told else f"{own[:100]}/{call.end_ms}"


def _finish(signal: Signal) -> str | None:
    reasons = signal.get("gen_ai.response.finish_reasons", "gen_ai.response.finish_reason", "gen_ai.completion.0.finish_reason")
    first = reasons[0] if isinstance(reasons, list) and reasons else reasons
    if isinstance(first, str) and first.startswith("["):  # a list that was turned into text
        listed = parse(first)
        first = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(first, str) and first:
        return finish_reason(first)
    return "error" if signal.failed or signal.text("error.type") else None


def finish_reason(given: str) -> str:
    """Return a provider's reason in the contract's words."""
    return _FINISH.get(given.lower(), given.lower()[:40])


def _tool(sessions: Sessions, signal: Signal) -> Mapped:
    placed = _placed(sessions, signal)
    if isinstance(placed, str):
        return Mapped(reason=placed)
    turn, start, end = placed
    verdict = failure(signal) or ev.ResultClass.OK
    call_id = (
        signal.text("gen_ai.tool.call.id", "tool.call.id", "tool_call.id", "ai.toolCall.id") or f"{signal.trace_id}:{signal.span_id}"
    )[:128]
    arguments = signal.get("gen_ai.tool.call.arguments", "ai.toolCall.args", "traceloop.entity.input", "input.value")
    result = signal.get("gen_ai.tool.call.result", "gen_ai.tool.message", "ai.toolCall.result", "traceloop.entity.output", "output.value")
    named = signal.text("gen_ai.tool.name", "tool.name", "ai.toolCall.name", "traceloop.entity.name")
    call = ev.ToolCallPayload(
        tool_call_id=call_id,
        name=(named or signal.name.removeprefix("execute_tool ").strip())[:128],
        arguments_valid=verdict is not ev.ResultClass.INVALID_ARGUMENTS,
        arguments_hash=arguments_hash(sessions, arguments),
        destructive=destroys_by_call(named or signal.name, arguments),
    )
    size = None if result is None else len((result if isinstance(result, str) else repr(result)).encode("utf-8", "replace"))
    answer = ev.ToolResultPayload(
        tool_call_id=call_id,
        result_class=verdict,
        duration_ms=float(end - start) if signal.ended and end >= start else None,
        output_bytes=size,
    )
    events = sessions.openings(signal, turn, start)
    seed = f"{signal.trace_id}:{signal.span_id}:{call_id}"
    events.append(ev.ToolCall(**sessions.envelope(signal, turn, start, f"{seed}/call"), payload=call))
    events.append(ev.ToolResult(**sessions.envelope(signal, turn, end, f"{seed}/result"), payload=answer))
    return Mapped(events=events)


def arguments_hash(sessions: Sessions, arguments: object) -> str | None:
    """Return the keyed hash of a tool call's arguments; None where they were not captured."""
    if arguments is None:
        return None
    return sessions.source.keyed("arguments", arguments if isinstance(arguments, str) else repr(arguments))


def failure(signal: Signal) -> ev.ResultClass | None:
    """Say how a tool's span failed; None when it did not. An error that says nothing is taken for the environment's."""
    kind = signal.text("error.type")
    if not signal.failed and kind is None:
        return None
    return failure_in(f"{kind or ''} {signal.message} {signal.text('error.message', 'exception.message') or ''}")


def failure_in(words: str) -> ev.ResultClass:
    """Say how a tool failed by what is said about it."""
    return next((found for found, pattern in _FAILURES if pattern.search(words[:1_000])), ev.ResultClass.UNEXPECTED_ENVIRONMENT)


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


def _body(signal: Signal) -> Mapping[str, Any]:
    return signal.body if isinstance(signal.body, dict) else {}
