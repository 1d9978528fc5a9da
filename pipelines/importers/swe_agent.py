"""SWE-agent trajectories (`*.traj`): one JSON document -> session events.

Takes and gives: see `registry.py`. What is in one (SWE-agent 0.x to 1.x): `trajectory`, a step for each model reply with its action
and what came of it; `history`, the same conversation again with the task as its first user message; `info` with the end and the sum
of tokens. There are no times: every event has the file's modification time, one millisecond later each step, and ids are made
without it, so that a copy of the file gives the same ids. The session is named by the file and the two folders above it.
Leaves out: tokens (only sums of a run are known), decisions (no person was there), demonstrations in the history.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final

from pipelines import events as ev
from pipelines.commands import destroys
from pipelines.importers.edit_sizes import EditSize, replaced
from pipelines.importers.engine import Mapped
from pipelines.importers.records import Advance, Record, json_document
from pipelines.importers.sessions import Session, Stamp
from pipelines.importers.shell_results import error_class, test_counts
from pipelines.importers.texts import mapping, milliseconds, text_of

VERSION: Final = "2"
SAMPLE: Final = Path(__file__).parent / "samples" / "swe_agent.traj"
_EDIT_RANGE: Final = re.compile(r"edit\s+(\d{1,9}):(\d{1,9})\s*\n(.*?)\n?end_of_edit\s*$", re.S)
_INSERT: Final = re.compile(r"insert\s+\d{1,9}\s*\n(.*?)\n?end_of_insert\s*$", re.S)
_QUOTED_CHARS: Final = 200_000
"""Actions longer than this are not taken apart by shell rules, which cost time."""
_REFUSED: Final = (
    "your proposed edit has introduced new syntax error", "no replacement was performed", "your edit was not applied", "invalid `",
    "usage: ", "text not found", "string not found", "error: invalid", "is not a valid", "no edit was", "your command was not recognized",
    "your output was not formatted correctly", "the `path` parameter", "parameter `", "did not appear verbatim",
)  # fmt: skip
"""Beginnings of what the tools say to a call that was wrong in itself."""
_ENDINGS: Final = {"submitted": "done", "early_exit": "abandoned"}


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the file's time, then steps and history one by one, then what the run was."""
    del path
    yield Record(0, _modified_ms(file), None, "$modified_ms", counted=False)
    yield from json_document(file, advance, lists=("trajectory", "history"))


def _modified_ms(file: IO[bytes]) -> int:
    try:
        return int(os.fstat(file.fileno()).st_mtime * 1000)
    except OSError:  # not a file on disk
        return 0


class Mapper:
    """Maps trajectories, one session a file; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._session: Session | None = None
        self._base_ms = 0
        self._asked = False
        self._ending = ""

    def identity(self, record: Record) -> str | None:
        """Return nothing: steps that look alike are steps."""
        del record
        return None

    def facts(self, record: Record) -> Iterator[str]:
        """Count actions, edits, and observations that are errors."""
        value = record.value
        if record.key == "history" and not self._asked and _is_task(value):
            yield "user_messages"
        if record.key == "trajectory":
            action = _action(value)
            if action:
                yield "tool_calls"
                if _edited(action):
                    yield "edits"
                if _verdict(action, text_of(value.get("observation"))) is not ev.ResultClass.OK:
                    yield "tool_errors"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one step, or an entry of the history."""
        del emit
        self._out = []
        if record.key == "$modified_ms":
            self._open(path, record.value)
            return Mapped()
        session = self._session or self._open(path, 0)
        session.out = self._out
        if record.key == "info":
            self._ending = str(mapping(record.value).get("exit_status"))
        if not record.counted:
            return Mapped()
        seed, at = f"{record.key}/{record.number}", self._base_ms + record.number
        if record.key == "trajectory":
            if _is_exit(record.value):
                return Mapped(reason="not_a_session_event:exit")
            self._step(session, record.value, seed, at)
            return Mapped(events=self._out)
        if record.key == "history":
            if self._asked or not _is_task(record.value):
                return Mapped(reason="not_a_session_event:repeated_history")
            self._asked = True
            session.turn("task", self._base_ms, text_of(record.value.get("content")))
            return Mapped(events=self._out)
        return Mapped(reason="not_a_session_event:entry")

    def end_file(self) -> Iterator[ev.Event]:
        """Yield the session's end."""
        session = self._session
        self._out = []
        if session is not None:
            session.out = self._out
            reason = _ENDINGS.get(self._ending.partition(" ")[0], "abandoned" if self._ending.startswith("exit") else "idle")
            session.end(reason=reason)  # pyright: ignore[reportArgumentType]
        self._session, self._asked, self._ending = None, False, ""
        yield from self._out

    def end(self) -> Iterator[ev.Event]:
        """Yield nothing: a file holds its session."""
        return iter(())

    def _open(self, path: Path, modified_ms: int) -> Session:
        place = "/".join(path.parts[-3:])
        name = f"{path.stem[:80]}-{blake2b(place.encode('utf-8', 'replace'), digest_size=8).hexdigest()}"
        self._base_ms = modified_ms
        self._session = Session(self._stamp, name, out=self._out, timeless=True)
        self._session.turn_id = f"{self._session.session_id[:96]}/0"
        return self._session

    def _step(self, session: Session, step: Mapping[str, Any], seed: str, at: int) -> None:
        action, observation = _action(step), text_of(step.get("observation"))
        reply = f"{session.session_id[:90]}/{seed}"
        session.completion(seed, at, completion_id=reply, finish_reason="tool_calls" if action else "stop")
        if not action:
            return
        verdict = _verdict(action, observation)
        session.call(
            seed,
            at,
            call_id=reply,
            name=action.split(None, 1)[0][:60],
            arguments=action,
            valid=verdict is not ev.ResultClass.INVALID_ARGUMENTS,
            completion_id=reply,
            destructive=destroys(action),
        )
        edited = _edited(action)
        if edited is not None:
            session.edit(seed, at, edit_id=reply, path=edited[0] or _open_file(step), size=edited[1], call_id=reply)
        spent = milliseconds(step.get("execution_time"), unit_ms=1000.0)
        session.result(seed, at, call_id=reply, verdict=verdict, output=observation, duration_ms=spent)
        tests = test_counts(observation)
        if tests is not None:
            session.tests(seed, at, tests)


