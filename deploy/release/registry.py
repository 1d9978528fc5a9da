"""The mirror of the ledger in MLflow's model registry: for people who look there, never the truth.

Each registered checkpoint is a version of the model `tidegate-policy`, tagged with its policy version; the aliases `serving`,
`anchor` and `candidate` point where the ledger points. Aliases are last-writer-wins and keep no history, so all of it is derived
from the ledger again each time. `python -m deploy.release.registry` runs in a process of its own: a mirror that cannot be written
is told and counted (`tasks.mirror`), and stops no ship.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cyclopts import App

from deploy.config import Config
from deploy.release.ledger import Ledger
from deploy.release.states import FINAL
from pipelines.errors import TransientError
from pipelines.storage import Home
from pipelines.terminal import Common, run

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODEL: Final = "tidegate-policy"
TAG: Final = "tidegate.policy_version"


def tracking_uri(home: Home, configured: str) -> str:
    """Return where MLflow tracks: the configured address, or SQLite in the deployment's home."""
    if configured:
        return configured
    home.mlflow.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{home.mlflow / 'mlflow.db'}"


def reconcile(ledger: Ledger, home: Home, *, configured: str = "") -> dict[str, int]:
    """Make MLflow say what the ledger says.

    Returns:
        `created` versions and `aliases` set.

    Raises:
        TransientError: MLflow does not answer.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    uri = tracking_uri(home, configured)
    try:
        return _reconcile(MlflowClient(tracking_uri=uri), ledger, home.store)
    except MlflowException as error:
        raise TransientError(f"MLflow at {uri} could not be written: {error}; the mirror catches up later") from error


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


app = App(name="registry", help="Mirror the ledger in MLflow's model registry.")


@app.default
def mirror(*, common: Common = Common()) -> None:
    """Make MLflow's registry say what the ledger says."""
    config, home = common.tree(Config), common.place()
    found = reconcile(Ledger(home.ledger), home, configured=config.mlflow.tracking_uri)
    common.show(found, lambda: f"{found['created']} versions created, {found['aliases']} aliases set")


if __name__ == "__main__":
    sys.exit(run(app))
