"""Continue development data, schema 0.2.0 (`~/.continue/dev_data/0.2.0/*.jsonl`): JSON lines, one file an event -> session events.

Takes and gives: see `registry.py`. What a line is (the schemas in Continue's source):
- `chatInteraction` is one exchange of a chat session: a turn and a reply. `chatFeedback` is a thumb about one; `toolUsage` a call with
  the user's approval and its success.
- `editOutcome` says whether an inline edit was kept; it repeats the prompt and reply of its `editInteraction`, and both are one edit.
- `autocomplete` and `nextEditOutcome` are proposals in the editor, taken or not: an edit and a decision, no turn (nobody asked).
- `tokensGenerated` counts a request's tokens without saying which: the reply nearest in time, within `NEAR_MS`, takes them.
- Only chats have a session id. The rest belongs to the user's day: session `editor-<hash>-<date>`.

Leaves out: `nextEditWithHistory` (training material of Continue, not an outcome), `quickEdit` (no time in its lines).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers.edit_sizes import EditSize, replaced
from pipelines.importers.engine import Mapped
from pipelines.importers.records import BAD, Advance, Record, json_lines, parse
from pipelines.importers.sessions import Session, Stamp, ends
from pipelines.importers.shell_results import error_class, test_counts
from pipelines.importers.texts import count, digest, identifier, items, mapping, milliseconds, text_of, time_ms, word

VERSION: Final = "2"
SAMPLE: Final = Path(__file__).parent / "samples" / "continue.jsonl"
NEAR_MS: Final = 2_000
"""A request's tokens are logged when its stream ends, the exchange right after."""
_EDIT_TOOLS: Final = frozenset({
    "builtin_edit_existing_file", "builtin_single_find_and_replace", "builtin_multi_edit", "builtin_create_new_file",
    "edit_existing_file", "single_find_and_replace", "multi_edit", "create_new_file",
})  # fmt: skip


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the lines of a file; its name is the event where a line does not say."""
    for record in json_lines(file, advance):
        yield Record(record.number, record.value, record.fault, key=path.stem)


def order(path: Path) -> tuple[int, str]:
    """Sort token counts first, so that replies find theirs; turns before what is about them."""
    rank = {"tokensGenerated": 0, "chatInteraction": 1, "editInteraction": 2}.get(path.stem, 3)
    return rank, str(path)


class Mapper:
    """Maps development data; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._sessions: dict[str, Session] = {}
        self._tokens: list[tuple[int, int, int]] = []
        """(time, prompt tokens, generated tokens), in file order, which is that of time."""
        self._nth: Counter[str] = Counter()
        """Events by name and time: two may have one millisecond."""
        self._thumbs: set[tuple[str, bool]] = set()
        self._chats: dict[str, list[tuple[int, str]]] = {}
        """Chat session -> (time, turn), in file order."""

    def identity(self, record: Record) -> str | None:
        """Return the whole line: two equal ones with one time are one event written twice."""
        return digest(record.value)

    def facts(self, record: Record) -> Iterator[str]:
        """Count exchanges, calls, and proposals with an answer."""
        line, name = record.value, _name(record)
        if name == "chatInteraction":
            yield "user_messages"
        elif name == "toolUsage":
            yield "tool_calls"
            if word(line.get("functionName")) in _EDIT_TOOLS:
                yield "edits"
            if line.get("accepted") is False:
                yield "tool_rejections"
            if not line.get("succeeded"):
                yield "tool_errors"
        elif name in ("editOutcome", "autocomplete", "nextEditOutcome"):
            yield "edits"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one line."""
        del path
        line, name = record.value, _name(record)
        make = _MAKERS.get(name)
        if make is None:
            return Mapped(reason=f"not_a_session_event:{name or 'untyped'}"[:80])
        stamp = line.get("timestamp")
        at = time_ms(stamp) if isinstance(stamp, str) else (int(ms) if (ms := _epoch_ms(stamp)) is not None else None)
        if at is None:
            return Mapped(reason="missing_field:timestamp")
        if not emit:
            return Mapped()
        self._out = []
        self._nth[f"{name}/{at}"] += 1
        return Mapped(events=self._out, reason=make(self, line, at, f"{name}/{at}/{self._nth[f'{name}/{at}']}"))

    def end_file(self) -> Iterator[ev.Event]:
        """Yield nothing: files are about the same sessions."""
        return iter(())

    def end(self) -> Iterator[ev.Event]:
        """Yield the ends of the sessions."""
        yield from ends(self._sessions.values())

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            self._sessions[name] = Session(self._stamp, name, out=self._out)
        session = self._sessions[name]
        session.out = self._out
        return session

    def _editor(self, line: Mapping[str, Any], at: int) -> Session:
        """Return the session of what happens in the editor: the user's day."""
        user = self._stamp.keyed("user", f"{line.get('userId', '')}/{line.get('selectedProfileId', '')}")
        return self._session(f"editor-{user[:16]}-{at // 86_400_000}")

    def _count(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        del seed
        self._tokens.append((at, count(line.get("promptTokens")), count(line.get("generatedTokens"))))
        return "not_a_session_event:tokensGenerated"

    def _near(self, at: int) -> tuple[int, int]:
        """Take the token counts that were logged nearest to a reply; the two name a model differently, so only time can tell."""
        rows = self._tokens
        index = bisect_left(rows, (at, 0, 0))
        near = [i for i in (index - 1, index) if 0 <= i < len(rows) and abs(rows[i][0] - at) <= NEAR_MS]
        if not near:
            return 0, 0
        _, prompt, generated = rows.pop(min(near, key=lambda i: abs(rows[i][0] - at)))
        return prompt, generated

    def _chat(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        session = self._session(identifier(line.get("sessionId"), "chat"))
        text, goes_on = _last_user_text(line.get("prompt"))
        if text and not (goes_on and session.turns):
            session.turn(seed, at, text)
        self._chats.setdefault(session.session_id, []).append((at, session.turn_id))
        completion = line.get("completion")
        self._reply(session, line, seed, at, said=completion if isinstance(completion, str) else None)
        return None

    def _reply(
        self, session: Session, line: Mapping[str, Any], seed: str, at: int, turn_id: str | None = None, *, said: str | None = None
    ) -> None:
        model = line.get("modelName")
        model = model if isinstance(model, str) else ""
        prompt, generated = self._near(at)
        session.completion(
            seed,
            at,
            completion_id=f"{session.session_id[:80]}/{seed}",
            model=model,
            finish_reason="stop",
            prompt_tokens=prompt,
            response_tokens=generated,
            duration_ms=milliseconds(line.get("time", line.get("elapsed"))),
            turn_id=turn_id,
            said=said,
        )

    def _thumb(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        liked = line.get("feedback")
        if not isinstance(liked, bool):
            return "not_a_session_event:no_feedback"
        session = self._session(identifier(line.get("sessionId"), "chat"))
        turns = self._chats.get(session.session_id)
        if turns:  # a thumb may come late: it belongs to the last exchange before it
            session.turn_id = turns[max(bisect_left(turns, (at + 1, "")) - 1, 0)][1]
        if (session.turn_id, liked) in self._thumbs:
            return "not_a_session_event:repeated_thumb"  # one line for each request of the answer
        self._thumbs.add((session.turn_id, liked))
        session.feedback(seed, at, source="chatFeedback", score=1.0 if liked else -1.0)
        return None

    def _tool(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        session = self._editor(line, at)
        call_id = identifier(line.get("toolCallId"), f"call/{at}")
        raw, name = line.get("toolCallArgs"), line.get("functionName")
        arguments = parse(raw) if isinstance(raw, str) else BAD
        known = arguments is not BAD and isinstance(arguments, dict)
        session.call(
            seed, at, call_id=call_id, name=word(name), arguments=raw, valid=known, destructive=destroys_by_call(word(name), raw),
        )  # fmt: skip
        if word(name) in _EDIT_TOOLS:
            session.edits(seed, at, call_id=call_id, files=[_tool_edit(mapping(arguments) if known else {})])
        text = text_of([mapping(item).get("content") for item in items(line.get("output"))])
        if line.get("accepted") is False:
            verdict = ev.ResultClass.USER_ABORTED
        elif line.get("succeeded") is True:
            verdict = ev.ResultClass.OK
        else:
            verdict = error_class(text) if known else ev.ResultClass.INVALID_ARGUMENTS
        session.result(seed, at, call_id=call_id, verdict=verdict, output=text)
        session.settle(seed, at, call_id=call_id, verdict=verdict)
        tests = test_counts(text)
        if tests is not None:
            session.tests(seed, at, tests)
        return None

    def _asked_edit(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        session = self._editor(line, at)
        own = _edit_key(line)
        text, _ = _last_user_text(line.get("prompt"))
        if text:
            session.turn(seed, at, text, turn_id=f"edit-{own}")
        self._reply(session, line, seed, at, f"edit-{own}")
        return None

    def _kept_edit(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        session = self._editor(line, at)
        own = _edit_key(line)
        session.turn_id = f"edit-{own}"
        path = line.get("filepath")
        size = replaced(line.get("previousCode"), line.get("newCode"))
        edit_id = f"edit-{digest(seed + own)}"
        session.edit(seed, at, edit_id=edit_id, path=path if isinstance(path, str) else "", size=size)
        if isinstance(line.get("accepted"), bool):
            session.decide(seed, at, edit_id=edit_id, decision="accepted" if line["accepted"] else "rejected")
        return None

    def _proposal(self, line: Mapping[str, Any], at: int, seed: str) -> str | None:
        session = self._editor(line, at)
        own = identifier(line.get("completionId"), f"proposal/{at}")
        session.turn_id = own
        self._reply(session, line, seed, at, own)
        path = line.get("filepath", line.get("fileUri"))
        size = replaced(line.get("originalEditableRange", ""), line.get("completion"))
        session.edit(seed, at, edit_id=own, path=path if isinstance(path, str) else "", size=size)
        if isinstance(line.get("accepted"), bool):
            session.decide(seed, at, edit_id=own, decision="accepted" if line["accepted"] else "rejected")
        return None


_MAKERS: Final = {
    "tokensGenerated": Mapper._count,
    "chatInteraction": Mapper._chat,
    "chatFeedback": Mapper._thumb,
    "toolUsage": Mapper._tool,
    "editInteraction": Mapper._asked_edit,
    "editOutcome": Mapper._kept_edit,
    "autocomplete": Mapper._proposal,
    "nextEditOutcome": Mapper._proposal,
}
"""Event name -> how it is mapped."""


def _name(record: Record) -> str:
    name = record.value.get("eventName")
    return name if isinstance(name, str) and name else record.key


def _epoch_ms(value: object) -> float | None:
    """Return an epoch time in milliseconds; the next-edit events write a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**47:
        return None
    return float(value)


def _edit_key(line: Mapping[str, Any]) -> str:
    text = f"{line.get('filepath')}\0{line.get('prompt')}\0{line.get('completion')}"
    return digest(text)


def _last_user_text(prompt: object) -> tuple[str, bool]:
    """Return the last user message of a rendered prompt, and whether the policy had already begun to answer it.

    A prompt is its messages one after the other, each headed by `<role>`; one without a head is the message itself.
    """
    text = prompt if isinstance(prompt, str) else ""
    _, head, last = text.rpartition("<user>\n")
    said = last if head else text
    goes_on = False
    for mark in ("\n<assistant>\n", "\n<tool>\n"):
        said, found, _ = said.partition(mark)
        goes_on = goes_on or bool(found)
    return said.strip(), goes_on


def _tool_edit(arguments: Mapping[str, Any]) -> tuple[str, EditSize]:
    path = arguments.get("filepath")
    path = path if isinstance(path, str) else ""
    changes = [mapping(item) for item in items(arguments.get("edits"))] or [arguments]
    size = EditSize()
    for change in changes:
        size += replaced(change.get("old_string", ""), change.get("new_string", change.get("contents", change.get("changes"))))
    return path, size
