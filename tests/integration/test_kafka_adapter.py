"""The Kafka adapter against a real broker."""

import random

import pytest

from pipelines import kafka
from pipelines.broker import EmbeddedBroker
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.errors import BrokerUnavailable, ConfigError, ContractViolation
from pipelines.storage import Home

pytestmark = pytest.mark.kafka


def test_what_is_sent_is_read_back_with_its_key_and_the_offsets_say_so(home: Home, kafka_config: KafkaConfig) -> None:
    config = PipelinesConfig(kafka=kafka_config)
    (state,) = kafka.ensure_topics(config, home)
    assert (state.created, state.drift) == (True, {})
    with kafka.Producer(config, home) as producer:
        for i in range(10):
            producer.send(f"event {i}".encode(), f"session {i % 2}")
    assert producer.delivered == producer.sent == 10
    ends = kafka.end_offsets(config, home)
    assert set(ends) == {0, 1}
    assert sum(ends.values()) == 10
    assert kafka.begin_offsets(config, home) == {0: 0, 1: 0}
    records = kafka.read_all(config, home)
    assert sorted(r.value for r in records) == sorted(f"event {i}".encode() for i in range(10))
    assert len({(r.key, r.partition) for r in records}) == 2, "a session stays on one partition"
    later = list(kafka.consume(config, home, start={p: end - 1 for p, end in ends.items() if end}))
    assert [r.offset for r in later] == [ends[r.partition] - 1 for r in later]


def test_ensuring_topics_again_changes_nothing_and_reports_drift(home: Home, kafka_config: KafkaConfig) -> None:
    config = PipelinesConfig(kafka=kafka_config)
    kafka.ensure_topics(config, home)
    (again,) = kafka.ensure_topics(config, home)
    assert (again.created, again.drift) == (False, {})
    wanted = PipelinesConfig(kafka=kafka_config.model_copy(update={"partitions": 6, "retention_hours": 1}))
    (drifted,) = kafka.ensure_topics(wanted, home)
    assert drifted.drift == {"partitions": ("6", "2"), "retention.ms": ("3600000", str(168 * 3_600_000))}
    assert set(kafka.end_offsets(config, home)) == {0, 1}, "nothing was changed"


def test_a_topic_that_does_not_exist_is_one_clear_sentence(home: Home, kafka_config: KafkaConfig) -> None:
    config = PipelinesConfig(kafka=kafka_config)
    with pytest.raises(BrokerUnavailable, match="topic does not exist"):
        kafka.end_offsets(config, home)


def test_an_event_over_the_limit_is_refused_at_once(home: Home, kafka_config: KafkaConfig) -> None:
    config = PipelinesConfig(kafka=kafka_config.model_copy(update={"max_event_bytes": 1_000}))
    kafka.ensure_topics(config, home)
    with kafka.Producer(config, home) as producer, pytest.raises(ContractViolation, match="no event this large"):
        producer.send(b"x" * 100_000, "s")


def test_a_broker_that_does_not_answer_is_unavailable_and_nothing_configured_says_how_to_start_one(home: Home) -> None:
    with pytest.raises(BrokerUnavailable, match="no Kafka broker is running"):
        kafka.bootstrap(PipelinesConfig(), home)
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        kafka.Producer(PipelinesConfig(kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1")), home)


def test_secrets_come_only_from_the_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    section = KafkaConfig(bootstrap_servers="127.0.0.1:1", security={"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"})
    monkeypatch.setenv("TIDEGATE_KAFKA_SASL_PLAIN_PASSWORD", "from the environment")
    settings = kafka.client_settings(PipelinesConfig(kafka=section), home)
    assert settings["sasl_plain_password"] == "from the environment"
    assert settings["security_protocol"] == "SASL_SSL"
    bad = section.model_copy(update={"security": {"sasl_plain_password": "in the file"}})
    with pytest.raises(ConfigError, match="TIDEGATE_KAFKA_SASL_PLAIN_PASSWORD"):
        kafka.client_settings(PipelinesConfig(kafka=bad), home)
    with pytest.raises(ConfigError, match="is not a setting"):
        kafka.client_settings(PipelinesConfig(kafka=section.model_copy(update={"security": {"sasl": "x"}})), home)


def test_the_first_producer_on_an_embedded_broker_makes_its_topic(home: Home) -> None:
    config = PipelinesConfig()
    with EmbeddedBroker(home, config=config.kafka), kafka.Producer(config, home) as producer:
        producer.send(b"{}", "s1")
        producer.flush()
        assert sum(kafka.end_offsets(config, home).values()) == 1


def test_batches_fit_the_topic_however_small_its_largest_event_is(home: Home, kafka_config: KafkaConfig) -> None:
    config = PipelinesConfig(kafka=kafka_config.model_copy(update={"max_event_bytes": 20_000}))
    kafka.ensure_topics(config, home)
    events = [random.Random(i).randbytes(19_000) for i in range(60)]  # nothing that lz4 could make smaller
    refused: list[object] = []
    with kafka.Producer(config, home) as producer:
        for event in events:
            producer.send(event, "one session", lambda failure: refused.append(failure) if failure else None)
    assert refused == []
    assert [record.value for record in kafka.read_all(config, home)] == events, "all of them, in order, each once"
