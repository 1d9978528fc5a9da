"""Every failure Tidegate raises on purpose, and the exit code each one ends a command with.

    StageError                      1   something failed; the message says what, where and what to do
    ├── TransientError             75   trying again later can help
    │   ├── BrokerUnavailable           the Kafka cluster does not answer
    │   ├── EngineUnavailable           a model engine does not answer
    │   └── StorageFull                 no space left where we must write
    └── TerminalError               1   trying again changes nothing
        ├── ConfigError             2   a setting, a flag or an argument is wrong
        ├── MissingDependency       2   a program this command needs is not installed
        ├── ContractViolation       1   data at a stage's boundary breaks its contract
        ├── CheckpointInvalid       1   a checkpoint folder is incomplete, altered or unsafe
        ├── Busy                    3   another process holds the lease
        ├── GateRefused             4   the gate said no
        ├── GateInconclusive        5   the gate could not tell
        └── Refused                 6   frozen, stale parent, fenced off

Leaves out: bad records. A bad record is data, not a failure: it is a `Rejected` value that is counted and kept.
"""

from dataclasses import dataclass
from typing import ClassVar


class StageError(Exception):
    """A failure with a sentence for a person and an exit code for a machine."""

    exit_code: ClassVar[int] = 1


class TransientError(StageError):
    """A failure that a later try may not meet."""

    exit_code = 75


class BrokerUnavailable(TransientError):
    """The Kafka cluster does not answer."""


class EngineUnavailable(TransientError):
    """A model engine does not answer."""


class StorageFull(TransientError):
    """There is no space left where Tidegate must write."""


class TerminalError(StageError):
    """A failure that stays until someone changes something."""


class ConfigError(TerminalError):
    """A setting, a flag or an argument is wrong."""

    exit_code = 2


class MissingDependency(TerminalError):
    """A program this command needs is not installed."""

    exit_code = 2


class ContractViolation(TerminalError):
    """Data at a stage's boundary breaks that stage's contract."""


class CheckpointInvalid(TerminalError):
    """A checkpoint folder is incomplete, altered or unsafe to load."""


class Busy(TerminalError):
    """Another process holds the lease."""

    exit_code = 3


class GateRefused(TerminalError):
    """The gate said no."""

    exit_code = 4


class GateInconclusive(TerminalError):
    """The gate could not tell."""

    exit_code = 5


class Refused(TerminalError):
    """Shipping is frozen, the parent no longer serves, or this process was fenced off."""

    exit_code = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A record that was not accepted, kept with the reason."""

    reason: str
    """One of a closed set of short codes, stated by the function that rejects."""
    raw: bytes
    """The record as it arrived."""
    detail: str = ""
    """What a person needs to see beyond the code; never user content."""
