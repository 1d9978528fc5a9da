"""A repository's mainline as the history of its files, read and never written.

Takes: a git repository (a bare one too) and a ref. Gives: the states that a file went through after an instant, renames followed,
and their texts. Only git itself reads the repository, as a process with a deadline; settings of the repository that would start
programs or reach the network are off, so a foreign repository is safe to look at.
The mainline is what the ref's first parents are: a branch shows when it is merged, as one change.
Leaves out: edits and what stands of them (`survival_edits.py`).
"""

import os
import select
import shutil
import subprocess
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from pipelines.errors import ConfigError, ContractViolation, MissingDependency, TransientError

SAFE: Final = (
    "core.fsmonitor=false", "core.hooksPath=/dev/null", "core.attributesFile=/dev/null", "core.pager=cat", "core.quotePath=true",
    "log.showSignature=false", "log.showRoot=true", "log.follow=false", "diff.external=", "diff.renames=true", "diff.renameLimit=2000",
    "diff.noprefix=false", "diff.submodule=short", "protocol.allow=never", "safe.directory=*",
)  # fmt: skip
"""Settings that win over the repository's own: nothing is started, nothing is fetched. `safe.directory=*` lets a mirror of another
user be read; what that check protects from (hooks, monitors, pagers) is off."""
CACHED: Final = 64
"""Texts kept in memory."""
MARK: Final = b"\x01"
REGULAR: Final = (b"100644", b"100755", b"100664")


