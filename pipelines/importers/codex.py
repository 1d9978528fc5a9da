"""Codex rollouts (`~/.codex/sessions/**/rollout-*.jsonl`): JSON lines -> session events.

Takes and gives: see `registry.py`. What a line is (observed in rollouts of Codex CLI 0.1 to 0.14x, and in the recorder's source):
- `{timestamp, type, payload}` with `session_meta`, `turn_context`, `response_item` (what the model saw and said), `event_msg` (what
  the program showed) and `compacted`; the first versions wrote the items bare, with one time in the first line.
- A person's message stands twice, as item and as `user_message`, in any order. Items of role user are also how the program speaks to
  the model (environment, instructions, notes of an abort): those open no turn.
- `token_count` tells a request's usage, before or after the items of its reply, and is repeated with the same totals.
- A command's output is a JSON text with an exit code, or plain text with a heading, or a list of blocks.
- A fork begins with a copy of its ancestor's lines, with new times: they are duplicates where the ancestor was imported.
- A subagent's rollout has prompts that no person wrote.

Leaves out: reasoning, plans, what an approval prompt was answered (it is not written), remote compaction.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers import codex_items as it
from pipelines.importers.engine import Mapped
from pipelines.importers.records import Advance, Record, json_lines
from pipelines.importers.sessions import Session, Stamp
from pipelines.importers.shell_results import test_counts
from pipelines.importers.texts import count, digest, identifier, items, mapping, text_of, time_ms, word

VERSION: Final = "2"
SAMPLE: Final = Path(__file__).parent / "samples" / "codex.jsonl"
COPY: Final = "copy"


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the lines of a rollout, a user's item marked as copy (its key) where the program shows the message right after it.

    Without that the copy of a short message could not be told from instructions that only the program wrote.
    """
    del path
    held: list[Record] = []
    for record in json_lines(file, advance):
        kind, payload = it.parts(record.value) if record.fault is None else ("", {})
        own = kind == "response_item" and payload.get("type") == "message" and payload.get("role") == "user"
        if not held and not own:
            yield record
            continue
        held.append(record)
        shown = kind == "event_msg" and payload.get("type") == "user_message"
        answered = kind == "response_item" and not (payload.get("type") == "message" and payload.get("role") != "assistant")
        if shown or answered or len(held) >= _HELD:
            yield from (_copy(item) if shown else item for item in held)
            held = []
    yield from held


def _copy(record: Record) -> Record:
    if record.fault is not None:
        return record
    kind, payload = it.parts(record.value)
    own = kind == "response_item" and payload.get("role") == "user"
    return Record(record.number, record.value, key=COPY) if own else record


_UNUSED: Final = frozenset({"agent_message", "agent_reasoning", "task_started", "task_complete", "turn_started", "turn_complete"})
"""Shown events that are most of a rollout and become nothing: whether they are repeated is not asked."""
_HELD: Final = 100
"""Lines that are held back at most until it is clear whether a user's item is a copy."""


@dataclass(slots=True)
class _Reply:
    """A model reply under assembly."""

    name: str
    at: int
    calls: int = 0
    said: str = ""
    """The last of its texts for the user."""
    usage: dict[str, Any] | None = None
    fresh: bool = False
    """Whether one of its lines is no repetition."""
    sealed: bool = False
    """Something else followed: the next item of the model is another reply."""


