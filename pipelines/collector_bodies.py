"""Bodies of requests to the collector: decompressed within a bound, and taken apart into records. Pure.

Takes: bytes as they came, their media type and encoding. Gives: bytes, parsed records; or `Unreadable`, with the HTTP status and the
sentence that the client gets. Nothing that a client can send raises anything else.
Leaves out: reading from the network (`collector_server.py`), what a record says (`collector.py`).
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any, Final

from pydantic_core import from_json

from pipelines.errors import Rejected

JSON_TYPES: Final = frozenset({"application/json"})
LINES_TYPES: Final = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"})
PROTOBUF: Final = frozenset({"application/x-protobuf", "application/protobuf"})
_CHUNK: Final = 1 << 16


class Unreadable(Exception):
    """A body that nothing can be taken from."""

    def __init__(self, status: int, code: str, sentence: str, *, retry_after_s: int = 0) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code
        self.sentence = sentence


def inflate(body: bytes, encoding: str | None, *, limit_bytes: int) -> bytes:
    """Undo a body's `Content-Encoding`.

    Raises:
        Unreadable: 413: it would be larger than `limit_bytes`. 400: it is cut or damaged. 415: another encoding than gzip or zstd.
    """
    name = (encoding or "identity").strip().lower()
    if name in ("identity", ""):
        found = body
    elif name in ("gzip", "x-gzip"):
        found = _gunzip(body, limit_bytes)
    elif name == "zstd":
        found = _unzstd(body, limit_bytes)
    else:
        raise Unreadable(415, "unsupported_encoding", f"Content-Encoding {name[:40]!r} is not taken; use gzip, zstd or none")
    if len(found) > limit_bytes:
        raise Unreadable(
            413, "body_too_large", f"the body is larger than {limit_bytes} bytes once decompressed; send fewer records at once"
        )
    return found


def _gunzip(body: bytes, limit_bytes: int) -> bytes:
    """Return at most `limit_bytes` + 1 bytes; a gzip file may have several members."""
    out = bytearray()
    rest = body
    try:
        while rest:
            member = zlib.decompressobj(wbits=31)
            while not member.eof and len(out) <= limit_bytes:
                before = len(out)
                out += member.decompress(rest, min(_CHUNK, limit_bytes + 1 - len(out)))
                rest = member.unconsumed_tail
                if not member.eof and not rest and len(out) == before:
                    raise Unreadable(400, "truncated_body", "the gzip body ends too early")
            if len(out) > limit_bytes:
                break
            rest = member.unused_data
    except zlib.error as error:
        raise Unreadable(400, "damaged_body", "the body is not gzip, though its Content-Encoding says so") from error
    return bytes(out)


def _unzstd(body: bytes, limit_bytes: int) -> bytes:
    """Return at most `limit_bytes` + 1 bytes."""
    import pyarrow as pa  # the zstd that is installed anyway

    if not body:
        return b""
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            return stream.read(limit_bytes + 1)
    except OSError as error:
        code = "truncated_body" if "Truncated" in str(error) else "damaged_body"
        raise Unreadable(400, code, "the body is not whole zstd, though its Content-Encoding says so") from error
    except MemoryError as error:  # a frame that names a window of gigabytes
        raise Unreadable(413, "body_too_large", "the zstd body needs too much memory to decompress") from error


def media_type(header: str | None) -> str:
    """Return a `Content-Type` without its parameters."""
    return (header or "").partition(";")[0].strip().lower()


def document(body: bytes) -> Any:
    """Parse one JSON value.

    Raises:
        Unreadable: 400: it is not JSON (numbers that are none, like NaN, are not), or nested too deep.
    """
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Unreadable(400, "malformed_json", f"the body is not JSON: {str(error)[:200]}") from error


def records(body: bytes, kind: str) -> list[Any]:
    """Take a native body apart: a JSON array, one JSON value, or one JSON value a line.

    Args:
        body: Decompressed.
        kind: Its media type, `JSON_TYPES` or `LINES_TYPES`.

    Returns:
        Parsed values, and a `Rejected` in place of each line that is not JSON.

    Raises:
        Unreadable: 400: a JSON body is not JSON as a whole, and its first line is not either.
    """
    if kind in LINES_TYPES:
        return list(_lines(body))
    try:
        value = document(body)
    except Unreadable:
        first = body.lstrip().split(b"\n", 1)[0]
        if first[:1] == b"{" and not isinstance(_line(first), Rejected):
            return list(_lines(body))
        raise
    return value if isinstance(value, list) else [value]


def _lines(body: bytes) -> Iterator[Any]:
    for line in body.split(b"\n"):
        if line.strip():
            yield _line(line)


def _line(line: bytes) -> Any:
    try:
        return from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        return Rejected(reason="malformed_json", raw=line[:1_000], detail=str(error)[:200])


def answer(value: dict[str, Any]) -> bytes:
    """Return a response's JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
