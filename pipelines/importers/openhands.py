"""OpenHands conversations: events one a file (`events/*.json`), in a list, or in an evaluation's `history` -> session events.

Takes and gives: see `registry.py`. What an event is (the event store's source, versions 0.8 to 1.x):
- 0.x: an action (`action`, `args`) or an observation (`observation`, `content`, `extras`, its action as `cause`), with a running
  number, a source (user, agent, environment), and for a call the model's whole response, which several calls of one reply share.
- 1.x: a `kind` (MessageEvent, ActionEvent, ObservationEvent, ...), with string ids.
- Tokens are counted by response id, or, where a reply has no response, as the growth of the running totals.
- A session is a folder above `events/`, a file, or an `instance_id`.

Leaves out: recalls, condensations, and what the program says to itself (states, nulls), thoughts.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipelines import events as ev
from pipelines.commands import destroys_by_call
from pipelines.importers.engine import Mapped
from pipelines.importers.openhands_events import Observed, edited_file, observed, read_call, response_of, shown_edit
from pipelines.importers.records import Advance, Record, json_values
from pipelines.importers.sessions import Session, Stamp
from pipelines.importers.shell_results import test_counts
from pipelines.importers.texts import identifier, items, mapping, text_of, time_ms

VERSION: Final = "2"
SAMPLE: Final = Path(__file__).parent / "samples" / "openhands.json"
_STOPS: Final = frozenset({"stopped", "paused", "user_rejected"})


_EVENT_FILE: Final = re.compile(r"(?:event-)?\d+(?:-|$)")
_COMMON_NAMES: Final = frozenset({"events", "trajectory", "conversation", "history", "output"})


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield events, each with its session's name as key; those inside an evaluation's line or an exported object one by one."""
    home = _session_name(path)
    number = 0
    for record in json_values(file, advance):
        value = record.value
        inside = _events_in(value) if value else None
        if inside is None:
            number += 1
            yield Record(number, value, record.fault, home)
            continue
        own = value.get("instance_id", mapping(value.get("issue")).get("number"))
        own = str(own) if isinstance(own, int) else own
        for event in _flat(inside):
            number += 1
            fault = None if isinstance(event, dict) else "not_an_object"
            yield Record(number, event, fault, identifier(f"{own}/{path.parent.name}", home) if isinstance(own, str) and own else home)


def _events_in(value: Mapping[str, Any]) -> list[Any] | None:
    """Return the events of an object that holds them; None for an event itself."""
    if "action" in value or "observation" in value or "kind" in value:
        return None
    return next((value[name] for name in ("history", "trajectory", "events") if isinstance(value.get(name), list)), None)


def order(path: Path) -> tuple[str, int, str]:
    """Sort the files of a conversation by their running number."""
    digits = "".join(character for character in path.stem.split("-")[1 if path.stem.startswith("event-") else 0] if character.isdigit())
    return str(path.parent), int(digits[:18] or 0), path.name


def _session_name(path: Path) -> str:
    """Return the folder's name where the file's own is the same in every conversation."""
    folder = path.parent
    if folder.name == "events":
        name = folder.parent.name
    elif _EVENT_FILE.match(path.stem) or path.stem in _COMMON_NAMES:
        name = folder.name
    else:
        name = path.stem
    return identifier(name, "unnamed")


def _flat(events: list[Any]) -> Iterator[Any]:
    """Yield events; the first evaluations wrote pairs of action and observation."""
    for event in events:
        if isinstance(event, list):
            yield from event
        else:
            yield event


