"""What the edit tracker reads and keeps on disk.

Takes: paths. Gives: a file's text now (never blocking on what is no file), the branch that a file is on (no git process), and the
edits that still wait for a measurement, one file each, safe against a `kill -9` and handed on to the next process.
Leaves out: when to look and what to say (`tracker.py`).
"""

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from pydantic import TypeAdapter, ValidationError

from pipelines.events import Consent, Origin, new_id
from pipelines.storage import Home, give_up_folder, hold_folder, write_atomic
from pipelines.survival import Tracked

log = logging.getLogger(__name__)

HEAD_BYTES: Final = 4_096
"""Longest HEAD or `.git` file that is read; real ones have a line."""
GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What opening a path says where there is no such file (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An edit that is being watched."""

    edit_id: str
    path: str
    """Absolute."""
    branch: str | None
    """What HEAD said when the edit was made; None outside of a repository."""
    made_at_ms: int
    done: int
    """Horizons that are over."""
    tracked: Tracked
    session_id: str
    turn_id: str | None
    origin: Origin
    policy_version: int | None
    arm: str
    user_key: str
    consent: Consent


PENDING: Final[TypeAdapter[Pending]] = TypeAdapter(Pending)


def read_bytes(path: Path, max_bytes: int) -> bytes | None:
    """Return a regular file's bytes, None when there is none.

    Raises:
        OSError: It cannot be read, it is no regular file, or it is larger than `max_bytes`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO without a writer would block for ever
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    except ValueError:  # a null byte in the path
        return None
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            return None
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", str(path))
    return data


def read_text(path: Path, max_bytes: int) -> str | None:
    """Return a regular file's text, None when there is none; what is no UTF-8 becomes U+FFFD.

    Raises:
        OSError: See `read_bytes`.
    """
    data = read_bytes(path, max_bytes)
    return None if data is None else data.decode("utf-8", "replace")


def branch_of(path: Path) -> str | None:
    """Return what HEAD of the repository around a path says: `ref: refs/heads/...`, or a commit when detached; None without one.

    Worktrees and submodules, whose `.git` is a file that names the real folder, are followed.
    """
    for folder in path.parents:
        dot_git = folder / ".git"
        try:
            if dot_git.is_dir():
                head = read_bytes(dot_git / "HEAD", HEAD_BYTES)
            elif (pointer := read_bytes(dot_git, HEAD_BYTES)) is not None and pointer.startswith(b"gitdir:"):
                head = read_bytes(folder / os.fsdecode(pointer.removeprefix(b"gitdir:").strip()) / "HEAD", HEAD_BYTES)
            else:
                continue
        except OSError:
            return None
        return head.decode("utf-8", "replace").strip() if head is not None else None
    return None


class Shelf:
    """The pending edits of one process on disk, `spool/survival/<own id>/`, and those kept for later, `spool/survival/kept/`."""

    def __init__(self, home: Home) -> None:
        """Make the process's folder.

        Raises:
            OSError: It cannot be written.
        """
        self._root = home.spool / "survival"
        self._folder = self._root / f"tracker-{new_id()}"
        self._lock = _hold(self._folder)

    def adopt(self) -> list[Pending]:
        """Take over what processes that are gone left; damaged files are dropped with a warning.

        Raises:
            OSError: They cannot be moved.
        """
        found: list[Pending] = []
        for folder in sorted(self._root.glob("tracker-*")):
            if folder == self._folder or (lock := _hold(folder)) is None:
                continue
            for path in sorted(folder.glob("*.json")):
                item = _load(path)
                if item is not None:
                    found.append(item)
                    path.replace(self._place(item))
                else:
                    path.unlink(missing_ok=True)
            give_up_folder(folder, lock)
        return found

    def put(self, item: Pending) -> int:
        """Write an edit, new or changed; returns its bytes.

        Raises:
            StorageFull: No space left.
            OSError: It cannot be written.
        """
        data = PENDING.dump_json(item)
        write_atomic(self._place(item), data)
        return len(data)

    def drop(self, item: Pending) -> None:
        """Forget an edit."""
        self._place(item).unlink(missing_ok=True)

    def keep(self, item: Pending) -> None:
        """Move an edit whose last horizon is over to those that `tidegate signals survival` measures days later."""
        kept = self._root / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        self._place(item).replace(kept / f"{item.made_at_ms:015d}-{_name(item)}")

    def prune(self, *, before_ms: int, max_bytes: int) -> None:
        """Delete kept edits that are older than an instant, and the oldest beyond a total size."""
        total = 0
        for path in sorted((self._root / "kept").glob("*.json"), reverse=True):
            total += path.stat().st_size
            if path.name < f"{before_ms:015d}" or total > max_bytes:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder up; what waits in it is for the next process."""
        if self._lock is None:
            return
        if any(self._folder.glob("*.json")):
            self._lock.close()
        else:
            give_up_folder(self._folder, self._lock)
        self._lock = None

    def _place(self, item: Pending) -> Path:
        return self._folder / _name(item)


def kept(home: Home) -> Iterator[Pending]:
    """Yield the edits whose text was kept, oldest first, those still waiting for a horizon included."""
    root = home.spool / "survival"
    for path in [*sorted((root / "kept").glob("*.json")), *sorted(root.glob("tracker-*/*.json"))]:
        item = _load(path)
        if item is not None:
            yield item


def _name(item: Pending) -> str:
    return hashlib.blake2b(f"{item.session_id}/{item.edit_id}".encode("utf-8", "replace"), digest_size=16).hexdigest() + ".json"


def _load(path: Path) -> Pending | None:
    try:
        return PENDING.validate_json(path.read_bytes())
    except FileNotFoundError:  # just measured for the last time
        return None
    except ValidationError as error:
        log.warning("a pending edit is damaged and was dropped", extra={"fields": {"path": str(path), "faults": error.error_count()}})
        return None


def _hold(folder: Path) -> IO[str] | None:
    """Make a folder and hold it for the life of this process; None when another live process does."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return hold_folder(folder)
        except FileNotFoundError:  # given up by its owner in this moment
            continue
