"""The embedded broker: one real Apache Kafka node (KRaft) as a Java process on loopback, for a deployment without its own cluster.

Takes: a home, the pinned jars, Java. Gives: a running broker whose data survives restarts, its address in `run/broker.json`, and
its log in `logs/broker.log`. Used as a context manager the broker stops with the block, and dies with this process when that is
killed; `start(detached=True)` leaves it running until `stop()`, from whichever process.

One broker a home: a lock file is handed down to Java, so the kernel frees it when the last holder is gone, however it died.

Leaves out: topics (`topics.py`, `kafka.py`), clusters of several nodes, and everything a user's own cluster brings.
"""

import base64
import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, Self

import psutil

from pipelines.broker_settings import HOST, JVM_OPTIONS, LOG4J, properties
from pipelines.config import KafkaConfig
from pipelines.errors import BrokerUnavailable, Busy, ConfigError, StorageFull
from pipelines.java import find_java, jars_folder
from pipelines.storage import Home, write_atomic
from pipelines.topics import BATCH_OVERHEAD_BYTES

__all__ = ["BATCH_OVERHEAD_BYTES", "EmbeddedBroker", "Running", "address", "jars_folder", "running"]

START_TIMEOUT_S: Final = 90.0
"""Two seconds on an idle machine; the rest is for a loaded one and for recovering segments after a power cut."""
HEALTH_TIMEOUT_S: Final = 2.0
STOP_TIMEOUT_S: Final = 20.0
TAKEOVER_TIMEOUT_S: Final = 15.0
"""How long a start waits for a predecessor that is going down."""
LOG_KEPT_BYTES: Final = 10_000_000
"""The log is begun anew at a start that finds it larger."""

DIE_WITH_PARENT: Final = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG outlives exec; set in a fresh interpreter, because code between fork and exec is unsafe in a threaded process."""

OUTLIVE_PARENT: Final = """\
import os, sys
child = os.fork()
if child:
    os.write(1, str(child).encode())
    os._exit(0)
os.setsid()
os.dup2(2, 1)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Forked twice, so that a detached broker is nobody's child: it is reaped by init, whether its starter lives on or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A broker that lives, as written to `run/broker.json`."""

    bootstrap: str
    """host:port for clients."""
    pid: int
    started_s: float
    """When the process was created (epoch seconds, by the kernel): tells it from a later one with the same pid."""
    parent: int | None
    """Process it dies with; None when it was started to outlive its starter."""


def _record(home: Home) -> Path:
    return home.run / "broker.json"


def _process(found: Running) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(found.pid)
        if abs(process.create_time() - found.started_s) < 1 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _is_orphan(found: Running) -> bool:
    """Whether the process it was to die with is gone, so that it is going down."""
    process = _process(found)
    return process is None or (found.parent is not None and process.ppid() != found.parent)


