"""Which session and turn a signal belongs to, and the events that open them.

Telemetry has no turns. Here a session is a conversation and a turn is a trace: agents start one for each message of their user.
A span tells its conversation only where its program knows it, so the conversation of one span of a trace is taken for all of them;
what arrives before it falls back on `session.id`, and then on the trace itself. Spans arrive when they end, a trace's first one last:
what they tell about a turn is learned before any of a file (or of a request over HTTP) becomes an event.

Takes: signals. Gives: envelopes, and `session_started` and `turn_started` once each. The memory is bounded (`KEPT`): a collector
runs for months.
Leaves out: what happened inside a turn (`otlp_genai.py`, `copilot.py`).
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from pipelines import events as ev
from pipelines.importers.otlp_wire import Signal
from pipelines.importers.texts import identifier, plain, stable_id
from pipelines.redaction import MESSAGE_MAX_CHARS, features, redact

KEPT: Final = 20_000
"""Traces, conversations and completions remembered: some 10 MB, hours of a busy team."""
CONVERSATION: Final = (
    "copilot_chat.session_id",  # before the convention's name, which Copilot's model calls give to their request
    "gen_ai.conversation.id", "conversation_id", "conversation.id", "langfuse.session.id", "traceloop.association.properties.session_id",
)  # fmt: skip
TOLD_CHARS: Final = 16_000
"""A longer message is not remembered for its turn, but taken from the span that carries it: thousands of turns wait at once."""
_USER: Final = ("enduser.id", "user.id", "langfuse.user.id", "enduser.pseudo.id")
_REPOSITORY: Final = ("vcs.repository.url.full", "github.copilot.git.repository", "copilot_chat.repo.remote_url")

_TURNS: Final = 10_000
"""Turns of one session that are kept in order: some programs name one session for all they ever do."""
_NEAR: Final = 100
"""Earlier turns that are looked at for the last place given."""
Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A mapping that forgets what was used least recently."""

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Value] = OrderedDict()

    def get(self, key: str) -> Value | None:
        """Return the value and note its use."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: str, value: Value) -> Value:
        """Remember a value; returns it."""
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return value

    def first(self, key: str, value: Value) -> bool:
        """Remember a value unless there is one; returns whether it was new."""
        if self.get(key) is not None:
            return False
        self.put(key, value)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Whose telemetry it is; what the sender says of itself is bounded by this."""

    origin: ev.Origin
    user_key: Callable[[str | None], str]
    """Keyed hash for the user that a signal names, or for the source's own where it names none."""
    consent: Callable[[str | None], ev.Consent]
    """What may be done, given what a signal claims (`tidegate.consent`)."""
    keep_text: bool
    client: ev.Client
    keyed: Callable[[str, str], str]
    """Keyed hash: (kind, raw) -> hex."""
    surface: str = "otlp"
    """Of sessions whose telemetry names no service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A model call that became a completion."""

    start_ms: int
    end_ms: int
    tokens: tuple[int, int]


@dataclass(slots=True)
class Turn:
    """A trace that is under way."""

    session_id: str
    turn_id: str
    certain: bool = False
    """Its conversation was named, not guessed."""
    started: bool = False
    steps: int = 0
    """Completions so far."""
    text: str | None = None
    """What the user said, where a log record told it before the spans came."""
    users: int = 0
    """User messages up to this turn, as the conversation itself counts them; 0 when unknown."""
    asked: bool = False
    """`text` is from the agent's own span: it is what the user typed, where a model call's messages hold what the program added."""
    start_ms: int | None = None
    """The earliest start of what is known of it."""
    calls_told: bool = False
    """A span tells a model call of it, so that log records about one are repeats."""
    tools_told: bool = False


