"""What the collector does with a request's records: each becomes an event that may be recorded, or is refused with a reason.

Takes: parsed records and who sent them. Gives: encoded events for the recorder's disk, and what is said of the others. One bad record
never spoils its request. A native record may leave out what the collector knows better (`origin`, `user_key`, `consent`,
`recorded_at_ms`, `client`, `schema_version`) and cannot override it:

- `origin` is the key's; a record that claims another is refused.
- `consent` is lowered to what the key may claim.
- `user_key` is taken for a name and hashed within the key's name space.
- token ids and log-probabilities are dropped, and the completion says so, unless the key is trusted with them: what is trained on is
  captured where it was sampled, not reported by a client.

Unknown fields are dropped: nobody has looked for secrets in them.
Leaves out: HTTP (`collector_server.py`), the mapping of telemetry (`importers/otlp.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from pipelines import codec
from pipelines.collector_keys import Caller
from pipelines.errors import Rejected
from pipelines.events import SCHEMA_VERSION, Client, Event
from pipelines.importers.otlp import Translator
from pipelines.importers.otlp_sessions import Source
from pipelines.redaction import clean_event

ORIGIN_REASON: Final = "origin_not_allowed"
UNTRUSTED: Final = "not_captured_by_us"
"""`capture_error` of completions whose token ids were dropped."""
_ARRAYS: Final = ("prompt_ids", "response_ids", "behaviour_logprobs")
_CLIENT_CHARS: Final = 64
_INT64: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one record of a request became."""

    lines: tuple[bytes, ...] = ()
    """Encoded events: one of a native record, several of a span."""
    rejected: Rejected | None = None
    ignored: bool = False
    """It was readable and is nothing of ours."""


class Intake:
    """Turns records into encoded events. Lives in one thread; remembers conversations of telemetry by key."""

    def __init__(self, *, keyed: Callable[[str, str], str], keep_text: bool, max_event_bytes: int) -> None:
        """Prepare.

        Args:
            keyed: The deployment's keyed hash.
            keep_text: The deployment's setting.
            max_event_bytes: Larger events are refused.
        """
        self._keyed = keyed
        self._keep_text = keep_text
        self._max_event_bytes = max_event_bytes
        self._translators: dict[Caller, Translator] = {}

    def native(self, record: object, caller: Caller, *, now_ms: int) -> Judged:
        """Judge one native record."""
        if isinstance(record, Rejected):
            return Judged(rejected=record)
        if not isinstance(record, dict):
            return Judged(rejected=_refused("malformed_json", "the record is not a JSON object"))
        if record.get("origin", caller.origin) != caller.origin:
            return Judged(rejected=_refused(ORIGIN_REASON, f"this key's origin is {caller.origin}"))
        if (place := _too_large(record)) is not None:
            return Judged(rejected=_refused("invalid_field", place))
        raw = to_json(self._stamped(record, caller, now_ms))
        verdict = codec.decode(raw, self._max_event_bytes, now_ms=now_ms)
        if isinstance(verdict, Rejected):
            return Judged(rejected=verdict)
        return Judged(lines=(codec.encode(clean_event(verdict, keep_text=self._keep_text)),))

    def _stamped(self, record: dict[str, Any], caller: Caller, now_ms: int) -> dict[str, Any]:
        user = record.get("user_key")
        stamped = record | {
            "schema_version": record.get("schema_version", SCHEMA_VERSION),
            "recorded_at_ms": now_ms,
            "origin": caller.origin,
            "consent": caller.allowed(record.get("consent")),
            "user_key": caller.user(user, self._keyed) if user is None or isinstance(user, str) else user,
            "client": _client(record.get("client"), caller),
        }
        payload = record.get("payload")
        if record.get("type") == "completion" and not caller.tokens and isinstance(payload, dict):
            if any(payload.get(name) is not None for name in _ARRAYS):
                stamped["payload"] = payload | dict.fromkeys(_ARRAYS) | {"capture_error": UNTRUSTED}
            elif payload.get("capture_error") is None:
                stamped["payload"] = payload | {"capture_error": "no_token_ids"}
        return stamped

    def telemetry(self, document: object, caller: Caller, *, now_ms: int, limit: int) -> Iterator[Judged]:
        """Judge each span, span event and log record of an OTLP request, at most `limit` of them."""
        translator = self._translators.get(caller)
        if translator is None:
            translator = self._translators[caller] = Translator(self._source(caller))
        for found in translator.request(document, limit=limit):
            if found.fault is not None:
                yield Judged(rejected=_refused(found.fault, ""))
                continue
            lines: list[bytes] = []
            fault: Rejected | None = None
            for event in found.events:
                verdict = self._encoded(event, now_ms)
                if isinstance(verdict, bytes):
                    lines.append(verdict)
                else:
                    fault = fault or verdict
            yield Judged(lines=tuple(lines), rejected=fault, ignored=not lines and fault is None)

    def _encoded(self, event: Event, now_ms: int) -> bytes | Rejected:
        """Encode an event that the mapping made and redacted."""
        try:
            line = codec.encode(event.model_copy(update={"recorded_at_ms": now_ms}))
        except ValueError as error:  # a lone surrogate, which JSON can spell and UTF-8 cannot
            return _refused("invalid_field", type(error).__name__)
        if len(line) > self._max_event_bytes:
            return _refused("oversized", f"{len(line)} bytes, limit {self._max_event_bytes}")
        fault = codec.find_fault(event, now_ms=now_ms)
        return line if fault is None else _refused(*fault)

    def _source(self, caller: Caller) -> Source:
        return Source(
            origin=caller.origin,
            user_key=lambda named: caller.user(named, self._keyed),
            consent=caller.allowed,
            keep_text=self._keep_text,
            client=Client(name=f"otlp:{caller.name}"[:_CLIENT_CHARS], version="1"),
            keyed=self._keyed,
        )


def _refused(reason: str, detail: str) -> Rejected:
    return Rejected(reason=reason, raw=b"", detail=detail)


def _client(given: object, caller: Caller) -> object:
    """Return who recorded an event, as far as it says so in the right form; a wrong form is judged with the rest."""
    if given is None:
        return {"name": f"collector:{caller.name}"[:_CLIENT_CHARS], "version": "1"}
    if isinstance(given, dict):
        return {name: value[:_CLIENT_CHARS] if isinstance(value, str) else value for name, value in given.items()}
    return given


def _too_large(value: object, path: str = "") -> str | None:
    """Return where a whole number is that no column can hold (int64), or None."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, int | dict | list) and (found := _too_large(inner, f"{path}.{name}" if path else name)) is not None:
                return found[:200]
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, int | dict | list) and (found := _too_large(inner, path)) is not None:
                return found
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > _INT64:
        return path
    return None
