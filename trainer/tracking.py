"""Send a run's figures to MLflow. The only place in this stage that imports it, and only when a run starts.

Tracking is for people. It runs beside the training in a thread of its own, so that nothing waits for it: importing MLflow and opening
its database take seconds. A missing or failing tracker is said once on stderr and never ends a run.
Takes figures; gives nothing back. Leaves out: the release registry (`deploy.release`).
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Final

from pipelines.storage import Home
from trainer.config import MlflowConfig

PATIENCE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""MLflow's own defaults wait many minutes for a server that is away; training does not."""
LAST_WORD_S: Final = 30.0
"""How long a finished run waits for its figures to be sent."""

log = logging.getLogger(__name__)


def uri(config: MlflowConfig, home: Home) -> str:
    """Return the tracking address: configured, or SQLite under the home."""
    return config.tracking_uri or f"sqlite:///{home.mlflow / 'mlflow.sqlite'}"


class Tracker:
    """Takes figures of a run without waiting for MLflow: one thread imports it, opens the run and sends them."""

    def __init__(self) -> None:
        self.entries: Queue[tuple[int, dict[str, Any]] | str] = Queue()
        """(when in ms, figures), or the run's last word."""

    def step(self, figures: Mapping[str, Any]) -> None:
        """Log the finite figures of one step."""
        self.entries.put((time.time_ns() // 1_000_000, dict(figures)))


@contextmanager
def tracked(config: MlflowConfig, home: Home, *, experiment: str, name: str, tags: Mapping[str, str]) -> Iterator[Tracker]:
    """Open a run beside the block; ends it as finished or failed.

    Args:
        config: Where to track.
        home: The deployment's folder.
        experiment: Group of runs.
        name: Name of this run.
        tags: Short facts to find it by.
    """
    tracker = Tracker()
    relay = Thread(target=_relay, args=(tracker.entries, config, home, experiment, name, dict(tags)), name="tracking", daemon=True)
    relay.start()
    status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    finally:
        tracker.entries.put(status)
        relay.join(LAST_WORD_S)
        if relay.is_alive():
            log.warning("tracking did not end in time and is left behind")


def _relay(
    entries: "Queue[tuple[int, dict[str, Any]] | str]", config: MlflowConfig, home: Home, experiment: str, name: str, tags: dict[str, str]
) -> None:
    """Send entries until the run's last word; after an error nothing more is sent."""
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        log.warning("tracking is off: mlflow cannot be imported", extra={"fields": {"error": str(error)}})
        return
    for key, value in PATIENCE.items():
        os.environ.setdefault(key, value)
    try:
        home.mlflow.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(uri(config, home))
        found = client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else client.create_experiment(experiment, artifact_location=_artifacts(home.mlflow))
        run_id = client.create_run(place, run_name=name, tags=tags).info.run_id
        while not isinstance(entry := entries.get(), str):
            _send(client, run_id, *entry)
        client.set_terminated(run_id, entry)
    except (MlflowException, OSError) as error:
        log.warning("tracking is off for the rest of this run", extra={"fields": {"error": str(error)}})


def _send(client: Any, run_id: str, at_ms: int, figures: Mapping[str, Any]) -> None:
    from mlflow.entities import Metric

    step = int(figures.get("step", 0))
    finite = {name: float(value) for name, value in figures.items() if isinstance(value, int | float) and math.isfinite(value)}
    client.log_batch(run_id, metrics=[Metric(name, value, at_ms, step) for name, value in finite.items()])


def _artifacts(folder: Path) -> str:
    return (folder / "artifacts").as_uri()
