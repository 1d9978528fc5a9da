"""Fixtures: real gateways with real engine processes on tiny checkpoints, and an independent scorer to judge them by."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.release.ledger import Ledger
from deploy.release.states import Observation
from pipelines.storage import Home
from tests.support.model import tiny_checkpoint

START_S = 240.0
FAST = (
    "serving.dtype='float32'", "serving.poll_s=0.2", "serving.threads=1", "serving.restart_backoff_s=0.1", "serving.context_tokens=512",
)  # fmt: skip
"""Settings of every gateway in tests: exact arithmetic, quick looks at the pointer."""


@lru_cache(maxsize=8)
def _plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()


def plain_logprobs(folder: Path, prompt: Sequence[int], response: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    """Score a response by one plain forward pass of transformers: no cache, no batch, none of our code."""
    import torch

    with torch.no_grad():
        logits = _plain_model(folder)(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
        found = (logits / temperature).log_softmax(-1)
    return found[range(len(response)), list(response)].tolist()


@dataclass
class Served:
    """A running `tidegate serve` and how to talk to it."""

    home: Home
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    state: Path = field(init=False)
    process: "subprocess.Popen[bytes] | None" = None
    url: str = ""
    client: httpx.Client | None = None

    def start(self) -> "Served":
        """Start it and wait until it answers."""
        self.state = self.home.root / "url.json"
        self.state.unlink(missing_ok=True)
        command = [sys.executable, "-m", "deploy.serving", "--home", str(self.home.root), "--state", str(self.state), *self.arguments]
        for text in (*FAST, *self.overrides):
            command += ["--set", text]
        self.home.root.mkdir(parents=True, exist_ok=True)
        with (self.home.root / "gateway.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + START_S
        while not self.state.exists():
            assert self.process.poll() is None, (self.home.root / "gateway.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.05)
        self.url = json.loads(self.state.read_text())["url"]
        key = (self.home.keys / "gateway.key").read_text()
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=120, limits=limits, trust_env=False
        )
        return self

    @property
    def http(self) -> httpx.Client:
        """The client, with a valid key."""
        assert self.client is not None
        return self.client

    def chat(self, text: str, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """Send one user message."""
        message = {"messages": [{"role": "user", "content": text}], "max_tokens": 8} | body
        return self.http.post("/v1/chat/completions", json=message, headers=headers)

    def status(self) -> dict[str, Any]:
        """Return /admin/status."""
        return self.http.get("/admin/status").json()

    def wait(self, true_of: Any, *, within_s: float = 60.0) -> dict[str, Any]:
        """Wait until `true_of(status)`; return that status."""
        deadline = time.monotonic() + within_s
        while True:
            status = self.status()
            if true_of(status):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.1)

    def stop(self) -> int:
        """Stop it politely; return its exit code."""
        assert self.process is not None
        if self.client is not None:
            self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def serving_checkpoint(status: dict[str, Any]) -> str | None:
    """Return which checkpoint new sessions get."""
    return next((replica["checkpoint"] for replica in status["replicas"] if replica["state"] == "serving"), None)


def promote(ledger: Ledger, candidate: str) -> None:
    """Move the pointer from whatever serves to `candidate`, through every step that the ledger demands."""
    pointer = ledger.serving()
    assert pointer is not None
    epoch = ledger.lease("ship", "test", 60).epoch
    ship = ledger.propose(pointer.checkpoint, candidate, gate_digest=f"test-{epoch}", epoch=epoch)
    ledger.observe(ship.ship_id, Observation.BYTES_VERIFIED, epoch=epoch)
    ledger.observe(ship.ship_id, Observation.GATE_PASSED, epoch=epoch)
    ledger.promote(ship.ship_id, candidate, pointer.checkpoint, epoch=epoch)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A store with two tiny checkpoints of different weights: its root and both ids."""
    store = tmp_path_factory.mktemp("pair") / "store"
    store.mkdir()
    first, _ = tiny_checkpoint(store, seed=1)
    second, _ = tiny_checkpoint(store, seed=2)
    return store, first, second


def pair_home(root: Path, tiny_pair: tuple[Path, str, str]) -> Home:
    """Return a new home whose store has both tiny checkpoints and whose ledger serves the first."""
    store, first, _ = tiny_pair
    home = Home(root / "home")
    shutil.copytree(store, home.store)
    Ledger(home.ledger).install(first)
    return home
