"""The recorder: how a program hands session events over without ever waiting for Kafka.

Takes: events, from any thread. Gives: each of them on the topic at least once (a repeat has the same event id), in order per
session, across broker restarts and a `kill -9` of this process. One background thread redacts, encodes and writes each event to a
spool on disk; another sends from there, so that connecting to a broker that is away holds up nobody. A segment leaves the disk
when all its events are acknowledged.
`record` promises nothing for the last milliseconds: an event still in the memory queue when the process is killed is lost. A caller
that must answer for its events (the collector) hands over lines with `submit` and learns when they are on disk.

Every event is accounted for: recorded + recovered = queued + spooled + delivered + dropped + sum(rejected).
"""

import base64
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final

from pipelines import claims, codec
from pipelines.config import PipelinesConfig
from pipelines.errors import Rejected, StageError, StorageFull
from pipelines.events import Client, Envelope, Event, new_id
from pipelines.kafka import Producer
from pipelines.redaction import clean_event
from pipelines.spool import QUARANTINE, Segment, Spool
from pipelines.storage import Home

log = logging.getLogger(__name__)

TICK_S: Final = 0.02
"""How long the thread sleeps when there is nothing to do: the delay it adds to an event."""
IN_FLIGHT: Final = 2_000
"""Events sent and not acknowledged; after a failure at most these are sent twice."""
DELIVERY_TIMEOUT_S: Final = 5.0
"""After this long without acknowledgement the broker counts as away. The spool holds the event, so patience gains nothing."""
BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits between attempts to connect; the last repeats."""
IDLE_ROLL_S: Final = 1.0
"""A segment that was delivered whole is closed and deleted after this long without a new event."""
CLOSE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderCounts:
    """What became of the events."""

    recorded: int
    """Handed over by callers."""
    recovered: int
    """Found in the spool of an earlier process."""
    queued: int
    """In memory."""
    spooled: int
    """On disk, not acknowledged yet."""
    delivered: int
    """Acknowledged by all replicas, each counted once."""
    dropped: int
    """Lost: the queue, the spool's bound or the disk was full, or the recorder was closed."""
    rejected: dict[str, int]
    """Kept in `spool/quarantine`, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Lines on their way to disk, and who waits for that."""

    lines: Sequence[bytes]
    kept: "Future[int]"


