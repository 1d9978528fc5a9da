"""What coding agents of the command line log about themselves: Claude Code, Codex, Gemini CLI.

Takes: their log records, by the names they give them. Gives: `turn_started` for a prompt, `completion` for a model call, `tool_call` and
`tool_result` for a tool's result and for a tool that was refused, and for tools that edit `edit_proposed` with `edit_decided`: a result
is accepted, by a person or by a mode that the person chose; a refusal is rejected.
Leaves out: records that say the same thing a second way (requests, decisions that a result follows), sizes of edits, hooks, costs.

None of them is a span, and few name a trace. A turn is a prompt: Claude Code and Gemini CLI give it an id that every record of it
carries; in Codex it is the conversation's latest prompt. Codex names a call's tokens in the record of its last streamed event.

Source: Claude Code documentation, Monitoring (2026); openai/codex, codex-rs/otel (2026); google-gemini/gemini-cli, docs/cli/telemetry.md.
"""

from collections.abc import Callable
from typing import Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers.engine import Mapped
from pipelines.importers.otlp_genai import arguments_hash, failure_in, finish_reason
from pipelines.importers.otlp_sessions import Sessions, Turn
from pipelines.importers.otlp_wire import Signal, number, whole_number
from pipelines.importers.records import parse
from pipelines.importers.texts import digest, identifier, mapping

PREFIXES: Final = ("claude_code.", "codex.", "gemini_cli.")
TOOLS: Final = frozenset({"claude_code.tool_result", "codex.tool_result", "gemini_cli.tool_call"})
PROMPTS: Final = frozenset(f"{prefix}user_prompt" for prefix in PREFIXES)
_CONVERSATION: Final = ("conversation.id", "session.id", "session_id")
_PROMPT: Final = ("prompt.id", "prompt_id")
_EDITS: Final = frozenset({"Edit", "MultiEdit", "Write", "NotebookEdit", "apply_patch", "replace", "write_file"})
_REFUSED: Final = frozenset({"reject", "denied", "abort", "cancel"})
_YES: Final = (True, "true")


def record(sessions: Sessions, signal: Signal) -> Mapped:
    """Map one log record whose name begins with one of `PREFIXES`."""
    known = _KNOWN.get(signal.name)
    if known is None:
        return Mapped(reason=f"not_a_session_event:{signal.name[:60]}")
    if signal.at_ms is None:
        return Mapped(reason="missing_field:timeUnixNano")
    if signal.around(*_CONVERSATION) is None:
        return Mapped(reason="missing_field:session.id")
    return known(sessions, signal, signal.at_ms)


def _turn(sessions: Sessions, signal: Signal, *, prompt: str | None = None) -> Turn:
    """Return a record's turn: its prompt's, else the conversation's latest."""
    conversation = identifier(signal.around(*_CONVERSATION), "unnamed")
    own = signal.text(*_PROMPT) or prompt
    latest = sessions.prompts.get(conversation)
    if own is None and latest is not None:
        return latest
    key = f"{conversation}/{own or 'start'}"
    turn = sessions.own(key, conversation)
    return sessions.prompts.put(conversation, turn)


