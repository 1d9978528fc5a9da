"""Edits whose survival is measured long after: where they come from and which states their files went through.

Takes: a file of edits, the edit tracker's kept texts, the lake, or commits of a repository; a repository or a folder of snapshots.
Gives: `Subject`s and the `State`s of their files. Leaves out: measuring and telling (`survival_report.py`).

Snapshots are folders that each hold a copy of the tree and whose names are instants: ISO 8601
(`2026-11-30T06:50:00Z`) or epoch seconds.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines import watched
from pipelines.errors import ConfigError, ContractViolation
from pipelines.events import Consent, Origin
from pipelines.redaction import hasher
from pipelines.storage import Home
from pipelines.survival import Tracked, track
from signals import lake
from signals.survival_git import Change, Repository, Unreadable

COLUMNS: Final = (
    "session_id", "turn_id", "occurred_at_ms", "origin", "policy_version", "arm", "user_key", "consent", "payload",
)  # fmt: skip
"""What is read of `edit_proposed` in the lake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One edit to be measured."""

    edit_id: str
    path: str | None
    """Relative to the repository; None where only its hash is known and no file of the repository has it."""
    made_at_s: float
    tracked: Tracked | None = None
    """None: only the sketch is known."""
    sketch: str | None = None
    commit: int | None = None
    """Index of the commit that is the edit, None for an edit that a commit took up later."""
    session_id: str | None = None
    turn_id: str | None = None
    origin: Origin = "live"
    policy_version: int | None = None
    arm: str = "none"
    user_key: str | None = None
    consent: Consent = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A file from one instant on."""

    at_s: float
    version: str
    """Commit id, or the snapshot's name."""
    key: str | None
    """What the history finds the text by; None: the file is gone."""
    irregular: bool = False
    """A symbolic link or a submodule took the path."""


class History(Protocol):
    """How files changed; there are two, a repository and a folder of snapshots."""

    root: Path
    milestones: ClassVar[bool]
    """Whether its first state after an edit is the commit that took the edit up."""

    def states(self, subject: Subject) -> Sequence[State]:
        """Return the states of an edit's file after the edit, oldest first."""
        ...

    def text(self, state: State) -> str | None:
        """Return a state's text, None when the file is gone; raises `Unreadable`."""
        ...

    def base(self, subject: Subject) -> str:
        """Return the text that the file had before the first state, empty without one; raises `Unreadable`."""
        ...

    def paths(self) -> Iterable[str]:
        """Return the paths that it knows."""
        ...

    def known_until_s(self) -> float:
        """Return the instant up to which nothing can have happened unseen."""
        ...


class GitHistory:
    """The mainline of a repository since an instant."""

    milestones: ClassVar[bool] = True

    def __init__(self, repository: Repository, *, since_s: float, until_s: float) -> None:
        """Read the changes.

        Raises:
            ConfigError: The clone is shallow and its history begins after `since_s`.
            ContractViolation: git cannot read the history.
        """
        self._repository, self._until_s, self.root = repository, until_s, repository.root
        if repository.shallow and (begins := repository.commits()) and begins[0].at_s > since_s:
            begin = f"{datetime.fromtimestamp(begins[0].at_s, UTC):%Y-%m-%d %H:%M}"
            raise ConfigError(
                f"{repository.root} is a shallow clone that begins at {begin}, after the first edit; "
                f"run: git -C {repository.root} fetch --unshallow (or name a later --since)"
            )
        self.changes = repository.changes(since_s)
        self._by_path: dict[str, list[Change]] = {}
        for change in self.changes:
            for path in {change.old_path, change.path} - {None}:
                self._by_path.setdefault(str(path), []).append(change)

    def _follow(self, subject: Subject) -> Iterator[Change]:
        path, after = subject.path, -1 if subject.commit is None else subject.commit
        while path is not None:
            moved = None
            for change in self._by_path.get(path, ()):
                if change.index <= after or (subject.commit is None and change.at_s < subject.made_at_s):
                    continue
                if change.path == path or change.old_path == path:
                    yield change
                    if change.old_path == path and change.path not in (path, None):
                        moved, after = change.path, change.index
                        break
            path = moved

    def states(self, subject: Subject) -> list[State]:
        """Return the states of an edit's file after the edit, oldest first; renames are followed."""
        return [
            State(at_s=change.at_s, version=change.commit, key=change.blob, irregular=change.irregular) for change in self._follow(subject)
        ]

    def base(self, subject: Subject) -> str:
        """Return the text before the first state."""
        first = next(self._follow(subject), None)
        return self._repository.text(first.old_blob) if first is not None and first.old_blob is not None else ""

    def text(self, state: State) -> str | None:
        """Return a state's text."""
        if state.irregular:
            raise Unreadable("not_a_file")
        return None if state.key is None else self._repository.text(state.key)

    def paths(self) -> Iterable[str]:
        """Return the paths that changed."""
        return self._by_path.keys()

    def known_until_s(self) -> float:
        """Return the instant that the caller vouches for: a repository that is worked in is known until now."""
        return self._until_s


