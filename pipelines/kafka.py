"""The event bus: everything Tidegate says to Kafka goes through here.

Takes: settings and bytes. Gives: a producer that loses nothing silently, topics as configured, offsets, and a reader for tests and
replay (the stream itself reads with Spark). kafka-python is imported here and nowhere else; `boundary` turns its errors into ours.
Leaves out: what the bytes mean (`codec.py`), what to do while the broker is away (`recorder.py`), starting a broker (`broker.py`).
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import kafka as client
from kafka import errors as foreign
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.structs import TopicPartition

from pipelines.broker import address
from pipelines.config import PipelinesConfig
from pipelines.errors import BrokerUnavailable, ConfigError, ContractViolation, StageError
from pipelines.storage import Home
from pipelines.topics import BATCH_OVERHEAD_BYTES, Topic, wanted

SECRETS: Final = ("sasl_plain_username", "sasl_plain_password", "ssl_password")
"""Settings read from `TIDEGATE_KAFKA_<NAME>` only, so that they are in no file and no dump of the settings."""
SECURITY_SETTINGS: Final = frozenset({
    "security_protocol", "ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_crlfile", "ssl_check_hostname", "sasl_mechanism",
    "sasl_kerberos_name", "sasl_kerberos_service_name", "sasl_kerberos_domain_name",
})  # fmt: skip
"""What `kafka.security` may set."""
CONNECT_TIMEOUT_S: Final = 10.0
"""A broker that says nothing for this long at connecting counts as away; a healthy one answers in under a second."""
DELIVERY_TIMEOUT_S: Final = 30.0
"""Longest time a sent event may stay unacknowledged: a leader election takes seconds."""
BATCH_BYTES: Final = 256 * 1024
"""A completion with its token arrays is a few KB; lz4 works best on tens of events at once. A batch is one message to the broker, so it is
never larger than the largest event: the topic takes no more, and kafka-python 3.0.12 loses its way when it has to split a batch."""
LINGER_MS: Final = 5

OnDelivery = Callable[[StageError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record as it lies on a topic."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicState:
    """What `ensure_topics` found or did."""

    name: str
    created: bool
    drift: dict[str, tuple[str, str]]
    """Setting: (wanted, actual). Never changed for you: fewer partitions or a shorter retention would lose data."""


def translate(error: BaseException, where: str) -> StageError:
    """Return our error for one of kafka-python's.

    Args:
        error: What the client raised.
        where: The bootstrap servers, for the message.
    """
    kind = type(error).__name__
    if isinstance(error, foreign.AuthorizationError | foreign.SaslAuthenticationFailedError | foreign.UnsupportedSaslMechanismError):
        return ConfigError(f"Kafka at {where} refused us ({kind}); check kafka.security and the TIDEGATE_KAFKA_* environment variables")
    if isinstance(error, foreign.MessageSizeTooLargeError | foreign.RecordListTooLargeError):
        return ContractViolation(f"Kafka at {where} takes no event this large; raise its max.message.bytes or lower kafka.max_event_bytes")
    if isinstance(error, foreign.UnknownTopicOrPartitionError):
        return BrokerUnavailable(
            f"the topic does not exist at {where}; `tidegate up` creates it, or create it yourself, then run this again"
        )
    if isinstance(error, ValueError | foreign.KafkaConfigurationError):
        return ConfigError(f"Kafka settings for {where} are not usable: {error}")
    return BrokerUnavailable(f"Kafka at {where} does not answer ({kind}); check that it runs, then run the same command again")


@contextmanager
def boundary(where: str) -> Iterator[None]:
    """Turn what kafka-python raises inside the block into our errors.

    Raises:
        BrokerUnavailable: No answer, or the topic is missing.
        ConfigError: Refused credentials or settings it does not take.
        ContractViolation: An event larger than the broker takes.
    """
    try:
        yield
    except (foreign.KafkaError, ValueError, OSError) as error:
        raise translate(error, where) from error


def bootstrap(config: PipelinesConfig, home: Home) -> str:
    """Return the servers to connect to: the configured ones, else those of this deployment's embedded broker.

    Raises:
        BrokerUnavailable: None are configured and the embedded broker is not running.
    """
    if config.kafka.bootstrap_servers:
        return config.kafka.bootstrap_servers
    if (found := address(home)) is None:
        raise BrokerUnavailable(
            f"no Kafka broker is running for {home.root}; start it with `tidegate up`, or set kafka.bootstrap_servers to your cluster"
        )
    return found


def client_settings(config: PipelinesConfig, home: Home) -> dict[str, Any]:
    """Return what every kafka-python client here is made with, secrets included (never log it).

    Raises:
        BrokerUnavailable: See `bootstrap`.
        ConfigError: `kafka.security` names something that is no security setting, or holds a secret.
    """
    if os.environ.get("TIDEGATE_LOG_LEVEL", "WARNING").upper() not in ("DEBUG", "INFO"):
        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # its retries are our normal life; we report the outcome once
    settings: dict[str, Any] = {"bootstrap_servers": bootstrap(config, home).split(",")}
    for name, value in config.kafka.security.items():
        if name in SECRETS:
            raise ConfigError(f"kafka.security.{name} is a secret; set TIDEGATE_KAFKA_{name.upper()} in the environment instead")
        if name not in SECURITY_SETTINGS:
            raise ConfigError(f"kafka.security.{name} is not a setting; it takes {', '.join(sorted(SECURITY_SETTINGS))}")
        settings[name] = value.lower() in ("1", "true", "yes") if name == "ssl_check_hostname" else value
    for name in SECRETS:
        if secret := os.environ.get(f"TIDEGATE_KAFKA_{name.upper()}"):
            settings[name] = secret
    return settings | {"bootstrap_timeout_ms": int(CONNECT_TIMEOUT_S * 1000), "reconnect_backoff_max_ms": 1_000}


def _reach(servers: list[str]) -> None:
    """Open and close a TCP connection to the first server that takes one.

    kafka-python's clients leave sockets open when they cannot connect; a recorder that tries for hours must not.

    Raises:
        BrokerUnavailable: None does.
    """
    refused: OSError | None = None
    for server in servers:
        host, _, port = server.strip().rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
                return
        except OSError as error:
            refused = error
        except ValueError as error:
            raise ConfigError(f"kafka.bootstrap_servers: {server!r} is not host:port") from error
    raise BrokerUnavailable(
        f"Kafka at {','.join(servers)} does not answer; check that it runs, then run the same command again"
    ) from refused


class Producer:
    """A connection that delivers events at least once and in order per key, and reports each delivery.

    Idempotent, acks from all in-sync replicas, lz4, keyed by session id. At most `kafka.buffer_events` are in flight: then `send`
    waits. Thread-safe. Use as a context manager; leaving it waits for what was sent.
    """

    def __init__(self, config: PipelinesConfig, home: Home, *, delivery_timeout_s: float = DELIVERY_TIMEOUT_S, topic: str = "") -> None:
        """Connect; on the embedded broker, which is ours alone, make the topics that are missing.

        Raises:
            BrokerUnavailable: Nothing answers.
            ConfigError: See `client_settings`.
        """
        if not config.kafka.bootstrap_servers:
            ensure_topics(config, home)
        self.topic = topic or config.kafka.topic
        self._delivery_timeout_s = delivery_timeout_s
        settings = client_settings(config, home)
        self.where = ",".join(settings["bootstrap_servers"])
        self._room = threading.BoundedSemaphore(config.kafka.buffer_events)
        self._lock = threading.Lock()
        self._failure: StageError | None = None
        _reach(settings["bootstrap_servers"])
        self.sent = 0
        self.delivered = 0
        with boundary(self.where):
            self._producer = client.KafkaProducer(
                **settings,
                enable_idempotence=True,
                acks="all",
                compression_type="lz4",
                batch_size=min(BATCH_BYTES, config.kafka.max_event_bytes),
                linger_ms=LINGER_MS,
                max_request_size=config.kafka.max_event_bytes + BATCH_OVERHEAD_BYTES,
                max_block_ms=int(CONNECT_TIMEOUT_S * 1000),
                delivery_timeout_ms=int(delivery_timeout_s * 1000),
                request_timeout_ms=int(min(delivery_timeout_s, 10.0) * 1000) - LINGER_MS - 1,
                allow_auto_create_topics=False,
                metrics_enabled=False,
            )

    def send(self, event: bytes, key: str, on_delivery: OnDelivery | None = None) -> None:
        """Hand over one event; returns once it is buffered.

        Args:
            event: An encoded event.
            key: Its session id.
            on_delivery: Called in another thread with None once all replicas have it, else with the failure. Without it, a failure
                is raised by the next `send` or `flush`.

        Raises:
            BrokerUnavailable: The buffer stayed full, the topic is unknown, or an earlier event was not delivered.
            ContractViolation: The event is larger than the broker takes.
        """
        if self._failure is not None:
            raise self._failure
        if not self._room.acquire(timeout=self._delivery_timeout_s):
            raise BrokerUnavailable(f"Kafka at {self.where} takes no more events; check that it runs, then run the same command again")
        try:
            with boundary(self.where):
                future = self._producer.send(self.topic, value=event, key=key.encode())
        except StageError:
            self._room.release()
            raise
        self.sent += 1
        future.add_callback(self._delivered, on_delivery)
        future.add_errback(self._failed, on_delivery)

    def _delivered(self, on_delivery: OnDelivery | None, _metadata: object) -> None:
        self._room.release()
        with self._lock:
            self.delivered += 1
        if on_delivery is not None:
            on_delivery(None)

    def _failed(self, on_delivery: OnDelivery | None, error: BaseException) -> None:
        self._room.release()
        failure = translate(error, self.where)
        if on_delivery is not None:
            on_delivery(failure)
        elif self._failure is None:
            self._failure = failure

    def flush(self, timeout_s: float = DELIVERY_TIMEOUT_S) -> None:
        """Wait until every event sent so far has been delivered.

        Raises:
            BrokerUnavailable: Not within `timeout_s`, or one was not delivered.
        """
        with boundary(self.where):
            self._producer.flush(timeout=timeout_s)
        if self._failure is not None:
            raise self._failure

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop the connection; what is not delivered by then is reported as failed."""
        try:
            self._producer.close(timeout=timeout_s)
        except foreign.KafkaError:
            # kafka-python 3.0.12: when its flush times out, or meets a batch that was split and never finished, close() ends before it
            # stops its thread. A second, patient one would block for as long as the broker is away, so its thread is told to drop what
            # it holds.
            inner: Any = self._producer
            inner._sender.force_close()
            inner._sender.join(2.0)

    def __enter__(self) -> "Producer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close(timeout_s=5.0 if kind is None else 0.5)


