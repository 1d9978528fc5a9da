"""Make a checkpoint that must be refused, to see the gate at work: NaN weights, or a policy of invalid tool calls.

The manifest says `sabotage`. Leaves out: the gate that has to find it by measurement alone.
"""

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import torch

from pipelines.errors import ConfigError
from pipelines.storage import Home
from trainer import candidates, publish
from trainer.config import TrainerConfig
from trainer.model import load
from trainer.warmstart import warmstart

Kind = Literal["nan", "invalid-tools"]
NAN_TENSOR: Final = "model.norm.weight"
"""Every Llama-like model has it, and one NaN there reaches every logit."""


def nan_weights(home: Home, *, parent: str, now: datetime) -> dict[str, Any]:
    """Export the parent with one NaN in it."""
    identity, folder = candidates.find(home.store, parent)
    manifest = candidates.verify(folder)
    model = load(folder)
    with torch.no_grad():
        model.get_parameter(NAN_TENSOR).view(-1)[0] = float("nan")
    staged = publish.stage_child(model, folder, home.store)
    shutil.copyfile(folder / publish.PROBE, staged / publish.PROBE)
    made, path = publish.seal(staged, home.store, kind="sabotage", base_model=manifest.base_model, created_at=now, parent=identity)
    return {"checkpoint": made, "path": str(path), "parent": identity, "kind": "nan"}


def sabotage(config: TrainerConfig, home: Home, *, parent: str, kind: Kind, data: Path | None, now: datetime) -> dict[str, Any]:
    """Make a checkpoint to be refused.

    Args:
        config: Settings.
        home: The deployment's folder.
        parent: Checkpoint id or prefix.
        kind: nan or invalid-tools.
        data: Demonstrations of broken tool calls, for invalid-tools.
        now: Aware UTC.

    Raises:
        ConfigError: invalid-tools without data.
    """
    if kind == "nan":
        return nan_weights(home, parent=parent, now=now)
    if data is None:
        raise ConfigError("--kind invalid-tools needs --data FILE.jsonl with demonstrations of broken tool calls")
    return warmstart(config, home, parent=parent, data=data, sabotage=True, now=now) | {"kind": "invalid-tools"}
