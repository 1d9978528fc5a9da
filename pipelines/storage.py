"""Where a local run keeps its state, and how to write a file so that a crash never leaves half of one.

Takes: `TIDEGATE_HOME` or the working folder. Gives: paths, atomic writes, a single-holder file lock, folders that one process holds.
Leaves out: what is inside the files, and object stores (the lake's own readers and writers handle those).
"""

import errno
import fcntl
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipelines.errors import Busy, StorageFull


@dataclass(frozen=True, slots=True)
class Home:
    """The folder that holds all state of one local deployment."""

    root: Path

    @property
    def broker(self) -> Path:
        """The embedded broker's data, logs and address."""
        return self.root / "kafka"

    @property
    def spool(self) -> Path:
        """Events waiting for the broker to come back."""
        return self.root / "spool"

    @property
    def claims(self) -> Path:
        """Events too large for a record, one file each, in a folder a day."""
        return self.root / "claims"

    @property
    def lake(self) -> Path:
        """Delta tables, one folder each."""
        return self.root / "lake"

    @property
    def streams(self) -> Path:
        """Spark's stream state, one folder a stream."""
        return self.root / "streams"

    @property
    def store(self) -> Path:
        """Checkpoints by id, each a folder with `MANIFEST.json`."""
        return self.root / "store"

    @property
    def training(self) -> Path:
        """The trainer's transaction checkpoints."""
        return self.root / "training"

    @property
    def ledger(self) -> Path:
        """The ship ledger (SQLite)."""
        return self.root / "ledger.sqlite"

    @property
    def mlflow(self) -> Path:
        """MLflow's database and artifacts."""
        return self.root / "mlflow"

    @property
    def prefect(self) -> Path:
        """Prefect's database and profile."""
        return self.root / "prefect"

    @property
    def logs(self) -> Path:
        """One log file a process."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Pids and addresses of the processes this deployment started."""
        return self.root / "run"

    @property
    def reports(self) -> Path:
        """Reports for people, one folder a run."""
        return self.root / "reports"

    @property
    def keys(self) -> Path:
        """Secrets made on first use: the user-key hash key and the signing key."""
        return self.root / "keys"


def default_home() -> Home:
    """Return `$TIDEGATE_HOME`, or `.tidegate` in the working folder."""
    return Home(Path(os.environ.get("TIDEGATE_HOME") or ".tidegate").absolute())


def fsync_folder(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that readers see the old file or the whole new one.

    Raises:
        StorageFull: No space left; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no space left to write {path}; free some and run the same command again") from error
        raise


@contextmanager
def exclusive(path: Path, *, what: str) -> Generator[None]:
    """Hold `path` as a lock for the life of the block; the kernel drops it if the process dies.

    Args:
        path: The lock file, made if missing.
        what: What the lock protects, for the message ("the append stream").

    Raises:
        Busy: Another live process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Busy(f"{what} is already running (pid {file.read().strip() or 'unknown'}, lock {path})") from error
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def hold_folder(folder: Path) -> IO[str] | None:
    """Hold a process's own folder by its file `lock` for as long as the file is open; the kernel drops it if the process dies.

    Returns:
        The open lock, or None when another live process holds the folder.

    Raises:
        FileNotFoundError: The folder is gone, or was given up by its owner in this moment.
    """
    file = (folder / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino == (folder / "lock").stat().st_ino:
            return file
    except BlockingIOError:
        file.close()
        return None
    except FileNotFoundError:
        pass
    file.close()  # what we hold is no longer the folder's lock
    raise FileNotFoundError(errno.ENOENT, "given up by its owner", str(folder))


def give_up_folder(folder: Path, lock: IO[str]) -> None:
    """Let go of a held folder, and remove it where nothing else is in it."""
    (folder / "lock").unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
    lock.close()
