"""Gemini CLI sessions (`~/.gemini/tmp/*/chats/session-*.json` and `.jsonl`): one document, or JSON lines -> session events.

Takes and gives: see `registry.py`. What an entry is (the recorder's source, and sessions of Gemini CLI 0.1 to 0.2x):
- A message has an id, and in `.jsonl` files it is written again, whole, each time a call or a token count is added: the last one with
  the id counts, once. A `.json` session that was resumed lives on as `.jsonl` and repeats its messages.
- A message of type `gemini` is one reply with its calls, their results and states, and its token counts; thinking tokens are apart.
- `$rewindTo` throws messages away: what happened stays, and the user is said to have stopped it. `$set` changes what is known about
  the session.
- An edit's display holds the diff of what was written, and whether the user changed it before.

Leaves out: thoughts, notes of the program (`info`, `error`, `warning`).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers.edit_sizes import EditSize, diff_files, replaced
from pipelines.importers.engine import Mapped
from pipelines.importers.records import Advance, Record, json_document, json_lines
from pipelines.importers.sessions import Session, Stamp, ends
from pipelines.importers.shell_results import error_class, exit_class, test_counts
from pipelines.importers.texts import count, digest, identifier, items, mapping, text_of, time_ms, word

VERSION: Final = "2"
SAMPLE: Final = Path(__file__).parent / "samples" / "gemini_cli.jsonl"
EDIT_TOOLS: Final = frozenset({"replace", "write_file", "edit", "smart_edit"})
_PROGRAM_HEADS: Final = ("<session_context>", "This is the Gemini CLI.", "<state_snapshot>", "System: ", "[SYSTEM]", "<hook_context>")
_EXIT: Final = re.compile(r"^Exit Code: (-?\d{1,6})", re.M)


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the messages of a session; a document's other members as context."""
    return json_lines(file, advance) if path.suffix == ".jsonl" else json_document(file, advance, lists=("messages",))


