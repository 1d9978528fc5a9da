"""Events of one session, stamped with who, where and which policy.

Takes: payloads as things happen. Gives: events to a recorder. The policy that serves a session is known only from the first
reply, so earlier events wait for it (with the time at which they happened) and are then recorded in order.
Leaves out: transport and privacy (`pipelines.recorder`), and `completion` (the gateway's).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pipelines.events import EVENT, PAYLOADS, Client, Consent, Event, Origin, Payload, new_id

CLIENT: Final = Client(name="tidegate-harness", version="1")
_TYPES: Final = {model: name for name, model in PAYLOADS.items()}


class Sink(Protocol):
    """Takes events; `pipelines.recorder.Recorder` is one. Never blocks, never raises."""

    def record(self, event: Event, /) -> object:
        """Take one event."""
        ...


def wall_ms() -> int:
    """Return UTC epoch milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True, kw_only=True)
class SessionLog:
    """The events of one session."""

    sink: Sink
    session_id: str
    origin: Origin
    user_key: str
    consent: Consent
    now_ms: Callable[[], int] = wall_ms
    policy_version: int | None = None
    arm: str = "none"
    _known: bool = False
    _waiting: list[tuple[Payload, str | None, int]] = field(default_factory=list)

    def add(self, payload: Payload, *, turn_id: str | None = None) -> None:
        """Record what happened now; the type follows from the payload."""
        entry = (payload, turn_id, self.now_ms())
        if self._known:
            self._emit(*entry)
        else:
            self._waiting.append(entry)

    def stamp(self, policy_version: int | None, arm: str) -> None:
        """Say which policy serves the session; from now on events go out at once."""
        self.policy_version, self.arm, self._known = policy_version, arm, True
        self._release()

    def close(self) -> None:
        """Let waiting events go, without a policy if none ever answered."""
        self._known = True
        self._release()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._emit(*entry)

    def _emit(self, payload: Payload, turn_id: str | None, occurred_at_ms: int) -> None:
        fields: dict[str, Any] = {
            "event_id": new_id(occurred_at_ms),
            "type": _TYPES[type(payload)],
            "session_id": self.session_id,
            "turn_id": turn_id,
            "occurred_at_ms": occurred_at_ms,
            "recorded_at_ms": self.now_ms(),
            "origin": self.origin,
            "policy_version": self.policy_version,
            "arm": self.arm,
            "user_key": self.user_key,
            "consent": self.consent,
            "client": CLIENT,
            "payload": payload,
        }
        self.sink.record(EVENT.validate_python(fields))
