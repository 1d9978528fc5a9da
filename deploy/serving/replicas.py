"""One engine process: start it, prove that it serves the right weights, ask it, restart it when it dies, stop it.

A replica belongs to one checkpoint for life. The process has its own group and dies with the gateway (the kernel sees to it),
so nothing outlives a killed gateway. A request that meets a dead engine waits for its restart and is sent again: nothing was
answered yet, so nothing is answered twice.

Takes: a verified checkpoint folder. Gives: `Replica`. Leaves out: which replica answers whom (`fleet.py`).
"""

import asyncio
import json
import logging
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from deploy.serving.capture import Policy
from deploy.serving.config import ServingConfig
from deploy.serving.protocol import RequestRefused
from pipelines.errors import CheckpointInvalid, EngineUnavailable
from pipelines.storage import Home
from trainer.candidates import Manifest

log = logging.getLogger(__name__)

PROBE: Final = "probe.json"
STOP_WAIT_S: Final = 10.0
"""After a polite signal; then the group is killed."""
LONGEST_BACKOFF_S: Final = 60.0
STEADY_S: Final = 60.0
"""A process that lived this long starts its back-off anew when it dies."""
LOOK_S: Final = 0.1
REAP_S: Final = 0.3
MAX_SENDS: Final = 3
"""How often one request is sent before it is taken to be what kills the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What should serve."""

    checkpoint: str
    folder: Path
    policy_version: int
    arm: str
    epoch: int
    """Changes with every write of the pointer, also when it comes back to an earlier checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How far an engine's log-probabilities are from the checkpoint's own reference."""

    mean_abs_nats: float
    tokens: int
    tolerance_nats: float