class _State:
    """What a conversation's later events need from its earlier ones."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls: dict[str, str] = {}
        """Open action -> tool call id."""
        self.waiting: dict[str, str] = {}
        """Open action whose edit is known only from its observation -> tool call id."""
        self.responses: set[str] = set()
        self.counted: tuple[int, int, int] = (0, 0, 0)
        """Prompt, response and cached tokens of the completions so far, to be compared with running totals."""
        self.last_ms: int | None = None
        self.seen = 0
        self.finished = False


class Mapper:
    """Maps conversations; an `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._out: list[ev.Event] = []
        self._states: dict[str, _State] = {}

    def identity(self, record: Record) -> str | None:
        """Return the conversation and the event's id."""
        own = record.value.get("id")
        return None if own is None else f"{record.key}/{own!r:.200}"

    def facts(self, record: Record) -> Iterator[str]:
        """Count a person's messages, the agent's calls, and answers that are failures."""
        event = record.value
        call = read_call(event)
        if _is_person(event):
            yield "user_messages"
        elif call is not None:
            yield "tool_calls"
            if edited_file(event) is not None:
                yield "edits"
        else:
            found = observed(event)
            if found is not None and found.verdict is not ev.ResultClass.OK:
                yield "tool_errors"
                if found.verdict is ev.ResultClass.USER_ABORTED:
                    yield "tool_rejections"
            if _is_stop(event):
                yield "interrupts"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one event."""
        del path
        self._out = []
        event = record.value
        state = self._states.get(record.key)
        if state is None:
            state = self._states[record.key] = _State(Session(self._stamp, record.key, out=self._out))
        session = state.session
        session.out, session.mute = self._out, not emit
        at = time_ms(event.get("timestamp"))
        state.last_ms = at = state.last_ms if at is None else at
        if at is None:
            return Mapped(reason="missing_field:timestamp")
        state.seen += 1
        own = event.get("id")
        seed = str(own)[:100] if isinstance(own, int | str) else f"nth/{state.seen}"
        reason = self._event(state, event, seed, at)
        return Mapped(events=self._out, reason=reason)

    def end_file(self) -> Iterator[ev.Event]:
        """Yield nothing: a conversation may be many files."""
        return iter(())

    def end(self) -> Iterator[ev.Event]:
        """Yield the ends of the conversations."""
        self._out = []
        for state in self._states.values():
            state.session.out, state.session.mute = self._out, False
            state.session.end(reason="done" if state.finished else "idle")
        yield from self._out

    def _event(self, state: _State, event: Mapping[str, Any], seed: str, at: int) -> str | None:
        session = state.session
        if _is_person(event):
            text, images = _said(event)
            if not text.strip() and not images:
                return "not_a_session_event:empty_message"
            session.turn(seed, at, text, images=images)
            return None
        if _is_stop(event):
            session.interrupt(seed, at)
            return None
        if read_call(event) is not None:
            self._call(state, event, seed, at)
            return None
        if _is_reply(event):
            self._reply(state, event, seed, at, called=False)
            return None
        found = observed(event)
        if found is not None:
            return self._observation(state, event, found, seed, at)
        kind = event.get("kind", event.get("action", event.get("observation")))
        return f"not_a_session_event:{kind if isinstance(kind, str) and kind else 'untyped'}"[:80]

    def _reply(self, state: _State, event: Mapping[str, Any], seed: str, at: int, *, called: bool) -> str:
        """Make the completion of an event, once for each response; return its id."""
        response = response_of(event)
        name = f"{state.session.session_id[:60]}/{response.name or seed}"[:120]
        if response.name:
            if name in state.responses:
                return name
            state.responses.add(name)
        own = response.usage
        if own is None and response.totals is not None:
            own = _less(response.totals, state.counted)
        prompt, generated, cached = own or (0, 0, 0)
        counted = state.counted
        state.counted = (counted[0] + prompt, counted[1] + generated, counted[2] + cached)
        state.session.completion(
            f"reply/{response.name or seed}",
            at,
            completion_id=name,
            model=response.model,
            finish_reason="tool_calls" if called else "stop",
            prompt_tokens=prompt,
            response_tokens=generated,
            cached_tokens=cached,
            said=None if called else _said(event)[0],
        )
        return name

    def _call(self, state: _State, event: Mapping[str, Any], seed: str, at: int) -> None:
        session, call = state.session, read_call(event)
        if call is None:
            return
        reply = self._reply(state, event, seed, at, called=True)
        call_id = identifier(call.call_id, f"{session.session_id[:80]}/{seed}")
        session.call(
            seed, at, call_id=call_id, name=call.name, arguments=call.arguments, valid=call.valid, completion_id=reply,
            destructive=destroys_by_call(call.name, call.runs),
        )  # fmt: skip
        state.finished = call.name == "finish"
        state.calls[seed] = call_id
        edit = edited_file(event)
        if edit is not None and edit[1] is not None:
            session.edits(seed, at, call_id=call_id, files=[(edit[0], edit[1])])
        elif edit is not None:
            state.waiting[seed] = call_id

    def _observation(self, state: _State, event: Mapping[str, Any], found: Observed, seed: str, at: int) -> str | None:
        session = state.session
        call_id = state.calls.pop(found.cause, None)
        if call_id is None and found.call_id:
            call_id = identifier(found.call_id, seed)
        if call_id is None:
            return "not_a_session_event:unasked_observation"
        if state.waiting.pop(found.cause, None) is not None:
            session.edits(seed, at, call_id=call_id, files=[shown_edit(event)])
        session.result(seed, at, call_id=call_id, verdict=found.verdict, output=found.text, exit_code=found.exit_code)
        session.settle(seed, at, call_id=call_id, verdict=found.verdict)
        tests = test_counts(found.text)
        if tests is not None:
            session.tests(seed, at, tests)
        return None


def _less(totals: tuple[int, int, int], counted: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(totals[0] - counted[0], 0), max(totals[1] - counted[1], 0), max(totals[2] - counted[2], 0)


def _is_person(event: Mapping[str, Any]) -> bool:
    return event.get("source") == "user" and (event.get("action") == "message" or event.get("kind") == "MessageEvent")


def _is_reply(event: Mapping[str, Any]) -> bool:
    return event.get("source") == "agent" and (event.get("action") == "message" or event.get("kind") == "MessageEvent")


def _is_stop(event: Mapping[str, Any]) -> bool:
    if event.get("kind") == "PauseEvent":
        return event.get("source") in (None, "user")
    state = mapping(event.get("args")).get("agent_state")
    return event.get("source") == "user" and event.get("action") == "change_agent_state" and isinstance(state, str) and state in _STOPS


def _said(event: Mapping[str, Any]) -> tuple[str, int]:
    """Return a message's text and how many images it has."""
    if event.get("kind") == "MessageEvent":
        content = mapping(event.get("llm_message")).get("content")
        images = sum(len(items(mapping(block).get("image_urls"))) for block in items(content))
        return text_of(content), images
    arguments = mapping(event.get("args"))
    text = arguments.get("content")
    return (text if isinstance(text, str) else ""), len(items(arguments.get("image_urls", arguments.get("images_urls"))))
