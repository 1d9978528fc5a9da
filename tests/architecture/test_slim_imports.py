"""A contract costs its reader no engine: each is imported in a fresh interpreter and what came with it is looked at."""

import resource
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

ENGINES = ("kafka", "pyspark", "torch", "deepspeed", "transformers", "peft", "prefect", "mlflow", "tensorflow", "jax")
CONTRACTS = (
    "pipelines.errors",
    "pipelines.storage",
    "pipelines.config",
    "pipelines.events",
    "pipelines.topics",
    "pipelines.broker",
    "pipelines.terminal",
    "signals.config",
    "signals.samples",
    "trainer.config",
    "trainer.candidates",
    "deploy.config",
    "deploy.release.ledger",
    "deploy.__main__",
)
HELP_LIMIT_S = 0.5
"""Processor time, so that a busy machine does not fail the test; on an idle one it is the time a person waits. The aim is 0.3."""


def _engines_after(statement: str) -> list[str]:
    code = f"import sys; {statement}; print(*sorted(set({ENGINES!r}) & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("module", CONTRACTS)
def test_a_contract_imports_without_any_engine(module: str) -> None:
    assert _engines_after(f"import {module}") == []


def test_the_check_sees_an_engine_when_there_is_one() -> None:
    assert _engines_after("import pipelines.kafka") == ["kafka"]


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        begun = _children_cpu_s()
        done = subprocess.run([sys.executable, "-m", "deploy", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
        times.append(_children_cpu_s() - begun)
        assert "import" in done.stdout
    assert min(times) < HELP_LIMIT_S, times


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
