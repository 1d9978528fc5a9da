"""Processes this deployment starts: services that live on, and jobs that end with a result.

Each runs in its own process group with its output in `logs/<name>.log`. A pid file in `run/` holds pid and kernel start time,
so that a recycled pid is never taken for ours and never killed. What is not detached is tethered: the kernel ends it when the
thread that started it dies. Stages are launched, never imported.

Takes: argv and the deployment's folder. Gives: `Running`, a job's JSON result, or an error with the end of its log.
Leaves out: which processes there are (`supervise.py`, `tasks.py`).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipelines import errors
from pipelines.storage import Home, write_atomic
from pipelines.terminal import waiting

STOP_TIMEOUT_S: Final = 20.0
"""A service gets this long to finish after SIGTERM; then its group is killed."""

LOG_TAIL_LINES: Final = 12

POLL_S: Final = 0.1

TETHER: Final = (
    "import ctypes,os,signal,sys;ctypes.CDLL(None).prctl(1,signal.SIGTERM);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(143);os.execvp(sys.argv[2],sys.argv[2:])"
)
"""PR_SET_PDEATHSIG, then become the command; in a process of its own because code between fork and exec is unsafe with threads."""

BY_EXIT_CODE: Final[dict[int, type[errors.StageError]]] = {
    2: errors.ConfigError,
    3: errors.Busy,
    4: errors.GateRefused,
    5: errors.GateInconclusive,
    6: errors.Refused,
    75: errors.TransientError,
}
"""What a stage's exit code means to whoever launched it; any other is a TerminalError."""


_CHILDREN: Final[dict[int, subprocess.Popen[bytes]]] = {}
"""Our own children by pid, so that `stop` can reap them; a dead child that nobody reaps keeps its pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process that was started under a name."""

    name: str
    pid: int
    started: str
    """Kernel start time in clock ticks since boot; with the pid it names one process for ever."""
    log: Path


def start_time(pid: int) -> str | None:
    """Return the kernel's start time of a live process, None when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pid_file(home: Home, name: str) -> Path:
    return home.run / f"{name}.pid"


def find(home: Home, name: str) -> Running | None:
    """Return the live process of that name, or None."""
    try:
        data = json.loads(_pid_file(home, name).read_text(encoding="utf-8"))
        running = Running(name=name, pid=int(data["pid"]), started=str(data["started"]), log=Path(data["log"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return running if start_time(running.pid) == running.started else None


def names(home: Home) -> list[str]:
    """Return the names that have a pid file, dead or alive."""
    return sorted(path.stem for path in home.run.glob("*.pid")) if home.run.exists() else []


def tail(log: Path, *, lines: int = LOG_TAIL_LINES) -> str:
    """Return the end of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no output)"


def log_size(log: Path) -> int:
    """Return a log's length in bytes, 0 when there is none."""
    return log.stat().st_size if log.exists() else 0


def last_line(log: Path, *, begin: int) -> str:
    """Return the newest whole line that was written after byte `begin`, or nothing."""
    size = log_size(log)
    if size <= begin:
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, size - 2_048))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _spawn(
    home: Home, name: str, argv: Sequence[str], *, detached: bool, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], Running]:
    home.logs.mkdir(parents=True, exist_ok=True)
    log = home.logs / f"{name}.log"
    command = list(argv) if detached else [sys.executable, "-I", "-S", "-c", TETHER, str(os.getpid()), *argv]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "TIDEGATE_HOME": str(home.root), "PYTHONUNBUFFERED": "1", **env},
        )  # fmt: skip
    _CHILDREN[process.pid] = process
    running = Running(name=name, pid=process.pid, started=start_time(process.pid) or "", log=log)
    record = {"pid": running.pid, "started": running.started, "log": str(log), "argv": list(argv)}
    write_atomic(_pid_file(home, name), json.dumps(record).encode())
    return process, running