class Snapshots:
    """Copies of a tree, each named by its instant."""

    milestones: ClassVar[bool] = False

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Find the snapshots.

        Raises:
            ConfigError: There is no such folder, or no folder in it is named by an instant.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; --snapshots names one that holds a copy of the tree per instant")
        self.root, self._max_bytes = folder.resolve(), max_bytes
        taken = [(at_s, path) for path in folder.iterdir() if path.is_dir() and (at_s := instant(path.name)) is not None]
        if not taken:
            raise ConfigError(
                f"{folder} has no folder named by an instant, such as {datetime(2026, 11, 30, 6, 50, tzinfo=UTC):%Y-%m-%dT%H%M%SZ}"
            )
        self._taken = sorted(taken)

    def states(self, subject: Subject) -> list[State]:
        """Return the file in every snapshot after the edit."""
        if subject.path is None:
            return []
        later = [(at_s, folder) for at_s, folder in self._taken if at_s >= subject.made_at_s]
        return [State(at_s=at_s, version=folder.name, key=str(folder / subject.path)) for at_s, folder in later]

    def base(self, subject: Subject) -> str:
        """Return the text in the last snapshot before the edit."""
        earlier = [folder for at_s, folder in self._taken if at_s < subject.made_at_s]
        return (self._read(earlier[-1] / subject.path) or "") if earlier and subject.path is not None else ""

    def text(self, state: State) -> str | None:
        """Return a state's text, None when the snapshot lacks the file."""
        return None if state.key is None else self._read(Path(state.key))

    def _read(self, path: Path) -> str | None:
        if not path.resolve().is_relative_to(self.root):  # a path or a link that leads out of the snapshots
            raise Unreadable("not_a_file")
        try:
            data = watched.read_bytes(path, self._max_bytes)
        except OSError as error:
            raise Unreadable("too_large" if path.is_file() else "not_a_file") from error
        if data is not None and b"\0" in data[:8_000]:
            raise Unreadable("binary")
        return None if data is None else data.decode("utf-8", "replace")

    def paths(self) -> Iterable[str]:
        """Yield the paths of all files, each once."""
        seen: set[str] = set()
        for _, folder in self._taken:
            for below, _, names in os.walk(folder):
                for name in names:
                    path = str((Path(below) / name).relative_to(folder))
                    if path not in seen:
                        seen.add(path)
                        yield path

    def known_until_s(self) -> float:
        """Return when the last was taken."""
        return self._taken[-1][0]


