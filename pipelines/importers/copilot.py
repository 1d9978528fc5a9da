"""What VS Code Copilot's telemetry says about edits, about what people thought of them, and about tools in files without spans.

Takes: log records named `copilot_chat.*`. Gives: `edit_survival`, `edit_decided` with the `edit_proposed` they are about,
`feedback`, `session_started`; `tool_call` and `tool_result` where no span tells them. Copilot's model calls and tools are spans of the
GenAI conventions (`otlp_genai.py`), but its file exporter writes an empty object for a span.

Copilot gives an edit no id: here it is the request and the file. Survival is measured up to a quarter of an hour after its trace has
ended, in records that name no trace; but the request is the response id of all of its model calls, and that gives the turn. Where no
call was seen, the request opens a turn of its own, in the conversation where a record names it, else in the editor's window
(`session.id` of the resource). Inline edits tell no request when they are decided: the survival of a file that was measured from the
same moment on is that edit's.
Leaves out: sizes of edits (Copilot tells them for single hunks only), copies and insertions from the chat, summaries of context.

Source: microsoft/vscode, extensions/copilot, docs/monitoring/agent_monitoring.md and src/platform/otel (2026).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from pipelines import events as ev
from pipelines.importers.engine import Mapped
from pipelines.importers.otlp_genai import failure
from pipelines.importers.otlp_sessions import Sessions, Turn, round_key
from pipelines.importers.otlp_wire import Signal, number, whole_number
from pipelines.importers.texts import digest, identifier

PREFIX: Final = "copilot_chat."
_START: Final = "copilot_chat.session.start"
_ROUND: Final = "copilot_chat.agent.turn"
_TOOL: Final = "copilot_chat.tool.call"
_SAME_EDIT_MS: Final = 2_000
"""Between an inline edit's decision and the first look at what became of it; some 25 were seen."""
_PATH: Final = ("copilot_chat.file.relative_path", "file_path")
_DECISIONS: Final[dict[str, Literal["accepted", "rejected"]]] = {"accepted": "accepted", "rejected": "rejected"}
_RATINGS: Final = {"positive": 1.0, "negative": -1.0}


def record(sessions: Sessions, signal: Signal) -> Mapped:
    """Map one log record whose name begins with `copilot_chat.`."""
    name = signal.name.partition(":")[0].strip()
    known = _KNOWN.get(name)
    if known is None:
        return Mapped(reason=f"not_a_session_event:{name[:60]}")
    return Mapped(reason="missing_field:timeUnixNano") if signal.at_ms is None else known(sessions, signal, signal.at_ms)


def learn(sessions: Sessions, signal: Signal) -> None:
    """Take in which conversation a trace is of, and which model calls, as this program's other records do not say it."""
    if signal.kind != "log" or not signal.trace_id:
        return
    if signal.name == _START and (named := signal.text("session.id")):
        sessions.name(signal.trace_id, named)
    elif signal.name.startswith(_ROUND) and (turn := sessions.turn(signal)) is not None:
        sessions.rounds.put(round_key(signal), turn)


def _turn(sessions: Sessions, signal: Signal) -> Turn | None:
    request = signal.text("request_id")
    if request is None:
        return sessions.turn(signal)
    return sessions.known(request) or sessions.completions.get(request) or sessions.turn(signal, own_id=request)


def _place(signal: Signal) -> str:
    return f"{signal.around('session.id')}/{signal.text(*_PATH)}"


def _edit(sessions: Sessions, signal: Signal, turn: Turn, at: int) -> tuple[str, list[ev.Event]]:
    """Return an edit's id, and its proposal when this is the first that is heard of it."""
    path = sessions.source.keyed("path", signal.text(*_PATH) or "")
    edit_id = f"{(signal.text('request_id') or turn.turn_id)[:64]}/{path[:16]}"
    events = sessions.openings(signal, turn, at)
    if sessions.edits.first(f"{turn.session_id}/{edit_id}", True):
        payload = ev.EditProposedPayload(
            edit_id=edit_id,
            path_hash=path,
            lines_added=min(max(whole_number(signal.get("lines_added")) or 0, 0), 10**6),
            lines_removed=min(max(whole_number(signal.get("lines_removed")) or 0, 0), 10**6),
        )
        events.append(ev.EditProposed(**sessions.envelope(signal, turn, at, f"{edit_id}/proposed"), payload=payload))
    return edit_id, events