def start(
    home: Home,
    name: str,
    argv: Sequence[str],
    *,
    ready: Callable[[], bool],
    deadline_s: float,
    detached: bool,
    env: Mapping[str, str] | None = None,
) -> Running:
    """Start a service and wait until it is ready; one that already runs is returned as it is.

    Args:
        home: The deployment.
        name: Names log and pid file.
        argv: The command.
        ready: Whether it answers; called every 0.1 s.
        deadline_s: Seconds it may take.
        detached: Whether it outlives us; else it ends with the thread that calls this.
        env: Additions to the environment.

    Raises:
        EngineUnavailable: It ended or was not ready in time; the message holds the end of its log. Nothing is left running.
    """
    if (running := find(home, name)) is not None:
        return running
    process, running = _spawn(home, name, argv, detached=detached, env=env or {})
    deadline = time.monotonic() + deadline_s
    try:
        begin = log_size(running.log)
        with waiting(f"starting {name}") as tick:
            while not ready():
                if process.poll() is not None:
                    raise errors.EngineUnavailable(
                        f"{name} ended with exit code {process.returncode}; {running.log} ends with:\n{tail(running.log)}"
                    )
                if time.monotonic() > deadline:
                    raise errors.EngineUnavailable(
                        f"{name} was not ready after {deadline_s:.0f} s; {running.log} ends with:\n{tail(running.log)}"
                    )
                time.sleep(POLL_S)
                tick(last_line(running.log, begin=begin))
    except BaseException:
        stop(home, name)
        _reap(process.pid)
        raise
    return running


def stop(home: Home, name: str, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Stop a process by its pid file: SIGTERM, then SIGKILL to its group. Returns whether one was running."""
    running = find(home, name)
    if running is not None:
        _signal_group(running.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while start_time(running.pid) == running.started and time.monotonic() < deadline:
            time.sleep(POLL_S)
        _signal_group(running.pid, signal.SIGKILL)  # what the leader left behind, or the leader itself
        _reap(running.pid)
    _pid_file(home, name).unlink(missing_ok=True)
    return running is not None


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _reap(pid: int) -> None:
    child = _CHILDREN.pop(pid, None)
    if child is not None:
        child.wait()


def run_job(home: Home, name: str, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a stage's command to its end and return what it wrote to `--result`.

    Args:
        home: The deployment.
        name: Names log and pid file; the job's own lock decides whether two may run.
        argv: The command; `--result FILE` is appended.
        timeout_s: Then its group is stopped.
        env: Additions to the environment.

    Raises:
        StageError: The class that its exit code stands for, with its own last line and the log's path.
        TransientError: It ran out of time.
        ContractViolation: It ended well without a JSON result.
    """
    result = home.run / f"{name}.{os.getpid()}.result.json"
    result.unlink(missing_ok=True)
    home.run.mkdir(parents=True, exist_ok=True)
    process, running = _spawn(home, name, [*argv, "--result", str(result)], detached=False, env=env or {})
    deadline = time.monotonic() + timeout_s
    try:
        begin = log_size(running.log)
        with waiting(name) as tick:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise errors.TransientError(
                        f"{name} was stopped after {timeout_s:.0f} s; {running.log} ends with:\n{tail(running.log)}"
                    )
                time.sleep(POLL_S)
                tick(last_line(running.log, begin=begin))
        if process.returncode != 0:
            kind = BY_EXIT_CODE.get(process.returncode, errors.TerminalError)
            ended = f"ended with exit code {process.returncode}"
            if process.returncode < 0:
                ended = f"was killed by signal {-process.returncode}; the same command goes on where it stopped"
            raise kind(f"{name} {ended}; {running.log} ends with:\n{tail(running.log)}")
        try:
            return dict(json.loads(result.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError) as error:
            raise errors.ContractViolation(f"{name} ended well but left no JSON result at {result}; see {running.log}") from error
    finally:
        stop(home, name)
        _reap(process.pid)
        result.unlink(missing_ok=True)


@contextmanager
def service(
    home: Home, name: str, argv: Sequence[str], *, ready: Callable[[], bool], deadline_s: float, env: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run a service for the life of the block.

    Raises:
        EngineUnavailable: See `start`.
    """
    running = start(home, name, argv, ready=ready, deadline_s=deadline_s, detached=False, env=env)
    try:
        yield running
    finally:
        stop(home, name)
