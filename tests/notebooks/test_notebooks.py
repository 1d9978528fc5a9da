"""Every notebook runs from top to bottom on a lake that real Kafka and Spark made, and is committed without outputs."""

import os
import random
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from pipelines import codec, kafka
from pipelines.config import PipelinesConfig
from pipelines.storage import Home
from tests.support.spark import made_up_session

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def lake_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A deployment whose lake holds a few dozen made-up sessions."""
    from pipelines.broker import EmbeddedBroker

    home = Home(tmp_path_factory.mktemp("notebooks"))
    config = PipelinesConfig()
    with EmbeddedBroker(home, config=config.kafka):
        kafka.ensure_topics(config, home)
        rng = random.Random(7)
        with kafka.Producer(config, home) as producer:
            for number in range(24):
                for event in made_up_session(rng, f"s{number:02d}"):
                    producer.send(codec.encode(event), event.session_id)
        command = [sys.executable, "-m", "signals", "run", "--once", "--home", str(home.root), "--set", 'spark.master="local[1]"']
        subprocess.run(command, check=True, capture_output=True, timeout=240)
    return home


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, lake_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(lake_home.root))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(path.parents[1]), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("sum(mass x value) / sum(mass)" in text for text in texts), "the story ends with the explanation of a reward"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    kept = [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None)]
    assert kept == []


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
