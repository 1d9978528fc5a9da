"""How much one key may send: a bucket of records that fills at a rate. Pure: the clock is an argument.

Takes: records as they come. Gives: whether they are taken, and if not, when to come back.
Leaves out: limits of size, time and number of requests (`collector_server.py`).
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Room for `burst` records that comes back at `rate_per_s`.

    A request is let in while there is room for one record, and may then take more than there is, which is paid back before the next
    one: a batch that is larger than the bucket would otherwise wait for ever.
    """

    rate_per_s: float
    burst: float
    room: float
    at_s: float
    """When `room` was true."""

    def wait_s(self, now_s: float) -> int:
        """Return 0 when a request may come in now, else whole seconds until then, at least 1."""
        self.room = min(self.burst, self.room + max(now_s - self.at_s, 0.0) * self.rate_per_s)
        self.at_s = now_s
        return 0 if self.room >= 1 else max(1, math.ceil((1 - self.room) / self.rate_per_s))

    def take(self, records: int) -> None:
        """Take the room of records that were let in."""
        self.room -= records


class Buckets:
    """One bucket a key."""

    def __init__(self, *, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: dict[str, Bucket] = {}

    def of(self, key: str, now_s: float) -> Bucket:
        """Return a key's bucket, full at first."""
        if key not in self._buckets:
            self._buckets[key] = Bucket(self._rate_per_s, self._burst, self._burst, now_s)
        return self._buckets[key]
