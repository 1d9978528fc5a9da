"""Every environment's file is valid, and the sections are the ones the stages agreed on."""

import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from deploy.config import Config
from pipelines import topics
from pipelines.config import ALL_SECTIONS, load
from tests.architecture.source import ROOT

FILES = sorted((ROOT / "infra" / "config").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_environment_loads_and_says_something(path: Path) -> None:
    tree = load(Config, path)
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    assert written, f"{path} sets nothing"
    assert set(written) <= set(ALL_SECTIONS)
    assert isinstance(tree, Config)


def test_the_three_environments_exist() -> None:
    assert {path.stem for path in FILES} >= {"local", "demo", "production"}


def test_the_tree_has_exactly_the_agreed_sections() -> None:
    assert set(Config.model_fields) == set(ALL_SECTIONS)


def test_production_keeps_no_secret_in_its_file() -> None:
    text = (ROOT / "infra" / "config" / "production.toml").read_text(encoding="utf-8")
    keys = {key for table in tomllib.loads(text).values() for key in _keys(table)}
    assert not {key for key in keys if key.endswith(("password", "secret", "token", "api_key"))}


def _keys(table: object) -> list[str]:
    return [key for name, value in table.items() for key in [name, *_keys(value)]] if isinstance(table, dict) else []


def test_every_section_is_closed_and_frozen() -> None:
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type), name
        assert issubclass(section, BaseModel), name
        assert section.model_config.get("extra") == "forbid", name
        assert section.model_config.get("frozen") is True, name


def test_topics_as_shipped_are_the_built_in_ones() -> None:
    assert topics.load() == dict(topics.BUILT_IN)


def test_a_deployments_topic_follows_its_settings() -> None:
    tree = load(
        Config, None, overrides=["kafka.topic=other", "kafka.partitions=7", "kafka.retention_hours=2", "kafka.max_event_bytes=5000"]
    )
    (topic,) = topics.wanted(tree.kafka)
    assert (topic.name, topic.partitions, topic.replication) == ("other", 7, 1)
    assert topic.settings()["retention.ms"] == "7200000"
    assert topic.settings()["max.message.bytes"] == "53576"