class Replica:
    """The engine process of one checkpoint. Lives in one event loop."""

    def __init__(self, target: Target, manifest: Manifest, *, config: ServingConfig, home: Home) -> None:
        self.target = target
        self.policy = Policy(
            checkpoint=target.checkpoint, policy_version=target.policy_version, arm=target.arm,
            tokenizer_sha=manifest.tokenizer_sha, template_sha=manifest.template_sha,
        )  # fmt: skip
        self.in_flight = 0
        self.restarts = 0
        self.probe: Probe | None = None
        self.drain_until: float | None = None
        """Monotonic time; None while it serves new sessions."""
        self._config = config
        self._home = home
        self._log = home.logs / f"engine-{target.arm}-{target.checkpoint[:12]}.log"
        self._state = home.run / "replicas" / f"{target.arm}-{target.checkpoint[:12]}-{os.getpid()}.json"
        self._process: asyncio.subprocess.Process | None = None
        self._client: httpx.AsyncClient | None = None
        self._ready = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether it answers now."""
        return self._ready.is_set()

    @property
    def pid(self) -> int | None:
        """The engine's process id; None before the first start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the engine, wait until it is ready, check its fingerprint, and keep it alive from then on.

        Raises:
            CheckpointInvalid: The engine does not load the folder, or computes something else than the trainer did.
            EngineUnavailable: It was not ready in time.
        """
        try:
            await self._launch()
            await self.fingerprint()
        except BaseException:
            await self.stop()
            raise
        self._ready.set()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.target.checkpoint[:12]}")

    async def stop(self) -> None:
        """Stop the engine and everything it started; wait until it is gone."""
        self._ready.clear()
        if self._keeper:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        await self._end()

    async def chat(self, body: dict[str, Any], *, deadline: float) -> dict[str, Any]:
        """Ask for a completion; wait and ask again while the engine restarts.

        Args:
            body: The engine's request.
            deadline: Monotonic time by which the caller gives up.

        Raises:
            EngineUnavailable: No answer before the deadline or within `retry_s` of a fault.
            RequestRefused: The engine refuses the request itself, or the deadline passed while it was decoding.
        """
        for _ in range(MAX_SENDS):
            await self._until_ready(min(deadline, time.monotonic() + self._config.retry_s))
            client = self._client
            assert client is not None
            try:
                reply = await client.post("/v1/chat/completions", json=body, timeout=max(0.1, deadline - time.monotonic()))
            except httpx.TimeoutException as error:
                raise RequestRefused(504, "the model did not finish in time; ask for fewer tokens", code="timeout") from error
            except httpx.TransportError:
                await self._until_reaped()
                continue
            return _answer(reply)
        raise EngineUnavailable(f"the engine died {MAX_SENDS} times over this request; shorten it, or see {self._log}")

    async def _until_reaped(self) -> None:
        """Wait for the keeper to notice that the process is dead, or a moment if only the connection was."""
        give_up = time.monotonic() + REAP_S
        while self.ready and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_S / 10)

    async def _until_ready(self, give_up: float) -> None:
        try:
            await asyncio.wait_for(self._ready.wait(), max(0.0, give_up - time.monotonic()))
        except TimeoutError as error:
            raise EngineUnavailable(
                f"the engine of checkpoint {self.target.checkpoint[:12]} is restarting; try again in a minute (log: {self._log})"
            ) from error

    async def fingerprint(self) -> Probe:
        """Compare the engine's log-probabilities of the probe with the checkpoint's reference.

        Raises:
            CheckpointInvalid: No probe in the folder, or the mean |difference| is above the tolerance or not a number.
        """
        path = self.target.folder / PROBE
        try:
            rows = json.loads(path.read_bytes())["rows"]
            asked = [{"prompt_ids": row["prompt_ids"], "response_ids": row["response_ids"]} for row in rows]
            reference = [value for row in rows for value in row["logprobs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointInvalid(f"{path} cannot be read ({error}); a checkpoint is served only with its fingerprint") from error
        assert self._client is not None
        try:
            reply = await self._client.post("/score", json={"rows": asked}, timeout=self._config.start_timeout_s)
            health = (await self._client.get("/health", timeout=self._config.start_timeout_s)).json()
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"the engine did not score its fingerprint ({error}); see {self._log}") from error
        if reply.status_code != 200:
            raise CheckpointInvalid(f"the engine cannot score the fingerprint of {self.target.checkpoint[:12]}: {reply.text[:300]}")
        found = [value for row in reply.json()["logprobs"] for value in row]
        tolerance = self._config.tolerance_bfloat16 if health["dtype"] == "bfloat16" else self._config.tolerance_float32
        self.probe = compare_probe(found, reference, tolerance_nats=tolerance)
        if not self.probe.mean_abs_nats <= tolerance:
            raise CheckpointInvalid(
                f"fingerprint of {self.target.checkpoint[:12]}: log-probabilities differ by {self.probe.mean_abs_nats:.4g} nat in the mean "
                f"on {self.probe.tokens} tokens, above {tolerance:.4g}; the weights are broken or the engine computes something else"
            )
        return self.probe

    async def check(self) -> None:
        """Kill an engine whose process lives but no longer decodes; its keeper then restarts it."""
        if not self.ready or self._client is None or self._process is None:
            return
        with suppress(httpx.HTTPError):
            if (await self._client.get("/health", timeout=5)).status_code == 503:
                log.error("the engine stopped decoding; restarting it", extra={"fields": {"checkpoint": self.target.checkpoint}})
                self._signal(signal.SIGKILL)

    async def _launch(self) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._state.unlink(missing_ok=True)
        config = self._config
        options = {
            "checkpoint": self.target.folder, "port": 0, "threads": config.engine_threads(), "dtype": config.dtype, "rows": config.rows,
            "context": config.context_tokens, "prefill-tokens": config.prefill_tokens, "prefix-bytes": config.prefix_bytes,
            "state": self._state, "parent": os.getpid(),
        }  # fmt: skip
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "deploy.serving.embedded", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": str(config.engine_threads())},
            )  # fmt: skip
        deadline = time.monotonic() + config.start_timeout_s
        while not self._state.exists():
            if self._process.returncode is not None:
                raise CheckpointInvalid(
                    f"the engine ended with code {self._process.returncode} while loading {self.target.folder}: {_last_line(self._log)}"
                )
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"the engine was not ready within {config.start_timeout_s:.0f} s; see {self._log}")
            await asyncio.sleep(LOOK_S)
        url = json.loads(self._state.read_text())["url"]
        self._client = httpx.AsyncClient(
            base_url=url, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64), trust_env=False
        )

    async def _keep(self) -> None:
        """Restart the engine whenever it dies."""
        backoff = self._config.restart_backoff_s
        while True:
            assert self._process is not None
            started = time.monotonic()
            code = await self._process.wait()
            self._ready.clear()
            self.restarts += 1
            log.error("an engine died; restarting it", extra={"fields": {"checkpoint": self.target.checkpoint, "code": code}})
            backoff = self._config.restart_backoff_s if time.monotonic() - started > STEADY_S else min(LONGEST_BACKOFF_S, backoff * 2)
            while not self.ready:
                await asyncio.sleep(backoff)
                try:
                    await self._end()
                    await self._launch()
                    await self.fingerprint()
                    self._ready.set()
                except (CheckpointInvalid, EngineUnavailable) as error:
                    log.error("an engine does not come back", extra={"fields": {"reason": str(error)}})
                    backoff = min(LONGEST_BACKOFF_S, backoff * 2)

    async def _end(self) -> None:
        process, client = self._process, self._client
        self._process = self._client = None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_WAIT_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if client is not None:
            await client.aclose()
        self._state.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def compare_probe(found: list[float | None], reference: list[float], *, tolerance_nats: float) -> Probe:
    """Return the mean |difference|; NaN when lengths differ or any value is not a number."""
    pairs = list(zip(found, reference, strict=False))
    whole = len(found) == len(reference) > 0 and all(value is not None and math.isfinite(value) for value in found)
    mean = sum(abs((value or 0.0) - wanted) for value, wanted in pairs) / len(pairs) if whole else math.nan
    return Probe(mean_abs_nats=mean, tokens=len(reference), tolerance_nats=tolerance_nats)


def _answer(reply: httpx.Response) -> dict[str, Any]:
    """Return the engine's body.

    Raises:
        RequestRefused: The engine refused.
        EngineUnavailable: The engine failed on it, or did not answer JSON.
    """
    try:
        body = reply.json()
    except ValueError as error:
        raise EngineUnavailable(f"the engine answered {reply.status_code} and no JSON") from error
    if reply.status_code == 200:
        return body
    fault = body.get("error") or {}
    if reply.status_code < 500:
        raise RequestRefused(reply.status_code, fault.get("message", "refused by the engine"), code=fault.get("code", "invalid_request"))
    raise EngineUnavailable(fault.get("message") or f"the engine answered {reply.status_code}")


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][-500:] if lines else "no output"