class Mapper:
    """Maps sessions; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._sessions: dict[str, Session] = {}
        self._session: Session | None = None
        self._side = False
        self._pending: Mapping[str, Any] | None = None
        """The newest message, until another comes: it may still grow."""
        self._done: set[str] = set()
        """Messages that were mapped, by session and id."""
        self._counted = ("", 0)
        self._last_ms: int | None = None

    def identity(self, record: Record) -> str | None:
        """Return session, id and content: a message that grew is not a repetition."""
        own = record.value.get("id")
        if not isinstance(own, str) or not own:
            return None
        return f"{self._session.session_id if self._session else ''}/{own}/{digest(record.value)}"

    def facts(self, record: Record) -> Iterator[str]:
        """Count messages once and a message's calls as they come."""
        value = record.value
        if not record.counted or not isinstance(value, dict):
            return
        own, kind = value.get("id"), value.get("type")
        before = self._counted[1] if own == self._counted[0] else 0
        if kind == "user" and own != self._counted[0]:
            yield "user_messages"
        calls = [mapping(call) for call in items(value.get("toolCalls"))]
        for call in calls[before:]:
            yield "tool_calls"
            if word(call.get("name")) in EDIT_TOOLS:
                yield "edits"
        for call in calls:
            if call.get("status") == "error" and before < len(calls):
                yield "tool_errors"
            if call.get("status") == "cancelled" and before < len(calls):
                yield "tool_rejections"
        if "$rewindTo" in value:
            yield "interrupts"
        self._counted = (own if isinstance(own, str) else "", max(before, len(calls)))

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one entry, which makes the message before it final."""
        self._out = []
        value = record.value
        if not record.counted:
            if record.key in ("sessionId", "kind", "projectHash"):
                self._about({record.key: value}, path)
            return Mapped()
        if "$set" in value:
            self._about(mapping(value["$set"]), path)
            for message in items(mapping(value["$set"]).get("messages")):
                self._message(mapping(message), path)
            return Mapped(events=self._out, reason="not_a_session_event:metadata")
        if "$rewindTo" in value:
            session = self._at(path)
            self._flush()
            if self._last_ms is None:
                return Mapped(reason="missing_field:timestamp")
            session.interrupt(f"rewind/{value['$rewindTo']!s:.60}/{record.number}", self._last_ms, target="rewind")
            return Mapped(events=self._out)
        if not isinstance(value.get("id"), str) and "sessionId" in value:
            self._about(value, path)
            for message in items(value.get("messages")):
                self._message(mapping(message), path)
            return Mapped(events=self._out, reason="not_a_session_event:metadata")
        if not emit:
            return Mapped()
        reason = self._message(value, path)
        return Mapped(events=self._out, reason=reason)

    def end_file(self) -> Iterator[ev.Event]:
        """Yield what the last message holds."""
        self._out = []
        self._flush()
        self._session, self._side, self._last_ms = None, False, None
        yield from self._out

    def end(self) -> Iterator[ev.Event]:
        """Yield the ends of the sessions."""
        yield from ends(self._sessions.values())

    def _about(self, value: Mapping[str, Any], path: Path) -> None:
        if isinstance(value.get("kind"), str):
            self._side = value["kind"] == "subagent"
        if isinstance(value.get("sessionId"), str) and self._session is None:
            self._open(value["sessionId"])
        if isinstance(value.get("projectHash"), str):
            session = self._at(path)
            session.folder = session.folder or value["projectHash"]

    def _open(self, name: str) -> Session:
        name = identifier(name, "unnamed")
        if name not in self._sessions:
            self._sessions[name] = Session(self._stamp, name, out=self._out)
        self._session = self._sessions[name]
        return self._session

    def _at(self, path: Path) -> Session:
        session = self._session or self._open(path.stem)
        session.out = self._out
        return session

    def _message(self, message: Mapping[str, Any], path: Path) -> str | None:
        session = self._at(path)
        own, kind = message.get("id"), message.get("type")
        if kind not in ("user", "gemini") or not isinstance(own, str) or not own:
            return f"not_a_session_event:{kind if isinstance(kind, str) and kind else 'untyped'}"[:80]
        if f"{session.session_id}/{own}" in self._done:
            return "not_a_session_event:repeated_message"
        if self._pending is not None and self._pending.get("id") != own:
            self._flush()
        at = time_ms(message.get("timestamp"))
        self._last_ms = self._last_ms if at is None else at
        if self._last_ms is None:
            return "missing_field:timestamp"
        self._pending = dict(message) | {"timestamp_ms": self._last_ms}
        return None if kind == "gemini" else self._why_no_turn(message)

    def _why_no_turn(self, message: Mapping[str, Any]) -> str | None:
        shown = message.get("displayContent")
        text = text_of(shown if shown is not None else message.get("content"))
        head = text.lstrip()
        if head.startswith(_PROGRAM_HEADS):
            return "not_a_session_event:program_text"
        if head.startswith(("/", "?")) and " " not in head.split("\n")[0][:30].strip() and len(head) < 30 and "\n" not in head.strip():
            return "not_a_session_event:local_command"
        if self._side:
            return "not_a_session_event:sidechain_prompt"
        return None if head or _images(message) else "not_a_session_event:empty_message"

    def _flush(self) -> None:
        """Map the pending message, which is final now."""
        message, self._pending = self._pending, None
        session = self._session
        if message is None or session is None:
            return
        session.out = self._out
        own = str(message["id"])
        self._done.add(f"{session.session_id}/{own}")
        seed, at = identifier(own, "unnamed"), int(message["timestamp_ms"])
        if message.get("type") == "gemini":
            self._reply(session, message, seed, at)
        elif self._why_no_turn(message) is None:
            shown = message.get("displayContent")
            session.turn(seed, at, text_of(shown if shown is not None else message.get("content")), images=_images(message))

    def _reply(self, session: Session, message: Mapping[str, Any], seed: str, at: int) -> None:
        tokens, model = mapping(message.get("tokens")), message.get("model")
        calls = [mapping(call) for call in items(message.get("toolCalls"))]
        session.completion(
            seed,
            at,
            completion_id=seed,
            model=model if isinstance(model, str) else "",
            finish_reason="tool_calls" if calls else "stop",
            prompt_tokens=count(tokens.get("input")),
            response_tokens=count(tokens.get("output")) + count(tokens.get("thoughts")),
            cached_tokens=count(tokens.get("cached")),
            side=self._side,
            said=None if calls else text_of(message.get("content")),
        )
        for index, call in enumerate(calls):
            self._call(session, call, seed, f"{seed}/{index}", at)

    def _call(self, session: Session, call: Mapping[str, Any], reply: str, seed: str, at: int) -> None:
        call_id = identifier(call.get("id"), seed)
        name, arguments = call.get("name"), call.get("args")
        found = time_ms(call.get("timestamp"))
        ended = at if found is None else found
        session.call(
            seed,
            at,
            call_id=call_id,
            name=name if isinstance(name, str) else "",
            arguments=arguments,
            valid=isinstance(arguments, dict),
            completion_id=reply,
            destructive=destroys_by_call(word(name), arguments),
        )
        if word(name) in EDIT_TOOLS:
            session.edits(seed, at, call_id=call_id, files=[_edited(call)])
        text = _result_text(call.get("result"))
        verdict = _verdict(call.get("status"), text)
        if verdict is None:
            return
        code = _EXIT.search(text[-400:]) or _EXIT.search(text[:400])
        if code and verdict is ev.ResultClass.OK:
            verdict = exit_class(int(code[1]), text)
        session.result(seed, ended, call_id=call_id, verdict=verdict, output=text, exit_code=int(code[1]) if code else None)
        stat = mapping(mapping(call.get("resultDisplay")).get("diffStat"))
        if verdict is ev.ResultClass.OK and count(stat.get("user_added_lines")) + count(stat.get("user_removed_lines")):
            session.decide(f"{seed}/0", ended, edit_id=call_id, decision="partly")
        else:
            session.settle(seed, ended, call_id=call_id, verdict=verdict)
        tests = test_counts(text)
        if tests is not None:
            session.tests(seed, ended, tests)


def _images(message: Mapping[str, Any]) -> int:
    return sum("inlineData" in mapping(part) or "fileData" in mapping(part) for part in items(message.get("content")))


def _result_text(result: object) -> str:
    """Return what a call answered: the output or error of its function responses, and texts beside them."""
    found: list[str] = []
    for part in items(result):
        response = mapping(mapping(mapping(part).get("functionResponse")).get("response"))
        found += [response[name] for name in ("output", "error") if isinstance(response.get(name), str)]
        text = mapping(part).get("text")
        if isinstance(text, str):
            found.append(text)
    return "\n".join(found)


def _verdict(status: object, text: str) -> ev.ResultClass | None:
    if status == "success":
        return ev.ResultClass.OK
    if status == "cancelled":
        return ev.ResultClass.USER_ABORTED
    if status == "error":
        return error_class(text)
    return None  # still running when the session was written


def _edited(call: Mapping[str, Any]) -> tuple[str, EditSize]:
    arguments, shown = mapping(call.get("args")), mapping(call.get("resultDisplay"))
    path = arguments.get("file_path", arguments.get("absolute_path"))
    path = path if isinstance(path, str) else ""
    diff = shown.get("fileDiff")
    if isinstance(diff, str):
        files = diff_files(diff)
        if files:
            return path, sum((size for _, size in files), EditSize())
    if "new_string" in arguments:
        return path, replaced(arguments.get("old_string"), arguments.get("new_string"))
    return path, replaced("", arguments.get("content"))