def _survival(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    turn = _turn(sessions, signal)
    if turn is None:
        return Mapped(reason="missing_field:request_id")
    four_gram, no_revert = number(signal.get("survival_rate_four_gram")), number(signal.get("survival_rate_no_revert"))
    delay = number(signal.get("time_delay_ms"))
    if four_gram is None or no_revert is None or delay is None:
        return Mapped(reason="missing_field:survival_rate")
    if not (0 <= four_gram <= 1 and 0 <= no_revert <= 1 and 0 <= delay <= at):
        return Mapped(reason="unmappable")
    inline = sessions.inline.get(_place(signal)) if signal.text("edit_source") == "inline_chat" else None
    if inline is not None and abs(at - int(delay) - inline[0]) <= _SAME_EDIT_MS:
        edit_id, turn, events = inline[1], inline[2], []
    else:
        edit_id, events = _edit(sessions, signal, turn, at - int(delay))
    payload = ev.EditSurvivalPayload(
        edit_id=edit_id,
        horizon_s=round(delay / 1000),
        survival_four_gram=four_gram,
        survival_no_revert=no_revert,
        branch_changed=signal.get("did_branch_change") in (True, 1, "true"),
    )
    seed = f"{edit_id}/{signal.text('edit_source')}/survival/{payload.horizon_s}"
    events.append(ev.EditSurvival(**sessions.envelope(signal, turn, at, seed), payload=payload))
    return Mapped(events=events)


def _feedback_on_file(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    decision = _DECISIONS.get(signal.text("outcome") or "")
    if decision is None:  # saved: the file went to disk, the edit is still open
        return Mapped(reason="not_a_session_event:copilot_chat.edit.feedback")
    turn = _turn(sessions, signal)
    return Mapped(reason="missing_field:request_id") if turn is None else _decided(sessions, signal, turn, at, decision)


def _hunk(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    """A part of an edit: rejecting one part keeps the rest, and the file's own decision, which follows, outweighs it."""
    decision = _DECISIONS.get(signal.text("outcome") or "")
    turn = _turn(sessions, signal)
    if decision is None or turn is None:
        return Mapped(reason="missing_field:outcome" if decision is None else "missing_field:request_id")
    return _decided(sessions, signal, turn, at, "partly" if decision == "rejected" else decision)


def _inline(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    accepted = signal.get("accepted")
    turn = sessions.turn(signal, own_id=signal.text("request_id") or f"inline-{signal.around('session.id') or ''}-{at}")
    if not isinstance(accepted, bool) or turn is None:
        return Mapped(reason="missing_field:accepted")
    mapped = _decided(sessions, signal, turn, at, "accepted" if accepted else "rejected")
    edit_id = next(event.payload.edit_id for event in mapped.events if isinstance(event, ev.EditDecided))
    sessions.inline.put(_place(signal), (at, edit_id, turn))
    return mapped


def _decided(
    sessions: Sessions, signal: Signal, turn: Turn, at: int, decision: Literal["accepted", "rejected", "partly", "undone"]
) -> Mapped:
    edit_id, events = _edit(sessions, signal, turn, at)
    payload = ev.EditDecidedPayload(edit_id=edit_id, decision=decision)
    events.append(ev.EditDecided(**sessions.envelope(signal, turn, at, f"{edit_id}/{decision}/{at}"), payload=payload))
    return Mapped(events=events)


def _vote(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    score, turn = _RATINGS.get(signal.text("rating") or ""), _turn(sessions, signal)
    if score is None or turn is None:
        return Mapped(reason="missing_field:rating" if score is None else "missing_field:request_id")
    events = sessions.openings(signal, turn, at)
    payload = ev.FeedbackPayload(source="copilot", score=score)
    events.append(ev.Feedback(**sessions.envelope(signal, turn, at, f"{turn.turn_id}/vote/{at}"), payload=payload))
    return Mapped(events=events)


def _session(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    name = signal.around("session.id")
    if name is None:
        return Mapped(reason="missing_field:session.id")
    opened = sessions.opening(signal, Turn(session_id=identifier(name, "unnamed"), turn_id="start"), at)
    return Mapped(events=opened, reason=None if opened else "not_a_session_event:told_before")


def tells_tool(sessions: Sessions, signal: Signal) -> bool:
    """Whether a record tells a tool's call that no span of the file tells."""
    if signal.kind != "log" or not signal.name.startswith(_TOOL) or not (sessions.whole and signal.printed):
        return False
    turn = sessions.turn(signal)
    return turn is not None and not turn.tools_told


def _tool(sessions: Sessions, signal: Signal, at: int) -> Mapped:
    turn = sessions.turn(signal)
    if turn is None:
        return Mapped(reason="missing_field:traceId")
    if not tells_tool(sessions, signal):
        return Mapped(reason="not_a_session_event:told_by_its_span")
    success, took, error = signal.get("success"), number(signal.get("duration_ms")), signal.text("error.type")
    duration = took if took is not None and 0 <= took <= at else None
    failed = success in (False, "false") or error is not None
    verdict = failure(replace(signal, failed=True)) or ev.ResultClass.OK if failed else ev.ResultClass.OK
    name, start = (signal.text("gen_ai.tool.name") or "")[:128], at - int(duration or 0)
    call_id = digest(f"{signal.trace_id}/{signal.span_id}/{name}/{at}/{took}")
    call = ev.ToolCallPayload(tool_call_id=call_id, name=name, arguments_valid=verdict is not ev.ResultClass.INVALID_ARGUMENTS)
    answer = ev.ToolResultPayload(tool_call_id=call_id, result_class=verdict, duration_ms=duration)
    events = sessions.openings(signal, turn, start)
    events.append(ev.ToolCall(**sessions.envelope(signal, turn, start, f"{call_id}/call"), payload=call))
    events.append(ev.ToolResult(**sessions.envelope(signal, turn, at, f"{call_id}/result"), payload=answer))
    return Mapped(events=events)


_KNOWN: Final[dict[str, Callable[[Sessions, Signal, int], Mapped]]] = {
    "copilot_chat.edit.survival": _survival,
    "copilot_chat.edit.feedback": _feedback_on_file,
    "copilot_chat.edit.hunk.action": _hunk,
    "copilot_chat.inline.done": _inline,
    "copilot_chat.user.feedback": _vote,
    _START: _session,
    _TOOL: _tool,
}