def ensure_topics(config: PipelinesConfig, home: Home) -> list[TopicState]:
    """Create the topics that are missing and report how the others differ from the settings.

    Raises:
        BrokerUnavailable: The cluster does not answer.
        ConfigError: It does not let us.
    """
    settings = client_settings(config, home)
    where = ",".join(settings["bootstrap_servers"])
    states: list[TopicState] = []
    _reach(settings["bootstrap_servers"])
    with boundary(where):
        admin = client.KafkaAdminClient(**settings)
        try:
            existing = set(admin.list_topics())
            for topic in wanted(config.kafka):
                created = topic.name not in existing and _create(admin, topic)
                states.append(TopicState(name=topic.name, created=created, drift={} if created else _drift(admin, topic)))
        finally:
            admin.close()
    return states


def _create(admin: Any, topic: Topic) -> bool:
    """Create one topic; False when another process was first."""
    shape = {"num_partitions": topic.partitions, "replication_factor": topic.replication, "configs": topic.settings()}
    try:
        admin.create_topics({topic.name: shape}, wait_for_metadata=True)
    except foreign.TopicAlreadyExistsError:
        return False
    return True


def _drift(admin: Any, topic: Topic) -> dict[str, tuple[str, str]]:
    actual_partitions = len(admin.describe_topics([topic.name])[0]["partitions"])
    described = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic.name)], config_filter="all")
    values = {key: str(entry["value"]) for key, entry in described["topic"][topic.name].items()}
    drift = {key: (value, values.get(key, "unknown")) for key, value in topic.settings().items() if values.get(key) != value}
    if actual_partitions != topic.partitions:
        drift["partitions"] = (str(topic.partitions), str(actual_partitions))
    return drift


