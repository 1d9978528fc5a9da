"""OTLP/JSON files: what the OpenTelemetry collector's file exporter writes (one request a line), a saved request, VS Code Copilot's
outfile, what the SDKs' console exporters print.

Takes and gives: see `registry.py`; a record is one span, span event or log record. `Translator` is the same mapping for requests
that come over HTTP (`pipelines/collector.py`). Files of traces and of logs can be mixed.
Leaves out: protobuf files. A file is read twice, so that what a later request names is known to the spans before; of more than
`otlp_sessions.KEPT` traces the first ones are known only as far as their own request tells.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError

from pipelines.events import Event
from pipelines.importers import copilot, otlp_agents, otlp_genai
from pipelines.importers.engine import Mapped
from pipelines.importers.otlp_sessions import Sessions, Source
from pipelines.importers.otlp_wire import ROOTS, Fault, Signal, group, signals
from pipelines.importers.records import Advance, Record, json_document, json_lines, json_values
from pipelines.importers.sessions import Stamp

SAMPLE: Final = Path(__file__).parent / "samples" / "otlp.jsonl"
"""Invented telemetry in the true shape: requests of traces and logs with the encodings that senders differ in."""
VERSION: Final = "3"
_OPENING_BYTES: Final = 16_384
"""In which a page of an API names its list; what comes before is about the page."""
_FIRST_LINE_BYTES: Final = 4_096


def read(path: Path, file: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Yield the signals of a file; those of one request (or of one resource in a document) are put in order of their start.

    Before them comes a record that does not count with all of them, from which the mapper learns what one tells about another.
    """
    del path
    return spread(
        file, advance, lists=ROOTS, found=lambda record: group(record.key, record.value) if record.key in ROOTS else signals(record.value)
    )


def spread(
    file: IO[bytes], advance: Advance, *, lists: Collection[str], found: Callable[[Record], Iterator[Signal | Fault]]
) -> Iterator[Record]:
    """Yield a record for each signal in a file's entries, and before them, for the mapper to learn from, one for all of an entry's: of
    every entry of the file, and again of the entry itself.

    Args:
        file: JSON lines or a JSON document.
        advance: Called with the bytes just read.
        lists: Members of a document whose entries are taken one by one.
        found: The signals of one entry.
    """
    first = file.read(_FIRST_LINE_BYTES).lstrip()
    file.seek(0)
    for record in _documents(first, file, lambda _bytes: None, lists):
        if record.fault is None:
            yield _lesson(record, found(record))
    file.seek(0)
    for record in _documents(first, file, advance, lists):
        if record.fault is not None:
            yield record
            continue
        ordered = _ordered(found(record))
        yield _lesson(record, ordered)
        yield from (Record(record.number, item) for item in ordered)


def _lesson(record: Record, found: Iterable[Signal | Fault]) -> Record:
    return Record(record.number, [item for item in found if isinstance(item, Signal)], counted=False)


def _documents(first: bytes, file: IO[bytes], advance: Advance, lists: Collection[str]) -> Iterator[Record]:
    """Read lines where the first line is a request, else one document: member by member where it begins with a list to be taken so (it may
    be longer than the memory), whole where it is an entry itself.
    """
    line = first.split(b"\n", 1)[0].strip()
    if line[:1] == b"{" and len(line) > 1 and not _opens_document(line):
        return json_lines(file, advance)
    opening = b"".join(first[:_OPENING_BYTES].split())
    if opening[:1] == b"{" and not any(f'"{name}":['.encode() in opening for name in lists):
        return json_values(file, advance)
    return (record for record in json_document(file, advance, lists=lists) if record.counted)


def _opens_document(line: bytes) -> bool:
    """Whether a line is only the beginning of a JSON object that goes on over lines; a line that was cut by us is none."""
    if len(line) >= _FIRST_LINE_BYTES - 1:
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return not line.endswith(b"}")
    return False


