"""Which arm a user belongs to, and which checkpoint a session stays on (pure).

Takes: user keys, session ids, clocks as arguments. Gives: an arm's name, a checkpoint. Leaves out: processes (`replicas.py`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

MAX_SESSIONS: Final = 100_000
"""Sessions remembered; past it the longest unseen is forgotten and would move to the serving checkpoint."""


def assign_arm(user_key: str, shares: Mapping[str, float], *, salt: str) -> str:
    """Return a user's arm: the same for all their requests, and independent of other experiments (the salt).

    The hash gives a point in [0, 1); arms take intervals from 0 in the mapping's order, and `serving` the rest, so raising an
    arm's share moves users into it and none out of it.

    Args:
        user_key: Keyed hash of the user.
        shares: Share of users of each arm but `serving`, each in [0, 1], together at most 1.
        salt: The experiment's name.
    """
    digest = hashlib.sha256(f"{salt}\x00{user_key}".encode()).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64
    reached = 0.0
    for arm, share in shares.items():
        reached += share
        if point < reached:
            return arm
    return "serving"


class Sessions:
    """Remembers the checkpoint each open session began with."""

    def __init__(self, *, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._where: OrderedDict[str, str] = OrderedDict()

    def place(self, session_id: str, *, serving: str, alive: frozenset[str]) -> str:
        """Return the checkpoint that answers this session: its own while that lives, else the serving one from now on."""
        checkpoint = self._where.pop(session_id, serving)
        if checkpoint not in alive:
            checkpoint = serving
        self._where[session_id] = checkpoint
        while len(self._where) > self._limit:
            self._where.popitem(last=False)
        return checkpoint

    def end(self, session_id: str) -> None:
        """Forget a session."""
        self._where.pop(session_id, None)

    def leave(self, checkpoint: str) -> None:
        """Forget the sessions of a checkpoint, so that their next request goes to the serving one."""
        for session_id in [key for key, value in self._where.items() if value == checkpoint]:
            del self._where[session_id]

    def count(self, checkpoint: str) -> int:
        """Return how many open sessions a checkpoint has."""
        return sum(value == checkpoint for value in self._where.values())
