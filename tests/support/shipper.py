"""A shipper in processes of its own that can be killed at every point, for tests of convergence.

    python -m tests.support.shipper points HOME PARENT CANDIDATE          kill at each point in turn, run again, tell what came of it
    python -m tests.support.shipper ship HOME PARENT CANDIDATE TTL HOLD   ship once; waits while the file HOLD exists during the gate

A point is every opening of the ledger, every reading of its clock (inside its transactions), and every outside action. Killing is
a real SIGKILL of a real process; nothing of the code under test knows about it.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from deploy.config import Config
from deploy.release import ship
from deploy.release.config import ReleaseConfig
from deploy.release.evidence import Evidence
from deploy.release.ledger import Ledger
from pipelines.config import load
from pipelines.errors import StageError
from pipelines.storage import Home
from tests.support.release import GOOD_POOLED, attempt, score_row
from trainer import candidates

DEMO = Path(__file__).parents[2] / "infra" / "config" / "demo.toml"


def good_evidence(parent: str, candidate: str) -> Evidence:
    """Return evidence of an equal candidate."""
    rows = tuple(attempt(f"t{i}", number=n, solved=(i + n) % 2 == 0) for i in range(12) for n in range(2))
    return Evidence(
        serving=parent, candidate=candidate, anchor=parent, artifact=None, scores=tuple(score_row(f"u{i}") for i in range(12)),
        pooled=GOOD_POOLED, benchmark_serving=rows, benchmark_candidate=rows, benchmark_anchor=rows,
    )  # fmt: skip


def ship_once(
    home: Home, parent: str, candidate: str, *, point: Callable[[], None], ttl_s: float, hold: Path | None = None
) -> dict[str, object]:
    """Ship as the cycle does."""

    def clock() -> float:
        point()
        return time.time()

    def measure() -> Evidence:
        point()
        while hold is not None and hold.exists():
            time.sleep(0.02)
        return good_evidence(parent, candidate)

    def swapped(_: object) -> bool:
        point()
        return True

    ledger = Ledger(home.ledger, clock=clock)
    release = ReleaseConfig(lease_ttl_s=ttl_s, lease_renew_s=ttl_s / 4)
    with ship.holding(ledger, "ship", release) as lease:
        shipper = ship.Shipper(ledger=ledger, home=home, gate=load(Config, DEMO).gate, release=release, epoch=lease.epoch)
        return ship.run(shipper, parent, candidate, measure=measure, wait_for_gateway=swapped, now=datetime.now(UTC))


def _forked(home: Home, parent: str, candidate: str, *, kill_at: int) -> tuple[str, int]:
    """Ship in a child; returns how it ended and the points it passed (when it was not killed)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        passed = 0

        def point() -> None:
            nonlocal passed
            passed += 1
            if passed == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(lambda event, _: point() if event == "sqlite3.connect" else None)
        ship_once(home, parent, candidate, point=point, ttl_s=60)
        os.write(writing, str(passed).encode())
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    text = os.read(reading, 16).decode()
    os.close(reading)
    return ("killed" if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}"), int(text or 0)


def points(template: Home, parent: str, candidate: str) -> list[dict[str, object]]:
    """Kill a ship at each of its points, run it again, and look at the result."""
    found: list[dict[str, object]] = []
    total = 1
    number = 0
    while number <= total:
        home = Home(template.root.with_name(f"killed-{number}"))
        shutil.copytree(template.root, home.root)
        first, passed = _forked(home, parent, candidate, kill_at=number)
        total = passed or total
        second, _ = _forked(home, parent, candidate, kill_at=0)
        ledger = Ledger(home.ledger)
        pointer = ledger.serving()
        assert pointer is not None
        candidates.verify(home.store / pointer.checkpoint)
        kinds = [event.kind for event in ledger.history(1000)]
        found.append(
            {
                "point": number, "first": first, "second": second, "serving": pointer.checkpoint, "promotions": kinds.count("promoted"),
                "states": [item.state.value for item in ledger.ships()], "steps_done": kinds.count("step_done"),
            }
        )  # fmt: skip
        shutil.rmtree(home.root)
        number += 1
    return found


def main(words: list[str]) -> int:
    """Run a verb of this file."""
    verb, root, parent, candidate, *rest = words
    if verb == "points":
        print(json.dumps(points(Home(Path(root)), parent, candidate)))
        return 0
    try:
        found = ship_once(Home(Path(root)), parent, candidate, point=lambda: None, ttl_s=float(rest[0]), hold=Path(rest[1]))
    except StageError as error:
        print(error)
        return error.exit_code
    print(found["state"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
