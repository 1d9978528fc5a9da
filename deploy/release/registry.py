"""The mirror of the ledger in MLflow's model registry: for people who look there, never the truth.

Each registered checkpoint is a version of the model `tidegate-policy`, tagged with its policy version; the aliases `serving`,
`anchor` and `candidate` point where the ledger points. Aliases are last-writer-wins and keep no history, so `reconcile`
re-derives all of it from the ledger, and a mirror that cannot be written is counted, never a reason to stop a ship.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy.release.ledger import Ledger
from deploy.release.states import FINAL
from pipelines.storage import Home

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODEL: Final = "tidegate-policy"
TAG: Final = "tidegate.policy_version"

log = logging.getLogger(__name__)

_failures = 0
"""Mirror writes that failed in this process; shown by `tidegate status` and nowhere acted upon."""


def failures() -> int:
    """Return how many mirror writes failed in this process."""
    return _failures


def tracking_uri(home: Home, configured: str) -> str:
    """Return where MLflow tracks: the configured address, or SQLite in the deployment's home."""
    if configured:
        return configured
    home.mlflow.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{home.mlflow / 'mlflow.db'}"


def reconcile(ledger: Ledger, home: Home, *, configured: str = "") -> dict[str, int]:
    """Make MLflow say what the ledger says.

    Returns:
        `created` versions, `aliases` set, `failed` (1 when the mirror could not be written).
    """
    global _failures
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return _reconcile(MlflowClient(tracking_uri=tracking_uri(home, configured)), ledger, home.store) | {"failed": 0}
    except (MlflowException, SQLAlchemyError, OSError) as error:
        _failures += 1
        log.warning("registry mirror not written", extra={"fields": {"error": type(error).__name__, "failures": _failures}})
        return {"created": 0, "aliases": 0, "failed": 1}


def _reconcile(client: "MlflowClient", ledger: Ledger, store: Path) -> dict[str, int]:
    if not client.search_registered_models(f"name='{MODEL}'"):
        client.create_registered_model(MODEL)
    known = {int(found.tags[TAG]): found.version for found in client.search_model_versions(f"name='{MODEL}'") if TAG in found.tags}
    created = 0
    tombstones = ledger.tombstones()
    for number, checkpoint in ledger.policies().items():
        if number not in known:
            tags = {TAG: str(number), "tidegate.checkpoint": checkpoint}
            known[number] = client.create_model_version(MODEL, source=str(store / checkpoint), tags=tags).version
            created += 1
        if checkpoint in tombstones:
            client.set_model_version_tag(MODEL, str(known[number]), "tidegate.tombstone", tombstones[checkpoint])
    wanted = _aliases(ledger)
    for alias, number in wanted.items():
        client.set_registered_model_alias(MODEL, alias, str(known[number]))
    for alias in set(client.get_registered_model(MODEL).aliases) - wanted.keys():
        client.delete_registered_model_alias(MODEL, alias)
    return {"created": created, "aliases": len(wanted)}


def _aliases(ledger: Ledger) -> dict[str, int]:
    versions = {checkpoint: number for number, checkpoint in ledger.policies().items()}
    pointer = ledger.serving()
    if pointer is None:
        return {}
    wanted = {"serving": versions[pointer.checkpoint], "anchor": versions[pointer.anchor]}
    candidates = [ship.candidate for ship in ledger.ships(limit=1) if ship.state not in FINAL]
    return wanted | {"candidate": versions[candidates[0]]} if candidates else wanted
