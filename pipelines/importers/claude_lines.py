"""One Claude Code transcript line -> session events, pure.

Takes: parsed lines in file order. Gives: events, and for each line what it was: a carrier of events, or a reason why not.
Nothing here reads a clock or makes a random number: the same transcript gives byte-identical events with the same ids, so that a
second import is harmless.

What a line is (observed in transcripts of Claude Code 1.0 to 2.1):
- One assistant message spans several lines (one content block each) with one message id; each repeats the usage, and only the
  last has the final output count. It becomes one `completion`, made when its file ends.
- A user line holds a person's words (a string, or text and image blocks), or tool results, or the interrupt marker, or text that the
  program wrote in the user's name: compaction summaries, subagent prompts, command echoes, meta notes. Only a person's words open a
  turn.
- A rejected tool use is an error result whose text begins "The user doesn't want to".

Leaves out: token ids and log-probabilities (there are none: these events feed rewards and calibration, never on-policy training),
whether an edit was undone later, thinking texts, and assistant texts but for what they are (a question, a refusal).
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.declining import declines
from pipelines.importers.claude_text import (
    EDIT_TOOLS,
    INTERRUPT,
    REJECTION,
    edit_size,
    person_text,
    result_class,
    text_of,
    user_text_kind,
)
from pipelines.importers.engine import Mapped
from pipelines.importers.records import Record
from pipelines.importers.sessions import NAME_CHARS, Stamp, envelope
from pipelines.importers.texts import clean, identifier, stable_id, time_ms
from pipelines.reading import ends_in_question
from pipelines.redaction import MESSAGE_MAX_CHARS, features, redact

_FINISH: Final = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
_USAGE: Final[tuple[str, ...]] = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_EXIT_CODE: Final = re.compile(r"\s*(?:Error: )?Exit code (\d{1,3})\b")


@dataclass(slots=True)
class _Reply:
    """An assistant message under assembly."""

    turn_id: str
    occurred_at_ms: int
    step: int
    policy: str
    usage: dict[str, int]
    finish_reason: str | None
    session: "_Session"
    said: str = ""
    """The last of its texts for the user."""
    calls: int = 0


@dataclass(slots=True)
class _Session:
    """What a session's later lines need from its earlier ones."""

    session_id: str
    repository: str | None
    user_turns: list[tuple[int, str]] = field(default_factory=list)
    """(time, turn id), in file order."""
    steps: dict[str, int] = field(default_factory=dict)
    """Completions seen by turn."""
    edits: dict[str, str] = field(default_factory=dict)
    """Tool call id -> edit id, until decided."""
    started: bool = False
    last_ms: int = 0
    last_uuid: str = ""
    replied_ms: int | None = None
    """When the main chain's last completion was written."""

    def turn_at(self, ms: int, *, sidechain: bool) -> str:
        """Return the turn a line belongs to: the latest one, or for a subagent (its own file) the latest one before `ms`."""
        turns = self.user_turns
        if not turns:
            return f"{self.session_id}/opening"
        if not sidechain:
            return turns[-1][1]
        return turns[max(bisect_right(turns, (ms, "\uffff")) - 1, 0)][1]


