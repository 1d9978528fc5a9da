"""Claim checks: an event too large for a record lies in a file, and the record says where it is and what it must hash to.

A completion over about 128k tokens does not fit into a Kafka record. The producer writes the whole encoded event to a file named by its
sha256, makes it durable, and only then sends a record of a few hundred bytes in its place. Whoever reads the topic takes the file for the
record's value if the hash agrees. A record whose file is gone or altered is no event (`claim_missing`, `claim_mismatch`).

Takes: encoded events. Gives: pointers. Leaves out: reading them back in bulk (the signal stage does, with Spark) and deleting files:
`tidegate signals forget` removes a user's, and after the topic's retention the folder of a day can be deleted.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pipelines.config import KafkaConfig
from pipelines.errors import ConfigError, StorageFull
from pipelines.storage import Home, write_atomic

MARK: Final = b'{"claim":'
"""How the value of such a record begins; no event does (its first field is the event id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Where an event lies."""

    uri: str
    sha256: str
    """Of the encoded event, hex."""
    size_bytes: int
    session_id: str
    """The key of the record, as of any event."""


def root(config: KafkaConfig, home: Home) -> str:
    """Return the address that all files are under: `kafka.claims`, else a folder of the deployment."""
    return config.claims.rstrip("/") if config.claims else home.claims.absolute().as_uri()


def encode(claim: Claim) -> bytes:
    """Return the record that stands for the event."""
    body = {"claim": {"uri": claim.uri, "sha256": claim.sha256, "bytes": claim.size_bytes}, "session_id": claim.session_id}
    return json.dumps(body, separators=(",", ":")).encode()


def parse(raw: bytes) -> Claim | None:
    """Return the claim in a record, or None when it is none."""
    if not raw.startswith(MARK):
        return None
    try:
        body = json.loads(raw)
        claim = body["claim"]
        return Claim(uri=str(claim["uri"]), sha256=str(claim["sha256"]), size_bytes=int(claim["bytes"]), session_id=str(body["session_id"]))
    except (ValueError, KeyError, TypeError):
        return None


def put(config: KafkaConfig, home: Home, event: bytes, *, session_id: str, now: datetime) -> Claim:
    """Write an event to its file; the same event again gives the same file.

    Args:
        config: Where files lie (`kafka.claims`).
        home: The deployment.
        event: The encoded event.
        session_id: Its session.
        now: Names the folder (UTC day), so that old files are found without opening them.

    Raises:
        ConfigError: `kafka.claims` is no address that can be written.
        StorageFull: No space left.
    """
    digest = hashlib.sha256(event).hexdigest()
    name = f"{now.astimezone(UTC):%Y-%m-%d}/{digest}.json"
    address = f"{root(config, home)}/{name}"
    if config.claims:
        _put_remote(address, event)
    else:
        write_atomic(home.claims / name, event)
    return Claim(uri=address, sha256=digest, size_bytes=len(event), session_id=session_id)


def _put_remote(address: str, event: bytes) -> None:
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    try:
        system, path = FileSystem.from_uri(address)
        system.create_dir(path.rpartition("/")[0])
        with system.open_output_stream(path) as file:
            file.write(event)
    except (ArrowException, OSError, ValueError) as error:
        if "No space left" in str(error):
            raise StorageFull(f"no space left to write {address}") from error
        raise ConfigError(f"kafka.claims: {address} cannot be written: {str(error)[:200]}") from error


def local_files(home: Home) -> Iterator[Path]:
    """Yield the files of claims that lie in the deployment's own folder."""
    yield from sorted(home.claims.glob("*/*.json"))
