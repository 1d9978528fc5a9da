"""Topics as data: what each is for, how it is keyed, and the settings a cluster must give it.

Takes: the settings tree (name, partitions, replication, retention, event size differ from deployment to deployment) and
`infra/kafka/topics.toml` (what is the same everywhere). Gives: `Topic` records. An installed package without the checkout uses
the same values from `BUILT_IN`; a test holds the two together. Leaves out: creating topics and seeing drift (`kafka.py`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from pipelines.config import KafkaConfig
from pipelines.errors import ConfigError

BATCH_OVERHEAD_BYTES: Final = 48_576
"""Room for key, headers and batch frame on top of an event; with the default event limit the sum is Kafka's own default."""
TOPICS_FILE: Final = Path(__file__).resolve().parent.parent / "infra" / "kafka" / "topics.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a topic is everywhere."""

    purpose: str
    """One sentence for people."""
    key: str
    """Field of the event that keys a record: records with equal keys keep their order."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"]
    """What producers compress with; the cluster stores batches as they come."""
    cleanup_policy: Literal["delete", "compact"]
    timestamp_type: Literal["CreateTime", "LogAppendTime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic of one deployment."""

    name: str
    partitions: int
    replication: int
    retention_ms: int
    max_message_bytes: int
    """Largest batch the cluster takes: the largest event and its frame."""
    traits: Traits

    def settings(self) -> dict[str, str]:
        """Return the topic's settings in Kafka's words."""
        return {
            "retention.ms": str(self.retention_ms),
            "max.message.bytes": str(self.max_message_bytes),
            "cleanup.policy": self.traits.cleanup_policy,
            "compression.type": "producer",
            "message.timestamp.type": self.traits.timestamp_type,
        }


BUILT_IN: Final[Mapping[str, Traits]] = {
    "session-events": Traits(
        purpose="What happened in agents' sessions, as clients and gateways saw it.",
        key="session_id",
        compression="lz4",
        cleanup_policy="delete",
        timestamp_type="CreateTime",
    ),
}


def load(path: Path = TOPICS_FILE) -> dict[str, Traits]:
    """Read the topics' traits; the built-in ones where there is no checkout.

    Raises:
        ConfigError: The file is not TOML, or a topic lacks a trait or has an unknown one.
    """
    if not path.exists():
        return dict(BUILT_IN)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return {name: _traits(path, name, table) for name, table in tables.items()}


def _traits(path: Path, name: str, table: Any) -> Traits:
    known = {field.name for field in fields(Traits)}
    given = set(table) if isinstance(table, dict) else set()
    if wrong := sorted(known ^ given):
        raise ConfigError(f"{path}: topic {name} must have exactly {', '.join(sorted(known))}; look at {', '.join(wrong)}")
    return Traits(**table)


def wanted(config: KafkaConfig, traits: Mapping[str, Traits] = BUILT_IN) -> tuple[Topic, ...]:
    """Return the topics a deployment needs.

    Args:
        config: The deployment's name, partitions, replication, retention and event size.
        traits: From `load()`.
    """
    return (
        Topic(
            name=config.topic,
            partitions=config.partitions,
            replication=config.replication,
            retention_ms=config.retention_hours * 3_600_000,
            max_message_bytes=config.max_event_bytes + BATCH_OVERHEAD_BYTES,
            traits=traits["session-events"],
        ),
    )
