"""The edit tracker: what became of an edit in the minutes after it was made, told as `edit_survival` events.

Takes: edits as a client makes them. Gives: one event an edit and horizon, through a recorder. One background thread reads the file
again at each horizon; a caller only hands over and never waits, and nothing is raised to it. Edits that wait are on disk, so a
client that restarts goes on measuring: a horizon that passed meanwhile is told once, with the time that really went by.

    with Recorder(config, home, client=client) as recorder, EditTracker(recorder, home, client=client) as tracker:
        tracker.edited(EditMade(edit_id=..., path=Path("/repo/app.py"), before=old, after=new, session_id=..., user_key=...))

While another branch is checked out than when the edit was made, an event says `branch_changed` and is not to be judged.
The text of edits stays on this machine, in `spool/survival`, and is deleted after `survival.keep_days` (without consent, at once).

Leaves out: how survival is computed (`survival.py`), and what happens after the last horizon (`tidegate signals survival`).
Every edit is accounted for: edited + adopted = queued + pending + finished + sum(refused).
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from pipelines.config import SurvivalConfig
from pipelines.errors import StorageFull
from pipelines.events import Client, Consent, EditSurvival, EditSurvivalPayload, Event, Origin, new_id
from pipelines.storage import Home
from pipelines.survival import advance, score, track
from pipelines.watched import Pending, Shelf, branch_of, read_text

log = logging.getLogger(__name__)

LATE_S: Final = 2.0
"""A measurement this late still counts for its horizon,"""
LATE_SHARE: Final = 0.1
"""or this share of the horizon, whichever is longer; later ones are told with the time that went by."""
GIVE_UP_S: Final = 86_400
"""An edit found this long after it was made (the client was off) is not measured any more; git history can still tell."""
POLL_S: Final = 1.0
"""Longest sleep of the thread: the wall clock may be set forward."""


class Sink(Protocol):
    """Takes events; `pipelines.recorder.Recorder` is one. Never blocks, never raises."""

    def record(self, event: Event, /) -> object:
        """Take one event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EditMade:
    """An edit that a client has just made."""

    edit_id: str
    """That of its `edit_proposed`."""
    path: Path
    """The file; relative ones are of the working folder."""
    before: str | None
    """Whole text before; None when the file did not exist."""
    after: str
    """Whole text after."""
    region: tuple[int, int] | None = None
    """[start, end) of what was written in `after`, in characters; None: found by a diff."""
    session_id: str
    turn_id: str | None = None
    origin: Origin = "live"
    policy_version: int | None = None
    arm: str = "serving"
    user_key: str
    consent: Consent = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerCounts:
    """What became of the edits."""

    edited: int
    """Handed over by the caller."""
    adopted: int
    """Found from an earlier process."""
    queued: int
    """Handed over and not looked at yet."""
    pending: int
    """Waiting for a horizon."""
    finished: int
    """Measured at the last one."""
    refused: dict[str, int]
    """Not followed (any more), by reason: full, too_large, unchanged, repeated, invalid, closed, no_space, gave_up."""
    events: int
    """Measurements recorded."""
    unreadable: int
    """Measurements that failed because the file could not be read (rights, size, no file)."""


@dataclass(frozen=True, slots=True)
class _Renamed:
    old: str
    new: str


