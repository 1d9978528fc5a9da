"""The ship ledger: the truth about what serves, what was shipped, and why (contract of the deploy stage).

One SQLite file (WAL, synchronous=FULL), standard library only, so that rollback works when everything else is broken. Every
operation opens its own connection and is one transaction: safe from any thread or process, and killed anywhere it happened
whole or not at all. Writers of a ship hold the lease `ship` and pass its epoch; a write with an older epoch is refused
(fencing), so a shipper that stalled past its lease cannot undo what came after. A person's verbs (rollback, freeze, anchor)
need no lease: rollback takes the next epoch itself and so fences off every shipper in flight.

Takes: a path and a clock. Gives: leases, the pointers `serving` and `anchor`, policy versions, ships with their steps,
tombstones, freezes, and an append-only history. Leaves out: weights, statistics, traffic, and waiting.
"""

import json
import sqlite3
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from deploy.release.leases import Leases
from deploy.release.records import Event, Pointer, Ship, moment, ship_id
from deploy.release.states import FINAL, SERVES, Observation, State, advance
from pipelines.errors import ContractViolation, Refused

ROLLBACKS_THAT_FREEZE: Final = 2
ROLLBACK_WINDOW_MS: Final = 24 * 3600 * 1000


class Ledger(Leases):
    """The ledger in one file. Every method is one transaction."""

    # Policies and pointers ---------------------------------------------------------------------------------------------

    def register(self, checkpoint: str, parent: str | None) -> int:
        """Return the policy version of a checkpoint, giving it the next one the first time."""
        with self.writing() as db:
            return self._register(db, checkpoint, parent)

    def _register(self, db: sqlite3.Connection, checkpoint: str, parent: str | None) -> int:
        row = db.execute("SELECT policy_version FROM policy WHERE checkpoint = ?", (checkpoint,)).fetchone()
        if row:
            return int(row["policy_version"])
        done = db.execute("INSERT INTO policy (checkpoint, parent, registered_ms) VALUES (?,?,?)", (checkpoint, parent, self.now_ms()))
        self.note(db, "registered", checkpoint=checkpoint, policy_version=done.lastrowid, parent=parent)
        return int(done.lastrowid or 0)

    def install(self, checkpoint: str) -> Pointer:
        """Make the first checkpoint policy 1, serving and anchor; again with the same one changes nothing.

        Raises:
            Refused: Another checkpoint is installed already.
        """
        with self.writing() as db:
            row = db.execute("SELECT checkpoint FROM policy WHERE policy_version = 1").fetchone()
            if row and row["checkpoint"] != checkpoint:
                raise Refused(f"{row['checkpoint'][:12]} is installed in {self.path}; ship {checkpoint[:12]} or use a new home")
            if not row:
                self._register(db, checkpoint, None)
                for name in ("serving", "anchor"):
                    db.execute("INSERT INTO pointer VALUES (?,?,NULL,0,?)", (name, checkpoint, self.now_ms()))
                self.note(db, "installed", checkpoint=checkpoint)
            return _need(self._serving(db))

    def serving(self) -> Pointer | None:
        """Return what serves, or None in a fresh deployment."""
        with self.reading() as db:
            return self._serving(db)

    def _serving(self, db: sqlite3.Connection) -> Pointer | None:
        row = db.execute(
            "SELECT s.*, p.policy_version, a.checkpoint AS anchor FROM pointer s JOIN policy p USING (checkpoint) "
            "JOIN pointer a ON a.name = 'anchor' WHERE s.name = 'serving'"
        ).fetchone()
        if row is None:
            return None
        return Pointer(
            checkpoint=row["checkpoint"], policy_version=row["policy_version"], previous=row["previous"], anchor=row["anchor"],
            epoch=row["epoch"], changed_at=moment(row["changed_ms"]),
        )  # fmt: skip

    def set_anchor(self, checkpoint: str, reason: str) -> None:
        """Pin the checkpoint that drift is measured against.

        Raises:
            Refused: It was never registered or is tombstoned.
        """
        with self.writing() as db:
            if not db.execute("SELECT 1 FROM policy WHERE checkpoint = ?", (checkpoint,)).fetchone():
                raise Refused(f"{checkpoint[:12]} was never registered here; ship it first")
            self._not_tombstoned(db, checkpoint)
            db.execute("UPDATE pointer SET checkpoint = ?, changed_ms = ? WHERE name = 'anchor'", (checkpoint, self.now_ms()))
            self.note(db, "anchor_set", checkpoint=checkpoint, reason=reason)

    def policies(self) -> dict[int, str]:
        """Return every policy version and its checkpoint."""
        with self.reading() as db:
            return {r["policy_version"]: r["checkpoint"] for r in db.execute("SELECT * FROM policy ORDER BY policy_version")}

    # Ships -------------------------------------------------------------------------------------------------------------

    def propose(self, parent: str, candidate: str, *, gate_digest: str, epoch: int) -> Ship:
        """Open a ship, or return it as it stands.

        Raises:
            Refused: Fenced off, or the candidate is tombstoned, or is what it wants to replace (a rollback would have nowhere to go).
        """
        if candidate == parent:
            raise Refused(f"checkpoint {candidate[:12]} serves already; there is nothing to ship in its place")
        identity, now = ship_id(parent, candidate, gate_digest=gate_digest), self.now_ms()
        with self.writing() as db:
            self.fence(db, epoch)
            row = db.execute("SELECT * FROM ship WHERE ship_id = ?", (identity,)).fetchone()
            if row is None:
                self._not_tombstoned(db, candidate)
                self._register(db, candidate, parent)
                values = (identity, parent, candidate, gate_digest, State.PROPOSED, "", now, now, epoch)
                db.execute("INSERT INTO ship VALUES (?,?,?,?,?,?,?,?,?)", values)
                self.note(db, "proposed", ship=identity, checkpoint=candidate, parent=parent, gate_digest=gate_digest)
            return self._ship(db, identity)

    def ship(self, prefix: str) -> Ship:
        """Return the one ship whose id starts with `prefix`.

        Raises:
            ContractViolation: None or several match.
        """
        with self.reading() as db:
            return self._ship(db, prefix)

    def _ship(self, db: sqlite3.Connection, prefix: str) -> Ship:
        rows = db.execute("SELECT * FROM ship WHERE substr(ship_id, 1, ?) = ?", (len(prefix), prefix)).fetchall()
        if len(rows) != 1:
            raise ContractViolation(f"{len(rows)} ships in {self.path} start with {prefix!r}; name exactly one (tidegate ship list)")
        return _ship_of(rows[0])

    def ships(self, limit: int = 20) -> list[Ship]:
        """Return the newest ships first."""
        with self.reading() as db:
            return [_ship_of(row) for row in db.execute("SELECT * FROM ship ORDER BY created_ms DESC, rowid DESC LIMIT ?", (limit,))]

    def step(
        self,
        ship: str,
        name: str,
        act: Callable[[], Mapping[str, Any]],
        *,
        epoch: int,
        observe: Callable[[Mapping[str, Any]], Observation | None],
    ) -> dict[str, Any]:
        """Return a step's stored result, or do it and store it together with the state it leads to.

        `act` runs outside the transaction (it may take minutes and rollback must not wait for it), so it may run again after
        a kill: it must be repeatable. What it returned first is what stays.

        Args:
            ship: The ship's id.
            name: The step's name.
            act: Does the work and returns a JSON-able result.
            epoch: Epoch of the lease `ship`.
            observe: What the result says about the ship; None moves nothing.

        Raises:
            Refused: Fenced off, or someone moved the ship to where this step has nothing to say.
        """
        with self.reading() as db:
            self.fence(db, epoch)
            stored = self._stored(db, ship, name)
        if stored is not None:
            return stored
        result = dict(act())
        text = json.dumps(result, sort_keys=True, allow_nan=False)
        with self.writing() as db:
            self.fence(db, epoch)
            stored = self._stored(db, ship, name)
            if stored is not None:
                return stored
            self._store(db, ship, name, text, epoch=epoch)
            if (seen := observe(result)) is not None:
                self._move(db, self._ship(db, ship), seen, reason=str(result.get("reason", "")))
        return json.loads(text)

    def steps(self, ship: str) -> dict[str, dict[str, Any]]:
        """Return the stored results of a ship's steps."""
        with self.reading() as db:
            rows = db.execute("SELECT step, data FROM step WHERE ship_id = ? ORDER BY done_ms, rowid", (ship,)).fetchall()
        return {row["step"]: json.loads(row["data"]) for row in rows}

    def _stored(self, db: sqlite3.Connection, ship: str, name: str) -> dict[str, Any] | None:
        row = db.execute("SELECT data FROM step WHERE ship_id = ? AND step = ?", (ship, name)).fetchone()
        return json.loads(row["data"]) if row else None

    def _store(self, db: sqlite3.Connection, ship: str, name: str, text: str, *, epoch: int) -> None:
        db.execute("INSERT INTO step VALUES (?,?,?,?,?)", (ship, name, text, epoch, self.now_ms()))
        self.note(db, "step_done", ship=ship, step=name)

    def _move(self, db: sqlite3.Connection, ship: Ship, seen: Observation, *, reason: str) -> State:
        to = advance(ship.state, seen)
        if to is None:
            raise Refused(f"ship {ship.ship_id[:12]} is {ship.state}: {seen} changes nothing there")
        db.execute("UPDATE ship SET state = ?, reason = ?, updated_ms = ? WHERE ship_id = ?", (to, reason, self.now_ms(), ship.ship_id))
        self.note(db, to, ship=ship.ship_id, checkpoint=ship.candidate, seen=seen, reason=reason)
        return to

    def observe(self, ship: str, seen: Observation, *, epoch: int, reason: str = "") -> State:
        """Move a ship by an observation; where it moves nothing the state stays.

        Raises:
            Refused: Fenced off.
        """
        with self.writing() as db:
            self.fence(db, epoch)
            current = self._ship(db, ship)
            return current.state if advance(current.state, seen) is None else self._move(db, current, seen, reason=reason)

    def promote(self, ship: str, checkpoint: str, parent: str, *, epoch: int) -> Pointer:
        """Move the serving pointer from `parent` to `checkpoint`, once per ship.

        Raises:
            Refused: Fenced off, frozen, tombstoned, the gate has not passed, or `parent` no longer serves.
        """
        with self.writing() as db:
            self.fence(db, epoch)
            current = self._ship(db, ship)
            if self._stored(db, ship, "promote") is not None:
                if current.state not in (State.PROMOTED, State.CONFIRMED):
                    raise Refused(f"ship {ship[:12]} was promoted once and is {current.state} now; train a new candidate")
                return _need(self._serving(db))
            self._not_frozen(db)
            self._not_tombstoned(db, checkpoint)
            pointer = _need(self._serving(db))
            if pointer.checkpoint != parent or (current.parent, current.candidate) != (parent, checkpoint):
                raise Refused(
                    f"{checkpoint[:12]} was trained from {parent[:12]}, but {pointer.checkpoint[:12]} serves; train again from that"
                )
            self._move(db, current, Observation.POINTER_MOVED, reason=current.reason)
            changed = (checkpoint, parent, epoch, self.now_ms())
            db.execute("UPDATE pointer SET checkpoint = ?, previous = ?, epoch = ?, changed_ms = ? WHERE name = 'serving'", changed)
            self._store(db, ship, "promote", json.dumps({"checkpoint": checkpoint, "previous": parent}), epoch=epoch)
            return _need(self._serving(db))

    # A person's verbs --------------------------------------------------------------------------------------------------

    def rollback(self, reason: str, *, holder: str) -> dict[str, Any]:
        """Restore the previous checkpoint, tombstone what is taken away, end open ships, fence off every shipper.

        Args:
            reason: Why, for the history.
            holder: Who, for the history.

        Returns:
            `restored` (checkpoint that serves now), `removed` (tombstoned checkpoints), `ended` (ship ids), `frozen` (reason or None).

        Raises:
            Refused: There is neither a previous checkpoint nor an open ship.
        """
        now = self.now_ms()
        with self.writing() as db:
            pointer = self._serving(db)
            affected = [
                ship
                for ship in map(_ship_of, db.execute("SELECT * FROM ship"))
                if ship.state not in FINAL | SERVES or (ship.state in SERVES and pointer and ship.candidate == pointer.checkpoint)
            ]
            if pointer is None or (pointer.previous is None and not affected):
                raise Refused(f"nothing to roll back in {self.path}: the first checkpoint serves and no ship is open")
            epoch = self.bump(db, holder)
            removed = {s.candidate for s in affected} - {pointer.checkpoint, pointer.previous}
            if pointer.previous is not None:
                removed.add(pointer.checkpoint)
            for checkpoint in sorted(removed):
                db.execute("INSERT OR IGNORE INTO tombstone VALUES (?,?,?)", (checkpoint, reason, now))
            for ship in affected:
                self._move(db, ship, Observation.ROLLED_BACK, reason=reason)
            if pointer.previous is not None:
                changed = (pointer.previous, self._ancestor(db, pointer.previous), epoch, now)
                db.execute("UPDATE pointer SET checkpoint = ?, previous = ?, epoch = ?, changed_ms = ? WHERE name = 'serving'", changed)
            restored = _need(self._serving(db)).checkpoint
            ended = [s.ship_id for s in affected]
            data: dict[str, Any] = {
                "reason": reason,
                "holder": holder,
                "removed": sorted(removed),
                "ended": ended,
                "moved": pointer.previous is not None,
            }
            self.note(db, "rollback", checkpoint=restored, **data)
            return {"restored": restored, "removed": sorted(removed), "ended": ended, "frozen": self._freeze_if_repeated(db, now)}

    def _ancestor(self, db: sqlite3.Connection, checkpoint: str) -> str | None:
        """Return the nearest ancestor that is registered and not tombstoned."""
        current: str | None = checkpoint
        while current is not None:
            row = db.execute("SELECT parent FROM policy WHERE checkpoint = ?", (current,)).fetchone()
            current = row["parent"] if row else None
            if current and not db.execute("SELECT 1 FROM tombstone WHERE checkpoint = ?", (current,)).fetchone():
                return current if db.execute("SELECT 1 FROM policy WHERE checkpoint = ?", (current,)).fetchone() else None
        return None

    def _freeze_if_repeated(self, db: sqlite3.Connection, now: int) -> str | None:
        rows = db.execute("SELECT data FROM event WHERE kind = 'rollback' AND at_ms > ?", (now - ROLLBACK_WINDOW_MS,)).fetchall()
        repeated = sum(bool(json.loads(row["data"])["moved"]) for row in rows)
        if repeated >= ROLLBACKS_THAT_FREEZE and self._frozen(db) is None:
            reason = f"{repeated} rollbacks in 24 h; find the cause, then: tidegate thaw --reason '...'"
            db.execute("INSERT INTO freeze (reason, at_ms) VALUES (?,?)", (reason, now))
            self.note(db, "frozen", reason=reason)
        return self._frozen(db)

    def freeze(self, reason: str) -> None:
        """Stop promotions until `thaw`; a second freeze keeps the first reason."""
        with self.writing() as db:
            if self._frozen(db) is None:
                db.execute("INSERT INTO freeze (reason, at_ms) VALUES (?,?)", (reason, self.now_ms()))
                self.note(db, "frozen", reason=reason)

    def thaw(self, reason: str) -> None:
        """Allow promotions again."""
        with self.writing() as db:
            if self._frozen(db) is not None:
                db.execute("UPDATE freeze SET thawed_ms = ?, thaw_reason = ? WHERE thawed_ms IS NULL", (self.now_ms(), reason))
                self.note(db, "thawed", reason=reason)

    def frozen(self) -> str | None:
        """Return why shipping is frozen, or None."""
        with self.reading() as db:
            return self._frozen(db)

    def _frozen(self, db: sqlite3.Connection) -> str | None:
        row = db.execute("SELECT reason FROM freeze WHERE thawed_ms IS NULL ORDER BY seq LIMIT 1").fetchone()
        return str(row["reason"]) if row else None

    def _not_frozen(self, db: sqlite3.Connection) -> None:
        if (reason := self._frozen(db)) is not None:
            raise Refused(f"shipping is frozen: {reason}")

    def tombstone(self, checkpoint: str, reason: str) -> None:
        """Bar a checkpoint from ever being promoted; its telemetry is not trainable.

        Raises:
            Refused: It serves; roll back instead.
        """
        with self.writing() as db:
            pointer = self._serving(db)
            if pointer and pointer.checkpoint == checkpoint:
                raise Refused(f"{checkpoint[:12]} serves; use: tidegate rollback --reason '...'")
            db.execute("INSERT OR IGNORE INTO tombstone VALUES (?,?,?)", (checkpoint, reason, self.now_ms()))
            self.note(db, "tombstoned", checkpoint=checkpoint, reason=reason)

    def tombstones(self) -> dict[str, str]:
        """Return tombstoned checkpoints and why."""
        with self.reading() as db:
            return {r["checkpoint"]: r["reason"] for r in db.execute("SELECT * FROM tombstone ORDER BY at_ms")}

    def quarantined(self) -> list[int]:
        """Return the policy versions whose telemetry must not be trained on."""
        with self.reading() as db:
            rows = db.execute("SELECT policy_version FROM policy JOIN tombstone USING (checkpoint) ORDER BY policy_version")
            return [row["policy_version"] for row in rows]

    def _not_tombstoned(self, db: sqlite3.Connection, checkpoint: str) -> None:
        row = db.execute("SELECT reason FROM tombstone WHERE checkpoint = ?", (checkpoint,)).fetchone()
        if row:
            raise Refused(f"{checkpoint[:12]} is tombstoned ({row['reason']}); train a new candidate")

    def history(self, limit: int = 50) -> list[Event]:
        """Return the newest events first."""
        with self.reading() as db:
            rows = db.execute("SELECT * FROM event ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
        return [
            Event(
                seq=r["seq"],
                at=moment(r["at_ms"]),
                kind=r["kind"],
                ship_id=r["ship_id"],
                checkpoint=r["checkpoint"],
                data=json.loads(r["data"]),
            )
            for r in rows
        ]

    def promotions_since(self, since: datetime) -> int:
        """Return how many promotions happened after `since`."""
        with self.reading() as db:
            row = db.execute(
                "SELECT count(*) AS n FROM event WHERE kind = 'promoted' AND at_ms > ?", (int(since.timestamp() * 1000),)
            ).fetchone()
        return int(row["n"])


def _ship_of(row: sqlite3.Row) -> Ship:
    return Ship(
        ship_id=row["ship_id"], parent=row["parent"], candidate=row["candidate"], gate_digest=row["gate_digest"], state=State(row["state"]),
        reason=row["reason"], created_at=moment(row["created_ms"]), updated_at=moment(row["updated_ms"]),
    )  # fmt: skip


def _need(pointer: Pointer | None) -> Pointer:
    if pointer is None:
        raise Refused("nothing serves yet; install the first checkpoint: tidegate ckpt install ID (or tidegate demo)")
    return pointer
