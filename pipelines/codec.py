"""Session events as bytes: one compact JSON object a record, and why a record is not one.

Takes: an `Event`, or raw bytes from a topic, a spool or a client. Gives: bytes, or an `Event`, or a `Rejected` with one of the
`REASONS`. A record is judged for transport faults only: what the policy got wrong (an invalid tool call, a truncated answer) is
a fact about a session and passes.
Leaves out: privacy (`redaction.py`), where records go (`kafka.py`, `recorder.py`).
"""

import binascii
import math
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from pipelines.errors import Rejected
from pipelines.events import EVENT, PAYLOADS, SCHEMA_VERSION, Client, Completion, EditProposed, Event

FUTURE_TOLERANCE_MS: Final = 3_600_000
"""How far ahead of us a client's clock may be. An hour: skew is seconds, a wrong time zone is hours."""

REASONS: Final = frozenset({
    "malformed_json", "unknown_type", "unknown_version", "missing_field", "invalid_field", "oversized", "future_dated",
    "wrong_key", "bad_packed_array",
})  # fmt: skip
"""Every reason a record can be rejected for."""

DEFAULTED: Final = ("schema_version", "arm", "consent")
"""Fields of the envelope that a record may leave out and that are never null."""


def encode(event: Event) -> bytes:
    """Return `event` as compact UTF-8 JSON; fields that are None are left out.

    Raises:
        ValueError: A text holds lone surrogates, which UTF-8 cannot carry, or a field was set to another type without validation.
    """
    return event.model_dump_json(exclude_none=True, warnings="error").encode("utf-8")


def decode(
    raw: bytes, max_bytes: int, *, now_ms: int | None = None, key: bytes | str | None = None, ahead_ms: int = FUTURE_TOLERANCE_MS
) -> Event | Rejected:
    """Parse and judge one record.

    Args:
        raw: The record's value.
        max_bytes: Larger records are `oversized`, unread.
        now_ms: The reader's clock; None leaves the `future_dated` check out.
        key: The record's key; None leaves the `wrong_key` check out.
        ahead_ms: How far the event's clock may be ahead of the reader's.
    """
    if len(raw) > max_bytes:
        return Rejected(reason="oversized", raw=raw, detail=f"{len(raw)} bytes, limit {max_bytes}")
    try:
        event = EVENT.validate_json(raw, strict=True)
    except ValidationError as error:
        reason, detail = _explain(raw, error)
        return Rejected(reason=reason, raw=raw, detail=detail)
    fault = _not_json(raw) or find_fault(event, now_ms=now_ms, key=key, ahead_ms=ahead_ms)
    return Rejected(reason=fault[0], raw=raw, detail=fault[1]) if fault else event


def as_sent(event: Event) -> bytes:
    """Return what a decoded event said in fields that this release knows, as `encode` would write it.

    Of what was left out only the envelope's defaults are said, which are facts about every event; a payload's stay unsaid.
    """
    unsaid = {name: getattr(event, name) for name in DEFAULTED if name not in event.model_fields_set}
    said = event.model_copy(update=unsaid) if unsaid else event
    return said.model_dump_json(exclude_unset=True, exclude_none=True).encode("utf-8")


def has_unknown_fields(raw: bytes, event: Event) -> bool:
    """Return whether a record holds fields that its decoded event does not have, as one from a newer client does."""
    found: dict[str, Any] = from_json(raw)
    known = {*type(event).model_fields}, {*Client.model_fields}, {*PAYLOADS[event.type].model_fields}
    return any(not names >= part.keys() for names, part in zip(known, (found, found["client"], found["payload"]), strict=True))


def find_fault(
    event: Event, *, now_ms: int | None = None, key: bytes | str | None = None, ahead_ms: int = FUTURE_TOLERANCE_MS
) -> tuple[str, str] | None:
    """Return (reason, detail) for what the types cannot say about a parsed event, or None."""
    if event.schema_version != SCHEMA_VERSION:
        return "unknown_version", f"schema_version {event.schema_version}, known: {SCHEMA_VERSION}"
    if field := _beyond_64_bits(vars(event)) or _beyond_64_bits(vars(event.payload), "payload."):
        return "invalid_field", field
    if now_ms is not None and event.occurred_at_ms > now_ms + ahead_ms:
        return "future_dated", f"{(event.occurred_at_ms - now_ms) / 1000:.0f} s ahead of the reader's clock"
    if key is not None:
        text = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
        if text != event.session_id:
            return "wrong_key", "the record's key is not its session_id"
    return _packed_fault(event)


def _beyond_64_bits(fields: Mapping[str, Any], prefix: str = "") -> str | None:
    """Return the first field whose number no column can hold: a whole one of more than 64 bits, or an infinite one."""
    for name, value in fields.items():
        kind = type(value)
        if (kind is int and not -(2**63) <= value < 2**63) or (kind is float and not math.isfinite(value)):
            return prefix + name
    return None


def _not_json(raw: bytes) -> tuple[str, str] | None:
    """Return the fault of a record with numbers that JSON does not have, which the parser takes where it knows no better."""
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            from_json(raw, allow_inf_nan=False)
        except ValueError:
            return "malformed_json", "NaN and Infinity are no JSON"
    return None


def _packed_fault(event: Event) -> tuple[str, str] | None:
    """Return the packed array at fault: no base64, not of whole 32-bit numbers (pairs of them), or of another length than its ids."""
    if isinstance(event, EditProposed) and event.payload.sketch is not None:
        length = _packed_length(event.payload.sketch)
        if length is None or length % 2:
            return "bad_packed_array", "payload.sketch"
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
            return "bad_packed_array", f"payload.{name}"
        lengths[name] = length
    ids, logprobs = lengths.get("response_ids"), lengths.get("behaviour_logprobs")
    if ids is not None and logprobs is not None and ids != logprobs:
        return "bad_packed_array", "payload.behaviour_logprobs"
    return None


def _packed_length(text: str) -> int | None:
    """Return how many 32-bit numbers are packed; None where it is no base64 of whole ones."""
    try:
        size = len(binascii.a2b_base64(text, strict_mode=True))
    except ValueError:
        return None
    return None if size % 4 else size // 4


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
    place = first["loc"][1:] if first["loc"] and first["loc"][0] in PAYLOADS else first["loc"]
    field = ".".join(str(part) for part in place)
    if kind == "union_tag_invalid":
        return "unknown_type", "type is none of the event types"
    if kind == "union_tag_not_found":
        return "missing_field", "type"
    return ("missing_field" if kind == "missing" else "invalid_field"), field
