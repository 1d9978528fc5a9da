"""The collector: an HTTP door for session events, from clients that have no Kafka library and from OpenTelemetry.

    POST /v1/events    native events: one JSON object, a JSON array, or one object a line; 202, and what became of each
    POST /v1/traces    OTLP ExportTraceServiceRequest, JSON or protobuf; 200, as the protocol wants
    POST /v1/logs      OTLP ExportLogsServiceRequest, JSON or protobuf; 200
    GET  /health       200 while events are taken (no key needed, like /metrics)
    GET  /metrics      Prometheus text

Takes: requests with an API key (without, while there are no keys and it listens on this machine only). Gives: events to the recorder;
an answer says "taken" only once they are on disk, so a client may forget them then. Repeats are harmless: the lake keeps one event
an id. One body is parsed at a time: it takes the processor alone, and memory is bounded by one parsed body and `max_requests` raw ones.
Leaves out: what a record becomes (`collector.py`), processes and sockets (`collector_serve.py`).

Source: OpenTelemetry protocol 1.9, OTLP/HTTP: responses and throttling.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pipelines import collector_bodies as bodies
from pipelines import collector_protobuf as protobuf
from pipelines.collector import Intake, Judged
from pipelines.collector_bodies import Unreadable
from pipelines.collector_keys import Caller, Keys
from pipelines.collector_limits import Buckets
from pipelines.config import CollectorConfig
from pipelines.errors import ConfigError
from pipelines.metrics import CONTENT_TYPE, Registry
from pipelines.recorder import RecorderCounts

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 10
"""Told to clients when the disk has no room: the broker must take some first."""
NO_ROOM: Final = "the disk has no room for more events; send them again later"
BREATH: Final = 200
"""Records judged between two looks at other connections: some 10 ms."""
DISCARD_BYTES: Final = 16_000_000
DISCARD_S: Final = 2.0
"""Of a body that is refused, so much is still read, for so long."""


class Records(Protocol):
    """Where events go (`pipelines.recorder.Recorder`)."""

    def submit(self, lines: Sequence[bytes]) -> "Future[int]":
        """Take encoded events; the future tells how many are on disk."""
        ...

    def counts(self) -> RecorderCounts:
        """Return what became of the events so far."""
        ...


class Meters:
    """The collector's metrics, each declared here once."""

    def __init__(self) -> None:
        self.registry: Final = Registry()
        of = self.registry
        self.requests = of.counter("tidegate_collector_requests_total", "Requests by path and HTTP status.", ["path", "status"])
        self.records = of.counter(
            "tidegate_collector_records_total", "Records by path and fate: accepted, rejected, ignored.", ["path", "fate"]
        )
        self.rejected = of.counter("tidegate_collector_rejected_total", "Rejected records by reason.", ["reason"])
        self.events = of.counter("tidegate_collector_events_total", "Events handed to the recorder's disk.")
        self.bytes = of.counter("tidegate_collector_body_bytes_total", "Bytes of bodies as received.")
        self.seconds = of.histogram("tidegate_collector_request_seconds", "Seconds from the headers to the answer.")
        self.in_flight = of.gauge("tidegate_collector_in_flight", "Requests being read or answered.")
        self.full = of.gauge("tidegate_collector_spool_full", "1 while events are refused because the spool has no room.")
        self.fates = of.gauge("tidegate_recorder_events", "Session events by fate.", ["fate"])

    def refresh(self, counts: RecorderCounts) -> None:
        """Bring the gauges up to date."""
        for fate, number in (asdict(counts) | {"rejected": sum(counts.rejected.values())}).items():
            self.fates.set(number, fate=fate)


@dataclass(slots=True)
class Tally:
    """What became of a request's records so far."""

    lines: list[bytes] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """Index of the record that each line came from."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    ignored: int = 0
    received: int = 0

    def add(self, judged: Judged) -> None:
        """Count the next record."""
        index = self.received
        self.received += 1
        self.lines += judged.lines
        self.owners += [index] * len(judged.lines)
        self.ignored += judged.ignored
        if judged.rejected is not None:
            self.reject(index, judged.rejected.reason, judged.rejected.detail)

    def reject(self, index: int, reason: str, detail: str = "") -> None:
        """Note a record that was not taken."""
        self.rejected.append({"index": index, "reason": reason} | ({"detail": detail[:200]} if detail else {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Who is let in."""

    keys: Keys
    anonymous: bool
    """Whether requests without a key are taken while there are no keys: only where nobody but this machine can ask."""