def _ordered(found: Iterable[Signal | Fault]) -> list[Signal | Fault]:
    """Sort by start, faults first: a turn opens with its first span, though exporters send a span when it ends."""
    return sorted(found, key=lambda item: -1 if isinstance(item, Fault) or item.start_ms is None else item.start_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one entry of a request became."""

    events: tuple[Event, ...]
    fault: str | None
    """Why it was not taken; None when it was, or when it is nothing of ours."""
    ignored: bool


class Translator:
    """Requests of one source -> events; remembers a bounded number of conversations between requests."""

    def __init__(self, source: Source, *, whole: bool = False) -> None:
        """Begin without conversations; `whole`: see `Sessions`."""
        self._sessions = Sessions(source, whole=whole)

    def learn(self, signal: Signal) -> None:
        """Take in what a signal tells about others, before any of its request is mapped."""
        otlp_genai.learn(self._sessions, signal)
        copilot.learn(self._sessions, signal)

    def signal(self, signal: Signal) -> Mapped:
        """Map one signal.

        Raises:
            ValidationError: A value does not fit an event.
        """
        if signal.kind == "log" and signal.name.startswith(copilot.PREFIX):
            return copilot.record(self._sessions, signal)
        if signal.kind == "log" and signal.name.startswith(otlp_agents.PREFIXES):
            return otlp_agents.record(self._sessions, signal)
        return otlp_genai.record(self._sessions, signal)

    def tells_tool(self, signal: Signal) -> bool:
        """Whether a log record is the only one that tells a tool's call."""
        return copilot.tells_tool(self._sessions, signal)

    def taken(self, signal: Signal) -> Answer:
        """Map one signal; one whose values do not fit is answered with `unmappable`."""
        try:
            return _answer(self.signal(signal))
        except ValidationError:
            return _answer(Mapped(reason="unmappable"))

    def request(self, document: object, *, limit: int | None = None) -> Iterator[Answer]:
        """Map a whole request; every span, span event and log record gets one answer, and none of them spoils another's.

        Args:
            document: The parsed request.
            limit: Signals looked at; a few bytes of a request can become one.
        """
        found = _ordered(islice(signals(document), limit))
        for item in found:
            if isinstance(item, Signal):
                self.learn(item)
        for item in found:
            yield _answer(Mapped(reason=item.reason)) if isinstance(item, Fault) else self.taken(item)


def _answer(mapped: Mapped) -> Answer:
    ignored = mapped.reason is not None and mapped.reason.startswith("not_a_session_event")
    return Answer(events=tuple(mapped.events), fault=None if ignored else mapped.reason, ignored=ignored)


class Mapper:
    """The importer's mapper: see `engine.Mapper`."""

    def __init__(self, stamp: Stamp) -> None:
        source = Source(
            origin="imported",
            user_key=lambda _named: stamp.user_key,
            consent=lambda _claimed: stamp.consent,
            keep_text=stamp.keep_text,
            client=stamp.client,
            keyed=stamp.keyed,
            surface=stamp.format,
        )
        self._translator = Translator(source, whole=True)

    def identity(self, record: Record) -> str | None:
        """Return what a span or log record is recognised by: its ids, or all of it."""
        signal: Signal | Fault = record.value
        if isinstance(signal, Fault):
            return None
        if signal.kind == "span":
            return f"{signal.trace_id}/{signal.span_id}" if signal.span_id else None
        attributes = json.dumps(signal.attributes, sort_keys=True, default=str)
        return f"{signal.trace_id}/{signal.span_id}/{signal.at_ms}/{signal.name}/{signal.position}/{attributes}/{signal.body}"

    def facts(self, record: Record) -> Iterator[str]:
        """Name what a signal holds, from its own words."""
        signal: Signal = record.value
        if not isinstance(signal, Signal):
            return
        did = otlp_genai.operation(signal) if signal.kind == "span" else None
        if did == "execute_tool":
            yield "tool_calls"
            if signal.failed or "error.type" in signal.attributes:
                yield "tool_errors"
        elif signal.name in otlp_agents.TOOLS or self._translator.tells_tool(signal):
            yield "tool_calls"
            if signal.get("success") in (False, "false"):
                yield "tool_errors"
        elif (did in otlp_genai.AGENTS and not signal.parent_id) or signal.name in otlp_agents.PROMPTS:
            yield "user_messages"
        elif signal.name.startswith("copilot_chat.edit.feedback"):
            yield "edits"
            if signal.attributes.get("outcome") == "rejected":
                yield "tool_rejections"

    def record(self, record: Record, *, path: Path, emit: bool) -> Mapped:
        """Map one signal."""
        del path
        if not record.counted:
            for each in record.value:
                self._translator.learn(each)
            return Mapped()
        if isinstance(record.value, Fault):
            return Mapped(reason=record.value.reason)
        return self._translator.signal(record.value) if emit else Mapped()

    def end_file(self) -> Iterator[Any]:
        """Yield nothing: every signal stands alone."""
        yield from ()

    def end(self) -> Iterator[Any]:
        """Yield nothing: telemetry does not say when a conversation is over."""
        yield from ()
