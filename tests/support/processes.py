"""Whether a process still runs, for tests of what must not outlive what."""

import psutil


def runs(pid: int, *, started_s: float | None = None) -> bool:
    """Return whether a process executes; one that ended and that its parent has not collected yet does not.

    Args:
        pid: Process id.
        started_s: Its creation, epoch seconds: a later process that was given the same id does not count; None for whichever has the id.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and started_s in (None, process.create_time())
    except psutil.NoSuchProcess:
        return False