@dataclass(slots=True)
class _Session:
    started: bool = False
    starts: list[tuple[int, str]] = field(default_factory=list)
    """Its turns by their starts, of which the earlier ones give a turn its place; the latest `_TURNS`."""
    dropped: int = 0
    """Turns that are no longer among them."""
    places: dict[str, int] = field(default_factory=dict)
    """The places given to them so far."""

    def expect(self, turn: "Turn", start_ms: int) -> None:
        """Note a turn's start, the earliest that is told."""
        if turn.start_ms is not None:
            old = (turn.start_ms, turn.turn_id)
            at = bisect_left(self.starts, old)
            if start_ms >= turn.start_ms and self.starts[at : at + 1] == [old]:
                return
            if self.starts[at : at + 1] == [old]:
                del self.starts[at]
        turn.start_ms = start_ms if turn.start_ms is None else min(turn.start_ms, start_ms)
        insort(self.starts, (turn.start_ms, turn.turn_id))
        if len(self.starts) > _TURNS:
            self.places.pop(self.starts.pop(0)[1], None)
            self.dropped += 1

    def place(self, turn: "Turn", at: int, users: int) -> int:
        """Return a turn's number: what the conversation itself counts, else how many earlier ones there are."""
        self.expect(turn, at)
        rank = bisect_left(self.starts, (turn.start_ms or 0, turn.turn_id))
        before = next((self.places[name] for _, name in reversed(self.starts[max(rank - _NEAR, 0) : rank]) if name in self.places), -1)
        found = max(users - 1, self.dropped + rank, before + 1)
        if self.starts[rank : rank + 1] == [(turn.start_ms or 0, turn.turn_id)]:
            self.places[turn.turn_id] = found
        return found

    def leave(self, turn: "Turn") -> None:
        """Forget a turn that was of another session after all."""
        at = bisect_left(self.starts, (turn.start_ms or 0, turn.turn_id))
        if self.starts[at : at + 1] == [(turn.start_ms or 0, turn.turn_id)]:
            del self.starts[at]


def conversation(signal: Signal) -> str | None:
    """Return the conversation that a signal names. Some programs write the response's own id there: that is none."""
    named = signal.around(*CONVERSATION)
    return None if named is not None and named == signal.text("gen_ai.response.id") else named


def round_key(signal: Signal) -> str:
    """Return what the records of one model call share where only some of them name the trace: the editor's window and the tokens."""
    window, used = signal.context.get("session.id"), [signal.get(f"gen_ai.usage.{side}_tokens") for side in ("input", "output")]
    return f"{window}/{used}"