def _prompt(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    turn = _turn(sessions, signal, prompt=str(at))
    text = signal.text("prompt")
    sessions.expect(turn, at)
    return Mapped(events=sessions.openings(signal, turn, at, text=None if text in (None, "<REDACTED>", "[REDACTED]") else text))


def _call(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    if signal.name == "codex.sse_event" and signal.text("event.kind") != "response.completed":
        return Mapped(reason="not_a_session_event:codex.sse_event")
    turn, took = _turn(sessions, signal), None if signal.name == "codex.sse_event" else _duration(signal, at)  # Codex: of the event
    start, failed = at - int(took or 0), signal.name.endswith("_error")
    prompted, cached = signal.count("input_tokens", "input_token_count"), signal.count(*_CACHED)
    if signal.name.startswith("claude_code."):  # whose input does not count what came from the cache or went into it
        prompted += cached + signal.count("cache_creation_tokens")
    thought = signal.count("thoughts_token_count")  # Gemini: beside the output; Claude Code's and Codex's output holds them
    own = signal.text("request_id") or digest(f"{turn.turn_id}/{at}/{signal.get('event.sequence')}/{prompted}")
    events = sessions.openings(signal, turn, start)
    payload = ev.CompletionPayload(
        completion_id=identifier(own, "unnamed"),
        step=turn.steps,
        model=(signal.text("model", "model_name") or "")[:128],
        finish_reason="error" if failed else _finish(signal),
        ttft_ms=number(signal.get("ttft_ms")),
        duration_ms=took,
        prompt_tokens=min(prompted, 2**31 - 1),
        response_tokens=min(signal.count("output_tokens", "output_token_count") + thought, 2**31 - 1),
        cached_tokens=cached,
        capture_error="no_token_ids",
    )
    turn.steps += 1
    events.append(ev.Completion(**sessions.envelope(signal, turn, at, f"{own}/completion"), payload=payload))
    return Mapped(events=events)


_CACHED: Final = ("cache_read_tokens", "cached_token_count", "cached_content_token_count")


def _finish(signal: Signal) -> str | None:
    given = signal.get("finish_reason", "finish_reasons", "stop_reason")
    reason = given[0] if isinstance(given, list) and given else given
    return finish_reason(reason) if isinstance(reason, str) and reason else None


def _tool(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    if signal.get("success") in _YES:
        return _answered(sessions, signal, at, ev.ResultClass.OK)
    words = f"{signal.text('error_type') or ''} {signal.text('error', 'error.message') or ''}"
    return _answered(sessions, signal, at, ev.ResultClass.USER_ABORTED if _refused(signal) else failure_in(words))


def _decision(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    """A refusal, of which nothing else is told; what was allowed has a result."""
    if not _refused(signal):
        return Mapped(reason=f"not_a_session_event:{signal.name}")
    return _answered(sessions, signal, at, ev.ResultClass.USER_ABORTED)


def _refused(signal: Signal) -> bool:
    return (signal.text("decision", "decision_type") or "").lower() in _REFUSED


def _answered(sessions: Sessions, signal: Signal, at: int, verdict: ev.ResultClass) -> Mapped:
    """Return a tool's call, its result, and the edit that it was, each once: a result may follow a refusal and say it again."""
    turn, took, name = _turn(sessions, signal), _duration(signal, at), signal.text("tool_name", "function_name") or ""
    own = signal.text("tool_use_id", "call_id", "tool_call_id")
    call_id = identifier(own, digest(f"{name}/{at}/{signal.get('event.sequence', 'function_args')}"))
    if not sessions.edits.first(f"{turn.session_id}/{call_id}/answered", True):
        return Mapped(reason="not_a_session_event:told_before")
    start, arguments = at - int(took or 0), signal.get("tool_input", "tool_parameters", "arguments", "function_args")
    keyed = sessions.source.keyed
    call = ev.ToolCallPayload(
        tool_call_id=call_id,
        name=name[:128],
        arguments_valid=verdict is not ev.ResultClass.INVALID_ARGUMENTS,
        arguments_hash=arguments_hash(sessions, arguments),
        destructive=destroys_by_call(name, arguments),
    )
    answer = ev.ToolResultPayload(tool_call_id=call_id, result_class=verdict, duration_ms=took, output_bytes=_size(signal))
    events = sessions.openings(signal, turn, start)
    events.append(ev.ToolCall(**sessions.envelope(signal, turn, start, f"{call_id}/call"), payload=call))
    events.append(ev.ToolResult(**sessions.envelope(signal, turn, at, f"{call_id}/result"), payload=answer))
    if name in _EDITS and verdict in (ev.ResultClass.OK, ev.ResultClass.USER_ABORTED):
        path = mapping(parse(arguments) if isinstance(arguments, str) else arguments).get("file_path")
        hashed = keyed("path", path if isinstance(path, str) else "")
        proposed = ev.EditProposedPayload(edit_id=call_id, tool_call_id=call_id, path_hash=hashed)
        events.append(ev.EditProposed(**sessions.envelope(signal, turn, start, f"{call_id}/proposed"), payload=proposed))
        decided = ev.EditDecidedPayload(edit_id=call_id, decision="accepted" if verdict is ev.ResultClass.OK else "rejected")
        events.append(ev.EditDecided(**sessions.envelope(signal, turn, at, f"{call_id}/{decided.decision}"), payload=decided))
    return Mapped(events=events)


def _size(signal: Signal) -> int | None:
    output, size = signal.text("output"), whole_number(signal.get("tool_result_size_bytes", "content_length"))
    if output is not None:
        return len(output.encode("utf-8", "replace"))
    return size if size is not None and 0 <= size < 2**31 else None


def _duration(signal: Signal, at: int) -> float | None:
    took = number(signal.get("duration_ms", "duration"))
    return took if took is not None and 0 <= took <= at else None


_KNOWN: Final[dict[str, Callable[[Sessions, Signal, int], Mapped]]] = {
    "claude_code.user_prompt": _prompt,
    "claude_code.api_request": _call,
    "claude_code.api_error": _call,
    "claude_code.tool_result": _tool,
    "claude_code.tool_decision": _decision,
    "codex.user_prompt": _prompt,
    "codex.sse_event": _call,
    "codex.tool_result": _tool,
    "codex.tool_decision": _decision,
    "gemini_cli.user_prompt": _prompt,
    "gemini_cli.api_response": _call,
    "gemini_cli.api_error": _call,
    "gemini_cli.tool_call": _tool,
}
