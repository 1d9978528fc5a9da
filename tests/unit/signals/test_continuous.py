"""When the continuous job distils: after a batch, or when windows may have closed by themselves, and never after it was told to stop."""

import threading
import time

from signals.job import _work_comes
from signals.stream import Totals


def test_a_batch_is_work_at_once_and_silence_is_work_after_a_while() -> None:
    stop, totals = threading.Event(), Totals(batches=3)
    begun = time.monotonic()
    assert _work_comes(stop, totals, 2, 60.0)
    assert time.monotonic() - begun < 1
    assert _work_comes(stop, totals, 3, 0.1)


def test_a_batch_that_comes_while_waiting_ends_the_wait() -> None:
    stop, totals = threading.Event(), Totals(batches=0)
    timer = threading.Timer(0.2, lambda: setattr(totals, "batches", 1))
    timer.start()
    begun = time.monotonic()
    assert _work_comes(stop, totals, 0, 60.0)
    assert time.monotonic() - begun < 10
    timer.join()


def test_nothing_is_work_once_told_to_stop() -> None:
    stop = threading.Event()
    stop.set()
    assert not _work_comes(stop, Totals(batches=5), 0, 60.0)
    assert not _work_comes(stop, Totals(), 0, 60.0)