class Sessions:
    """The sessions and turns of one source."""

    def __init__(self, source: Source, *, whole: bool = False) -> None:
        """Begin without sessions.

        Args:
            source: Whose telemetry it is.
            whole: All that will be mapped has been learned from before: what no span has told by then, none will.
        """
        self.source = source
        self.whole = whole
        self.completions: Recent[Turn] = Recent()
        """Turns by completion id: evaluations and edits name the completion."""
        self.calls: Recent[list[Call]] = Recent()
        """Model calls by completion id, which one program gives to all rounds of a turn and two of its layers to the same call."""
        self.edits: Recent[bool] = Recent()
        """Edits that were proposed."""
        self.inline: Recent[tuple[int, str, Turn]] = Recent()
        """When an inline edit of a file was decided, and which edit of which turn that was."""
        self.rounds: Recent[Turn] = Recent()
        """Turns by `round_key`, for model calls that name no trace."""
        self.prompts: Recent[Turn] = Recent()
        """The latest prompt's turn by conversation, for programs whose records do not all name their prompt."""
        self._turns: Recent[Turn] = Recent()
        self._sessions: Recent[_Session] = Recent()

    def learn(self, signal: Signal) -> None:
        """Take in what a signal tells of its trace, before any signal of its request becomes an event."""
        if signal.trace_id and (named := conversation(signal)):
            self.name(signal.trace_id, named)

    def name(self, trace_id: str, named: str) -> None:
        """Take in what a trace's conversation is called, from a record that says it in its own way."""
        turn = self._turns.get(trace_id)
        if turn is None:
            self._turns.put(trace_id, Turn(session_id=identifier(named, "unnamed"), turn_id=trace_id, certain=True))
        elif not turn.started and not turn.certain:
            guessed = self._sessions.get(turn.session_id)
            if guessed is not None:
                guessed.leave(turn)
            turn.session_id, turn.certain = identifier(named, "unnamed"), True
            if turn.start_ms is not None:
                self._session(turn.session_id).expect(turn, turn.start_ms)

    def expect(self, turn: Turn, start_ms: int | None) -> None:
        """Note that a turn will have events, from this time on: it takes its place among its session's turns."""
        if start_ms is not None:
            self._session(turn.session_id).expect(turn, start_ms)

    def own(self, key: str, conversation: str) -> Turn:
        """Return the turn of a program that has ids of its own for its turns and conversations."""
        return self._turns.get(key) or self._turns.put(key, Turn(session_id=conversation, turn_id=identifier(key, "unnamed"), certain=True))

    def known(self, key: str) -> Turn | None:
        """Return the turn that was opened under an id of a program's own."""
        return self._turns.get(key)

    def _session(self, session_id: str) -> _Session:
        return self._sessions.get(session_id) or self._sessions.put(session_id, _Session())

    def turn(self, signal: Signal, *, own_id: str | None = None) -> Turn | None:
        """Return the turn a signal belongs to; None when it names neither a trace nor a conversation.

        Args:
            signal: The signal.
            own_id: The turn's id where the program has one of its own; else the trace's.
        """
        key = own_id or signal.trace_id
        session = None if key and self._turns.get(key) is not None else conversation(signal) or signal.around("session.id")
        key = key or (identifier(session, "unnamed") if session is not None else "")
        if not key:
            return None
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns.put(key, Turn(session_id=identifier(session, f"trace-{key}"), turn_id=identifier(key, "unnamed")))
        return turn

    def envelope(self, signal: Signal, turn: Turn, at: int, seed: str) -> dict[str, Any]:
        """Return an event's envelope; the id is a hash of the source's user and the seed, so that a repeat has the same id."""
        source = self.source
        user = source.user_key(signal.around(*_USER))
        return {
            "event_id": stable_id(f"{user}/{turn.session_id}/{seed}", at, space="otlp"),
            "session_id": turn.session_id,
            "turn_id": turn.turn_id,
            "occurred_at_ms": at,
            "recorded_at_ms": at,  # not the clock: a second import must give the same bytes
            "origin": source.origin,
            "arm": "none",
            "user_key": user,
            "consent": source.consent(signal.around("tidegate.consent")),
            "client": source.client,
        }

    def kept(self, text: str | None, consent: ev.Consent) -> str | None:
        """Return what may be kept of a text: redacted, or nothing."""
        return redact(text)[0][:MESSAGE_MAX_CHARS] if text is not None and self.source.keep_text and consent != "none" else None

    def opening(self, signal: Signal, turn: Turn, at: int) -> list[ev.Event]:
        """Return the session's opening alone, once."""
        session = self._session(turn.session_id)
        if session.started:
            return []
        session.started = True
        repository = signal.around(*_REPOSITORY)
        payload = ev.SessionStartedPayload(
            surface=(signal.around("service.name") or self.source.surface)[:64],
            repository=self.source.keyed("repository", repository) if repository else None,
        )
        envelope = self.envelope(signal, turn, at, f"{turn.turn_id}/session")
        envelope["turn_id"] = None
        return [ev.SessionStarted(**envelope, payload=payload)]

    def openings(self, signal: Signal, turn: Turn, at: int, *, text: str | None = None, users: int = 0, images: int = 0) -> list[ev.Event]:
        """Return what opens a signal's session and turn, each once.

        Args:
            signal: The first signal of the turn, or any later one.
            turn: Its turn.
            at: When the turn began, as far as this signal knows.
            text: What the user said; None when it was not captured.
            users: How many user messages the conversation holds; 0 when unknown.
            images: Images the user attached.
        """
        events = self.opening(signal, turn, at)
        if turn.started:
            return events
        turn.started = True
        said = turn.text if turn.asked or text is None else text
        said = None if said is None else plain(said)
        at = at if turn.start_ms is None else min(at, turn.start_ms)
        index = self._session(turn.session_id).place(turn, at, users or turn.users)
        derived = features(said or "")
        envelope = self.envelope(signal, turn, at, f"{turn.turn_id}/turn")
        payload = ev.TurnStartedPayload(
            turn_index=index,
            message=self.kept(said, envelope["consent"]),
            message_chars=derived.chars,
            language=derived.language,
            stack_traces=derived.stack_traces,
            diffs=derived.diffs,
            images=images,
        )
        turn.text = None
        return [*events, ev.TurnStarted(**envelope, payload=payload)]
