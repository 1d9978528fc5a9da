"""Send again what lies on disk: spools of dead processes, quarantined records after a fix, or any file of events.

Takes: a home or files of one JSON event a line (a quarantine file's lines carry the record in `raw`). Gives: the events on the topic,
once more under their own ids, and counts. A record that is still faulty stays where it is.
Leaves out: live recorders' spools (their own process sends those) and reading a topic (`kafka.consume`).
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines import codec
from pipelines.config import PipelinesConfig
from pipelines.errors import Rejected
from pipelines.kafka import Producer
from pipelines.spool import QUARANTINE
from pipelines.storage import Home


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay did."""

    sent: int
    rejected: dict[str, int]
    """Records still faulty, by reason; they stay where they are."""


def records(path: Path) -> Iterator[bytes]:
    """Yield the events of a spool, an event file or a quarantine file; a truncated last line is left out.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not line.strip():
                continue
            yield _unwrap(line.rstrip(b"\r\n"))


def _unwrap(line: bytes) -> bytes:
    """Return the record inside a quarantine entry, or the line itself."""
    if not line.startswith(b'{"quarantine_id"'):
        return line
    try:
        return base64.b64decode(json.loads(line)["raw"], validate=True)
    except (ValueError, KeyError, TypeError):
        return line


def quarantined(home: Home) -> list[Path]:
    """Return the quarantine's files, one a reason."""
    return sorted((home.spool / QUARANTINE).glob("*.jsonl"))


def replay(config: PipelinesConfig, home: Home, paths: Iterable[Path], *, now_ms: int) -> Replayed:
    """Send every sound event of `paths` to the topic; returns once all are delivered.

    Args:
        config: Settings.
        home: The deployment.
        paths: Files, see `records`.
        now_ms: The clock, for the `future_dated` check.

    Raises:
        BrokerUnavailable: Kafka does not answer. Run it again: repeats have the same event ids.
    """
    sent, rejected = 0, Counter[str]()
    with Producer(config, home) as producer:
        for path in paths:
            for raw in records(path):
                verdict = codec.decode(raw, config.kafka.max_event_bytes, now_ms=now_ms)
                if isinstance(verdict, Rejected):
                    rejected[verdict.reason] += 1
                    continue
                producer.send(raw, verdict.session_id)
                sent += 1
    return Replayed(sent=sent, rejected=dict(rejected))
