"""Keep what serves equal to what the ledger says: the blue/green swap.

Each tick compares the target with the replica that serves. A new target is verified byte for byte, started, fingerprinted, and
only then gets new sessions; old sessions stay where they began until they end or `drain_s` has passed; the old replica stops
when nothing is in flight on it. A target that fails any check never gets traffic: the old replica goes on and the reason is
visible. Coming back to a checkpoint that still drains (a rollback) costs no start.

Takes: a source of targets (the ledger's pointer, or one pinned folder). Gives: replicas to ask. Leaves out: HTTP, events.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from deploy.serving.config import ServingConfig
from deploy.serving.replicas import Replica, Target
from deploy.serving.routing import Sessions
from pipelines.errors import EngineUnavailable, Refused, StageError, TransientError
from pipelines.storage import Home
from trainer.candidates import verify

log = logging.getLogger(__name__)

RETRY_TRANSIENT_S: Final = 30.0
"""Before a target that failed for lack of time, memory or disk is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedTarget:
    """A target that got no traffic."""

    checkpoint: str
    epoch: int
    reason: str
    retry_at: float | None
    """Monotonic time; None when only a new pointer helps."""


class Fleet:
    """The replicas of one gateway, in one event loop."""

    def __init__(self, source: Callable[[], Target | None], *, config: ServingConfig, home: Home) -> None:
        self._source = source
        self._config = config
        self._home = home
        self._serving: Replica | None = None
        self._draining: dict[str, Replica] = {}
        self._sessions = Sessions()
        self._preparing: tuple[Target, asyncio.Task[Replica]] | None = None
        self._loop: asyncio.Task[None] | None = None
        self._source_fault: str | None = None
        self.refused: RefusedTarget | None = None
        self.swaps = 0

    @property
    def serving(self) -> Replica | None:
        """The replica that new sessions go to; None before `start`."""
        return self._serving

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, the serving one first."""
        return [*([self._serving] if self._serving else []), *self._draining.values()]

    async def start(self) -> None:
        """Bring up the first replica, then follow the source until `stop`.

        Raises:
            Refused: Nothing is to be served yet.
            CheckpointInvalid, EngineUnavailable: The first checkpoint does not come up.
        """
        target = await asyncio.to_thread(self._source)
        if target is None:
            raise Refused(f"the ledger {self._home.ledger} names no serving checkpoint; run: tidegate ckpt install ID (or tidegate demo)")
        self._serving = await self._prepare(target)
        self._loop = asyncio.create_task(self._follow(), name="fleet")

    async def stop(self) -> None:
        """Stop following and stop every replica."""
        if self._loop:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        await self._abandon()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    @asynccontextmanager
    async def borrow(self, session_id: str, *, ends: bool) -> AsyncIterator[Replica]:
        """Hold the replica that answers a session for the length of one request; it does not stop meanwhile.

        Args:
            session_id: The session, new or known.
            ends: Whether the session is over after this request.

        Raises:
            EngineUnavailable: Nothing serves yet.
        """
        if self._serving is None:
            raise EngineUnavailable("no checkpoint serves yet; try again in a moment")
        known = {replica.target.checkpoint: replica for replica in self.replicas}
        replica = known[self._sessions.place(session_id, serving=self._serving.target.checkpoint, alive=frozenset(known))]
        replica.in_flight += 1
        try:
            yield replica
        finally:
            replica.in_flight -= 1
            if ends:
                self._sessions.end(session_id)

    async def broken(self) -> None:
        """Wait until following the source fails for a reason nobody foresaw, and raise it."""
        assert self._loop is not None
        await asyncio.shield(self._loop)

    async def _follow(self) -> None:
        ticks = 0
        while True:
            await self.tick()
            ticks += 1
            if ticks % 5 == 0:
                await asyncio.gather(*(replica.check() for replica in self.replicas))
            await asyncio.sleep(self._config.poll_s)

    async def tick(self) -> None:
        """Look once: follow the target, finish what was prepared, let go what has drained."""
        try:
            target = await asyncio.to_thread(self._source)
            self._source_fault = None
        except StageError as error:  # a ledger that cannot be read now is no reason to stop serving
            self._source_fault = str(error)
            target = None
        if target is not None:
            await self._aim(target)
        self._finish_preparing()
        await self._let_go()

    async def _aim(self, target: Target) -> None:
        if self._preparing and self._preparing[0].checkpoint != target.checkpoint:
            await self._abandon()
        assert self._serving is not None
        if target.checkpoint == self._serving.target.checkpoint or self._preparing or self._is_refused(target):
            return
        if back := self._draining.pop(target.checkpoint, None):
            back.drain_until = None
            self._switch(back)
            return
        self._preparing = (target, asyncio.create_task(self._prepare(target), name=f"prepare {target.checkpoint[:12]}"))

    async def _abandon(self) -> None:
        """Give up what is being prepared; stop it if it came up in the meantime."""
        if self._preparing is None:
            return
        (_, task), self._preparing = self._preparing, None
        task.cancel()
        with suppress(asyncio.CancelledError, StageError, OSError):
            await (await task).stop()

    def _is_refused(self, target: Target) -> bool:
        gone = self.refused
        if gone is None or (gone.checkpoint, gone.epoch) != (target.checkpoint, target.epoch):
            return False
        return gone.retry_at is None or time.monotonic() < gone.retry_at

    async def _prepare(self, target: Target) -> Replica:
        manifest = await asyncio.to_thread(verify, target.folder)
        replica = Replica(target, manifest, config=self._config, home=self._home)
        await replica.start()
        return replica

    def _finish_preparing(self) -> None:
        if self._preparing is None or not self._preparing[1].done():
            return
        (target, task), self._preparing = self._preparing, None
        fault = task.exception()
        if fault is None:
            self.refused = None
            self._switch(task.result())
            return
        if not isinstance(fault, StageError | OSError):
            raise fault
        retry_at = time.monotonic() + RETRY_TRANSIENT_S if isinstance(fault, TransientError | OSError) else None
        self.refused = RefusedTarget(checkpoint=target.checkpoint, epoch=target.epoch, reason=str(fault), retry_at=retry_at)
        log.error("a checkpoint gets no traffic", extra={"fields": {"checkpoint": target.checkpoint, "reason": str(fault)}})

    def _switch(self, new: Replica) -> None:
        old = self._serving
        assert old is not None
        old.drain_until = time.monotonic() + self._config.drain_s
        self._draining[old.target.checkpoint] = old
        self._serving = new
        self.swaps += 1
        log.warning("new sessions go to another checkpoint", extra={"fields": {"from": old.target.checkpoint, "to": new.target.checkpoint}})

    async def _let_go(self) -> None:
        now = time.monotonic()
        for checkpoint, replica in list(self._draining.items()):
            over = now >= (replica.drain_until or 0)
            if over:
                self._sessions.leave(checkpoint)
            if replica.in_flight == 0 and (over or self._sessions.count(checkpoint) == 0):
                del self._draining[checkpoint]
                self._sessions.leave(checkpoint)
                await replica.stop()

    def status(self) -> dict[str, Any]:
        """Return what people and `tidegate status` need to see."""
        now = time.monotonic()
        return {
            "replicas": [
                {
                    "checkpoint": replica.target.checkpoint,
                    "policy_version": replica.target.policy_version,
                    "arm": replica.target.arm,
                    "state": ("serving" if replica is self._serving else "draining") if replica.ready else "restarting",
                    "pid": replica.pid,
                    "restarts": replica.restarts,
                    "in_flight": replica.in_flight,
                    "open_sessions": self._sessions.count(replica.target.checkpoint),
                    "drain_left_s": None if replica.drain_until is None else max(0.0, replica.drain_until - now),
                    "fingerprint_mean_abs_nats": replica.probe.mean_abs_nats if replica.probe else None,
                    "fingerprint_tolerance_nats": replica.probe.tolerance_nats if replica.probe else None,
                }
                for replica in self.replicas
            ],
            "preparing": self._preparing[0].checkpoint if self._preparing else None,
            "refused": {"checkpoint": self.refused.checkpoint, "reason": self.refused.reason} if self.refused else None,
            "ledger_fault": self._source_fault,
            "swaps": self.swaps,
        }