class Mapper:
    """Maps rollouts, one session a file; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._session: Session | None = None
        self._roots: dict[str, str] = {}
        """Session -> the ancestor that it and its forks share identities in."""
        self._root = ""
        self._nth: Counter[int] = Counter()
        """Equal lines of the file so far, by a hash: a rollout may have a million lines."""
        self._model = ""
        self._side = False
        self._last_ms: int | None = None
        self._reply: _Reply | None = None
        self._replies = 0
        self._total: int | None = None
        self._ahead: dict[str, Any] | None = None
        """A request's usage that was written before what the model said."""
        self._heard: str | None = None
        """The turn's text as it was first seen, until its second copy came."""

    def identity(self, record: Record) -> str | None:
        """Return the line's content with its place among equal ones, within the session and its ancestors: a copy has other times."""
        kind, payload = it.parts(record.value)
        if kind == "session_meta":
            self._open(payload)
            return None
        name = word(payload.get("type"))
        if kind not in ("response_item", "event_msg") or name in _UNUSED:
            return None
        own = payload.get("call_id") or payload.get("id")
        if isinstance(own, str) and own:
            return f"{self._root}/{kind}/{name}/{own}"
        key = f"{kind}/{name}/{digest(payload)}"
        if name == "token_count":  # its totals grow: an equal one is a repetition
            return f"{self._root}/{key}"
        short = hash(key)
        self._nth[short] += 1
        return f"{self._root}/{key}/{self._nth[short]}"

    def facts(self, record: Record) -> Iterator[str]:
        """Count messages as the program shows them, calls as the model makes them."""
        kind, payload = it.parts(record.value)
        name = word(payload.get("type"))
        if kind == "event_msg":
            if name == "user_message":
                yield "user_messages"
            elif name == "turn_aborted" and payload.get("reason") == "interrupted":
                yield "interrupts"
        elif kind == "response_item":
            if name in it.CALLS:
                yield "tool_calls"
                yield from ["edits"] * len(it.edited_files(payload))
            elif name in it.OUTPUTS:
                verdict = it.outcome(payload.get("output")).verdict
                if verdict is not ev.ResultClass.OK:
                    yield "tool_errors"
                if verdict is ev.ResultClass.USER_ABORTED:
                    yield "tool_rejections"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one line."""
        kind, payload = it.parts(record.value)
        at = time_ms(record.value.get("timestamp"))
        at = self._last_ms if at is None else at
        if at is None:
            return Mapped(reason="missing_field:timestamp")
        self._last_ms = at
        self._out = []
        if self._session is None:
            self._session = Session(self._stamp, path.stem.removeprefix("rollout-"), out=self._out)
        session = self._session
        session.out, session.mute = self._out, not emit
        if record.key == COPY:
            program = it.is_program_text(text_of(payload.get("content")))
            return Mapped(reason=f"not_a_session_event:{'program_text' if program else 'repeated_user_message'}")
        reason = self._line(session, kind, payload, f"{record.number}", at)
        return Mapped(events=self._out, reason=reason)

    def end_file(self) -> Iterator[ev.Event]:
        """Yield the last completion and the session's end."""
        self._out = []
        if self._session is not None:
            self._session.out, self._session.mute = self._out, False
            self._flush()
            self._session.end()
        self._session, self._root, self._model, self._side = None, "", "", False
        self._last_ms, self._reply, self._replies, self._total, self._heard = None, None, 0, None, None
        self._ahead = None
        self._nth.clear()
        yield from self._out

    def end(self) -> Iterator[ev.Event]:
        """Yield nothing: a file holds its session."""
        return iter(())

    def _open(self, payload: dict[str, Any]) -> None:
        """Take the first `session_meta` of a file; later ones are an ancestor's, copied."""
        if self._session is not None:
            return
        session_id = identifier(payload.get("id"), "unnamed")
        folder = payload.get("cwd")
        self._session = Session(self._stamp, session_id, out=self._out, folder=folder if isinstance(folder, str) else None)
        parent = payload.get("forked_from_id")
        self._root = self._roots.get(parent, parent) if isinstance(parent, str) and parent else session_id
        self._roots[session_id] = self._root
        self._side = "subagent" in mapping(payload.get("source"))

    def _line(self, session: Session, kind: str, payload: dict[str, Any], seed: str, at: int) -> str | None:
        name = word(payload.get("type"))
        if kind == "response_item":
            return self._item(session, payload, seed, at)
        if kind == "event_msg":
            return self._shown(session, payload, seed, at)
        if kind == "turn_context":
            model = payload.get("model")
            self._model = model if isinstance(model, str) else self._model
        if kind == "compacted":
            return "not_a_session_event:compaction_summary"
        return f"not_a_session_event:{kind or (name or 'untyped')}"[:80]

    def _item(self, session: Session, payload: dict[str, Any], seed: str, at: int) -> str | None:
        name = word(payload.get("type"))
        if name == "message":
            if payload.get("role") == "assistant":
                self._model_item(session, at).said = text_of(payload.get("content"))
                return None
            if payload.get("role") != "user":
                return "not_a_session_event:instructions"
            content = payload.get("content")
            images = sum(mapping(block).get("type") == "input_image" for block in items(content))
            return self._message(session, text_of(content), images, seed, at)
        if name in it.CALLS:
            self._call(session, payload, seed, at)
            return None
        if name in it.OUTPUTS:
            self._output(session, payload, seed, at)
            return None
        if name == "reasoning":
            self._model_item(session, at)
            return None
        return f"not_a_session_event:{name or 'item'}"[:80]

    def _shown(self, session: Session, payload: dict[str, Any], seed: str, at: int) -> str | None:
        name = word(payload.get("type"))
        if name == "user_message":
            message = payload.get("message")
            if payload.get("kind") not in (None, "plain"):
                return "not_a_session_event:program_text"
            images = len(items(payload.get("images"))) + len(items(payload.get("local_images")))
            return self._message(session, message if isinstance(message, str) else "", images, seed, at)
        if name == "token_count":
            return None if self._usage(payload) else "not_a_session_event:token_count"
        if name == "turn_aborted" and payload.get("reason") == "interrupted":
            session.interrupt(seed, at)
            return None
        if name == "thread_rolled_back":
            session.interrupt(seed, at, target="rollback")
            return None
        if name == "undo_completed" and payload.get("success"):
            session.undo(seed, at)
            return None
        return f"not_a_session_event:{name or 'event'}"[:80]

    def _message(self, session: Session, text: str, images: int, seed: str, at: int) -> str | None:
        said = " ".join(text.split())
        if self._heard is not None and said and (said == self._heard or said in self._heard or self._heard in said):
            self._heard = None
            return "not_a_session_event:repeated_user_message"
        if it.is_program_text(text):
            return "not_a_session_event:program_text"
        if self._side:
            return "not_a_session_event:sidechain_prompt"
        if not said and not images:
            return "not_a_session_event:empty_message"
        self._flush()
        session.turn(seed, at, text, images=images)
        self._heard = said
        return None

    def _model_item(self, session: Session, at: int) -> _Reply:
        self._heard = None
        reply = self._reply
        if reply is None or reply.sealed:
            self._flush()
            reply = self._reply = _Reply(name=f"{session.session_id[:100]}/{self._replies}", at=at, usage=self._ahead)
            self._replies += 1
            self._ahead = None
        reply.at = at
        reply.fresh = reply.fresh or not session.mute
        return reply

    def _call(self, session: Session, payload: dict[str, Any], seed: str, at: int) -> None:
        reply = self._model_item(session, at)
        reply.calls += 1
        call = it.read_call(payload, seed=f"{session.session_id[:90]}/{seed}")
        session.call(
            seed,
            at,
            call_id=call.call_id,
            name=call.name,
            arguments=call.arguments,
            valid=call.valid,
            completion_id=reply.name,
            parallel_group=self._replies,
            destructive=destroys_by_call(call.name, call.runs),
        )
        session.edits(seed, at, call_id=call.call_id, files=it.edited_files(payload))

    def _output(self, session: Session, payload: dict[str, Any], seed: str, at: int) -> None:
        if self._reply is not None:
            self._reply.sealed = True
        call_id = identifier(payload.get("call_id"), f"{session.session_id[:90]}/{seed}")
        found = it.outcome(payload.get("output"))
        session.result(
            seed,
            at,
            call_id=call_id,
            verdict=found.verdict,
            output=found.text,
            duration_ms=found.duration_ms,
            exit_code=found.exit_code,
        )
        session.settle(seed, at, call_id=call_id, verdict=found.verdict)
        tests = test_counts(found.text)
        if tests is not None:
            session.tests(seed, at, tests)

    def _usage(self, payload: dict[str, Any]) -> bool:
        """Give a request's usage to the reply before it; whether it was news."""
        info = mapping(payload.get("info"))
        total = count(mapping(info.get("total_token_usage")).get("total_tokens"))
        last = mapping(info.get("last_token_usage"))
        if not last or total == self._total:
            return False
        self._total = total
        if self._reply is not None and self._reply.usage is None and not self._reply.sealed:
            self._reply.usage = last
            self._reply.sealed = True
        else:  # versions of 2025 write it before the items of its reply
            self._ahead = last
        return True

    def _flush(self) -> None:
        """Make the completion of the reply that has ended."""
        reply, self._reply = self._reply, None
        session = self._session
        if reply is None or session is None:
            return
        usage = reply.usage or {}
        mute, session.mute = session.mute, not reply.fresh
        session.completion(
            reply.name,
            reply.at,
            completion_id=reply.name,
            model=self._model,
            finish_reason="tool_calls" if reply.calls else "stop",
            prompt_tokens=count(usage.get("input_tokens")),
            response_tokens=count(usage.get("output_tokens")),
            cached_tokens=count(usage.get("cached_input_tokens")),
            side=self._side,
            said=None if reply.calls else reply.said,
        )
        session.mute = mute