def running(home: Home) -> Running | None:
    """Return the broker of a home, or None when none lives (a record left by a killed run counts as none)."""
    try:
        found = Running(**json.loads(_record(home).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return found if _process(found) else None


def address(home: Home) -> str | None:
    """Return host:port of a home's embedded broker, or None when it is not running."""
    found = running(home)
    return found.bootstrap if found else None


def _port_of(found: Running) -> int:
    return int(found.bootstrap.rpartition(":")[2])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _answers(port: int) -> bool:
    """Ask for the cluster's metadata in Kafka's protocol; True when the node is registered and serves.

    The request is Metadata version 1 for no topic: api key, version, correlation id, client id, number of topics. The answer
    begins with its length, the correlation id and the number of brokers. Written out, so that looking after a broker loads no
    client library.
    """
    name = b"tidegate-health"
    request = struct.pack(f">hhih{len(name)}si", 3, 1, 1, len(name), name, 0)
    try:
        with socket.create_connection((HOST, port), timeout=HEALTH_TIMEOUT_S) as connection:
            connection.settimeout(HEALTH_TIMEOUT_S)
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = b""
            while len(answer) < 12:
                part = connection.recv(12 - len(answer))
                if not part:
                    return False
                answer += part
    except OSError:
        return False
    return struct.unpack(">iii", answer)[1:] == (1, 1)


class EmbeddedBroker:
    """One Kafka node in a home; a context manager, or `start` and `stop`."""

    def __init__(self, home: Home, *, config: KafkaConfig | None = None, jars: Path | None = None, port: int | None = None) -> None:
        """Describe a broker without starting it.

        Args:
            home: Where data, address and log lie.
            config: Retention, event size and partitions; None means the defaults.
            jars: Folder of the broker's jars; None means those that infra/scripts/setup installed.
            port: A fixed loopback port for clients; None takes the last one again where it is free, else any free one.
        """
        self.home = home
        self._config = config or KafkaConfig()
        self._jars = jars
        self._port = port
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it, bound to this process's life."""
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop it."""
        self.stop()

    @property
    def log(self) -> Path:
        """What the broker says."""
        return self.home.logs / "broker.log"

    @property
    def bootstrap(self) -> str:
        """host:port for clients.

        Raises:
            BrokerUnavailable: It is not running.
        """
        found = address(self.home)
        if found is None:
            raise BrokerUnavailable(f"the embedded broker of {self.home.root} is not running; start it with: tidegate up")
        return found

    def start(self, *, detached: bool = False) -> Running:
        """Start the broker and wait until it serves; the first start in a home formats its storage.

        Call it from a thread that lives as long as the broker is to (the kernel ties an attached broker to its parent thread).

        Args:
            detached: Whether it outlives this process, until `stop()`.

        Raises:
            MissingDependency: No Java, or no jars; says how to install them.
            Busy: This home's broker runs already.
            ConfigError: The fixed port is taken.
            StorageFull: No space left for its data.
            BrokerUnavailable: It did not come up; the end of its log is in the message.
        """
        java = find_java()
        jars = self._jars or jars_folder("kafka")
        for folder in (self.home.broker, self.home.run, self.home.logs):
            folder.mkdir(parents=True, exist_ok=True)
        with self._lock() as lock:
            ports = self._choose_ports()
            data = self.home.broker / "data"
            settings = self.home.broker / "server.properties"
            write_atomic(settings, properties(data, self._config, port=ports[0], controller_port=ports[1]).encode())
            write_atomic(self.home.broker / "log4j2.properties", LOG4J.encode())
            fresh = not self.log.exists() or self.log.stat().st_size > LOG_KEPT_BYTES
            with self.log.open("wb" if fresh else "ab") as log:
                begin = log.tell()
                command = self._command(java, jars)
                if not (data / "meta.properties").exists():
                    self._format(command, settings, log, begin)
                pid = self._launch([*command, "kafka.Kafka", str(settings)], log, lock, detached=detached)
            return self._await(pid, ports[0], begin)

    def stop(self) -> None:
        """Stop this home's broker, whoever started it: in order, by force after a while; nothing happens when none runs."""
        found = running(self.home)
        process = _process(found) if found else None
        if process:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(timeout=STOP_TIMEOUT_S)
        if self._popen:
            self._popen.wait(timeout=STOP_TIMEOUT_S)
            self._popen = None
        _record(self.home).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[IO[str]]:
        path = self.home.run / "broker.lock"
        deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
        with path.open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    found = running(self.home)
                    if time.monotonic() > deadline or (found and not _is_orphan(found) and _answers(_port_of(found))):
                        who = f"pid {found.pid}, {found.bootstrap}" if found else f"lock {path}"
                        raise Busy(f"the embedded broker of {self.home.root} runs already ({who}); stop it with: tidegate down") from error
                    time.sleep(0.1)
            _record(self.home).unlink(missing_ok=True)
            yield lock

    def _choose_ports(self) -> tuple[int, int]:
        if self._port is not None:
            if not _is_free(self._port):
                raise ConfigError(f"port {self._port} on {HOST} is taken by another program; stop that, or choose another or no port")
            return self._port, _free_port()
        with contextlib.suppress(FileNotFoundError, ValueError):
            last = int((self.home.broker / "port").read_text(encoding="ascii"))
            if _is_free(last):
                return last, _free_port()
        return _free_port(), _free_port()

    def _command(self, java: Path, jars: Path) -> list[str]:
        return [
            str(java),
            *JVM_OPTIONS,
            f"-Dlog4j2.configurationFile={self.home.broker / 'log4j2.properties'}",
            "-cp",
            f"{jars}/*",
        ]

    def _format(self, command: list[str], settings: Path, log: IO[bytes], begin: int) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")  # Kafka's spelling of a UUID
        arguments = ["kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--config", str(settings), "--ignore-formatted"]
        done = subprocess.run([*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise self._failure("could not format its storage", begin)

    def _launch(self, command: list[str], log: IO[bytes], lock: IO[str], *, detached: bool) -> int:
        """Start Java and return its pid."""
        python = [sys.executable, "-I", "-S", "-c"]
        if detached:
            started = subprocess.run(
                [*python, OUTLIVE_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.home.broker,
                pass_fds=(lock.fileno(),),
                check=True,
            )
            return int(started.stdout)
        self._popen = subprocess.Popen(
            [*python, DIE_WITH_PARENT, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.home.broker,
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # Ctrl-C in the terminal reaches us, and we stop it in order
        )
        return self._popen.pid

    def _await(self, pid: int, port: int, begin: int) -> Running:
        try:
            parent = os.getpid() if self._popen else None
            found = Running(bootstrap=f"{HOST}:{port}", pid=pid, started_s=psutil.Process(pid).create_time(), parent=parent)
        except psutil.NoSuchProcess as error:
            raise self._failure("ended at once", begin) from error
        deadline = time.monotonic() + START_TIMEOUT_S
        while (process := _process(found)) and time.monotonic() < deadline:
            if _answers(port):
                write_atomic(self.home.broker / "port", str(port).encode())
                write_atomic(_record(self.home), json.dumps(asdict(found)).encode())
                return found
            time.sleep(0.05)
        if process:
            process.kill()
        if self._popen:
            self._popen.wait(timeout=STOP_TIMEOUT_S)
            self._popen = None
        raise self._failure(f"did not answer within {START_TIMEOUT_S:.0f} s" if process else "ended while starting", begin)

    def _failure(self, what: str, begin: int) -> StorageFull | BrokerUnavailable:
        with self.log.open("rb") as file:
            file.seek(begin)
            lines = file.read().decode(errors="replace").splitlines()
        if any("No space left on device" in line for line in lines):
            return StorageFull(
                f"no space left for the embedded broker's data in {self.home.broker}; free some and run the same command again"
            )
        tail = "\n    ".join(deque((line for line in lines if not line.startswith("\tat ")), maxlen=12))
        return BrokerUnavailable(f"the embedded broker of {self.home.root} {what}; its log {self.log} ends with:\n    {tail}")
