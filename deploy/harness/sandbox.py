"""Where the policy's commands run: confined, measured, and stopped when they take too much.

Takes: an argument list, a workspace folder, limits. Gives: `Finished`, also when the command was stopped (a bomb is data).
The default is bubblewrap: new user, pid, network, ipc, uts and cgroup namespaces; a read-only system; only the workspace (and
a small /tmp) writable; no capabilities; a cleared environment; its own session; it dies with us. Per-process limits come from
prlimit, limits over the whole process tree from a watchdog, because RLIMIT_NPROC does not bind root and cgroups need rights
that a container rarely gives. It fails closed: `preflight` raises, nothing falls back to running unconfined.

Container or remote backends implement `Sandbox` and are added to `SANDBOXES`. Leaves out: the tools (`tools.py`), and a disk
quota over many files (a file's size and the wall time bound it; a backend with quotas is the place for more).
"""

import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

import psutil

from deploy.harness.config import HarnessConfig
from pipelines.errors import MissingDependency

WORKSPACE: Final = "/workspace"
"""Where a confined command sees the workspace."""
POLL_S: Final = 0.05
"""Between two looks at the process tree; a fork bomb makes some hundred processes in this time, which we outlive."""
FLOOD_FACTOR: Final = 64
"""A command that writes this many times the visible output is stopped."""
TMP_BYTES: Final = 16_777_216

