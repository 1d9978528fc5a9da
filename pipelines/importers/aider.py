"""aider's chat history (`.aider.chat.history.md`): Markdown that is appended to for ever -> session events.

Takes and gives: see `registry.py`. What is in one (aider's writer, versions 0.20 to 0.86): `# aider chat started at ...` begins a
session; `#### ` lines are what the user typed; `> ` lines are what the program said; the rest is the model's answer. What user and
program say ends in two spaces, so that a heading or a quotation of the model is not taken for theirs (unless an editor has stripped
the file of them). A record is a start, a message, one line of the program, or an answer.
- The program applies an answer's edits at once (`Applied edit to`) and commits them: accepted, until `/undo` (`Removed:`) or a `git
  revert` or `reset --hard` of the user takes the commit back. An answer whose edits do not fit is an invalid call.
- The only times are the sessions' starts, local to an unknown zone: they are taken as UTC, and each record is one millisecond later.
- Token counts are rounded by the program (`4.2k sent`).

Leaves out: costs, repository maps, lint output.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from pipelines import events as ev
from pipelines.commands import destroys
from pipelines.importers.aider_lines import (
    Said,
    applied_path,
    confirmation,
    edits_of,
    is_command,
    model_of,
    reverted,
    skipped_path,
    token_counts,
)
from pipelines.importers.edit_sizes import EditSize
from pipelines.importers.engine import Mapped
from pipelines.importers.records import Advance, Record, lines
from pipelines.importers.sessions import Session, Stamp
from pipelines.importers.shell_results import test_counts
from pipelines.importers.texts import digest, identifier

VERSION: Final = "2"
SAMPLE: Final = Path(__file__).parent / "samples" / "aider.chat.history.md"
_START: Final = re.compile(r"# aider chat started at (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\s*$")
_ANSWER_BYTES: Final = 8_000_000
"""A longer answer is taken in pieces, so that a file without marks does not fill the memory."""
_TESTED: Final = re.compile(r"passed|failed|passing|\bOK\b|Tests run|FAIL")


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield starts, messages, the program's lines, and answers."""
    del path
    kind, first, size = "", 0, 0
    body: list[str] = []
    spaced: bool | None = None
    fenced = False
    for number, raw in lines(file, advance):
        if raw is None:
            yield Record(number, None, "oversized_line")
            continue
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if _START.match(line):
            found, fenced = "start", False
        elif line.startswith(("#### ", "> ")):
            if spaced is None:
                spaced = line.endswith("  ")
            own = line.endswith("  ") if spaced or fenced else True
            found = ("user" if line.startswith("#") else "program") if own else "answer"
            fenced = fenced and not own
        else:
            found = "answer"
        if found == "answer" and line.lstrip().startswith("```"):
            fenced = not fenced
        if body and (found != kind or found in ("start", "program") or size > _ANSWER_BYTES):
            yield Record(first, Said(kind, "\n".join(body)))
            body, size = [], 0
        if not body:
            kind, first = found, number
        body.append(line[5:].rstrip() if found == "user" else line[2:].rstrip() if found == "program" else line)
        size += len(raw)
    if body:
        yield Record(first, Said(kind, "\n".join(body)))