def instant(text: str) -> float | None:
    """Read epoch seconds or an ISO 8601 instant (UTC where it names no zone); None when it is neither."""
    if text.isascii() and text.isdigit() and len(text) >= 9:
        return float(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


class EditLine(BaseModel):
    """One line of an edits file."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    edit_id: str = Field(min_length=1)
    path: str = Field(min_length=1)
    """Relative to the repository, or absolute inside it."""
    before: str | None = None
    after: str
    made_at_ms: int = Field(ge=0)
    session_id: str | None = Field(default=None, min_length=1)
    turn_id: str | None = None
    origin: Origin = "live"
    policy_version: int | None = None
    arm: str = "none"
    user_key: str | None = None
    consent: Consent = "measure"


def inside(root: Path, path: str) -> str | None:
    """Return a path relative to the repository, None when it lies outside."""
    if not Path(path).is_absolute():
        clean = os.path.normpath(path)
        return None if clean.startswith("..") else clean
    try:
        return str(Path(path).resolve().relative_to(root.resolve()))
    except (ValueError, OSError):
        return None


def edit_lines(path: Path) -> list[EditLine]:
    """Read an edits file: JSON lines with `edit_id, path, before, after, made_at_ms` and, to record, `session_id, user_key`.

    Raises:
        ConfigError: There is no such file.
        ContractViolation: A line is no edit; its number and the field are named.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"the edits file {path} cannot be read: {error.strerror}") from error
    found: list[EditLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(EditLine.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            field = ".".join(map(str, first["loc"])) or "the line"
            raise ContractViolation(f"{path}:{number}: {field}: {first['msg']}") from error
    return found


def from_file(path: Path, root: Path) -> list[Subject]:
    """Return the edits of an edits file. Errors as `edit_lines`."""
    return [
        Subject(
            path=inside(root, edit.path), made_at_s=edit.made_at_ms / 1000, tracked=track(edit.before, edit.after),
            **edit.model_dump(exclude={"path", "before", "after", "made_at_ms"}),
        )
        for edit in edit_lines(path)
    ]  # fmt: skip


def from_tracker(home: Home, root: Path) -> list[Subject]:
    """Return the edits inside the repository whose texts the edit tracker kept."""
    return [
        Subject(
            edit_id=item.edit_id, path=path, made_at_s=item.made_at_ms / 1000, tracked=item.tracked, session_id=item.session_id,
            turn_id=item.turn_id, origin=item.origin, policy_version=item.policy_version, arm=item.arm, user_key=item.user_key,
            consent=item.consent,
        )
        for item in watched.kept(home)
        if (path := inside(root, item.path)) is not None
    ]  # fmt: skip


def from_lake(home: Home, history: History, *, since_s: float) -> list[Subject]:
    """Return the lake's edits that carry a sketch and whose path hash is that of a file of the repository.

    The lake knows no text and no path: hashes are compared with those of the repository's paths, relative and absolute.

    Raises:
        ContractViolation: The lake is damaged.
    """
    conditions = [("type", "=", "edit_proposed"), ("occurred_at_ms", ">=", int(since_s * 1000))]
    table = lake.read(home, "events", columns=COLUMNS, filters=conditions)
    rows: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in table.to_pylist():  # the same event can lie in the lake twice
        rows.setdefault((row["session_id"], row["payload"]["edit_id"]), row)
    wanted = {row["payload"]["path_hash"] for row in rows.values() if row["payload"]["sketch"]}
    places: dict[str, str] = {}
    if wanted:
        keyed = hasher(home)
        for path in history.paths():
            for form in (path, str(history.root / path)):
                if (digest := keyed("path", form)) in wanted:
                    places[digest] = path
    return [
        Subject(
            edit_id=edit_id, path=places[row["payload"]["path_hash"]], made_at_s=row["occurred_at_ms"] / 1000,
            sketch=row["payload"]["sketch"], session_id=session_id, turn_id=row["turn_id"], origin=row["origin"],
            policy_version=row["policy_version"], arm=row["arm"], user_key=row["user_key"], consent=row["consent"],
        )
        for (session_id, edit_id), row in rows.items()
        if row["payload"]["path_hash"] in places and row["payload"]["sketch"]
    ]  # fmt: skip


def from_commits(history: GitHistory, repository: Repository, *, containing: str, since_s: float, limit: int) -> Iterator[Subject]:
    """Yield what each commit whose message contains a text (in any case) did to each file, as an edit made by that commit.

    Files that it deleted or only moved, and files that are too large or binary, are left out; of more than `limit`, the oldest too.
    """
    chosen = {commit.id for commit in repository.commits(since_s) if containing.casefold() in commit.message.casefold()}
    changed = (change for change in history.changes if change.commit in chosen and change.blob != change.old_blob)
    wanted = [change for change in changed if change.blob is not None]
    for change in wanted[-limit:]:
        assert change.path is not None
        assert change.blob is not None
        try:
            before = repository.text(change.old_blob) if change.old_blob is not None else None
            tracked = track(before, repository.text(change.blob))
        except Unreadable:
            continue
        if tracked.hunks:
            yield Subject(
                edit_id=f"{change.commit[:12]}:{change.path}", path=change.path, made_at_s=change.at_s, tracked=tracked, commit=change.index
            )