class Collector:
    """The HTTP side. Lives in one event loop."""

    def __init__(self, door: Door, intake: Intake, recorder: Records, *, config: CollectorConfig, clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            door: Who is let in.
            intake: What records become.
            recorder: Where they go.
            config: Limits.
            clock: Monotonic seconds, for rates.
        """
        self._door = door
        self._intake = intake
        self._recorder = recorder
        self._config = config
        self._clock = clock
        self._buckets = Buckets(rate_per_s=config.rate_events_per_s, burst=config.burst_events)
        self._turn = asyncio.Lock()
        self._in_flight = 0
        self._full = False
        self.meters = Meters()

    def app(self) -> Starlette:
        """Return the HTTP application."""
        return Starlette(
            routes=[
                Route("/v1/events", self.native, methods=["POST"]),
                Route("/v1/traces", self.otlp, methods=["POST"]),
                Route("/v1/logs", self.otlp, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            exception_handlers={404: self._missing, 405: self._missing},
        )

    async def native(self, request: Request) -> Response:
        """Take native events."""
        return await self._guarded(request, self._native)

    async def otlp(self, request: Request) -> Response:
        """Take OTLP/JSON traces or logs."""
        return await self._guarded(request, self._otlp)

    async def health(self, _request: Request) -> Response:
        """Say whether events are taken now."""
        counts = self._recorder.counts()
        body = {"ready": not self._full, "queued": counts.queued, "spooled": counts.spooled}
        return _json(body, 503 if self._full else 200)

    async def metrics(self, _request: Request) -> Response:
        """Return the metrics."""
        self.meters.refresh(self._recorder.counts())
        self.meters.in_flight.set(self._in_flight)
        return PlainTextResponse(self.meters.registry.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _guarded(self, request: Request, answer: Callable[[Request, Caller], Any]) -> Response:
        """Let a request in, or say in one sentence why not."""
        arrived = time.monotonic()
        self._in_flight += 1
        try:
            if self._in_flight > self._config.max_requests:
                sentence = f"{self._config.max_requests} requests are in flight; come back in a second"
                raise Unreadable(503, "busy", sentence, retry_after_s=1)
            caller = self._who(request)
            if wait_s := self._buckets.of(caller.name, self._clock()).wait_s(self._clock()):
                raise Unreadable(429, "rate", f"this key has sent more than its rate; come back in {wait_s} s", retry_after_s=wait_s)
            response = await answer(request, caller)
        except Unreadable as refusal:
            response = _sentence(request, refusal)
        except ClientDisconnect:
            response = Response(status_code=499)
        finally:
            self._in_flight -= 1
        if response.status_code >= 400:
            await self._discard(request)
        self.meters.seconds.observe(time.monotonic() - arrived)
        return self._counted(request, response)

    def _who(self, request: Request) -> Caller:
        door = self._door
        try:
            door.keys.refresh()
        except ConfigError as error:
            log.error("keys not read again; those from before stay in force", extra={"fields": {"error": str(error)}})
        if door.keys.any or not door.anonymous:
            caller = door.keys.who(request.headers.get("Authorization"))
            if caller is None:
                raise Unreadable(
                    401, "invalid_key", "send a key of this collector as `Authorization: Bearer KEY` (tidegate collect keys add)"
                )
            return caller
        host = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
        if "Origin" in request.headers or host.strip("[]") not in ("127.0.0.1", "localhost", "::1"):
            raise Unreadable(403, "browser", "requests of web pages are not taken without keys; add one with `tidegate collect keys add`")
        return door.keys.local()

    async def _native(self, request: Request, caller: Caller) -> Response:
        kind = bodies.media_type(request.headers.get("Content-Type"))
        if kind not in bodies.JSON_TYPES | bodies.LINES_TYPES:
            raise Unreadable(415, "unsupported_media_type", "send events as application/json or application/x-ndjson")
        body = await self._read(request)
        async with self._turn:
            found = bodies.records(self._inflated(request, body), kind)
            now_ms = int(time.time() * 1000)
            tally = await self._judge((self._intake.native(record, caller, now_ms=now_ms) for record in found), caller)
        stored = await self._store(tally, "events")
        result = {"accepted": stored, "rejected": tally.rejected}
        if stored < len(tally.lines):
            return _full(_json(result | {"error": {"code": "spool_full", "message": NO_ROOM}}, 503))
        return _json(result, 422 if tally.rejected and not stored else 202)

    async def _otlp(self, request: Request, caller: Caller) -> Response:
        kind = bodies.media_type(request.headers.get("Content-Type"))
        if kind not in bodies.JSON_TYPES | bodies.PROTOBUF:
            raise Unreadable(415, "unsupported_media_type", "send OTLP requests as application/json or application/x-protobuf")
        body = await self._read(request)
        traces = request.url.path.endswith("traces")
        async with self._turn:
            inflated = self._inflated(request, body)
            if kind in bodies.PROTOBUF:
                document = protobuf.request(inflated, traces=traces, max_records=self._config.max_events)
            else:
                document = bodies.document(inflated)
            if not isinstance(document, dict):
                raise Unreadable(400, "malformed_json", "the body is not an OTLP request: it is no JSON object")
            if document:  # the protocol allows an empty request
                limit = self._config.max_events + 1
                judged = self._intake.telemetry(document, caller, now_ms=int(time.time() * 1000), limit=limit)
                tally = await self._judge(judged, caller)
            else:
                tally = Tally()
        stored = await self._store(tally, "traces" if traces else "logs")
        if stored < len(tally.lines):
            return _full(_status(request, 8, NO_ROOM))
        reasons = Counter(item["reason"] for item in tally.rejected)
        message = ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items()))
        if kind in bodies.PROTOBUF:
            return Response(protobuf.response(len(tally.rejected), message, traces=traces), media_type=kind)
        if not tally.rejected:
            return _json({}, 200)
        member = "rejectedSpans" if traces else "rejectedLogRecords"
        return _json({"partialSuccess": {member: str(len(tally.rejected)), "errorMessage": message}}, 200)

    async def _read(self, request: Request) -> bytes:
        """Read the body, but keep no more than `max_body_bytes` of it and wait no longer than `body_timeout_s`.

        Raises:
            Unreadable: 413, 408.
        """
        limit = self._config.max_body_bytes
        body, seen = bytearray(), 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for chunk in request.stream():
                    seen += len(chunk)
                    if seen > limit:
                        break
                    body += chunk
                else:
                    request.state.read = True
        except TimeoutError as error:
            raise Unreadable(408, "slow_body", f"the body did not arrive within {self._config.body_timeout_s:g} s") from error
        self.meters.bytes.inc(seen)
        if seen > limit:
            raise Unreadable(413, "body_too_large", f"the body is larger than {limit} bytes; send fewer records at once")
        return bytes(body)

    async def _discard(self, request: Request) -> None:
        """Read the rest of a refused body, within reason: a connection closed while its client writes shows it no answer."""
        seen = 0
        try:
            async with asyncio.timeout(DISCARD_S):
                while not getattr(request.state, "read", False) and seen < DISCARD_BYTES:
                    message = await request.receive()
                    seen += len(message.get("body", b""))
                    request.state.read = message["type"] == "http.disconnect" or not message.get("more_body", False)
        except TimeoutError:
            return

    def _inflated(self, request: Request, body: bytes) -> bytes:
        return bodies.inflate(body, request.headers.get("Content-Encoding"), limit_bytes=self._config.max_inflated_bytes)

    async def _judge(self, judged: Iterable[Judged], caller: Caller) -> Tally:
        """Judge records one by one, and let other connections breathe in between.

        Raises:
            Unreadable: 413: there are more than `max_events`; none of them is recorded.
        """
        tally = Tally()
        for item in judged:
            tally.add(item)
            if tally.received > self._config.max_events:
                raise Unreadable(413, "too_many_records", f"more than {self._config.max_events} records in one request; send fewer at once")
            if tally.received % BREATH == 0:
                await asyncio.sleep(0)
        self._buckets.of(caller.name, self._clock()).take(tally.received)
        return tally

    async def _store(self, tally: Tally, path: str) -> int:
        """Wait until the events are on disk; return how many are. The others' records become rejected ones, to be sent again."""
        stored = await asyncio.wrap_future(self._recorder.submit(tally.lines)) if tally.lines else 0
        if tally.lines:
            self._full = stored < len(tally.lines)
            self.meters.full.set(self._full)
        for index in dict.fromkeys(tally.owners[stored:]):
            tally.reject(index, "spool_full")
        self.meters.events.inc(stored)
        for fate, number in (("rejected", len(tally.rejected)), ("ignored", tally.ignored)):
            self.meters.records.inc(number, path=path, fate=fate)
        self.meters.records.inc(len(set(tally.owners[:stored])), path=path, fate="accepted")
        for item in tally.rejected:
            self.meters.rejected.inc(reason=item["reason"])
        return stored

    def _counted(self, request: Request, response: Response) -> Response:
        path = request.url.path.removeprefix("/v1/")
        self.meters.requests.inc(path=path if path in ("events", "traces", "logs") else "other", status=str(response.status_code))
        return response

    async def _missing(self, request: Request, _error: Exception) -> Response:
        sentence = f"{request.method} {request.url.path[:100]} is not served; POST to /v1/events, /v1/traces or /v1/logs"
        return self._counted(request, _sentence(request, Unreadable(404, "not_found", sentence)))


def _json(value: dict[str, Any], status: int) -> Response:
    return Response(bodies.answer(value), status_code=status, media_type="application/json")


def _status(request: Request, code: int, message: str) -> Response:
    """Return a `google.rpc.Status` in the form that the request was in."""
    kind = bodies.media_type(request.headers.get("Content-Type"))
    if kind in bodies.PROTOBUF:
        return Response(protobuf.status(code, message), media_type=kind)
    return Response(bodies.answer({"code": code, "message": message}), media_type="application/json")


def _sentence(request: Request, refusal: Unreadable) -> Response:
    """Return a refusal: for OTLP a `Status`, else our own form."""
    if request.url.path in ("/v1/traces", "/v1/logs"):
        codes = {401: 16, 403: 7, 404: 5, 408: 4, 413: 8, 429: 8, 503: 14}  # google.rpc.Code
        response = _status(request, codes.get(refusal.status, 3), refusal.sentence)
    else:
        response = _json({"error": {"code": refusal.code, "message": refusal.sentence}}, 200)
    response.status_code = refusal.status
    if refusal.retry_after_s:
        response.headers["Retry-After"] = str(refusal.retry_after_s)
    return response


def _full(response: Response) -> Response:
    response.status_code = 503
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
