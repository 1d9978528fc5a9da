"""Run a gateway with its replicas until a signal (the job behind `tidegate serve`).

Takes: settings, a home, and either the ledger or one pinned folder. Gives: a listening gateway, its address in
`run/gateway.json`. Leaves out: requests (`gateway.py`) and swaps (`fleet.py`).
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import uvicorn

from deploy.config import Config
from deploy.release.ledger import Ledger
from deploy.serving.fleet import Fleet
from deploy.serving.gateway import Gateway, Identity
from deploy.serving.keys import load_keys
from deploy.serving.replicas import Target
from pipelines.errors import ConfigError
from pipelines.events import Client
from pipelines.recorder import Recorder
from pipelines.redaction import hasher
from pipelines.storage import Home, write_atomic
from signals.monitors_alarms import metrics_text
from trainer.candidates import checkpoint_id

STATE: Final = "gateway.json"
GRACE_S: Final = 10
"""How long requests in flight may finish after a signal."""
FLUSH_S: Final = 2.0
"""How long the end waits for the broker; what is not delivered by then is on disk and goes out at the next start."""


def follow_ledger(home: Home) -> Callable[[], Target | None]:
    """Return a source of targets: what the ledger's pointer names."""
    ledger = Ledger(home.ledger)

    def look() -> Target | None:
        pointer = ledger.serving()
        if pointer is None:
            return None
        folder = home.store / pointer.checkpoint
        return Target(
            checkpoint=pointer.checkpoint, folder=folder, policy_version=pointer.policy_version, arm="serving", epoch=pointer.epoch
        )  # fmt: skip

    return look


def pinned(folder: Path, *, policy_version: int, arm: str) -> Callable[[], Target | None]:
    """Return a source that always names one folder.

    Raises:
        CheckpointInvalid: The folder has no manifest.
    """
    target = Target(checkpoint=checkpoint_id(folder), folder=folder.absolute(), policy_version=policy_version, arm=arm, epoch=0)
    return lambda: target


async def serve(
    source: Callable[[], Target | None], *, config: Config, home: Home, state: Path | None, announce: Callable[[str], None]
) -> None:
    """Serve until a signal.

    Args:
        source: What should serve.
        config: All settings.
        home: The deployment.
        state: Where {url, pid} is written once requests are answered; removed at the end.
        announce: Called with the URL at that moment.

    Raises:
        ConfigError: The port is taken.
        Refused: Nothing is to be served yet.
        CheckpointInvalid, EngineUnavailable: The first checkpoint does not come up.
    """
    serving = config.serving
    identity = Identity(keys=load_keys(home, os.environ), hasher=hasher(home), default_consent=config.privacy.default_consent)
    fleet = Fleet(source, config=serving, home=home)
    with _listen(serving.host, serving.port) as listener, Recorder(config, home, client=Client(name="gateway", version="1")) as recorder:
        stop = _signalled()
        try:
            if not await _unless(stop, fleet.start()):
                return
            listener.listen(1024)
            url = f"http://{serving.host}:{listener.getsockname()[1]}"
            gateway = Gateway(fleet, recorder, identity=identity, config=serving, more_metrics=lambda: metrics_text(home))
            app = gateway.app()
            if state:
                write_atomic(state, json.dumps({"url": url, "pid": os.getpid()}).encode())
            announce(url)
            await _answer_until(stop, fleet, uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"), listener)
        finally:
            if state:
                state.unlink(missing_ok=True)
            await fleet.stop()
            recorder.close(FLUSH_S)


def _signalled() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work unless `stop` is set first; return whether it was done."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return False


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us: its own handling raises them again at the end, which would kill this process
    before events are flushed and replicas stopped."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


async def _answer_until(stop: asyncio.Event, fleet: Fleet, config: uvicorn.Config, listener: socket.socket) -> None:
    config.timeout_graceful_shutdown = GRACE_S
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _unless(stop, fleet.broken())
    finally:
        server.should_exit = True
        await serving


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); free the port or set --port 0 for a free one") from error
    return listener
