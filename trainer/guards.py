"""What a rank works inside: its lock, and a full disk told from a fault.

Takes a job's folder. Gives context managers. Leaves out: time limits of collectives (`engine.connect`) and of the whole job (`launch.py`).
"""

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from pipelines.errors import Busy, StorageFull
from pipelines.storage import exclusive
from trainer import checkpoint, publish
from trainer import job as jobs
from trainer.launch import FULL_BYTES

LOCK_WAIT_S: Final = 20.0


@contextmanager
def alone(folder: Path, rank: int) -> Iterator[None]:
    """Hold this rank's lock; ranks of a run that was just killed get a moment to die.

    Raises:
        Busy: They are still alive after `LOCK_WAIT_S`.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(exclusive(folder / f"rank-{rank}.lock", what=f"rank {rank} of {folder.name}"))
                break
            except Busy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield


@contextmanager
def room(job_folder: Path, store: Path) -> Iterator[None]:
    """Turn a write that found no room into `StorageFull`, after giving back what the unfinished write took.

    Three libraries write here and each says it in its own way: Python with an errno, safetensors in words, torch not at all ("unexpected
    pos 576 vs 534"), so for torch the disk is asked.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        full = full or (isinstance(error, SafetensorError) and "No space left" in str(error))
        full = full or ("inline_container" in str(error) and shutil.disk_usage(job_folder).free < FULL_BYTES)
        if not full:
            raise
        checkpoint.discard(job_folder / jobs.CHECKPOINTS)
        publish.discard_staged(store, label=job_folder.name)
        raise StorageFull(f"no space left to train in {job_folder.parent.parent}; free some and run the same command again") from error
