"""Many sessions at once against one gateway, resumable.

Takes: services, a number, a seed, a folder. Gives: in the folder `sessions.jsonl` (a line a finished session), `transcripts/`
(for people), `attempts.jsonl` (what was begun) and `run.json` (what this run is). The same command again does what is missing: a session
that was cut off is done anew under a new id, because its first half was sampled and sent and cannot be taken back; a session that our own
machinery failed is done again too. Leaves out: what a session is (`session.py`), rates (`summary.py`).
"""

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.harness.session import Plan, Services, SessionRecord, run_session
from deploy.harness.tasks import Split
from pipelines.errors import ConfigError, EngineUnavailable
from pipelines.events import Origin, new_id
from pipelines.storage import exclusive, write_atomic

SESSIONS: Final = "sessions.jsonl"
ATTEMPTS: Final = "attempts.jsonl"
TRANSCRIPTS: Final = "transcripts"
RUN: Final = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Which sessions a run holds."""

    sessions: int
    seed: int
    origin: Origin
    split: Split
    concurrency: int


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a last line that was cut off by a crash is left out, a missing file is empty."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def finished_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the latest line of each session by index; those that our machinery failed count as not done."""
    rows = {row["index"]: row for row in read_lines(folder / SESSIONS)}
    return {index: row for index, row in rows.items() if row["outcome"] != "infra_error"}


class _Lines:
    """Appends whole lines from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
            with path.open("ab") as file:  # a crash cut the last line; keep the next one whole
                file.write(b"\n")

    def add(self, row: dict[str, Any]) -> None:
        with self._lock, self._path.open("ab") as file:
            file.write(json.dumps(row, default=str).encode() + b"\n")


def _claim(folder: Path, plan: RunPlan) -> None:
    """Make the folder this run's, or check that it is.

    Raises:
        ConfigError: It holds another run.
    """
    identity = {"seed": plan.seed, "origin": plan.origin, "split": plan.split}
    path = folder / RUN
    if path.exists():
        found = json.loads(path.read_bytes())
        if any(found.get(name) != value for name, value in identity.items()):
            raise ConfigError(f"{folder} holds another run ({found}); choose another --out or the same --seed and --origin")
        return
    write_atomic(path, json.dumps(identity).encode())


def run_sessions(
    services: Services, plan: RunPlan, folder: Path, *, advance: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run the sessions that the folder does not hold yet.

    Args:
        services: Shared parts.
        plan: Which sessions.
        folder: Where results go; also where they are resumed from.
        advance: Told 1 for each session that is done, those of earlier runs included.

    Returns:
        One row a session, by index; those that failed now have outcome infra_error.

    Raises:
        Busy: The folder is in use.
        ConfigError: The folder holds another run.
        EngineUnavailable: No session of this call got an answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", what=f"a run in {folder}"):
        _claim(folder, plan)
        (folder / TRANSCRIPTS).mkdir(exist_ok=True)
        done = {index: row for index, row in finished_rows(folder).items() if index < plan.sessions}
        advance(len(done))
        begun: dict[int, int] = {}
        for entry in read_lines(folder / ATTEMPTS):
            begun[entry["index"]] = max(begun.get(entry["index"], -1), entry["attempt"])
        missing = [
            Plan(
                index=index,
                attempt=begun.get(index, -1) + 1,
                session_id=f"{plan.origin}-{new_id()}",
                seed=plan.seed,
                split=plan.split,
                origin=plan.origin,
            )
            for index in range(plan.sessions)
            if index not in done
        ]
        fresh = _run_missing(services, missing, folder, concurrency=plan.concurrency, advance=advance)
    if missing and all(row["outcome"] == "infra_error" for row in fresh.values()):
        raise EngineUnavailable(
            f"none of {len(missing)} sessions got an answer from the gateway; the same command again resumes in {folder}"
        )
    return [row for _, row in sorted((done | fresh).items())]


def _run_missing(
    services: Services, missing: Iterable[Plan], folder: Path, *, concurrency: int, advance: Callable[[int], None]
) -> dict[int, dict[str, Any]]:
    sessions, attempts = _Lines(folder / SESSIONS), _Lines(folder / ATTEMPTS)

    def one(plan: Plan) -> SessionRecord:
        attempts.add({"index": plan.index, "attempt": plan.attempt, "session_id": plan.session_id})
        record, transcript = run_session(services, plan)
        text = json.dumps({"session": record.row(), "turns": transcript}, default=str, ensure_ascii=False, indent=1)
        write_atomic(folder / TRANSCRIPTS / f"{plan.session_id}.json", text.encode())
        sessions.add(record.row())
        return record

    rows: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="session") as pool:
        waiting: set[Future[SessionRecord]] = {pool.submit(one, plan) for plan in missing}
        try:
            while waiting:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    record = future.result()
                    rows[record.index] = record.row()
                    advance(1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return rows
