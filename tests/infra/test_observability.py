"""Alerts, dashboards and runbooks say only what the code can do: declared metrics, known labels, existing commands."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.__main__ import app
from deploy.serving.gateway import Meters as GatewayMeters
from pipelines.metrics import Histogram
from signals.monitors_alarms import Meters as DriftMeters
from signals.monitors_metrics import NAMES
from tests.architecture.source import ROOT

RULES = sorted((ROOT / "infra" / "prometheus").glob("*.yml"))
BOARDS = sorted((ROOT / "infra" / "grafana").glob("*.json"))
RUNBOOKS = sorted((ROOT / "infra" / "runbooks").glob("*.md"))
REGISTRIES = (GatewayMeters().registry, DriftMeters().registry)

NAME = re.compile(r"\btidegate_[a-z0-9_]+")
SELECTED = re.compile(r"(tidegate_[a-z0-9_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
VALUES = {"cause": {"policy", "traffic"}, "metric": set(NAMES)}
"""Labels whose values are a closed set."""


def declared() -> dict[str, set[str]]:
    """Return every name a scrape can show, with its labels."""
    found: dict[str, set[str]] = {}
    for registry in REGISTRIES:
        for metric in registry.metrics():
            if isinstance(metric, Histogram):
                found |= {f"{metric.name}_{part}": set(metric.labels) for part in ("sum", "count")}
                found[f"{metric.name}_bucket"] = {*metric.labels, "le"}
            else:
                found[metric.name] = set(metric.labels)
    return found


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def panels() -> Iterator[dict[str, Any]]:
    for path in BOARDS:
        yield from json.loads(path.read_text(encoding="utf-8"))["panels"]


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels() for target in panel["targets"]]


def test_there_are_alerts_a_board_and_a_runbook() -> None:
    assert RULES
    assert BOARDS
    assert RUNBOOKS


def test_every_expression_names_declared_metrics_and_their_labels_only() -> None:
    known = declared()
    for text in expressions():
        names = NAME.findall(text)
        assert names, text
        assert set(names) <= known.keys(), text
        assert text.count("(") == text.count(")"), text
        for name, inside in SELECTED.findall(text):
            for label, _, value in MATCHER.findall(inside):
                assert label in known[name], text
                if label in VALUES:
                    assert set(value.split("|")) <= VALUES[label], text


def test_every_alarm_of_a_policy_belongs_to_exactly_one_alert() -> None:
    chosen: list[tuple[str, set[str]]] = []
    for rule in rules():
        for _, inside in SELECTED.findall(rule["expr"]):
            if 'cause="policy"' in inside:
                chosen += [(how, set(value.split("|"))) for label, how, value in MATCHER.findall(inside) if label == "metric"]
    assert sorted(how for how, _ in chosen) == ["!~", "=~"]
    assert chosen[0][1] == chosen[1][1]


def test_every_alert_has_a_severity_a_summary_and_a_runbook_that_names_it() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        runbook = ROOT / rule["annotations"]["runbook"]
        assert f"`{rule['alert']}`" in runbook.read_text(encoding="utf-8")


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    for path in BOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24, panel["title"]
            assert panel["description"]
            taken |= cells
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.name)
def test_the_commands_of_a_runbook_exist(path: Path) -> None:
    commands = {tuple(found.split()) for found in re.findall(r"tidegate ((?:[a-z]+ ?)+)", path.read_text(encoding="utf-8"))}
    assert len(commands) >= 3
    for words in sorted(commands):
        node = app
        for word in words:
            assert word in node, f"{path.name} names `tidegate {' '.join(words)}`, which does not exist"
            node = node[word]
