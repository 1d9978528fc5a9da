"""Checkpoint folders and their manifest: the contract of the trainer (torch-free).

A checkpoint is a folder in the store: safetensors weights, `config.json`, tokenizer files, `chat_template.jinja`, and
`MANIFEST.json`, written last. Its id is the sha256 of the manifest's bytes, so an id names exactly one set of weights, one
parent and one training window. Folders without a manifest do not exist for readers. Pickle files and `auto_map` (code in a
model folder) are refused.

Takes and gives folders. Leaves out: tensors themselves (`publish.py`), who serves what (`deploy.release.ledger`).
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import CheckpointInvalid
from pipelines.storage import fsync_folder, write_atomic

MANIFEST: Final = "MANIFEST.json"
UNSAFE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py")
TOKENIZER_FILES: Final = ("tokenizer.json",)
TEMPLATE_FILE: Final = "chat_template.jinja"


class FileEntry(BaseModel):
    """One file of the folder."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    size_bytes: int


class Manifest(BaseModel):
    """What a checkpoint is and where it comes from."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    kind: Literal["base", "warmstart", "update", "sabotage"]
    """`sabotage`: made on purpose by `tidegate demo break` to show the gate at work."""
    base_model: str
    files: dict[str, FileEntry]
    tensors_digest: str
    """sha256 over sorted lines `name dtype shape`."""
    tokenizer_sha: str
    template_sha: str
    parent: str | None = None
    """Checkpoint id it was trained from; None for a base."""
    created_at: str
    """ISO 8601, UTC."""
    git_revision: str = ""
    config_digest: str = ""
    reward_version: str | None = None
    lake_version: int | None = None
    """Delta version of `samples` it was trained on; None when not trained on the lake."""
    training: dict[str, float | int | str | None] = {}
    """Figures for people: rows, rejected.<code>, steps, kl_nats_per_token, loss, stop_reason, ..."""


def sha256_file(path: Path) -> str:
    """Return the sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_sha(folder: Path) -> str:
    """Return the identity of a folder's tokenizer: sha256 over its tokenizer files."""
    state = hashlib.sha256()
    for name in TOKENIZER_FILES:
        state.update((folder / name).read_bytes())
    return state.hexdigest()


def template_sha(folder: Path) -> str:
    """Return the identity of a folder's chat template."""
    return sha256_file(folder / TEMPLATE_FILE)


def checkpoint_id(folder: Path) -> str:
    """Return the id of a folder: sha256 (hex) of its manifest's bytes.

    Raises:
        CheckpointInvalid: The folder has no manifest.
    """
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise CheckpointInvalid(f"{folder} has no {MANIFEST}: it is not a checkpoint or was never finished") from error


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Return size and sha256 of every file in `folder` but the manifest."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(sha256=sha256_file(path), size_bytes=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def seal(staged: Path, store: Path, manifest: Manifest) -> tuple[str, Path]:
    """Write the manifest into a staged folder and move it into the store.

    Order: fsync files, manifest, fsync folder, rename, fsync parent; killed anywhere, readers see the whole checkpoint or none.

    Args:
        staged: A folder on the same file system as `store`, complete but for its manifest.
        store: The store's root.
        manifest: As built from `file_entries(staged)`.

    Returns:
        The checkpoint id and its folder (an identical one that is already there is kept and `staged` removed).
    """
    for name in manifest.files:
        with (staged / name).open("rb") as file:
            os.fsync(file.fileno())
    write_atomic(staged / MANIFEST, manifest.model_dump_json(indent=1).encode())
    identity = checkpoint_id(staged)
    target = store / identity
    if target.exists():
        shutil.rmtree(staged)
        return identity, target
    staged.rename(target)
    fsync_folder(store)
    return identity, target


def read_manifest(folder: Path) -> Manifest:
    """Parse a folder's manifest without reading the weights.

    Raises:
        CheckpointInvalid: Missing or malformed manifest.
    """
    checkpoint_id(folder)
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except ValidationError as error:
        raise CheckpointInvalid(f"{folder / MANIFEST} is malformed: {error.errors()[0]['msg']}") from error


def verify(folder: Path) -> Manifest:
    """Check a checkpoint folder against its manifest, byte for byte.

    Raises:
        CheckpointInvalid: Missing manifest, missing, altered or unlisted files, unsafe files, or code in `config.json`.
    """
    manifest = read_manifest(folder)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name in sorted(present):
        if name.endswith(UNSAFE_SUFFIXES):
            raise CheckpointInvalid(f"{folder / name}: pickle or code is never loaded; export safetensors")
    if missing := sorted(set(manifest.files) - present):
        raise CheckpointInvalid(f"{folder} lacks {', '.join(missing)}")
    if unlisted := sorted(present - set(manifest.files)):
        raise CheckpointInvalid(f"{folder} holds files its manifest does not list: {', '.join(unlisted)}")
    for name, entry in manifest.files.items():
        path = folder / name
        if path.stat().st_size != entry.size_bytes or sha256_file(path) != entry.sha256:
            raise CheckpointInvalid(f"{path} differs from its manifest (damaged or altered); restore it or roll back")
    if "auto_map" in json.loads((folder / "config.json").read_bytes()):
        raise CheckpointInvalid(f"{folder / 'config.json'} names code to run (auto_map); it is refused")
    return manifest


def find(store: Path, prefix: str) -> tuple[str, Path]:
    """Find the one checkpoint whose id starts with `prefix`.

    Raises:
        CheckpointInvalid: None or several match.
    """
    found = [path for path in store.iterdir() if path.name.startswith(prefix) and (path / MANIFEST).exists()] if store.exists() else []
    if len(found) != 1:
        raise CheckpointInvalid(
            f"{len(found)} checkpoints in {store} start with {prefix!r}; name exactly one (`tidegate ckpt list` shows them)"
        )
    return found[0].name, found[0]
