"""Small readings that every importer needs: ids, times, texts, numbers. Pure, and total: any value gives an answer.

Takes: values of a transcript, of any type. Gives: what they say, or None.
Leaves out: what is special to one format.
"""

import re
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

ANSI: Final = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
"""Terminal colour and title codes."""
ID_CHARS: Final = 120
"""Ids of a transcript are cut to this; the contract's limit is 128."""
_INT32: Final = 2**31 - 1


def stable_id(seed: str, occurred_at_ms: int, *, space: str) -> str:
    """Return an id shaped as a UUIDv7 whose random bits are a hash of `seed`: the same fact, the same id.

    Args:
        seed: What the event is, unique within a session's format.
        occurred_at_ms: Its time.
        space: The format, so that equal seeds of two formats differ.

    Source: RFC 9562, sections 5.7 and 5.8.
    """
    digest = int.from_bytes(blake2b(seed.encode("utf-8", "replace"), digest_size=10, person=space.encode()[:16]).digest())
    value = (occurred_at_ms & (2**48 - 1)) << 80 | digest
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    hexadecimal = f"{value:032x}"
    return f"{hexadecimal[:8]}-{hexadecimal[8:12]}-{hexadecimal[12:16]}-{hexadecimal[16:20]}-{hexadecimal[20:]}"


def time_ms(value: object) -> int | None:
    """Return an ISO 8601 timestamp as UTC epoch milliseconds, None when it is not one. One without a zone is taken as UTC."""
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
        return max(int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000), 0)
    except (ValueError, OverflowError, OSError):
        return None


def identifier(value: object, default: str) -> str:
    """Return a text that can be an id: `value` cut to `ID_CHARS`, or the default where it is no text or empty."""
    return clean(value if isinstance(value, str) and value else default, limit=ID_CHARS) or "unnamed"


def clean(text: str, *, limit: int) -> str:
    """Return the beginning of a text, without the lone surrogates that some programs write and UTF-8 cannot carry."""
    return text[:limit].encode("utf-8", "replace").decode()


def count(value: object) -> int:
    """Return a whole number from 0 up to 2^31 - 1, 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _INT32:
        return 0
    return int(value)


def milliseconds(value: object, *, unit_ms: float = 1.0) -> float | None:
    """Return a duration in milliseconds, None for what is no finite number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _INT32:
        return None
    return float(value) * unit_ms


def text_of(content: object) -> str:
    """Return the readable text of a content value: a string, one block with a text, or the texts of a list of those, by lines."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        text = content.get("text")
        return text if isinstance(text, str) else ""
    if isinstance(content, list):
        return "\n".join(part for block in content if (part := text_of(block) if not isinstance(block, list) else ""))
    return ""


def plain(text: str) -> str:
    """Return a text without terminal codes."""
    return ANSI.sub("", text) if "\x1b" in text else text


def word(value: object) -> str:
    """Return a text, an empty one for anything else: for values that are looked up in tables."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Return a JSON object, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """Return a JSON list, an empty one for anything else."""
    return value if isinstance(value, list) else []


def digest(value: object) -> str:
    """Return a hash (24 hex digits) that equal JSON values share: for identities of records, not for secrets."""
    text = value if isinstance(value, str) else repr(value)
    return blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()