@contextmanager
def _consumer(config: PipelinesConfig, home: Home, topic: str) -> Iterator[tuple[Any, list[TopicPartition]]]:
    """Yield a consumer without group and the topic's partitions."""
    settings = client_settings(config, home)
    where = ",".join(settings["bootstrap_servers"])
    _reach(settings["bootstrap_servers"])
    with boundary(where):
        consumer = client.KafkaConsumer(
            **settings,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            allow_auto_create_topics=False,
            metrics_enabled=False,
            fetch_max_wait_ms=100,
        )
        try:
            numbers = consumer.partitions_for_topic(topic)
            if not numbers:
                raise foreign.UnknownTopicOrPartitionError(topic)
            yield consumer, [TopicPartition(topic, number) for number in sorted(numbers)]
        finally:
            consumer.close(autocommit=False)


def end_offsets(config: PipelinesConfig, home: Home, *, topic: str = "") -> dict[int, int]:
    """Return the next offset of each partition.

    Raises:
        BrokerUnavailable: No answer, or no such topic.
    """
    with _consumer(config, home, topic or config.kafka.topic) as (consumer, partitions):
        return {part.partition: offset for part, offset in consumer.end_offsets(partitions).items()}


def begin_offsets(config: PipelinesConfig, home: Home, *, topic: str = "") -> dict[int, int]:
    """Return the oldest offset that each partition still holds; raises as `end_offsets`."""
    with _consumer(config, home, topic or config.kafka.topic) as (consumer, partitions):
        return {part.partition: offset for part, offset in consumer.beginning_offsets(partitions).items()}