class EditTracker:
    """Watches edits in the background. Use as a context manager; leaving it keeps what waits for the next process."""

    def __init__(
        self,
        sink: Sink,
        home: Home,
        *,
        client: Client,
        config: SurvivalConfig | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        read: Callable[[Path, int], str | None] = read_text,
        branch: Callable[[Path], str | None] = branch_of,
    ) -> None:
        """Take over what an earlier process left; nothing runs before the block is entered.

        Args:
            sink: Where measurements go.
            home: The deployment; pending edits are under `home.spool`.
            client: Stamped on the events.
            config: Horizons and bounds.
            now_ms: Wall clock, UTC epoch milliseconds.
            read: Text of a file now (at most so many bytes), None when it is gone; raises OSError.
            branch: What HEAD says around a path.

        Raises:
            OSError: The spool cannot be written.
        """
        self._sink, self._client, self._now_ms, self._read, self._branch = sink, client, now_ms, read, branch
        self._config = config or SurvivalConfig()
        self._queue: deque[tuple[EditMade | _Renamed, int]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._refused: Counter[str] = Counter()
        self._edited = self._finished = self._events = self._unreadable = 0
        self._shelf = Shelf(home)
        self._pending: dict[tuple[str, str], Pending] = {(item.session_id, item.edit_id): item for item in self._shelf.adopt()}
        self._bytes = {key: len(item.tracked.text) for key, item in self._pending.items()}
        self._adopted = len(self._pending)
        self._thread = threading.Thread(target=self._loop, name="tidegate-tracker", daemon=True)

    def edited(self, edit: EditMade) -> None:
        """Take an edit that was just made; returns at once and never raises."""
        with self._lock:
            self._edited += 1
            if self._closing.is_set():
                self._refused["closed"] += 1
            elif len(self._queue) + len(self._pending) >= self._config.max_edits:
                self._refused["full"] += 1
            else:
                self._queue.append((edit, self._now_ms()))
        self._wake.set()

    def renamed(self, old: Path, new: Path) -> None:
        """Say that a file moved, so that its edits are looked for in the new place; never raises."""
        with self._lock:
            if len(self._queue) < 2 * self._config.max_edits:
                self._queue.append((_Renamed(str(old), str(new)), self._now_ms()))
        self._wake.set()

    def counts(self) -> TrackerCounts:
        """Return what became of the edits so far."""
        with self._lock:
            return TrackerCounts(
                edited=self._edited,
                adopted=self._adopted,
                queued=self._edited + self._adopted - len(self._pending) - self._finished - self._refused.total(),
                pending=len(self._pending),
                finished=self._finished,
                refused=dict(self._refused),
                events=self._events,
                unreadable=self._unreadable,
            )

    def step(self) -> float:
        """Take what was handed over and measure what is due; the thread does nothing else.

        Returns:
            Seconds until the next measurement, at most `POLL_S`.
        """
        for _ in range(len(self._queue)):
            item = self._taken(*self._queue[0])
            with self._lock:
                self._queue.popleft()
                if item is not None:
                    self._pending[item.session_id, item.edit_id] = item
        now_ms = self._now_ms()
        for key, item in list(self._pending.items()):
            if self._due_ms(item) <= now_ms:
                self._measure(key, item, now_ms)
        waits = [self._due_ms(item) - now_ms for item in self._pending.values()]
        return min([POLL_S, *(max(wait, 0) / 1000 for wait in waits)])

    def close(self) -> TrackerCounts:
        """Write what waits to disk and stop."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self.step()
        self._shelf.close()
        return self.counts()

    def __enter__(self) -> "EditTracker":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _loop(self) -> None:
        while True:
            closing = self._closing.is_set()
            wait = self.step()
            if closing:
                return
            self._wake.wait(wait)
            self._wake.clear()

    def _taken(self, said: EditMade | _Renamed, at_ms: int) -> Pending | None:
        """Do what a caller asked for; what cannot be understood is refused, because nobody is there to raise to."""
        try:
            if isinstance(said, EditMade):
                return self._start(said, at_ms)
            was, now = str(Path(said.old).absolute()), str(Path(said.new).absolute())
            for key, item in list(self._pending.items()):
                if item.path == was:
                    self._replace(key, replace(item, path=now))
        except (ValueError, TypeError, AttributeError, OSError) as error:
            log.warning("an edit that cannot be followed", extra={"fields": {"error": type(error).__name__}})
            self._refuse("invalid")
        return None

    def _start(self, edit: EditMade, at_ms: int) -> Pending | None:
        """Begin to follow an edit, and carry earlier ones of the same file over it; None when it is refused."""
        path = edit.path.absolute()
        after, before = _clean(edit.after), None if edit.before is None else _clean(edit.before)
        branch = self._branch(path)
        if max(len(after), len(before or "")) > self._config.max_file_bytes:
            return self._refuse("too_large")
        for key, item in list(self._pending.items()):
            if item.path == str(path) and item.branch == branch:
                moved = advance(item.tracked, before) if before is not None else item.tracked
                self._replace(key, replace(item, tracked=advance(moved, after)))
        if (edit.session_id, edit.edit_id) in self._pending:
            return self._refuse("repeated")
        tracked = track(before, after, region=edit.region)
        if not tracked.hunks:
            return self._refuse("unchanged")
        if sum(self._bytes.values()) + len(after) > self._config.spool_max_bytes:
            return self._refuse("full")
        item = Pending(
            edit_id=edit.edit_id,
            path=str(path),
            branch=branch,
            made_at_ms=at_ms,
            done=0,
            tracked=tracked,
            session_id=edit.session_id,
            turn_id=edit.turn_id,
            origin=edit.origin,
            policy_version=edit.policy_version,
            arm=edit.arm,
            user_key=edit.user_key,
            consent=edit.consent,
        )
        self._event(item, EditSurvivalPayload(edit_id=item.edit_id, horizon_s=0, survival_four_gram=1.0, survival_no_revert=1.0), at_ms)
        return item if self._write(item) else self._refuse("no_space")

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _write(self, item: Pending) -> bool:
        try:
            self._bytes[item.session_id, item.edit_id] = self._shelf.put(item)
        except (StorageFull, OSError) as error:
            log.error("an edit that waits for its measurement is not on disk", extra={"fields": {"error": str(error)}})
            return False
        return True

    def _replace(self, key: tuple[str, str], item: Pending) -> None:
        """Note an edit's new state, in memory even where the disk is full."""
        self._write(item)
        with self._lock:
            self._pending[key] = item

    def _due_ms(self, item: Pending) -> int:
        last = len(self._config.horizons_s) - 1  # an adopted edit may come from settings with more horizons
        return item.made_at_ms + self._config.horizons_s[min(item.done, last)] * 1000

    def _measure(self, key: tuple[str, str], item: Pending, now_ms: int) -> None:
        """Measure an edit at its newest horizon that is due, and note that those before it are over."""
        horizons = self._config.horizons_s
        elapsed_s = max(0, now_ms - item.made_at_ms) / 1000
        due = max(index for index, horizon in enumerate(horizons) if horizon <= elapsed_s)
        if elapsed_s > GIVE_UP_S:
            self._remove(key, item, reason="gave_up")
            return
        late_s = elapsed_s - horizons[due]
        horizon_s = horizons[due] if late_s <= max(LATE_S, LATE_SHARE * horizons[due]) else int(elapsed_s)
        self._tell(item, horizon_s, now_ms)
        if (done := max(due, item.done) + 1) < len(horizons):
            self._replace(key, replace(item, done=done))
        else:
            self._remove(key, item, reason=None)

    def _tell(self, item: Pending, horizon_s: int, now_ms: int) -> None:
        path = Path(item.path)
        branch = self._branch(path)
        try:
            now = self._read(path, self._config.max_file_bytes)
        except OSError as error:
            self._unreadable += 1
            log.info("a file cannot be read again", extra={"fields": {"errno": error.errno}})
            return
        found = score(item.tracked, now)
        payload = EditSurvivalPayload(
            edit_id=item.edit_id,
            horizon_s=horizon_s,
            survival_four_gram=found.four_gram,
            survival_no_revert=found.no_revert,
            branch_changed=branch is not None and item.branch is not None and branch != item.branch,
        )
        self._events += 1
        self._sink.record(self._event(item, payload, now_ms))

    def _event(self, item: Pending, payload: EditSurvivalPayload, now_ms: int) -> Event:
        return EditSurvival(
            event_id=new_id(now_ms),
            session_id=item.session_id,
            turn_id=item.turn_id,
            occurred_at_ms=now_ms,
            recorded_at_ms=now_ms,
            origin=item.origin,
            policy_version=item.policy_version,
            arm=item.arm,
            user_key=item.user_key,
            consent=item.consent,
            client=self._client,
            payload=payload,
        )

    def _remove(self, key: tuple[str, str], item: Pending, *, reason: str | None) -> None:
        try:
            if self._config.keep_days > 0 and item.consent != "none":
                self._shelf.keep(item)
                oldest_ms = self._now_ms() - self._config.keep_days * 86_400_000
                self._shelf.prune(before_ms=oldest_ms, max_bytes=self._config.spool_max_bytes)
            else:
                self._shelf.drop(item)
        except OSError as error:
            log.error("a measured edit is still on disk", extra={"fields": {"error": str(error)}})
        with self._lock:
            del self._pending[key]
            self._bytes.pop(key, None)
            if reason is None:
                self._finished += 1
            else:
                self._refused[reason] += 1


def _clean(text: str) -> str:
    """Return a text that UTF-8 can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
