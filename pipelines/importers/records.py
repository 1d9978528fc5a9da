"""Files of transcripts as records: JSON lines, JSON documents of any size, text lines. The memory holds one record at a time.

Takes: a binary file, and where to say how many bytes were read. Gives: `Record`s, a broken one with the reason: nothing in a file
raises. Reasons: `malformed_json`, `truncated_last_line` (a session still being written, or a cut copy), `truncated_document`,
`not_an_object`, `oversized_line`.
Leaves out: what a record means (each format's module), accounts (`engine.py`).
"""

import codecs
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

from pydantic_core import from_json

MAX_LINE_BYTES: Final = 64_000_000
"""A line with pasted images reaches some MB; far above that it is not a transcript and must not fill the memory."""
_CHUNK_BYTES: Final = 1 << 20
_SPACE: Final = " \t\r\n"

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a transcript."""

    number: int
    """Its line in the file, or its place in its document; from 1."""
    value: Any
    """A JSON object; any JSON value for the member of a document; None when it is broken."""
    fault: str | None = None
    """Why it could not be read."""
    key: str = ""
    """The member of the document that it is or that it is an entry of; empty for lines."""
    counted: bool = True
    """False for a document's members that are not entries (its id, its start): they are context, not lines."""


def lines(file: IO[bytes], advance: Advance) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line with its end) of every line that is not blank; None for a line over `MAX_LINE_BYTES`."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        advance(len(line))
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                advance(len(rest))
            advance(len(rest))
            yield number, None
        elif line.strip():
            yield number, line


def json_lines(file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield one record a line that is not blank."""
    for number, line in lines(file, advance):
        if line is None:
            yield Record(number, None, "oversized_line")
            continue
        value = parse(line)
        if value is BAD:
            yield Record(number, None, "malformed_json" if line.endswith(b"\n") else "truncated_last_line")
        elif not isinstance(value, dict):
            yield Record(number, None, "not_an_object")
        else:
            yield Record(number, value)


BAD: Final = object()
"""What `parse` returns for what is not JSON; None is a JSON value."""


def parse(text: bytes | str) -> Any:
    """Parse JSON; `BAD` when it is none. The fast parser refuses lone surrogates, which some programs write: those go to json."""
    if isinstance(text, str):
        text = text.encode("utf-8", "replace")
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return BAD


def json_document(file: IO[bytes], advance: Advance, *, lists: Collection[str]) -> Iterator[Record]:
    """Yield the entries of a JSON document: of a top-level list, or of those members of a top-level object that are named in `lists`.

    Other members of a top-level object come as records that do not count, in file order. After a fault nothing more can be told
    apart: one broken record ends the document. Documents that follow one another are read on.
    """
    reader = _Reader(file, advance)
    try:
        while first := reader.peek():
            if first == "[":
                yield from _entries(reader, "")
            elif first == "{":
                yield from _members(reader, lists)
            else:
                yield Record(reader.next_number(), None, _fault(reader.value()))
    except _Broken as broken:
        yield Record(reader.next_number(), None, broken.reason)
        reader.drain()


class _Broken(Exception):
    """The document cannot be read on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _fault(value: object) -> str | None:
    return None if isinstance(value, dict) else "not_an_object"


def _entries(reader: "_Reader", key: str) -> Iterator[Record]:
    reader.take("[")
    if reader.peek() == "]":
        reader.take("]")
        return
    while True:
        value = reader.value()
        fault = _fault(value)
        yield Record(reader.next_number(), None if fault else value, fault, key)
        if reader.take(",]") == "]":
            return


def _members(reader: "_Reader", lists: Collection[str]) -> Iterator[Record]:
    reader.take("{")
    if reader.peek() == "}":
        reader.take("}")
        return
    while True:
        key = reader.value()
        if not isinstance(key, str):
            raise _Broken("malformed_json")
        reader.take(":")
        if key in lists and reader.peek() == "[":
            yield from _entries(reader, key)
        else:
            yield Record(0, reader.value(), None, key, counted=False)
        if reader.take(",}") == "}":
            return


class _Reader:
    """A text window over a file, from which JSON values are taken one by one."""

    def __init__(self, file: IO[bytes], advance: Advance) -> None:
        self._file = file
        self._advance = advance
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._end = False
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def peek(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < len(text):
                return text[at]
            if not self._more(_CHUNK_BYTES):
                return ""

    def take(self, expected: str) -> str:
        """Take the next character, which must be one of `expected`."""
        found = self.peek()
        if not found or found not in expected:
            raise _Broken("malformed_json" if found else "truncated_document")
        self._at += 1
        return found

    def value(self) -> Any:
        """Take the next JSON value; the window grows until it is in it."""
        self.peek()
        wanted = _CHUNK_BYTES
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_LINE_BYTES:
                    raise _Broken("oversized_line") from None
                if not self._more(wanted):
                    cut = error.pos >= len(self._text.rstrip()) or error.msg.startswith("Unterminated")
                    raise _Broken("truncated_document" if cut else "malformed_json") from None
                wanted *= 2
                continue
            except (ValueError, RecursionError):
                raise _Broken("malformed_json") from None
            if end == len(self._text) and not isinstance(value, dict | list | str) and self._more(wanted):
                continue  # a number or word that touches the window's edge may go on
            self._at = end
            return value

    def drain(self) -> None:
        """Read the rest unseen, so that progress reaches its total."""
        while chunk := self._file.read(_CHUNK_BYTES):
            self._advance(len(chunk))

    def _more(self, size: int) -> bool:
        if self._end:
            return False
        chunk = self._file.read(size)
        self._advance(len(chunk))
        self._end = not chunk
        self._text = self._text[self._at :] + self._decode(chunk, final=not chunk)
        self._at = 0
        return not self._end


def json_values(file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the JSON objects of a file whole, whatever lies between them, and the entries of a list one by one."""
    reader = _Reader(file, advance)
    try:
        while first := reader.peek():
            if first == "[":
                yield from _entries(reader, "")
            else:
                value = reader.value()
                fault = _fault(value)
                yield Record(reader.next_number(), None if fault else value, fault)
    except _Broken as broken:
        yield Record(reader.next_number(), None, broken.reason)
        reader.drain()