StopReason = Literal["wall_time", "memory", "processes", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one command may take."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1_073_741_824
    processes: int = 64
    file_bytes: int = 16_777_216
    output_bytes: int = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A host folder shown to a command."""

    source: Path
    writable: Literal["no", "yes"] = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended."""

    exit_code: int
    """As the command gave it; negative: the signal that ended it."""
    output: str
    """stdout and stderr together, cut to `Limits.output_bytes`."""
    output_bytes: int
    """Before the cut."""
    duration_ms: float
    stopped: StopReason | None = None
    """Which limit of ours stopped it; None when it ended by itself."""


class Sandbox(Protocol):
    """Runs one command at a time for one workspace; several threads may call it at once."""

    def preflight(self) -> None:
        """Prove that confinement works here, or raise MissingDependency."""
        ...

    def run(
        self,
        argv: Sequence[str],
        workspace: Path,
        *,
        stdin: bytes = b"",
        mounts: Mapping[str, Mount] | None = None,
        limits: Limits | None = None,
    ) -> Finished:
        """Run a command with the workspace as its working folder.

        Args:
            argv: Program and arguments; the program is found on the sandbox's own PATH.
            workspace: Host folder; the only writable place that outlives the command.
            stdin: Bytes given to the command.
            mounts: Absolute paths inside the sandbox to host folders.
            limits: None means the sandbox's own.
        """
        ...


def limits_of(config: HarnessConfig) -> Limits:
    """Return the limits that the settings ask for."""
    return Limits(
        wall_s=config.command_timeout_s,
        cpu_s=config.cpu_s,
        memory_bytes=config.memory_bytes,
        processes=config.processes,
        file_bytes=config.file_bytes,
        output_bytes=config.output_bytes,
    )


def _search_path() -> str:
    return f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"


def _environment() -> dict[str, str]:
    return {"PATH": _search_path(), "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}


def _prlimit(limits: Limits) -> list[str]:
    return [
        shutil.which("prlimit") or "prlimit",
        f"--cpu={limits.cpu_s}",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        "--nofile=256",
        "--core=0",
        "--",
    ]


def _over_limit(root: psutil.Process, limits: Limits) -> StopReason | None:
    """Look at the whole process tree below `root`, double forks included (its own pid 1 adopts them)."""
    try:
        tree = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    if len(tree) > limits.processes:
        return "processes"
    resident = 0
    for process in tree:
        try:
            resident += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return "memory" if resident > limits.memory_bytes else None


def _feed(process: subprocess.Popen[bytes], stdin: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(stdin)
        process.stdin.close()
    except BrokenPipeError:
        process.stdin = None


def _watch(process: subprocess.Popen[bytes], limits: Limits, deadline: float) -> tuple[bytes, int, StopReason | None]:
    """Read the output until it ends or a limit is passed; returns the visible bytes, the count of all, and why it was stopped."""
    assert process.stdout is not None
    root = psutil.Process(process.pid)
    kept, total = bytearray(), 0
    next_look = time.monotonic() + POLL_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return bytes(kept), total, "wall_time"
            if now >= next_look:
                if (reason := _over_limit(root, limits)) is not None:
                    return bytes(kept), total, reason
                next_look = time.monotonic() + POLL_S
            if not selector.select(timeout=min(POLL_S, deadline - now)):
                continue
            chunk = os.read(process.stdout.fileno(), 65_536)
            if not chunk:
                return bytes(kept), total, None
            total += len(chunk)
            kept += chunk[: max(0, limits.output_bytes - len(kept))]
            if total > FLOOD_FACTOR * limits.output_bytes:
                return bytes(kept), total, "output"


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a command and everything below it, also what forks while we look; a pid namespace dies with its first process at once."""
    for _ in range(20):
        try:
            tree = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            break
        for child in tree:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        if not tree:
            break
    process.kill()


def _execute(command: Sequence[str], *, cwd: Path, stdin: bytes, limits: Limits) -> Finished:
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        _feed(process, stdin)
        kept, total, stopped = _watch(process, limits, started + limits.wall_s)
        if stopped is None:
            try:  # output has ended; a command that closed its output and goes on is still under the wall time
                process.wait(timeout=max(0.01, started + limits.wall_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                stopped = "wall_time"
        if stopped is not None:
            _kill_tree(process)
        code = process.wait()
    text = kept.decode("utf-8", errors="replace")
    return Finished(exit_code=code, output=text, output_bytes=total, duration_ms=(time.monotonic() - started) * 1000, stopped=stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """Confinement by bubblewrap."""

    limits: Limits = field(default_factory=Limits)

    def preflight(self) -> None:
        """Run `true` confined.

        Raises:
            MissingDependency: bubblewrap or prlimit is missing, or the kernel or container forbids namespaces.
        """
        for program, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux")):
            if shutil.which(program) is None:
                raise MissingDependency(
                    f"{program} is not installed, so the policy's commands cannot be confined; install it: apt-get install {package}"
                )
        try:
            finished = self.run(["true"], Path("/usr"))
        except OSError as error:
            raise MissingDependency(f"bubblewrap does not start here: {error}") from error
        if finished.exit_code != 0:
            raise MissingDependency(
                f"bubblewrap cannot make a sandbox here ({finished.output.strip() or finished.stopped}); "
                "in a container allow user namespaces "
                "(docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined, or --cap-add SYS_ADMIN), on a host "
                "sysctl -w kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0. "
                "On a machine that is a sandbox itself you may type --sandbox none"
            )

    def run(
        self,
        argv: Sequence[str],
        workspace: Path,
        *,
        stdin: bytes = b"",
        mounts: Mapping[str, Mount] | None = None,
        limits: Limits | None = None,
    ) -> Finished:
        """Run a command confined (see `Sandbox.run`)."""
        bounds = limits or self.limits
        command = [*_prlimit(bounds), *self._wrapper(workspace, mounts or {}), "--", *argv]
        return _execute(command, cwd=Path("/"), stdin=stdin, limits=bounds)

    def _wrapper(self, workspace: Path, mounts: Mapping[str, Mount]) -> list[str]:
        command = [
            shutil.which("bwrap") or "bwrap",
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--clearenv",
        ]
        for name, value in _environment().items():
            command += ["--setenv", name, value]
        command += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = Path("/") / name
            if path.is_symlink():
                command += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                command += ["--ro-bind", str(path), str(path)]
        # Of /etc only what the loader and Debian's alternatives need: as root we could otherwise read secrets that we own.
        for name in ("/etc/ld.so.cache", "/etc/alternatives"):
            command += ["--ro-bind-try", name, name]
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        command += ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
        command += ["--bind", str(workspace), WORKSPACE]
        for target, mount in mounts.items():
            command += ["--bind" if mount.writable == "yes" else "--ro-bind", str(mount.source), target]
        return [*command, "--remount-ro", "/", "--chdir", WORKSPACE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unconfined:
    """No confinement at all: limits, watchdog and a cleared environment only. Chosen by typing `none`, never by fallback."""

    limits: Limits = field(default_factory=Limits)

    def preflight(self) -> None:
        """Check that prlimit is there.

        Raises:
            MissingDependency: It is not.
        """
        if shutil.which("prlimit") is None:
            raise MissingDependency("prlimit is not installed; install it: apt-get install util-linux")

    def run(
        self,
        argv: Sequence[str],
        workspace: Path,
        *,
        stdin: bytes = b"",
        mounts: Mapping[str, Mount] | None = None,
        limits: Limits | None = None,
    ) -> Finished:
        """Run a command unconfined (see `Sandbox.run`); in `argv`, paths of workspace and mounts become host paths."""
        bounds = limits or self.limits
        places = {WORKSPACE: workspace} | {target: mount.source for target, mount in (mounts or {}).items()}
        arguments = list(argv)
        for inside, host in places.items():
            arguments = [argument.replace(inside, str(host)) for argument in arguments]
        return _execute([*_prlimit(bounds), *arguments], cwd=workspace, stdin=stdin, limits=bounds)


SANDBOXES: Final[dict[str, Callable[[Limits], Sandbox]]] = {
    "bubblewrap": lambda limits: Bubblewrap(limits=limits),
    "none": lambda limits: Unconfined(limits=limits),
}


def open_sandbox(config: HarnessConfig) -> Sandbox:
    """Build the configured sandbox and prove that it works.

    Raises:
        MissingDependency: It does not (see `Sandbox.preflight`); nothing falls back to a weaker one.
    """
    sandbox = SANDBOXES[config.sandbox](limits_of(config))
    sandbox.preflight()
    return sandbox