def _action(step: Mapping[str, Any]) -> str:
    action = step.get("action")
    return action.strip() if isinstance(action, str) and not _is_exit(step) else ""


def _is_exit(step: Mapping[str, Any]) -> bool:
    """Whether a step was written by the program when it ended the run (`exit_cost`, `exit_format`)."""
    action = step.get("action")
    return isinstance(action, str) and action.startswith("exit_") and len(action.split()) == 1


def _is_task(entry: Mapping[str, Any]) -> bool:
    """Whether a history entry is the task: the first user message that is no demonstration."""
    return (
        entry.get("role") == "user" and not entry.get("is_demo") and not text_of(entry.get("content")).startswith("Here is a demonstration")
    )


def _verdict(action: str, observation: str) -> ev.ResultClass:
    head = observation[:2_000].lstrip().lower()
    if "execution timed out" in head or "command timed out" in head or "was cancelled because it took more than" in head:
        return ev.ResultClass.TIMEOUT
    if head.startswith(_REFUSED):
        return ev.ResultClass.INVALID_ARGUMENTS
    first = action.split(None, 1)[0]
    if f"{first}: command not found" in head:
        return ev.ResultClass.UNKNOWN_TOOL
    if head.startswith(("error:", "traceback (most recent call last)", "bash: ", "/bin/bash: ", "/bin/sh: ")) or "\nerror: " in head[-200:]:
        return error_class(observation)
    return ev.ResultClass.OK


@lru_cache(maxsize=2)
def _edited(action: str) -> tuple[str, EditSize] | None:
    """Return (path, size) of an action that edits; the path is empty where it is the open file's. None for any other action."""
    if found := _EDIT_RANGE.match(action):
        rows = found[3].split("\n") if found[3] else []
        gone = max(int(found[2]) - int(found[1]) + 1, 0)
        return "", EditSize(lines_added=len(rows), chars_added=sum(map(len, rows)), lines_removed=min(gone, 2**31 - 1))
    if found := _INSERT.match(action):
        return "", replaced("", found[1])
    first, second = (*action.split(None, 2)[:2], "", "")[:2]
    editor = first in ("str_replace_editor", "edit_anthropic") and second in ("create", "str_replace", "insert")
    if not (editor or first in ("edit", "insert")) or len(action) > _QUOTED_CHARS:
        return None
    words = shell_words(action)
    return None if words is None else _quoted(words)


_PIECE: Final = re.compile(r"""(\s+)|'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^\s'"\\]+)""", re.S)
_ESCAPED: Final = re.compile(r"""\\(["\\])""")


def shell_words(text: str) -> list[str] | None:
    """Split a command into words by the shell's rules of quotation, None where a quotation does not end.

    Does what `shlex.split` does, which takes a character at a time and with that most of an import's time.
    """
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            return None
        at = found.end()
        space, single, double, escaped, bare = found.groups()
        if space is not None:
            if word is not None:
                words.append(word)
            word = None
            continue
        if double is not None:
            double = _ESCAPED.sub(r"\1", double)
        word = (word or "") + next(part for part in (single, double, escaped, bare) if part is not None)
    return words if word is None else [*words, word]


def _quoted(words: list[str]) -> tuple[str, EditSize] | None:
    """Read `edit OLD NEW`, `insert TEXT [LINE]` and `str_replace_editor COMMAND PATH --option VALUE`."""
    if words[0] == "edit" and len(words) >= 3:
        return "", replaced(words[1], words[2])
    if words[0] == "insert" and len(words) >= 2:
        return "", replaced("", words[1])
    if len(words) < 3 or words[1] not in ("create", "str_replace", "insert"):
        return None
    options = {name: value for name, value in pairwise(words[3:]) if name in ("--file_text", "--old_str", "--new_str")}
    if words[1] == "create":
        return words[2], replaced("", options.get("--file_text"))
    old = options.get("--old_str", "") if words[1] == "str_replace" else ""
    return words[2], replaced(old, options.get("--new_str", ""))


def _open_file(step: Mapping[str, Any]) -> str:
    """Return the file that was open in the step's state: an object, or JSON text."""
    state = step.get("state")
    if isinstance(state, str):
        found = re.search(r'"open_file": "([^"]{1,1000})"', state[:5_000])
        return found[1] if found else ""
    name = mapping(state).get("open_file")
    return name if isinstance(name, str) else ""
