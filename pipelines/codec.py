"""Session events as bytes: one compact JSON object a record, and why a record is not one.

Takes: an `Event`, or raw bytes from a topic, a spool or a client. Gives: bytes, or an `Event`, or a `Rejected` with one of the
`REASONS`. A record is judged for transport faults only: what the policy got wrong (an invalid tool call, a truncated answer) is
a fact about a session and passes.
Leaves out: privacy (`redaction.py`), where records go (`kafka.py`, `recorder.py`).
"""

from typing import Final

from pydantic import ValidationError
from pydantic_core import from_json

from pipelines.errors import Rejected
from pipelines.events import EVENT, SCHEMA_VERSION, Completion, EditProposed, Event, unpack_ids

FUTURE_TOLERANCE_MS: Final = 3_600_000
"""How far ahead of us a client's clock may be. An hour: skew is seconds, a wrong time zone is hours."""

REASONS: Final = frozenset({
    "malformed_json", "unknown_type", "unknown_version", "missing_field", "invalid_field", "oversized", "future_dated",
    "wrong_key", "bad_packed_array",
})  # fmt: skip
"""Every reason a record can be rejected for."""


def encode(event: Event) -> bytes:
    """Return `event` as compact UTF-8 JSON; fields that are None are left out.

    Raises:
        ValueError: A text holds lone surrogates, which UTF-8 cannot carry, or a field was set to another type without validation.
    """
    return event.model_dump_json(exclude_none=True, warnings="error").encode("utf-8")


def decode(raw: bytes, max_bytes: int, *, now_ms: int | None = None, key: bytes | str | None = None) -> Event | Rejected:
    """Parse and judge one record.

    Args:
        raw: The record's value.
        max_bytes: Larger records are `oversized`, unread.
        now_ms: The reader's clock; None leaves the `future_dated` check out.
        key: The record's key; None leaves the `wrong_key` check out.
    """
    if len(raw) > max_bytes:
        return Rejected(reason="oversized", raw=raw, detail=f"{len(raw)} bytes, limit {max_bytes}")
    try:
        event = EVENT.validate_json(raw, strict=True)
    except ValidationError as error:
        reason, detail = _explain(raw, error)
        return Rejected(reason=reason, raw=raw, detail=detail)
    fault = find_fault(event, now_ms=now_ms, key=key)
    return Rejected(reason=fault[0], raw=raw, detail=fault[1]) if fault else event


def find_fault(event: Event, *, now_ms: int | None = None, key: bytes | str | None = None) -> tuple[str, str] | None:
    """Return (reason, detail) for what the types cannot say about a parsed event, or None."""
    if event.schema_version != SCHEMA_VERSION:
        return "unknown_version", f"schema_version {event.schema_version}, known: {SCHEMA_VERSION}"
    if now_ms is not None and event.occurred_at_ms > now_ms + FUTURE_TOLERANCE_MS:
        return "future_dated", f"{(event.occurred_at_ms - now_ms) / 1000:.0f} s ahead of the reader's clock"
    if key is not None:
        text = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
        if text != event.session_id:
            return "wrong_key", "the record's key is not its session_id"
    return _packed_fault(event)


def _packed_fault(event: Event) -> tuple[str, str] | None:
    if isinstance(event, EditProposed) and event.payload.sketch is not None:
        length = _packed_length(event.payload.sketch)
        if length is None or length % 2:
            return "bad_packed_array", "sketch is not packed int32 pairs"
    if not isinstance(event, Completion):
        return None
    payload = event.payload
    lengths: dict[str, int] = {}
    for name in ("prompt_ids", "response_ids", "behaviour_logprobs"):
        text: str | None = getattr(payload, name)
        if text is None:
            continue
        length = _packed_length(text)
        if length is None:
            return "bad_packed_array", f"{name} is not base64 of whole little-endian 32-bit numbers"
        lengths[name] = length
    ids, logprobs = lengths.get("response_ids"), lengths.get("behaviour_logprobs")
    if ids is not None and logprobs is not None and ids != logprobs:
        return "bad_packed_array", f"{logprobs} log-probabilities for {ids} response ids"
    return None


def _packed_length(text: str) -> int | None:
    try:
        return len(unpack_ids(text))
    except ValueError:
        return None


def _explain(raw: bytes, error: ValidationError) -> tuple[str, str]:
    """Turn pydantic's account into a reason; field names only, never values."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind = first["type"]
    if kind == "json_invalid":
        return "malformed_json", str(first["msg"])
    if kind in ("model_attributes_type", "model_type", "dict_type") and len(first["loc"]) < 2:
        return "malformed_json", "the record is not a JSON object"
    version = from_json(raw).get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version != SCHEMA_VERSION:
        return "unknown_version", f"schema_version {version}, known: {SCHEMA_VERSION}"
    field = ".".join(str(part) for part in first["loc"])
    if kind == "union_tag_invalid":
        return "unknown_type", "type is none of the event types"
    if kind == "union_tag_not_found":
        return "missing_field", "type"
    return ("missing_field" if kind == "missing" else "invalid_field"), field
