"""The ledger's file: its tables, and transactions that happen whole or not at all.

SQLite in WAL mode with synchronous=FULL, a connection per operation: safe from any thread or process. Standard library only.
Takes a path and a clock. Gives transactions and the append-only history. Leaves out: what the rows mean (`ledger.py`).
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

from pipelines.errors import StorageFull, TerminalError, TransientError

BUSY_TIMEOUT_S: Final = 30.0
"""Transactions here take milliseconds; a lock held for this long means a stuck process."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS lease (name TEXT PRIMARY KEY, holder TEXT NOT NULL, epoch INTEGER NOT NULL, expires_ms INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS pointer (name TEXT PRIMARY KEY CHECK (name IN ('serving', 'anchor')),
  checkpoint TEXT NOT NULL REFERENCES policy (checkpoint), previous TEXT, epoch INTEGER NOT NULL, changed_ms INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS policy (policy_version INTEGER PRIMARY KEY AUTOINCREMENT, checkpoint TEXT NOT NULL UNIQUE, parent TEXT,
  registered_ms INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS ship (ship_id TEXT PRIMARY KEY, parent TEXT NOT NULL, candidate TEXT NOT NULL, gate_digest TEXT NOT NULL,
  state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '', created_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL, epoch INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS step (ship_id TEXT NOT NULL REFERENCES ship (ship_id), step TEXT NOT NULL, data TEXT NOT NULL,
  epoch INTEGER NOT NULL, done_ms INTEGER NOT NULL, PRIMARY KEY (ship_id, step)) STRICT;
CREATE TABLE IF NOT EXISTS event (seq INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, kind TEXT NOT NULL, ship_id TEXT,
  checkpoint TEXT, data TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS tombstone (checkpoint TEXT PRIMARY KEY, reason TEXT NOT NULL, at_ms INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS freeze (seq INTEGER PRIMARY KEY AUTOINCREMENT, reason TEXT NOT NULL, at_ms INTEGER NOT NULL,
  thawed_ms INTEGER, thaw_reason TEXT) STRICT;
CREATE TRIGGER IF NOT EXISTS event_is_never_changed BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT, 'history is append-only'); END;
CREATE TRIGGER IF NOT EXISTS event_is_never_deleted BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT, 'history is append-only'); END;
"""


class Database:
    """One SQLite file. Every use is one transaction on its own connection."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        with self.reading() as db:
            complete = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'event_is_never_deleted'").fetchone()
        if not complete:
            with self.writing() as db:
                for statement in SCHEMA.split(";\n"):
                    db.execute(statement)

    def now_ms(self) -> int:
        """Return the clock's Unix milliseconds."""
        return int(self._clock() * 1000)

    @contextmanager
    def _transaction(self, mode: str) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
                db.row_factory = sqlite3.Row
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                db.execute("PRAGMA foreign_keys=ON")
                db.execute(f"BEGIN {mode}")
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
        except sqlite3.DatabaseError as error:
            raise _translate(error, self.path) from error

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Open a consistent view."""
        return self._transaction("DEFERRED")

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """Open the one writing transaction; others wait."""
        return self._transaction("IMMEDIATE")

    def note(self, db: sqlite3.Connection, kind: str, *, ship: str | None = None, checkpoint: str | None = None, **data: object) -> None:
        """Add a line to the history, inside the transaction of what it tells."""
        values = (self.now_ms(), kind, ship, checkpoint, json.dumps(data, sort_keys=True))
        db.execute("INSERT INTO event (at_ms, kind, ship_id, checkpoint, data) VALUES (?,?,?,?,?)", values)


def _translate(error: sqlite3.DatabaseError, path: Path) -> TerminalError | TransientError:
    text = str(error)
    if "full" in text:
        return StorageFull(f"no space left for the ledger {path}; free some and run the same command again")
    if "locked" in text or "busy" in text:
        return TransientError(f"the ledger {path} stayed locked for {BUSY_TIMEOUT_S:.0f} s by another process; try again")
    return TerminalError(f"the ledger {path} cannot be used: {text}; check its folder's permissions and that it is a Tidegate ledger")
