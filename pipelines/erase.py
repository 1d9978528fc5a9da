"""Taking one user's events out of what waits on this machine: the spool, its quarantine and the files of large events.

Takes: texts that name the user (key, session ids). Gives: counts of what was removed and of what a live process still holds.
Leaves out: the topic (`kafka.delete_records`) and the lake (`tidegate signals forget`, which calls this).
"""

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipelines import claims, spool
from pipelines.storage import Home, write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """What became of one user's events outside Kafka and the lake."""

    spooled: int
    """Events removed from spools that no live process holds."""
    held: int
    """Events in the spool of a live process; it sends them, so they have to be removed again later."""
    quarantined: int
    """Rejected events removed from the spool's quarantine."""
    claims: int
    """Files of large events removed."""


def pattern(needles: Iterable[str]) -> re.Pattern[bytes]:
    """Return what matches any of the texts in bytes.

    Raises:
        ValueError: There are none.
    """
    longest_first = sorted({needle for needle in needles if needle}, key=lambda text: (-len(text), text))
    if not longest_first:
        raise ValueError("at least one text is needed")
    return re.compile(b"|".join(re.escape(text.encode()) for text in longest_first))


def erase(home: Home, needles: Iterable[str]) -> Erased:
    """Remove every waiting or rejected event that holds one of the texts.

    Args:
        home: The deployment.
        needles: The user's key and session ids.

    Raises:
        StorageFull: No space to rewrite a file; it is as it was.
    """
    found = pattern(needles)
    free = set(spool.waiting_files(home))
    spooled = held = quarantined = 0
    for path in sorted(home.spool.glob("recorder-*/*.jsonl")):
        lines = path.read_bytes().splitlines(keepends=True)
        left = [line for line in lines if not found.search(line)]
        if len(left) == len(lines):
            continue
        if path not in free:
            held += len(lines) - len(left)
            continue
        spooled += len(lines) - len(left)
        write_atomic(path, b"".join(left))
    for path in sorted((home.spool / spool.QUARANTINE).glob("*.jsonl")):
        lines = path.read_bytes().splitlines(keepends=True)
        left = [line for line in lines if not found.search(_raw(line)) and not found.search(line)]
        quarantined += len(lines) - len(left)
        if len(left) < len(lines):
            write_atomic(path, b"".join(left))
    gone = [path for path in claims.local_files(home) if found.search(path.read_bytes())]
    for path in gone:
        path.unlink()
    return Erased(spooled=spooled, held=held, quarantined=quarantined, claims=len(gone))


def _raw(line: bytes) -> bytes:
    """Return the rejected record inside a line of the quarantine; nothing when the line is damaged."""
    try:
        return base64.b64decode(json.loads(line)["raw"])
    except (ValueError, KeyError, TypeError):
        return b""