class Mapper:
    """Turns the lines of one import into events; holds what later lines need from earlier ones. An `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._sessions: dict[str, _Session] = {}
        self._replies: dict[str, _Reply] = {}
        self._made: set[str] = set()
        self._last_ms: int | None = None

    def identity(self, record: Record) -> str | None:
        """Return the line's uuid."""
        own = record.value.get("uuid")
        return None if not own else own if isinstance(own, str) else repr(own)

    def facts(self, record: Record) -> Iterator[str]:
        """Name what the line itself says, independent of the mapping."""
        line = record.value
        message = line.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            if line.get("type") == "user" and not line.get("isMeta"):
                yield "user_messages"
            return
        for block in content if isinstance(content, list) else ():
            if not isinstance(block, dict):
                continue
            kind = block.get("type")
            if kind == "tool_use":
                yield "tool_calls"
                name = block.get("name")
                if isinstance(name, str) and name in EDIT_TOOLS:
                    yield "edits"
            elif kind == "tool_result" and block.get("is_error"):
                yield "tool_errors"
                if REJECTION in json.dumps(block.get("content")):
                    yield "tool_rejections"
            elif kind == "text" and INTERRUPT in str(block.get("text", "")):
                yield "interrupts"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one line; a duplicate (`emit` false) only gives context (which turn is open), no event."""
        line, stem, number = record.value, path.stem, record.number
        kind, message = line.get("type"), line.get("message")
        if not isinstance(message, dict):
            return Mapped(reason=f"not_a_session_event:{kind[:40] if isinstance(kind, str) and kind else 'untyped'}")
        at = time_ms(line.get("timestamp"))
        at = self._last_ms if at is None else at
        if at is None:
            return Mapped(reason="missing_field:timestamp")
        self._last_ms = at
        own = line.get("uuid")
        own = identifier(own, f"{stem}:{number}")
        session = self._session(line, stem)
        made: list[ev.Event] = []
        if kind == "assistant":
            reason = self._assistant(session, line, message, own, at, made)
        else:
            reason = self._user(session, line, message, own, at, made)
        if not emit:
            return Mapped(reason=reason)
        if made and not session.started:
            session.started = True
            seed = f"{session.session_id}/started"
            payload = ev.SessionStartedPayload(surface="claude-code", repository=session.repository)
            made.insert(0, ev.SessionStarted(**self._envelope(session, None, at, seed), payload=payload))
        if made or reason is None:
            session.last_ms, session.last_uuid = max(session.last_ms, at), own
        return Mapped(events=made, reason=reason)

    def end_file(self) -> Iterator[ev.Event]:
        """Yield the completions of the file that just ended."""
        self._last_ms = None
        for message_id, reply in self._replies.items():
            usage = reply.usage
            cached = usage["cache_read_input_tokens"]
            payload = ev.CompletionPayload(
                completion_id=message_id,
                step=reply.step,
                model=reply.policy,
                finish_reason=reply.finish_reason,
                prompt_tokens=usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached,
                response_tokens=usage["output_tokens"],
                cached_tokens=cached,
                capture_error="no_token_ids",
                ends_in_question=ends_in_question(reply.said) if reply.said and not reply.calls else None,
                refused=declines(reply.said) if reply.said and not reply.calls else None,
            )
            yield ev.Completion(
                **self._envelope(reply.session, reply.turn_id, reply.occurred_at_ms, f"completion/{message_id}"), payload=payload
            )
        self._replies.clear()

    def end(self) -> Iterator[ev.Event]:
        """Yield one `session_ended` a session; a transcript that has grown since gets another at its new end."""
        for session in self._sessions.values():
            if session.started:
                seed = f"{session.session_id}/ended/{session.last_uuid}"
                yield ev.SessionEnded(**self._envelope(session, None, session.last_ms, seed), payload=ev.SessionEndedPayload(reason="idle"))

    def _session(self, line: Mapping[str, Any], stem: str) -> _Session:
        name = line.get("sessionId")
        name = identifier(name, stem)
        if name not in self._sessions:
            folder = line.get("cwd")
            repository = self._stamp.keyed("repository", folder) if isinstance(folder, str) and folder else None
            self._sessions[name] = _Session(session_id=name, repository=repository)
        return self._sessions[name]

    def _envelope(self, session: _Session, turn_id: str | None, at: int, seed: str) -> dict[str, Any]:
        event_id = stable_id(seed, at, space=self._stamp.format)
        return envelope(self._stamp, session_id=session.session_id, turn_id=turn_id, at=at, event_id=event_id)

    def _assistant(
        self, session: _Session, line: Mapping[str, Any], message: Mapping[str, Any], own: str, at: int, made: list[ev.Event]
    ) -> str | None:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        sidechain = bool(line.get("isSidechain"))
        turn = session.turn_at(at, sidechain=sidechain)
        identity = message.get("id")
        identity = identifier(identity, own)
        synthetic = message.get("model") == "<synthetic>"
        if not synthetic:
            self._reply(session, message, identity, turn, at)
            if not sidechain:
                session.replied_ms = at
        reply = None if synthetic else self._replies.get(identity)
        for index, block in enumerate(blocks):
            name = block.get("type") if isinstance(block, dict) else None
            if name == "tool_use":
                self._tool_use(session, block, identity, turn, at, f"{own}/{index}", made)
            if reply is not None:
                reply.calls += name == "tool_use"
                reply.said = text_of([block]) or reply.said
        return "not_a_session_event:synthetic_message" if synthetic and not made else None

    def _reply(self, session: _Session, message: Mapping[str, Any], identity: str, turn: str, at: int) -> None:
        reply = self._replies.get(identity)
        if reply is None:
            if identity in self._made:
                return  # the rest of a message whose first lines were in another file
            self._made.add(identity)
            step = session.steps.get(turn, 0)
            session.steps[turn] = step + 1
            usage: dict[str, int] = dict.fromkeys(_USAGE, 0)
            reply = _Reply(turn, at, step, clean(str(message.get("model") or ""), limit=NAME_CHARS), usage, None, session)
            self._replies[identity] = reply
        reported = message.get("usage")
        for name, count in reported.items() if isinstance(reported, dict) else ():
            if name in reply.usage and isinstance(count, int):
                reply.usage[name] = max(reply.usage[name], count)
        reason = message.get("stop_reason")
        if isinstance(reason, str):
            reply.finish_reason = _FINISH.get(reason, clean(reason, limit=NAME_CHARS))

    def _tool_use(
        self, session: _Session, block: Mapping[str, Any], completion: str, turn: str, at: int, seed: str, made: list[ev.Event]
    ) -> None:
        arguments = block.get("input")
        call_id = block.get("id")
        call_id = identifier(call_id, seed)
        name = block.get("name")
        name = clean(name, limit=NAME_CHARS) if isinstance(name, str) else ""
        payload = ev.ToolCallPayload(
            tool_call_id=call_id,
            completion_id=completion,
            name=name,
            arguments_valid=isinstance(arguments, dict),
            arguments_hash=self._stamp.keyed("arguments", repr(arguments)),
            destructive=destroys_by_call(name, arguments),
        )
        made.append(ev.ToolCall(**self._envelope(session, turn, at, f"{seed}/call"), payload=payload))
        if name in EDIT_TOOLS:
            arguments = arguments if isinstance(arguments, dict) else {}
            path = arguments.get("file_path", arguments.get("notebook_path"))
            size = edit_size(name, arguments)
            edit = ev.EditProposedPayload(
                edit_id=call_id,
                tool_call_id=call_id,
                path_hash=self._stamp.keyed("path", path if isinstance(path, str) else ""),
                lines_added=size.lines_added,
                lines_removed=size.lines_removed,
                chars_added=size.chars_added,
                chars_removed=size.chars_removed,
            )
            session.edits[call_id] = call_id
            made.append(ev.EditProposed(**self._envelope(session, turn, at, f"{seed}/edit"), payload=edit))

    def _user(
        self, session: _Session, line: Mapping[str, Any], message: Mapping[str, Any], own: str, at: int, made: list[ev.Event]
    ) -> str | None:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        turn = session.turn_at(at, sidechain=bool(line.get("isSidechain")))
        results = interrupts = images = 0
        for index, block in enumerate(blocks):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_result":
                results += 1
                self._tool_result(session, line, block, turn, at, f"{own}/{index}", made)
            elif kind == "tool_use":  # seen in no real transcript, but counted as a call wherever it stands
                self._tool_use(session, block, own, turn, at, f"{own}/{index}", made)
            elif kind == "image":
                images += 1
            elif kind == "text" and str(block.get("text", "")).lstrip().startswith(INTERRUPT):
                interrupts += 1
                target = "tool" if "for tool use" in block["text"] else "turn"
                payload = ev.InterruptedPayload(by="user", target=target)
                made.append(ev.Interrupted(**self._envelope(session, turn, at, f"{own}/{index}/interrupted"), payload=payload))
        if results or interrupts:
            return None
        if line.get("type") != "user":
            return None if made else "not_a_session_event:unknown_message"
        text = text_of(content)
        reason = user_text_kind(line, text) if text or not images else None
        if reason is None:
            self._turn(session, person_text(text), images, own, at, made)
            return None
        return None if made else f"not_a_session_event:{reason}"

    def _turn(self, session: _Session, text: str, images: int, own: str, at: int, made: list[ev.Event]) -> None:
        derived = features(text)
        index = len(session.user_turns)
        session.user_turns.append((at, own[:128]))
        kept = self._stamp.keep_text and self._stamp.consent != "none"
        payload = ev.TurnStartedPayload(
            turn_index=index,
            message=redact(text)[0][:MESSAGE_MAX_CHARS] if kept else None,
            message_chars=derived.chars,
            language=derived.language,
            stack_traces=derived.stack_traces,
            diffs=derived.diffs,
            images=images,
            reply_delay_ms=None if session.replied_ms is None else max(at - session.replied_ms, 0),
        )
        made.append(ev.TurnStarted(**self._envelope(session, own[:128], at, f"{own}/turn"), payload=payload))

    def _tool_result(
        self, session: _Session, line: Mapping[str, Any], block: Mapping[str, Any], turn: str, at: int, seed: str, made: list[ev.Event]
    ) -> None:
        text = text_of(block.get("content"))
        failed = bool(block.get("is_error"))
        verdict = result_class(text) if failed else ev.ResultClass.OK
        call_id = block.get("tool_use_id")
        call_id = identifier(call_id, seed)
        details = line.get("toolUseResult")
        duration = details.get("durationMs", details.get("totalDurationMs")) if isinstance(details, dict) else None
        exit_code = _EXIT_CODE.match(text) if failed else None
        payload = ev.ToolResultPayload(
            tool_call_id=call_id,
            result_class=verdict,
            duration_ms=float(duration) if isinstance(duration, int | float) and duration >= 0 else None,
            exit_code=int(exit_code[1]) if exit_code else None,
            output_bytes=len(text.encode("utf-8", "replace")),
        )
        made.append(ev.ToolResult(**self._envelope(session, turn, at, f"{seed}/result"), payload=payload))
        edit_id = session.edits.pop(call_id, None)
        if edit_id is None:
            return
        decision: Literal["accepted", "rejected"] | None = None if failed else "accepted"
        if verdict is ev.ResultClass.USER_ABORTED:
            decision = "rejected"
        if decision is not None:  # a failed edit never reached the user: nothing was decided
            decided = ev.EditDecidedPayload(edit_id=edit_id, decision=decision)
            made.append(ev.EditDecided(**self._envelope(session, turn, at, f"{seed}/decided"), payload=decided))