def delete_records(config: PipelinesConfig, home: Home, before: Mapping[int, int]) -> dict[int, int]:
    """Delete a topic's records up to an offset of each partition, everybody's: Kafka cannot delete single records.

    Args:
        config: Settings.
        home: The deployment.
        before: First offset to keep, by partition.

    Returns:
        The oldest offset that each partition holds now.

    Raises:
        BrokerUnavailable: No answer, or no such topic.
        ConfigError: The cluster does not let us.
    """
    settings = client_settings(config, home)
    _reach(settings["bootstrap_servers"])
    with boundary(",".join(settings["bootstrap_servers"])):
        admin = client.KafkaAdminClient(**settings)
        try:
            admin.delete_records({TopicPartition(config.kafka.topic, partition): offset for partition, offset in before.items()})
        finally:
            admin.close()
    return begin_offsets(config, home)


def consume(
    config: PipelinesConfig, home: Home, *, start: Mapping[int, int] | None = None, topic: str = "", idle_timeout_s: float = 10.0
) -> Iterator[Record]:
    """Yield what the topic holds now, partition by partition as it arrives, then stop.

    Args:
        config: Settings.
        home: The deployment.
        start: First offset by partition; a partition not named starts at its oldest record.
        topic: Another topic than the configured one.
        idle_timeout_s: Longest wait for the next record before the end was reached.

    Raises:
        BrokerUnavailable: No answer, no such topic, or it fell silent before the end.
    """
    with _consumer(config, home, topic or config.kafka.topic) as (consumer, partitions):
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        for part, first in consumer.beginning_offsets(partitions).items():
            consumer.seek(part, max(first, (start or {}).get(part.partition, first)))
        deadline = time.monotonic() + idle_timeout_s
        while any(consumer.position(part) < end for part, end in ends.items()):
            batches = consumer.poll(timeout_ms=200)
            if batches:
                deadline = time.monotonic() + idle_timeout_s
            elif time.monotonic() > deadline:
                raise foreign.KafkaTimeoutError(f"no record for {idle_timeout_s:.0f} s")
            for part, records in batches.items():
                for item in records:
                    if item.offset < ends[part]:
                        yield _record(item)


def _record(item: Any) -> Record:
    return Record(partition=item.partition, offset=item.offset, timestamp_ms=item.timestamp, key=item.key, value=item.value or b"")


def read_all(config: PipelinesConfig, home: Home, *, topic: str = "") -> list[Record]:
    """Return everything the topic holds, for tests and small deployments; raises as `consume`."""
    return list(consume(config, home, topic=topic))