class Recorder:
    """Records events in the background. Use as a context manager; leaving it flushes for a few seconds.

    The lock guards the queue, the counts and the spool. The writing thread adds to the spool; all else there is the sending thread's.
    """

    def __init__(self, config: PipelinesConfig, home: Home, *, client: Client) -> None:
        """Start the background thread; the broker need not be there.

        Args:
            config: Settings.
            home: The deployment; the spool is under `home.spool`.
            client: Stamped on every event recorded here.
        """
        self._config = config
        self._home = home
        self._client = client
        self._queue: deque[Event | _Batch] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._recorded = self._delivered = self._dropped = 0
        self._rejected: Counter[str] = Counter()
        self._spool = Spool(home, max_bytes=config.kafka.spool_max_bytes)
        self._recovered = self._spool.recovered
        self._producer: Producer | None = None
        self._generation = 0
        self._in_flight = 0
        self._failed: StageError | None = None
        self._next_attempt = 0.0
        self._attempts = 0
        self._appended_at = time.monotonic()
        self._synced_at = 0.0
        self._written = threading.Event()
        self._writer = threading.Thread(target=self._write_loop, name="tidegate-recorder-disk", daemon=True)
        self._thread = threading.Thread(target=self._send_loop, name="tidegate-recorder", daemon=True)
        self._writer.start()
        self._thread.start()

    def record(self, event: Event) -> None:
        """Take one event; returns at once and never raises."""
        with self._lock:
            self._recorded += 1
            if self._closing.is_set() or len(self._queue) >= self._config.kafka.buffer_events:
                self._dropped += 1
                return
            self._queue.append(event)
        self._wake.set()

    def submit(self, lines: Sequence[bytes]) -> "Future[int]":
        """Take events that were already redacted, encoded and judged; returns at once and never raises.

        Args:
            lines: What `codec.encode` gives, each accepted by `codec.decode`.

        Returns:
            How many of them, from the first on, are on disk, fsynced. The rest found no room and counts nowhere: it stays the caller's.
        """
        batch = _Batch(lines=lines, kept=Future())
        with self._lock:
            if not (closing := self._closing.is_set()):
                self._recorded += len(lines)
                self._queue.append(batch)
        if closing:
            batch.kept.set_result(0)
        self._wake.set()
        return batch.kept

    def counts(self) -> RecorderCounts:
        """Return what became of the events so far."""
        with self._lock:
            return RecorderCounts(
                recorded=self._recorded,
                recovered=self._recovered,
                queued=self._recorded + self._recovered - self._spool.waiting - self._delivered - self._dropped - self._rejected.total(),
                spooled=self._spool.waiting,
                delivered=self._delivered,
                dropped=self._dropped,
                rejected=dict(self._rejected),
            )

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything recorded so far is delivered.

        Returns:
            False when the time ran out: the rest is on disk and goes out later.
        """
        deadline = time.monotonic() + timeout_s
        self._wake.set()
        while time.monotonic() < deadline and self._thread.is_alive():
            counts = self.counts()
            if counts.queued == 0 and counts.spooled == 0:
                return True
            time.sleep(TICK_S / 2)
        counts = self.counts()
        return counts.queued == 0 and counts.spooled == 0

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> RecorderCounts:
        """Flush for up to `timeout_s`, write the rest to disk and stop."""
        if self._thread.is_alive():
            self.flush(timeout_s)
            self._closing.set()
            self._wake.set()
            self._thread.join()
        return self.counts()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write_loop(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            self._drain()
        self._drain()

    def _send_loop(self) -> None:
        try:
            while not self._closing.is_set():
                self._written.wait(TICK_S)
                self._written.clear()
                self._turn()
        finally:
            self._writer.join()
            self._disconnect(timeout_s=0.5)
            with self._lock:
                self._spool.close()

    def _turn(self) -> None:
        try:
            self._pump()
            self._tidy()
        except OSError as error:  # the spool's disk; what is on it waits for the next turn
            log.error("spool not usable", extra={"fields": {"error": str(error)}})
            self._closing.wait(BACKOFF_S[-1])

    def _drain(self) -> None:
        """Step 1: memory to disk; who waits for it is told after one fsync for all of them."""
        done: list[tuple[_Batch, int]] = []
        for _ in range(len(self._queue)):
            item = self._queue[0]
            if isinstance(item, _Batch):
                with self._lock:
                    self._queue.popleft()
                    kept = self._append(item.lines)
                    self._recorded -= len(item.lines) - kept
                done.append((item, kept))
                continue
            line = self._encode(item)
            with self._lock:
                self._queue.popleft()
                self._dropped += line is not None and not self._append([line])
        if done:
            with self._lock:
                synced = self._sync()
            for batch, kept in done:
                batch.kept.set_result(kept if synced else 0)
        self._written.set()

    def _append(self, lines: Sequence[bytes]) -> int:
        """Write lines to the spool until one does not fit, return how many; the caller holds the lock."""
        kept = 0
        try:
            while kept < len(lines) and self._spool.append(lines[kept]):
                kept += 1
        except (StorageFull, OSError) as error:
            log.error("event not spooled", extra={"fields": {"error": str(error)}})
        self._appended_at = time.monotonic()
        return kept

    def _sync(self) -> bool:
        """Make what was written survive a power cut; False when the disk refuses (it is sent all the same, but nothing is promised)."""
        try:
            self._spool.sync()
        except OSError as error:
            log.error("spool not synced", extra={"fields": {"error": str(error)}})
            return False
        return True

    def _encode(self, event: Event) -> bytes | None:
        """Redact, stamp and encode; a faulty event goes to quarantine and None comes back."""
        if not isinstance(event, Envelope):
            return self._reject("invalid_field", b"", f"{type(event).__name__} is not an event")
        try:
            cleaned = clean_event(event, keep_text=self._config.privacy.keep_text)
            line = codec.encode(cleaned.model_copy(update={"client": self._client}))
        except (ValueError, AttributeError, TypeError) as error:  # fields set without validation can hold anything
            return self._reject("invalid_field", b"", type(error).__name__)
        kafka = self._config.kafka
        verdict = codec.decode(line, max(kafka.max_event_bytes, kafka.max_claim_bytes), now_ms=int(time.time() * 1000))
        if isinstance(verdict, Envelope):
            return line if len(line) <= kafka.max_event_bytes else self._claim(line, verdict.session_id)
        return self._reject(verdict.reason, line, verdict.detail)

    def _claim(self, line: bytes, session_id: str) -> bytes | None:
        """Write an event too large for a record to a file; returns the record that names it."""
        try:
            return claims.encode(claims.put(self._config.kafka, self._home, line, session_id=session_id, now=datetime.now(UTC)))
        except (StageError, OSError) as error:
            log.error("large event not written", extra={"fields": {"error": str(error)}})
            return self._reject("oversized", line, f"{len(line)} bytes, and its file could not be written")

    def _reject(self, reason: str, raw: bytes, detail: str) -> None:
        with self._lock:
            self._rejected[reason] += 1
        try:
            quarantine(self._home, reason=reason, raw=raw, detail=detail, at_ms=int(time.time() * 1000))
        except OSError as error:
            log.error("rejected event not kept", extra={"fields": {"error": str(error), "reason": reason}})

    def _pump(self) -> None:
        """Step 2: disk to broker, in order, as far as the window allows."""
        if self._failed is not None:
            log.warning("events wait on disk until Kafka takes them", extra={"fields": {"error": str(self._failed)}})
            self._disconnect(timeout_s=0.0)
        if not self._spool.waiting or not (self._producer or self._connect()):
            return
        with self._lock:
            segments = list(self._spool.segments)
        for segment in segments:
            while segment.sent < len(segment.starts):
                with self._lock:
                    room = IN_FLIGHT - self._in_flight
                    upto = min(segment.sent + room, len(segment.starts))
                    lines = segment.read(segment.sent, room) if room > 0 else []
                if room <= 0:
                    return
                for index, line in lines:
                    if not self._send(segment, index, line):
                        return
                segment.sent = upto

    def _send(self, segment: Segment, index: int, line: bytes) -> bool:
        producer, generation = self._producer, self._generation

        def reported(failure: StageError | None) -> None:
            with self._lock:
                if generation == self._generation:
                    self._in_flight -= 1
                    self._failed = self._failed or failure
                if failure is None and segment.acknowledge(index):
                    self._delivered += 1

        verdict = claims.parse(line) or codec.decode(line, self._config.kafka.max_event_bytes)
        if isinstance(verdict, Rejected) or producer is None:  # a damaged line of an earlier process; our own were judged before
            if isinstance(verdict, Rejected):
                self._reject(verdict.reason, line, verdict.detail)
                with self._lock:
                    segment.acknowledge(index)
            return producer is not None
        with self._lock:
            self._in_flight += 1
        try:
            producer.send(line, verdict.session_id, reported)
        except StageError as error:
            with self._lock:
                self._in_flight -= 1
                self._failed = error
            return False
        return True

    def _connect(self) -> bool:
        if time.monotonic() < self._next_attempt:
            return False
        try:
            self._producer = Producer(self._config, self._home, delivery_timeout_s=DELIVERY_TIMEOUT_S)
        except StageError as error:
            self._next_attempt = time.monotonic() + BACKOFF_S[min(self._attempts, len(BACKOFF_S) - 1)]
            if self._attempts == 0:
                log.warning("events wait on disk until Kafka takes them", extra={"fields": {"error": str(error)}})
            self._attempts += 1
            return False
        self._attempts = 0
        return True

    def _disconnect(self, *, timeout_s: float) -> None:
        """Forget the connection; everything not acknowledged is sent again over the next one, oldest first."""
        with self._lock:
            self._generation += 1
            self._in_flight = 0
            self._failed = None
            for segment in self._spool.segments:
                segment.sent = 0
        if self._producer is not None:
            self._producer.close(timeout_s=timeout_s)
            self._producer = None
            self._next_attempt = time.monotonic() + BACKOFF_S[0]

    def _tidy(self) -> None:
        """Step 3: give delivered segments' disk back; while events wait, keep them through a power cut."""
        now = time.monotonic()
        with self._lock:
            waiting = self._spool.waiting
            if not waiting and now - self._appended_at > IDLE_ROLL_S:
                self._spool.roll()
            self._spool.prune()
            if waiting and self._producer is None and now - self._synced_at > IDLE_ROLL_S:
                self._spool.sync()
                self._synced_at = now


def quarantine(home: Home, *, reason: str, raw: bytes, detail: str, at_ms: int) -> Path:
    """Keep a rejected record in `spool/quarantine`, one file a reason; returns the file.

    Raises:
        OSError: It cannot be written.
    """
    folder = home.spool / QUARANTINE
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{reason}.jsonl"
    entry = {"quarantine_id": new_id(at_ms), "at_ms": at_ms, "reason": reason, "detail": detail, "raw": base64.b64encode(raw).decode()}
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
    return path
