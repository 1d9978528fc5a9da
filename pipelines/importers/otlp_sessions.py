"""Which session and turn a signal belongs to, and the events that open them.

Telemetry has no turns. Here a session is a conversation and a turn is a trace: agents start one for each message of their user.
A span tells its conversation only where its program knows it, so the conversation of one span of a trace is taken for all of them;
what arrives before it falls back on `session.id`, and then on the trace itself.

Takes: signals. Gives: envelopes, and `session_started` and `turn_started` once each. The memory is bounded (`KEPT`): a collector
runs for months.
Leaves out: what happened inside a turn (`otlp_genai.py`, `copilot.py`).
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pipelines import events as ev
from pipelines.importers.otlp_wire import Signal
from pipelines.importers.texts import identifier, plain, stable_id
from pipelines.redaction import MESSAGE_MAX_CHARS, features, redact

KEPT: Final = 20_000
"""Traces, conversations and completions remembered: some 10 MB, hours of a busy team."""
CONVERSATION: Final = ("gen_ai.conversation.id", "conversation_id", "langfuse.session.id", "traceloop.association.properties.session_id")
_USER: Final = ("enduser.id", "user.id", "langfuse.user.id", "enduser.pseudo.id")
_REPOSITORY: Final = ("vcs.repository.url.full", "github.copilot.git.repository", "copilot_chat.repo.remote_url")

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


@dataclass(slots=True)
class _Session:
    started: bool = False
    turns: int = 0


class Sessions:
    """The sessions and turns of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.completions: Recent[Turn] = Recent()
        """Turns by completion id: evaluations name the completion, and log records repeat it."""
        self.edits: Recent[bool] = Recent()
        """Edits that were proposed."""
        self._turns: Recent[Turn] = Recent()
        self._sessions: Recent[_Session] = Recent()

    def learn(self, signal: Signal) -> None:
        """Take in what a signal tells of its trace, before any signal of its request becomes an event."""
        if signal.trace_id and (named := signal.around(*CONVERSATION)):
            turn = self._turns.get(signal.trace_id)
            if turn is None:
                self._turns.put(signal.trace_id, Turn(session_id=identifier(named, "unnamed"), turn_id=signal.trace_id, certain=True))
            elif not turn.started and not turn.certain:
                turn.session_id, turn.certain = identifier(named, "unnamed"), True

    def turn(self, signal: Signal, *, own_id: str | None = None) -> Turn | None:
        """Return the turn a signal belongs to; None when it names neither a trace nor a conversation.

        Args:
            signal: The signal.
            own_id: The turn's id where the program has one of its own; else the trace's.
        """
        key = own_id or signal.trace_id
        turn = self._turns.get(key) if key else None
        if turn is not None:
            return turn
        session = signal.around(*CONVERSATION, "session.id")
        if session is None and not key:
            return None
        name = identifier(session, f"trace-{key}")
        return self._turns.put(key or name, Turn(session_id=name, turn_id=identifier(key, name)))

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
        session = self._sessions.get(turn.session_id) or self._sessions.put(turn.session_id, _Session())
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
        session = self._sessions.get(turn.session_id) or self._sessions.put(turn.session_id, _Session())
        said = text if text is not None else turn.text
        said = None if said is None else plain(said)
        users = users or turn.users
        index = users - 1 if users else session.turns
        session.turns = max(session.turns, index) + 1
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
