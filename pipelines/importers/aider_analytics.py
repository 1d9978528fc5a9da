"""aider's analytics log (`--analytics-log FILE`): JSON lines -> session events.

Takes and gives: see `registry.py`. A line is an event with properties, a user id and seconds: no message, no file, no session. A
session lasts from `launched` to `exit`, or to the next start of the same user. A `message_send` is a completion with its token
counts; `/undo` is the user's no to what was last done; a key press that ends the program while a request is under way is a stop.
Leaves out: turns (a request may be a user's message or the program's own reflection), edits, costs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipelines import events as ev
from pipelines.importers.engine import Mapped
from pipelines.importers.records import Advance, Record, json_lines
from pipelines.importers.sessions import Session, Stamp
from pipelines.importers.texts import count, digest, mapping

VERSION: Final = "1"
SAMPLE: Final = Path(__file__).parent / "samples" / "aider_analytics.jsonl"
_ABANDONED: Final = ("Control-C", "Keyboard interrupt")


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the lines of a log."""
    del path
    return json_lines(file, advance)


class Mapper:
    """Maps logs; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._open: dict[str, Session] = {}
        """User -> running session."""
        self._starts: Counter[str] = Counter()
        """Sessions by user and second: two may start in one."""
        self._same: Counter[str] = Counter()
        """Equal lines of this log so far: many events may share a second."""
        self._own = ""
        self._sending: set[str] = set()
        """Users whose request is under way."""

    def identity(self, record: Record) -> str | None:
        """Return the line with its place among equal ones of its log: they are events of one second, and a copy repeats them all."""
        text = digest(record.value)
        self._same[text] += 1
        self._own = f"{text[:12]}/{self._same[text]}"
        return f"{text}/{self._same[text]}"

    def facts(self, record: Record) -> Iterator[str]:
        """Count stops; there is nothing else to count."""
        if record.value.get("event") == "exit" and _abandoned(record.value):
            yield "interrupts"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one line."""
        del path
        self._out = []
        line = record.value
        name, at_s = line.get("event"), line.get("time")
        if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < 2**40:
            return Mapped(reason="missing_field:time")
        at = int(at_s * 1000)
        name = name if isinstance(name, str) else ""
        user = self._stamp.keyed("user", str(line.get("user_id", "")))[:16]
        session = self._open.get(user)
        if session is None or name == "launched":
            self._end(user)
            name_at = f"aider-log-{user}-{at}"
            self._starts[name_at] += 1
            again = f"-{self._starts[name_at]}" if self._starts[name_at] > 1 else ""
            session = self._open[user] = Session(self._stamp, name_at + again, out=self._out)
        session.out, session.mute = self._out, not emit
        seed = f"{name}/{at}/{self._own}"
        reason = self._event(session, name, mapping(line.get("properties")), seed, at)
        stopped = name == "exit" and _abandoned(line) and user in self._sending
        if stopped:
            session.interrupt(seed, at, target="session")
            reason = None
        if name == "message_send_starting":
            self._sending.add(user)
        else:
            self._sending.discard(user)
        if name == "exit":
            self._end(user, reason="abandoned" if stopped else "done")
        return Mapped(events=self._out, reason=reason)

    def end_file(self) -> Iterator[ev.Event]:
        """Yield the ends of what is still running."""
        self._out = []
        self._same.clear()
        for user in list(self._open):
            self._end(user)
        yield from self._out

    def end(self) -> Iterator[ev.Event]:
        """Yield nothing: a log holds its sessions."""
        return iter(())

    def _end(self, user: str, *, reason: str = "idle") -> None:
        session = self._open.pop(user, None)
        if session is not None:
            session.out, session.mute = self._out, False
            session.end(reason=reason)  # pyright: ignore[reportArgumentType]

    def _event(self, session: Session, name: str, properties: Mapping[str, Any], seed: str, at: int) -> str | None:
        if name == "message_send":
            model = properties.get("main_model")
            session.completion(
                seed,
                at,
                completion_id=f"{session.session_id[:60]}/{seed}",
                model=model if isinstance(model, str) else "",
                finish_reason="stop",
                prompt_tokens=count(properties.get("prompt_tokens")),
                response_tokens=count(properties.get("completion_tokens")),
            )
            return None
        if name == "message_send_exception":
            session.interrupt(seed, at, by="system", target="completion")
            return None
        if name == "command_undo":
            session.feedback(seed, at, source="command_undo", score=-1.0)
            return None
        return f"not_a_session_event:{name or 'untyped'}"[:80]


def _abandoned(line: Mapping[str, Any]) -> bool:
    return str(mapping(line.get("properties")).get("reason", "")).startswith(_ABANDONED)
