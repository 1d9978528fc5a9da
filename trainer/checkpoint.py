"""The trainer's own checkpoints: a transaction, so that a killed run goes on as if it had not been killed.

Order: temporary folder, write, fsync files and folder, manifest (sha256 and size of every file), COMPLETE, rename, fsync parent,
then rotate. A reader takes the newest folder that has COMPLETE and whose files match; anything else is as good as absent.

Takes a writer that fills a folder (DeepSpeed's weights, optimizer and RNG come from there) and a JSON state (step, KL spent,
quarantined rows, figures). Leaves out: exported candidates (`publish.py`, `candidates.py`).
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pipelines.storage import fsync_folder, write_atomic
from trainer.candidates import sha256_file

COMPLETE: Final = "COMPLETE"
STATE: Final = "state.json"
FILES: Final = "files.json"
PREFIX: Final = "step-"


def name(step: int) -> str:
    """Return the folder name of the checkpoint taken after `step` optimizer steps; names sort by step."""
    return f"{PREFIX}{step:08d}"


def begin(root: Path, step: int) -> Path:
    """Make an empty temporary folder for a checkpoint, removing what a killed run left there."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".{name(step)}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def discard(root: Path) -> None:
    """Remove unfinished checkpoints: on a full disk they hold the room that everything else needs."""
    for path in root.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def commit(temporary: Path, root: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Make a filled temporary folder the checkpoint of `step`.

    Args:
        temporary: As from `begin`, filled by every rank.
        root: Where checkpoints live.
        step: Optimizer steps done.
        state: JSON-able; read back by `latest`.
        keep: Newest checkpoints that survive the rotation.
    """
    (temporary / STATE).write_text(json.dumps(state, sort_keys=True), encoding="utf-8")
    listed = {}
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            listed[path.relative_to(temporary).as_posix()] = {"sha256": sha256_file(path), "size_bytes": path.stat().st_size}
        else:
            fsync_folder(path)
    write_atomic(temporary / FILES, json.dumps(listed, sort_keys=True).encode())
    write_atomic(temporary / COMPLETE, b"")
    target = root / name(step)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    fsync_folder(root)
    for old in sorted(path for path in root.iterdir() if path.name.startswith(PREFIX))[:-keep]:
        shutil.rmtree(old)
    return target


def intact(folder: Path) -> bool:
    """Return whether a checkpoint is complete and unaltered."""
    if not (folder / COMPLETE).exists() or not (folder / FILES).exists():
        return False
    listed = json.loads((folder / FILES).read_bytes())
    return all(
        (folder / relative).is_file()
        and (folder / relative).stat().st_size == entry["size_bytes"]
        and sha256_file(folder / relative) == entry["sha256"]
        for relative, entry in listed.items()
    )


def latest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest intact checkpoint and its state; None when there is none."""
    if not root.exists():
        return None
    for folder in sorted((path for path in root.iterdir() if path.name.startswith(PREFIX)), reverse=True):
        if intact(folder):
            return folder, json.loads((folder / STATE).read_bytes())
    return None


def save(root: Path, step: int, state: Mapping[str, Any], *, keep: int, fill: Callable[[Path], None]) -> Path:
    """Take a checkpoint in one process: `begin`, `fill`, `commit`."""
    temporary = begin(root, step)
    fill(temporary)
    return commit(temporary, root, step, state, keep=keep)
