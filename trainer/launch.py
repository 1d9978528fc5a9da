"""Start the ranks of a job with torchrun, relay their progress, and turn their end into a result or one sentence.

The same call runs CPU ranks (gloo) or one rank a GPU. A rank dies with torchrun, torchrun with this process, so a kill leaves
nobody behind. Torch-free: the process that selects rows and logs metrics never loads the training engine.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from pipelines.errors import EngineUnavailable, StageError, StorageFull, TerminalError, TransientError
from pipelines.terminal import progress
from trainer import job as jobs
from trainer.config import UpdateConfig

POLL_S: Final = 0.2
TAIL_BYTES: Final = 4000
LOG: Final = "ranks.log"
KILLED: Final = re.compile(r"exitcode\s*:\s*-9\b")
"""How torchrun reports a rank that got SIGKILL."""
FULL_BYTES: Final = 1_000_000
"""A disk with less room than this is full: the ranks' own words may not have fitted either."""
LAUNCHER: Final = "TIDEGATE_LAUNCHER_PID"
"""In a rank's environment: the process that started its torchrun."""
PR_SET_PDEATHSIG: Final = 1
"""linux/prctl.h: deliver a signal when the parent ends."""


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sig))


def orphaned() -> bool:
    """Tell whether this rank's torchrun ended before `die_with_parent` was asked for: no signal will ever come then.

    A rank loads torch for seconds before it can ask. Its grandparent must be the process that started torchrun.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:  # another launcher's rank
        return False
    try:
        return psutil.Process(os.getppid()).ppid() != int(launcher)
    except psutil.NoSuchProcess:
        return True


def terminate_with(parent: int) -> None:
    """Ask, in the child, to be ended with its parent, which may be gone already."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def environment(*, threads: int) -> dict[str, str]:
    """Return the ranks' environment: threads bound, waiting threads asleep, CPU unless there is a GPU."""
    found = dict(os.environ)
    found.update(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    # Nothing is compiled here, but decorators inside DeepSpeed load the whole compiler where it is not off: seconds a rank.
    found.update(TORCHDYNAMO_DISABLE="1")
    if "DS_ACCELERATOR" not in found and not Path("/dev/nvidia0").exists():
        found["DS_ACCELERATOR"] = "cpu"
    root = str(Path(__file__).resolve().parent.parent)
    found["PYTHONPATH"] = os.pathsep.join([root, *([found["PYTHONPATH"]] if found.get("PYTHONPATH") else [])])
    return found


def command(folder: Path, settings: UpdateConfig) -> list[str]:
    """Return the command that runs this machine's ranks of a job, or with DeepSpeed's launcher those of all machines."""
    rank = ["trainer.rank", str(folder)]
    if settings.launcher == "deepspeed":
        hosts = ["--hostfile", settings.hostfile, "--num_gpus", str(settings.world_size)]
        return [sys.executable, "-m", "deepspeed.launcher.runner", *hosts, "--no_local_rank", "--module", *rank]
    # Without a folder of its own torchrun leaves one behind in the system's temporary folder each time.
    own = [f"--log-dir={folder / jobs.AGENTS}", f"--nnodes={settings.nodes}", f"--nproc-per-node={settings.world_size}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *own]
    if settings.nodes == 1:
        return [*torchrun, "--standalone", "-m", *rank]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={settings.rendezvous}", f"--rdzv-id={folder.name}"]
    return [*torchrun, *meeting, f"--rdzv-conf=join_timeout={settings.collective_timeout_s:.0f}", "-m", *rank]


@contextmanager
def ranks_of(folder: Path, settings: UpdateConfig) -> Iterator[subprocess.Popen[bytes]]:
    """Run this machine's ranks of a job for the life of the block; their words go to `ranks.log`."""
    own = {LAUNCHER: str(os.getpid())} if settings.launcher == "torchrun" else {}
    with (folder / LOG).open("ab") as output:
        ranks = subprocess.Popen(
            command(folder, settings), env=environment(threads=settings.threads_per_rank) | own, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, preexec_fn=partial(terminate_with, os.getpid()),  # noqa: PLW1509  two system calls, no lock is taken
        )  # fmt: skip
        try:
            yield ranks
        finally:
            if ranks.poll() is None:
                ranks.terminate()
                try:
                    ranks.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    ranks.kill()
                    ranks.wait()


def open_jobs(root: Path) -> list[Path]:
    """Return the jobs of several nodes that have neither a result nor a failure, newest first."""
    found = [path.parent for path in root.glob(f"*/{jobs.JOB}") if not (path.parent / jobs.RESULT).exists()]
    several = [folder for folder in found if not (folder / jobs.FAILURE).exists() and jobs.read(folder).settings.nodes > 1]
    return sorted(several, key=lambda folder: (folder / jobs.JOB).stat().st_mtime, reverse=True)


def join(folder: Path) -> int:
    """Lend this machine's ranks to a job that another machine started; returns torchrun's exit code.

    Raises:
        EngineUnavailable: It did not end in time.
    """
    settings = jobs.read(folder).settings
    with ranks_of(folder, settings) as ranks:
        try:
            return ranks.wait(timeout=settings.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise EngineUnavailable(f"{folder.name} did not end in time (trainer.timeout_s); join again") from error


def run(folder: Path, *, label: str, on_step: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Run a job to its end, or return the result it already has.

    Args:
        folder: A job folder.
        label: For the progress bar.
        on_step: Called with the figures of every step.

    Raises:
        StageError: What a rank reported.
        EngineUnavailable: The ranks did not end in time.
        TransientError: A rank was killed from outside, as by a machine without memory.
        StorageFull: No space left for checkpoints or the candidate.
        TerminalError: A rank died without a word; its last lines are in the message.
    """
    if finished := jobs.result(folder):
        return finished
    settings = jobs.read(folder).settings
    for stale in (jobs.FAILURE, jobs.PROGRESS):
        (folder / stale).unlink(missing_ok=True)
    log = folder / LOG
    begin = log.stat().st_size if log.exists() else 0  # what earlier runs of the job said is not about this one
    deadline = time.monotonic() + settings.timeout_s
    with ranks_of(folder, settings) as ranks:
        _follow(ranks, folder, label=label, on_step=on_step, deadline=deadline)
    if finished := jobs.result(folder):
        return finished
    raise jobs.read_failure(folder) or _unspoken(folder, settings, code=ranks.returncode, begin=begin)


def _unspoken(folder: Path, settings: UpdateConfig, *, code: int | None, begin: int) -> StageError:
    """Say why ranks ended that left neither a result nor a failure, from what torchrun wrote behind `begin`."""
    log = folder / LOG
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - TAIL_BYTES, begin))
        tail = file.read().decode(errors="replace")
    if shutil.disk_usage(folder).free < FULL_BYTES:
        return StorageFull(f"no space left at {folder}; free some and run the same command again")
    if "RendezvousTimeoutError" in tail or "RendezvousConnectionError" in tail:
        return TransientError(
            f"not all {settings.nodes} nodes came to {settings.rendezvous} in {settings.collective_timeout_s:.0f} s; start "
            f"`tidegate trainer join` on the others, then give the same command again; see {log}"
        )
    if code == -signal.SIGKILL or KILLED.search(tail):
        return TransientError(
            f"a training rank was killed by the system, most often because memory ran out; the same command goes on from the last "
            f"checkpoint. Free memory, or lower trainer.world_size or trainer.max_tokens_per_micro_batch; see {log}"
        )
    return TerminalError(f"the training ranks ended with code {code} and no result; see {log}. Its end: ...{tail}")


def _follow(
    ranks: subprocess.Popen[bytes], folder: Path, *, label: str, on_step: Callable[[dict[str, Any]], None], deadline: float
) -> None:
    position = 0
    total: int | None = None
    path = folder / jobs.PROGRESS
    with progress(f"{label}: loading", total=None):
        while ranks.poll() is None and not path.exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if path.exists():
        first, newline, _ = path.read_text(encoding="utf-8").partition("\n")
        total = json.loads(first)["of"] if newline else None
    with progress(label, total=total) as advance:
        while True:
            ended = ranks.poll() is not None
            lines = path.read_bytes() if path.exists() else b""
            fresh, position = lines[position:], lines.rfind(b"\n") + 1
            for line in fresh[: max(position - (len(lines) - len(fresh)), 0)].splitlines():
                figures = json.loads(line)
                on_step(figures)
                advance(1 if "loss" in figures else figures.get("done", 0))
            if ended:
                return
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{label} did not end in time (trainer.timeout_s); the same command goes on from its last checkpoint"
                )
            time.sleep(POLL_S)
