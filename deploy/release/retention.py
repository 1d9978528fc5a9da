"""Which checkpoints the store must keep, and removal of the others.

Kept: serving, previous, anchor, candidates of open ships, the last few confirmed, the base of all. Takes the store and the ledger.
"""

import shutil
from pathlib import Path
from typing import Any

from deploy.release.ledger import Ledger
from deploy.release.signing import signature_path
from deploy.release.states import FINAL, SERVES
from pipelines.storage import Home
from trainer import candidates


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def roles(ledger: Ledger, *, keep_confirmed: int) -> dict[str, list[str]]:
    """Return why each checkpoint must stay; one that is missing here may go."""
    found: dict[str, list[str]] = {}
    pointer = ledger.serving()
    if pointer is not None:
        for name, checkpoint in (("serving", pointer.checkpoint), ("previous", pointer.previous), ("anchor", pointer.anchor)):
            if checkpoint:
                found.setdefault(checkpoint, []).append(name)
    tombstoned = ledger.tombstones()
    ships = ledger.ships(limit=10_000)
    for ship in ships:
        if ship.state not in FINAL:
            found.setdefault(ship.candidate, []).append("open ship")
    confirmed = [ship.candidate for ship in ships if ship.state in SERVES and ship.candidate not in tombstoned]
    for checkpoint in confirmed[:keep_confirmed]:
        found.setdefault(checkpoint, []).append("confirmed")
    return found


def listing(home: Home) -> list[dict[str, Any]]:
    """Return every checkpoint of the store with size, kind, policy version and roles, newest first."""
    ledger = Ledger(home.ledger) if home.ledger.exists() else None
    kept = roles(ledger, keep_confirmed=5) if ledger else {}
    versions = {checkpoint: number for number, checkpoint in ledger.policies().items()} if ledger else {}
    tombstoned = ledger.tombstones() if ledger else {}
    folders = [path for path in home.store.iterdir() if (path / candidates.MANIFEST).exists()] if home.store.exists() else []
    found: list[dict[str, Any]] = []
    for path in sorted(folders, key=lambda p: (p / candidates.MANIFEST).stat().st_mtime, reverse=True):
        manifest = candidates.read_manifest(path)
        marks = kept.get(path.name, []) + (["tombstoned"] if path.name in tombstoned else []) + [manifest.kind]
        version = versions.get(path.name)
        found.append({"checkpoint": path.name, "policy_version": version, "bytes": _size(path), "roles": marks, "kind": manifest.kind})
    return found


def removable(home: Home, ledger: Ledger, *, keep_confirmed: int) -> list[dict[str, Any]]:
    """Return the checkpoints that nothing needs; bases and warm starts stay, everything is trained from them."""
    kept = roles(ledger, keep_confirmed=keep_confirmed)
    return [item for item in listing(home) if item["checkpoint"] not in kept and item["kind"] in ("update", "sabotage")]


def remove(home: Home, checkpoint: str) -> None:
    """Remove a checkpoint: the manifest first, so that readers never see half of one."""
    folder = home.store / checkpoint
    (folder / candidates.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    signature_path(home, checkpoint).unlink(missing_ok=True)
