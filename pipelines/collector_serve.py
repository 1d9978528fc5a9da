"""Run the collector until a signal (the job behind `tidegate collect`).

Takes: settings and a home. Gives: a listening collector, its address in `run/collector.json`; at the end every event that was taken
is on disk and, if the broker answers, delivered. Bounds what HTTP servers leave open: connections, and the time for headers.
Leaves out: requests (`collector_server.py`).
"""

import asyncio
import ipaddress
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipelines.collector import Intake
from pipelines.collector_keys import Keys
from pipelines.collector_server import Collector, Door
from pipelines.config import CollectorConfig, PipelinesConfig
from pipelines.errors import ConfigError
from pipelines.events import Client
from pipelines.recorder import Recorder
from pipelines.redaction import hasher
from pipelines.storage import Home, write_atomic

STATE: Final = "collector.json"
GRACE_S: Final = 10
"""How long requests in flight may finish after a signal."""
FLUSH_S: Final = 5.0
"""How long the end waits for the broker; what is not delivered by then is on disk and goes out at the next start."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def serve(config: PipelinesConfig, home: Home, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: Settings.
        home: The deployment.
        announce: Called with the URL once requests are answered.

    Raises:
        ConfigError: The port is taken, the keys are not readable, or there are none and the address is not this machine's own.
    """
    settings = config.collector
    keys = Keys(home, default_consent=config.privacy.default_consent)
    anonymous = is_loopback(settings.host)
    if not anonymous and not keys.any:
        raise ConfigError(
            f"collector.host {settings.host} can be reached by others and there are no keys; add one with `tidegate collect keys add NAME`"
        )
    intake = Intake(keyed=hasher(home), keep_text=config.privacy.keep_text, max_event_bytes=config.kafka.max_event_bytes)
    with _listen(settings) as listener, Recorder(config, home, client=Client(name="collector", version="1")) as recorder:
        collector = Collector(Door(keys=keys, anonymous=anonymous), intake, recorder, config=settings, clock=time.monotonic)
        listener.listen(1024)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        state = home.run / STATE
        write_atomic(state, json.dumps({"url": url, "pid": os.getpid()}).encode())
        announce(url)
        try:
            await _answer(uvicorn.Config(collector.app(), **_limits(settings)), listener)
        finally:
            state.unlink(missing_ok=True)
            await asyncio.to_thread(recorder.close, FLUSH_S)


def _limits(settings: CollectorConfig) -> dict[str, Any]:
    class Patient(_Patience):
        timeout_s = settings.header_timeout_s

    return {
        "http": Patient, "ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False, "server_header": False,
        "limit_concurrency": settings.max_connections, "timeout_keep_alive": settings.idle_timeout_s, "timeout_graceful_shutdown": GRACE_S,
    }  # fmt: skip


class _Patience(H11Protocol):
    """uvicorn's HTTP with a time limit for headers: a client that sends them byte by byte holds a connection no longer."""

    timeout_s: ClassVar[float]
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Set the alarm while headers are awaited, take it back once they are whole; idle connections are uvicorn's to close."""
        awaited = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if awaited and self._alarm is None:
            self._alarm = self.loop.call_later(self.timeout_s, self._ring)
        elif not awaited and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us: its own handling raises them again at the end, before events are flushed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


async def _answer(config: uvicorn.Config, listener: socket.socket) -> None:
    server = _Server(config)

    def stop() -> None:
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listener])


def _listen(settings: CollectorConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"cannot listen on {where} ({error.strerror}); free the port or set collector.port to another (0: a free one)"
        ) from error
    return listener