class Unreadable(Exception):
    """A state whose text cannot be told: the reason is one of `too_large`, `binary`, `missing_object`, `not_a_file`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one commit of the mainline did to one file."""

    index: int
    """Place of the commit, oldest first."""
    commit: str
    at_s: float
    """Committer's time, never earlier than that of a commit before it."""
    old_path: str | None
    """None: the commit added the file."""
    path: str | None
    """None: the commit deleted it."""
    old_blob: str | None
    blob: str | None
    """None: deleted, or no regular file (`irregular`)."""
    irregular: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit of the mainline."""

    id: str
    at_s: float
    author_at_s: float
    message: str


class Repository:
    """One repository. Use as a context manager: leaving it ends git's processes."""

    def __init__(self, path: Path, *, ref: str = "HEAD", max_bytes: int = 1_000_000, timeout_s: float = 300.0) -> None:
        """Find the repository.

        Args:
            path: Its folder, or one inside it.
            ref: What is the mainline.
            max_bytes: Larger files are `too_large`.
            timeout_s: Deadline of each call of git.

        Raises:
            MissingDependency: git is not installed.
            ConfigError: There is no repository, no such ref, or no commit.
        """
        git = shutil.which("git")
        if git is None:
            raise MissingDependency("git is not installed; survival from a repository needs it (or name --snapshots instead of --repo)")
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder; --repo names a git repository")
        self._git, self._path, self._max_bytes, self._timeout_s = git, path, max_bytes, timeout_s
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_NO_LAZY_FETCH": "1",
        }  # fmt: skip
        self._readers: dict[str, _Reader] = {}
        self._texts: OrderedDict[str, str | Unreadable] = OrderedDict()
        if self._run("rev-parse", "--git-dir") is None:
            raise ConfigError(f"{path} is no git repository")
        head = self._run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        if head is None:
            raise ConfigError(f"the repository at {path} has no commit {ref!r}; name another with --ref")
        self.head = head.decode().strip()
        top = self._run("rev-parse", "--show-toplevel")
        self.root = Path(os.fsdecode(top.rstrip(b"\n"))) if top else path.resolve()
        """Where paths are relative to."""
        self.shallow = self._run("rev-parse", "--is-shallow-repository") == b"true\n"

    def __enter__(self) -> "Repository":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for reader in self._readers.values():
            reader.close()

    def _command(self, *arguments: str) -> list[str]:
        return [self._git, "-C", str(self._path), "--no-pager", *[part for setting in SAFE for part in ("-c", setting)], *arguments]

    def _run(self, *arguments: str) -> bytes | None:
        """Run git to its end; None when it says no.

        Raises:
            TransientError: It took too long.
        """
        try:
            done = subprocess.run(
                self._command(*arguments), env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=self._timeout_s,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TransientError(
                f"git {arguments[0]} at {self._path} took more than {self._timeout_s:.0f} s; ask for less with --since"
            ) from error
        return done.stdout if done.returncode == 0 else None

    def commits(self, since_s: float = 0.0) -> list[Commit]:
        """Return the mainline's commits since an instant, oldest first, with their messages.

        Raises:
            ContractViolation: git cannot read the history.
            TransientError: It took too long.
        """
        out = self._run(
            "log", "--first-parent", "--reverse", "--no-color", *_since(since_s), "-z",
            "--format=%H %ct %at %B", self.head, "--",
        )  # fmt: skip
        if out is None:
            raise ContractViolation(f"git cannot read the history of {self._path}; try: git -C {self._path} fsck")
        found: list[Commit] = []
        latest = 0.0
        for entry in out.split(b"\0"):
            parts = entry.split(b" ", 3)
            if len(parts) == 4:
                latest = max(latest, float(parts[1]))
                message = parts[3].decode("utf-8", "replace")
                found.append(Commit(id=parts[0].decode(), at_s=latest, author_at_s=float(parts[2]), message=message))
        return found

    def changes(self, since_s: float) -> list[Change]:
        """Return what the mainline's commits since an instant did to files, oldest first.

        Where texts are missing (a partial clone), only files that moved without a change are followed: seeing others needs their texts.

        Raises:
            ContractViolation: git cannot read the history.
            TransientError: It took too long.
        """
        for renames in ("-M", "-M100%"):
            out = self._run(
                "log", "--first-parent", "--diff-merges=first-parent", "--reverse", "--raw", "-z", renames, "--no-abbrev", "--no-color",
                "--no-ext-diff", "-O/dev/null", "--no-textconv", "--no-relative", "--ignore-submodules=none", *_since(since_s),
                "--format=%x01%H %ct", self.head, "--",
            )  # fmt: skip
            if out is not None:
                return list(_parse(out))
        raise ContractViolation(f"git cannot read the history of {self._path}; try: git -C {self._path} fsck")

    def text(self, blob: str) -> str:
        """Return a file's text; what is no UTF-8 becomes U+FFFD.

        Raises:
            Unreadable: It is too large, binary or not there (a partial clone).
            TransientError: git took too long.
        """
        if blob not in self._texts:
            try:
                self._texts[blob] = self._load(blob)
            except Unreadable as error:
                self._texts[blob] = error
            while len(self._texts) > CACHED:
                self._texts.popitem(last=False)
        self._texts.move_to_end(blob)
        found = self._texts[blob]
        if isinstance(found, Unreadable):
            raise found
        return found

    def _load(self, blob: str) -> str:
        header = self._reader("--batch-check").ask(blob).split()
        if len(header) != 3:
            raise Unreadable("missing_object")
        size = int(header[2])
        if header[1] != b"blob":
            raise Unreadable("not_a_file")
        if size > self._max_bytes:
            raise Unreadable("too_large")
        reader = self._reader("--batch")
        reader.ask(blob)
        data = reader.take(size + 1)[:size]
        if b"\0" in data[:8_000]:
            raise Unreadable("binary")
        return data.decode("utf-8", "replace")

    def _reader(self, kind: str) -> "_Reader":
        if kind not in self._readers:
            self._readers[kind] = _Reader(self._command("cat-file", kind), self._environment, self._timeout_s)
        return self._readers[kind]


def _since(since_s: float) -> list[str]:
    """Return git's option for commits from an instant on; it reads small numbers as no time at all."""
    return [f"--since-as-filter=@{int(since_s)}"] if since_s > 86_400 else []


class _Reader:
    """A `git cat-file` that answers until it is closed, each answer within a deadline."""

    def __init__(self, command: list[str], environment: dict[str, str], timeout_s: float) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._timeout_s = timeout_s
        self._held = bytearray()

    def ask(self, blob: str) -> bytes:
        """Return the line that git says about an object.

        Raises:
            TransientError: It took too long.
            ContractViolation: git ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(blob.encode() + b"\n")
        except BrokenPipeError as error:
            raise ContractViolation("git cat-file ended; the repository may be damaged: git fsck") from error
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._held:
            self._fill(deadline)
        end = self._held.index(b"\n")
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        deadline = time.monotonic() + self._timeout_s
        while len(self._held) < count:
            self._fill(deadline)
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    def _fill(self, deadline: float) -> None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TransientError(f"git cat-file did not answer within {self._timeout_s:.0f} s")
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            raise ContractViolation("git cat-file ended; the repository may be damaged: git fsck")
        self._held += data

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _parse(out: bytes) -> Iterator[Change]:
    """Read `git log --raw -z`: a mark, id and time for a commit, then modes, blobs, status and one or two paths a file."""
    words = iter(out.split(b"\0"))
    commit, at_s, index = "", 0.0, -1
    for raw in words:
        word = raw.lstrip(b"\n")
        if word.startswith(MARK):
            name, stamp = word[1:].split(b" ")
            commit, at_s, index = name.decode(), max(at_s, float(stamp)), index + 1
        elif word.startswith(b":"):
            old_mode, mode, old_blob, blob, status = word[1:].split(b" ")
            first = os.fsdecode(next(words))
            second = os.fsdecode(next(words)) if status[:1] in b"RC" else first
            kind = status[:1]
            yield Change(
                index=index,
                commit=commit,
                at_s=at_s,
                old_path=None if kind in b"AC" else first,
                path=None if kind == b"D" else second,
                old_blob=old_blob.decode() if kind not in b"AC" and old_mode in REGULAR else None,
                blob=blob.decode() if kind != b"D" and mode in REGULAR else None,
                irregular=kind != b"D" and mode not in REGULAR,
            )
