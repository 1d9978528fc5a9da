"""Leases with fencing epochs: who may write, and how a late writer is stopped.

A lease runs out by the clock; what protects the ledger is the epoch, which only grows: a writer whose epoch is not the newest is
refused inside its own transaction, whatever the clocks say. A dead process of this host loses its lease at once.
Standard library only. Leaves out: what the writers write (`ledger.py`).
"""

import sqlite3
from typing import Final

from deploy.release.database import Database
from deploy.release.records import Lease, is_dead, moment
from pipelines.errors import Busy, Refused

SHIP_LEASE: Final = "ship"
"""The lease whose epoch fences every write of a ship."""


class Leases(Database):
    """The leases in the ledger's file."""

    def lease(self, name: str, holder: str, ttl_s: float) -> Lease:
        """Take a lease under the next epoch.

        Raises:
            Busy: Another holder has it, has not let it expire, and is not a dead process of this host.
        """
        now = self.now_ms()
        with self.writing() as db:
            row = db.execute("SELECT * FROM lease WHERE name = ?", (name,)).fetchone()
            if row and row["expires_ms"] > now and row["holder"] != holder and not is_dead(row["holder"]):
                left = (row["expires_ms"] - now) / 1000
                raise Busy(f"{name}: {row['holder']} holds the lease for {left:.0f} s more; wait for it to finish")
            epoch = row["epoch"] + 1 if row else 1
            expires = now + int(ttl_s * 1000)
            db.execute("INSERT OR REPLACE INTO lease VALUES (?,?,?,?)", (name, holder, epoch, expires))
            self.note(db, "lease_taken", name=name, holder=holder, epoch=epoch)
        return Lease(name=name, holder=holder, epoch=epoch, expires_at=moment(expires))

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """Extend a lease.

        Raises:
            Refused: A higher epoch exists: this holder was fenced off.
        """
        expires = self.now_ms() + int(ttl_s * 1000)
        with self.writing() as db:
            self.fence(db, lease.epoch, name=lease.name)
            db.execute("UPDATE lease SET expires_ms = ? WHERE name = ? AND epoch = ?", (expires, lease.name, lease.epoch))
        return Lease(name=lease.name, holder=lease.holder, epoch=lease.epoch, expires_at=moment(expires))

    def release(self, lease: Lease) -> None:
        """Give a lease back; nothing happens when someone else already holds it."""
        with self.writing() as db:
            db.execute("UPDATE lease SET expires_ms = 0 WHERE name = ? AND epoch = ?", (lease.name, lease.epoch))

    def leases(self) -> list[Lease]:
        """Return the leases that have not expired."""
        with self.reading() as db:
            rows = db.execute("SELECT * FROM lease WHERE expires_ms > ? ORDER BY name", (self.now_ms(),)).fetchall()
        return [Lease(name=r["name"], holder=r["holder"], epoch=r["epoch"], expires_at=moment(r["expires_ms"])) for r in rows]

    def fence(self, db: sqlite3.Connection, epoch: int, *, name: str = SHIP_LEASE) -> None:
        """Refuse a write whose epoch is not the newest.

        Raises:
            Refused: Always then; whoever holds the newer epoch goes on.
        """
        row = db.execute("SELECT epoch FROM lease WHERE name = ?", (name,)).fetchone()
        if row is None or row["epoch"] != epoch:
            current = row["epoch"] if row else "none"
            raise Refused(f"lease {name}: epoch {epoch} was fenced off by epoch {current}; another process took over, this one stops")

    def bump(self, db: sqlite3.Connection, holder: str) -> int:
        """Take the next epoch of the lease `ship` without asking, which fences off every shipper."""
        row = db.execute("SELECT epoch FROM lease WHERE name = ?", (SHIP_LEASE,)).fetchone()
        epoch = row["epoch"] + 1 if row else 1
        db.execute("INSERT OR REPLACE INTO lease VALUES (?,?,?,0)", (SHIP_LEASE, holder, epoch))
        return epoch
