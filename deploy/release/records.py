"""Records of the ship ledger, and the identities in them.

Standard library only, because rollback depends on it. Takes rows and clocks' milliseconds, gives frozen records.
Leaves out: how they are kept (`database.py`, `ledger.py`).
"""

import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.release.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """What serves now."""

    checkpoint: str
    policy_version: int
    previous: str | None
    """What rollback restores; None for the first checkpoint."""
    anchor: str
    """The last checkpoint a person pinned; drift is measured against it."""
    epoch: int
    """Fencing epoch of the write that put it here."""
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write under one name until it expires or a higher epoch exists."""

    name: str
    holder: str
    epoch: int
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Ship:
    """One candidate on its way."""

    ship_id: str
    parent: str
    candidate: str
    gate_digest: str
    state: State
    reason: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the history."""

    seq: int
    at: datetime
    kind: str
    ship_id: str | None
    checkpoint: str | None
    data: dict[str, Any]


def ship_id(parent: str, candidate: str, *, gate_digest: str) -> str:
    """Return the id of shipping `candidate` over `parent` under one set of gate settings (sha256, hex)."""
    return hashlib.sha256(f"{parent}>{candidate}>{gate_digest}".encode()).hexdigest()


def process_holder() -> str:
    """Return a holder name that ends with this process: host, pid and start time."""
    return f"{os.uname().nodename}:{os.getpid()}:{_started(os.getpid())}"


def _started(pid: int) -> str:
    """Return the kernel's start time of a process, or an empty text when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_dead(holder: str) -> bool:
    """Tell whether `holder` is a process of this host that is certainly gone (fencing makes a wrong guess harmless)."""
    host, _, rest = holder.partition(":")
    pid, _, started = rest.partition(":")
    return host == os.uname().nodename and pid.isdigit() and _started(int(pid)) != started


def moment(ms: int) -> datetime:
    """Return Unix milliseconds as an aware instant."""
    return datetime.fromtimestamp(ms / 1000, tz=UTC)