class Mapper:
    """Maps histories; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._session: Session | None = None
        self._starts: set[str] = set()
        """Sessions of this file: two may start in one second."""
        self._base_ms = 0
        self._nth = 0
        self._model = ""
        self._answer: tuple[str, int, bool, str] | None = None
        """(seed, time, whether it is a repetition, text) of the reply that is not a completion yet: its token counts follow it."""
        self._waiting = False
        """Whether a message's answer has not been reported complete: then a key press stops it, at the prompt it stops nothing."""
        self._sizes: list[tuple[str, EditSize]] = []
        self._loose: list[str] = []
        """Edits since the last commit."""
        self._commits: list[tuple[str, list[str]]] = []
        """(commit, its edits), the newest last."""
        self._reply = ""
        self._tail: list[str] = []

    def identity(self, record: Record) -> str | None:
        """Return the session's start, the record's place in it, and its text."""
        said: Said = record.value
        if said.kind == "start":
            self._out = []  # the end of the session before comes with this record
            self._begin(said.text)
        self._nth += 1
        return f"{self._session.session_id if self._session else ''}/{self._nth}/{digest(said.text)}"

    def facts(self, record: Record) -> Iterator[str]:
        """Count what the user typed that is no command, and the program's lines about edits, commands and stops."""
        kind, text = record.value.kind, record.value.text
        if kind == "user" and not is_command(text) and text != "<blank>" and confirmation(text) is None:
            yield "user_messages"
        if kind != "program":
            return
        if applied_path(text):
            yield from ("tool_calls", "edits")
        elif skipped_path(text):
            yield from ("tool_calls", "edits", "tool_rejections", "tool_errors")
        elif text.startswith("The LLM did not conform"):
            yield from ("tool_calls", "tool_errors")
        elif text.startswith("Running ") or _refused_command(text):
            yield "tool_calls"
            if _refused_command(text):
                yield from ("tool_rejections", "tool_errors")
        elif text.startswith("^C"):
            yield "interrupts"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one record."""
        del path
        said: Said = record.value
        self._out = self._out if said.kind == "start" else []
        session = self._session
        if session is None:
            return Mapped(reason="not_a_session_event:before_first_start")
        session.out, session.mute = self._out, not emit
        seed, at = f"{self._nth}-{digest(said.text)[:8]}", self._base_ms + self._nth
        if said.kind == "start":
            return Mapped(events=self._out, reason="not_a_session_event:start")
        if said.kind == "user":
            reason = self._user(session, said.text, seed, at)
        elif said.kind == "answer":
            self._finish(session)
            self._answer = (seed, at, session.mute, said.text)
            self._reply = f"{session.session_id}/{seed}"
            self._sizes = edits_of(said.text)
            reason = None
        else:
            reason = self._program(session, said.text, seed, at)
        return Mapped(events=self._out, reason=reason)

    def end_file(self) -> Iterator[ev.Event]:
        """Yield the end of the last session."""
        self._out = []
        self._close()
        self._starts.clear()
        yield from self._out

    def end(self) -> Iterator[ev.Event]:
        """Yield nothing: a file holds its sessions."""
        return iter(())

    def _begin(self, line: str) -> None:
        """Open a session; the one before ends here, with events that the next record carries."""
        found = _START.match(line)
        stamp = found[1] if found else ""
        self._close()
        name, again = f"aider-{stamp.replace(' ', 'T')}", 1
        while name in self._starts:
            again += 1
            name = f"aider-{stamp.replace(' ', 'T')}-{again}"
        self._starts.add(name)
        self._nth = 0
        try:
            self._base_ms = max(int(datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() * 1000), 0)
        except ValueError:
            self._base_ms = 0
        self._session = Session(self._stamp, name, out=self._out, timeless=True)

    def _close(self) -> None:
        session = self._session
        if session is not None:
            session.out, session.mute = self._out, False
            self._finish(session)
            session.end()
        self._session, self._answer, self._sizes, self._loose, self._commits, self._model = None, None, [], [], [], ""
        self._tail, self._waiting = [], False

    def _finish(self, session: Session, tokens: tuple[int, int, int] = (0, 0, 0)) -> bool:
        """Make the completion of the answer that has ended; whether there was one."""
        answer, self._answer = self._answer, None
        if answer is None:
            return False
        mute, session.mute = session.mute, answer[2]
        session.completion(
            answer[0],
            answer[1],
            completion_id=self._reply,
            model=self._model,
            finish_reason="tool_calls" if self._sizes else "stop",
            prompt_tokens=tokens[0],
            response_tokens=tokens[1],
            cached_tokens=tokens[2],
            said=None if self._sizes else answer[3],
        )
        session.mute = mute
        return True

    def _user(self, session: Session, text: str, seed: str, at: int) -> str | None:
        self._finish(session)
        if text == "<blank>" or not text.strip():
            return "not_a_session_event:empty_message"
        if confirmation(text) is not None:
            return "not_a_session_event:confirmation"
        if is_command(text):
            gone = reverted(text, [name for name, _ in self._commits])
            for index in range(gone):
                self._undo(session, self._commits[-1][0], f"{seed}/{index}", at)
            return None if gone else "not_a_session_event:local_command"
        session.turn(seed, at, text)
        self._waiting = True
        return None

    def _program(self, session: Session, text: str, seed: str, at: int) -> str | None:
        self._tail = [*self._tail[-3:], text[-2_000:]]
        tokens = token_counts(text)
        if tokens is not None:
            self._waiting = False
            return None if self._finish(session, tokens) else "not_a_session_event:token_count"
        if (model := model_of(text)) is not None:
            self._model = model
        elif path := applied_path(text):
            self._edit(session, path, seed, at, kept=True)
            return None
        elif path := skipped_path(text):
            self._edit(session, path, seed, at, kept=False)
            return None
        elif text.startswith("Commit ") and len(text) > 14:
            self._commits = [*self._commits[-50:], (text.split()[1], self._loose)]
            self._loose = []
        elif text.startswith("Removed: "):
            return None if self._undo(session, text.split()[1], seed, at) else "not_a_session_event:program_line"
        elif text.startswith("The LLM did not conform"):
            self._call(session, "edit", text, seed, at, verdict=ev.ResultClass.INVALID_ARGUMENTS)
            return None
        elif text.startswith("Running ") or _refused_command(text):
            refused = _refused_command(text)
            self._call(session, "shell", text, seed, at, verdict=ev.ResultClass.USER_ABORTED if refused else None)
            return None
        elif text.startswith("^C") and self._waiting:
            self._waiting = False
            session.interrupt(seed, at)
            return None
        elif _TESTED.search(text) and (tests := test_counts("\n".join(self._tail))) is not None:
            self._tail = []
            session.tests(seed, at, tests)
            return None
        return "not_a_session_event:program_line"

    def _call(self, session: Session, name: str, text: str, seed: str, at: int, *, verdict: ev.ResultClass | None) -> str:
        call_id = identifier(f"{session.session_id}/{seed}", seed)
        valid = verdict is not ev.ResultClass.INVALID_ARGUMENTS
        session.call(
            seed, at, call_id=call_id, name=name, arguments=text, valid=valid, completion_id=self._reply or None,
            destructive=destroys(text.removeprefix("Running ")) if text.startswith("Running ") else None,
        )  # fmt: skip
        if verdict is not None:
            session.result(seed, at, call_id=call_id, verdict=verdict)
        return call_id

    def _edit(self, session: Session, path: str, seed: str, at: int, *, kept: bool) -> None:
        verdict = ev.ResultClass.OK if kept else ev.ResultClass.USER_ABORTED
        call_id = self._call(session, "edit", path, seed, at, verdict=verdict)
        same = [size for name, size in self._sizes if name == path or name.endswith(f"/{path}") or path.endswith(f"/{name}")]
        self._sizes = [(name, size) for name, size in self._sizes if size not in same]
        session.edit(seed, at, edit_id=call_id, path=path, size=sum(same, EditSize()), call_id=call_id)
        session.decide(seed, at, edit_id=call_id, decision="accepted" if kept else "rejected")
        if kept:
            self._loose.append(call_id)

    def _undo(self, session: Session, commit: str, seed: str, at: int) -> bool:
        """Take a commit's edits back; whether it was known."""
        for index in range(len(self._commits) - 1, -1, -1):
            name, edits = self._commits[index]
            if name.startswith(commit) or commit.startswith(name):
                del self._commits[index]
                for nth, edit_id in enumerate(edits):
                    session.decide(f"{seed}/{nth}", at, edit_id=edit_id, decision="undone")
                return bool(edits)
        return False


def _refused_command(text: str) -> bool:
    return text.startswith("Run shell command") and confirmation(text) is False
