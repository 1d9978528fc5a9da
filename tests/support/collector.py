"""A collector in a process of its own, and how to talk to it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from pipelines.config import KafkaConfig
from pipelines.storage import Home

START_S = 60.0
ROOT = Path(__file__).parents[2]


@dataclass
class Collecting:
    """A running `tidegate collect`. Use as a context manager."""

    home: Home
    kafka: KafkaConfig
    overrides: tuple[str, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None
    url: str = ""
    client: httpx.Client = field(init=False)

    def __enter__(self) -> "Collecting":
        command = [sys.executable, "-m", "pipelines.collector_commands", "--home", str(self.home.root), "--set", "collector.port=0"]
        for text in (
            f"kafka.bootstrap_servers={self.kafka.bootstrap_servers}", f"kafka.topic={self.kafka.topic}",
            f"kafka.spool_max_bytes={self.kafka.spool_max_bytes}", *self.overrides,
        ):  # fmt: skip
            command += ["--set", text]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
        self.home.root.mkdir(parents=True, exist_ok=True)
        with (self.home.root / "collector.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        state, deadline = self.home.run / "collector.json", time.monotonic() + START_S
        while not state.exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, "the collector did not start"
            time.sleep(0.02)
        self.url = json.loads(state.read_text())["url"]
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.close()
        away = self.kafka.bootstrap_servers.endswith(":1")  # nobody listens there: a gentle stop would wait for it
        self.stop(signal.SIGKILL if away else signal.SIGTERM)

    @property
    def log(self) -> str:
        """What it printed so far."""
        return (self.home.root / "collector.log").read_text()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code; nothing happens to one that has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Send a body: bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(path, content=content, headers=named)

    def metric(self, line: str) -> float:
        """Return the number of one sample of `/metrics`, 0 when there is none."""
        for text in self.client.get("/metrics").text.splitlines():
            name, _, value = text.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0

    def delivered(self) -> bool:
        """Wait until nothing is on disk any more."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            health = self.client.get("/health").json()
            if health["queued"] == health["spooled"] == 0:
                return True
            time.sleep(0.02)
        return False
