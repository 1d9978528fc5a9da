"""Fixtures: one real Apache Kafka for the whole test run, and a fresh home and topic for each test."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.broker import EmbeddedBroker
from pipelines.config import KafkaConfig
from pipelines.storage import Home


def pytest_configure(config: pytest.Config) -> None:
    """Let kafka-python 3.0.12 be: it imports with functions that Python 3.11 deprecates (3.13 takes that back), and while a broker is
    away it leaves each refused socket to the garbage collector (such a socket has a local address and no peer).
    """
    config.addinivalue_line("filterwarnings", "ignore:(read|open)_text is deprecated:DeprecationWarning")
    config.addinivalue_line("filterwarnings", r"ignore:unclosed <socket.*laddr=\('0.0.0.0', \d+\)>:ResourceWarning")


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A running embedded broker in its own home (`broker.home`, `broker.bootstrap`), shared by all tests: use topics of your own."""
    with EmbeddedBroker(Home(tmp_path_factory.mktemp("broker"))) as started:
        yield started


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home of this test."""
    return Home(tmp_path / "home")


@pytest.fixture
def kafka_config(broker: EmbeddedBroker) -> KafkaConfig:
    """Settings that name the shared broker and a topic of this test's own (not created yet)."""
    return KafkaConfig(bootstrap_servers=broker.bootstrap, topic=f"events-{uuid.uuid4().hex[:12]}", partitions=2)
