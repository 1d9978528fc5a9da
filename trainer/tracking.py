"""Send a run's figures to MLflow. The only place in this stage that imports it, and only when a run starts.

Tracking is for people. A missing or failing tracker is said once on stderr and never ends a run.
Takes figures; gives nothing back. Leaves out: the release registry (`deploy.release`).
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pipelines.storage import Home
from trainer.config import MlflowConfig

PATIENCE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""MLflow's own defaults wait many minutes for a server that is away; training does not."""

log = logging.getLogger(__name__)


def uri(config: MlflowConfig, home: Home) -> str:
    """Return the tracking address: configured, or SQLite under the home."""
    return config.tracking_uri or f"sqlite:///{home.mlflow / 'mlflow.sqlite'}"


class Tracker:
    """One MLflow run, or nothing when MLflow does not answer."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def step(self, figures: Mapping[str, Any]) -> None:
        """Log the finite figures of one step."""
        if self._client is None:
            return
        from mlflow.exceptions import MlflowException

        step = int(figures.get("step", 0))
        try:
            for name, value in figures.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._client.log_metric(self._run_id, name, float(value), step=step)
        except (MlflowException, OSError) as error:
            log.warning("tracking stopped", extra={"fields": {"error": str(error)}})
            self._client = None


@contextmanager
def tracked(config: MlflowConfig, home: Home, *, experiment: str, name: str, tags: Mapping[str, str]) -> Iterator[Tracker]:
    """Open a run for the block; ends it as finished or failed.

    Args:
        config: Where to track.
        home: The deployment's folder.
        experiment: Group of runs.
        name: Name of this run.
        tags: Short facts to find it by.
    """
    client: Any = None
    run_id = ""
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        home.mlflow.mkdir(parents=True, exist_ok=True)
        try:
            client = MlflowClient(uri(config, home))
            found = client.get_experiment_by_name(experiment)
            place = found.experiment_id if found else client.create_experiment(experiment, artifact_location=_artifacts(home.mlflow))
            run_id = client.create_run(place, run_name=name, tags=dict(tags)).info.run_id
        except (MlflowException, OSError) as error:
            log.warning("tracking is off for this run", extra={"fields": {"error": str(error)}})
            client = None
    except ImportError as error:
        log.warning("tracking is off: mlflow cannot be imported", extra={"fields": {"error": str(error)}})
    tracker = Tracker(client, run_id)
    status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    finally:
        if tracker._client is not None:
            tracker._client.set_terminated(run_id, status)


def _artifacts(folder: Path) -> str:
    return (folder / "artifacts").as_uri()
