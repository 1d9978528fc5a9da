"""A checkpoint's benchmark: every task folder several times, and a suite of held-out simulated sessions.

Takes: services, attempts, a seed, a folder. Gives: `results.jsonl`, one row an attempt, paired between two checkpoints by (suite,
task, attempt) because the same seed gives the same tasks, users and sampling seeds. The sessions (suite `edits`) are there for
n: invalid calls, asks, edits and turns without a score cannot be told apart on ten folders. There `solved` means that the check of
the session's first request passed, however the policy cited the ticket: the benchmark asks whether a policy can do the
work, not what users like. Resumable: attempts with a verdict stay, infra errors are tried again.

Leaves out: comparing two checkpoints (`deploy.release`).
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.benchmark.attempts import AttemptRow, Outcome, attempt_task, unsound
from deploy.benchmark.folders import FolderTask
from deploy.harness.runner import RunPlan, read_lines, run_sessions
from deploy.harness.session import Services
from deploy.harness.summary import wilson
from pipelines.errors import ConfigError, ContractViolation, EngineUnavailable
from pipelines.storage import exclusive, write_atomic

RESULTS: Final = "results.jsonl"
EDITS: Final = "edits"
"""Suite of the simulated sessions."""
PLAN: Final = "benchmark.json"
TRANSCRIPTS: Final = "transcripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkPlan:
    """What a benchmark run holds."""

    tasks: tuple[FolderTask, ...]
    attempts: int
    sessions: int
    seed: int
    concurrency: int


def session_row(row: Mapping[str, Any]) -> AttemptRow:
    """Turn a session of the suite `edits` into an attempt."""
    turns: Sequence[Mapping[str, Any]] = row["turns"]
    first: list[Mapping[str, Any]] = []
    for at, turn in enumerate(turns):
        if at > 0 and turn["try_number"] == 0:
            break
        first.append(turn)
    solved = any(turn["check"] == "passed" for turn in first)
    verdict: Outcome = "infra_error" if row["outcome"] == "infra_error" else "pass" if solved else "fail"
    return AttemptRow(
        suite=EDITS,
        task=f"session-{row['index']:03d}",
        attempt=0,
        user_key=row["user_key"],
        outcome=verdict,
        solved=verdict == "pass",
        turns=len(turns),
        scored_turns=row["scored_turns"],
        unscored_turns=row["unscored_turns"],
        calls=row["calls"],
        invalid_calls=row["invalid_calls"],
        asks=row["asks"],
        edits_proposed=row["edits_proposed"],
        edits_kept=row["edits_kept"],
        response_tokens=row["response_tokens"],
        seconds=row["seconds"],
        session_id=row["session_id"],
        policy_version=row["policy_version"],
        detail="the gateway did not answer" if verdict == "infra_error" else "",
    )


def _claim(folder: Path, plan: BenchmarkPlan) -> None:
    path = folder / PLAN
    if path.exists():
        found = json.loads(path.read_bytes())
        if found != {"seed": plan.seed}:
            raise ConfigError(f"{folder} holds another benchmark ({found}); choose another --out or the same --seed")
        return
    write_atomic(path, json.dumps({"seed": plan.seed}).encode())


def run_benchmark(
    services: Services, plan: BenchmarkPlan, folder: Path, *, advance: Callable[[int], None] = lambda _: None
) -> list[AttemptRow]:
    """Run what the folder does not hold yet and write `results.jsonl`.

    Args:
        services: Shared parts; the sandbox must support mounts as bubblewrap does.
        plan: What to run.
        folder: Where results go and are resumed from.
        advance: Told 1 for each attempt or session that is done.

    Returns:
        All rows, folders first.

    Raises:
        Busy: The folder is in use.
        ConfigError: It holds another benchmark, or the sandbox is `none`: tests cannot be kept from the policy there.
        ContractViolation: A task is unsound: its oracle does not pass, or doing nothing does.
        EngineUnavailable: No attempt got an answer.
    """
    if services.harness.sandbox == "none":
        raise ConfigError("the benchmark needs a sandbox: without one the policy could read the tests")
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", what=f"a benchmark in {folder}"):
        _claim(folder, plan)
        if faults := unsound(plan.tasks, services.sandbox, services.harness):
            raise ContractViolation(f"benchmark tasks measure nothing: {'; '.join(faults)}")
        rows = _run_folders(services, plan, folder, advance=advance)
        if plan.sessions:
            sessions = RunPlan(sessions=plan.sessions, seed=plan.seed, origin="benchmark", split="held_out", concurrency=plan.concurrency)
            rows += [session_row(row) for row in run_sessions(services, sessions, folder / "sessions", advance=advance)]
        if all(row.outcome == "infra_error" for row in rows):
            raise EngineUnavailable(f"none of {len(rows)} benchmark attempts got an answer ({rows[0].detail}); the same command resumes")
        write_atomic(folder / RESULTS, b"".join(json.dumps(row.row()).encode() + b"\n" for row in rows))
    return rows


def _run_folders(services: Services, plan: BenchmarkPlan, folder: Path, *, advance: Callable[[int], None]) -> list[AttemptRow]:
    path = folder / "attempts.jsonl"
    transcripts = folder / TRANSCRIPTS
    transcripts.mkdir(exist_ok=True)
    done = {(row["task"], row["attempt"]): AttemptRow(**row) for row in read_lines(path) if row["outcome"] != "infra_error"}
    wanted = [(task, attempt) for task in plan.tasks for attempt in range(plan.attempts)]
    lock = threading.Lock()

    def one(task: FolderTask, attempt: int) -> AttemptRow:
        row, conversation = attempt_task(task, attempt, services, seed=plan.seed)
        text = json.dumps({"row": row.row(), "conversation": conversation}, ensure_ascii=False, indent=1)
        write_atomic(transcripts / f"{task.name}-{attempt}.json", text.encode("utf-8", "replace"))
        with lock, path.open("ab") as file:
            file.write(b"\n" if file.tell() and not path.read_bytes().endswith(b"\n") else b"")
            file.write(json.dumps(row.row()).encode() + b"\n")
        return row

    missing = [(task, attempt) for task, attempt in wanted if (task.name, attempt) not in done]
    advance(len(wanted) - len(missing))
    with ThreadPoolExecutor(max_workers=plan.concurrency, thread_name_prefix="attempt") as pool:
        waiting: set[Future[AttemptRow]] = {pool.submit(one, task, attempt) for task, attempt in missing}
        try:
            while waiting:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    row = future.result()
                    done[(row.task, row.attempt)] = row
                    advance(1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [done[(task.name, attempt)] for task, attempt in wanted]


def summarise(rows: Sequence[AttemptRow]) -> dict[str, Any]:
    """Sum up by suite: pass rate with Wilson's interval, infra errors, and rates over calls, turns and edits."""
    suites: dict[str, list[AttemptRow]] = defaultdict(list)
    for row in rows:
        suites[row.suite].append(row)
    result: dict[str, Any] = {}
    for suite, members in sorted(suites.items()):
        good = [row for row in members if row.outcome != "infra_error"]
        passed = sum(row.solved for row in good)
        low, high = wilson(passed, len(good))

        def share(numerator: str, denominator: str, over: Sequence[AttemptRow] = good) -> float | None:
            n = sum(getattr(row, denominator) for row in over)
            return sum(getattr(row, numerator) for row in over) / n if n else None

        result[suite] = {
            "n": len(good),
            "infra_errors": len(members) - len(good),
            "passed": passed,
            "pass_rate": passed / len(good) if good else None,
            "low": low,
            "high": high,
            "invalid_calls": share("invalid_calls", "calls"),
            "unscored_turns": share("unscored_turns", "turns"),
            "asks": share("asks", "turns"),
            "edits_kept": share("edits_kept", "edits_proposed"),
        }
    return result


def describe(summary: Mapping[str, Any]) -> str:
    """Write the summary as a table for people."""

    def percent(value: float | None) -> str:
        return "     -" if value is None else f"{value:6.1%}"

    lines = [f"{'suite':<16}{'pass':>8}   95 % interval   n  infra  invalid  unscored    asks    kept"]
    for suite, figures in summary.items():
        interval = f"[{figures['low']:.2f}, {figures['high']:.2f}]"
        lines.append(
            f"{suite:<16}{percent(figures['pass_rate']):>8}   {interval:<13} {figures['n']:>3}  {figures['infra_errors']:>5}  "
            f"{percent(figures['invalid_calls'])}    {percent(figures['unscored_turns'])}  {percent(figures['asks'])}  "
            f"{percent(figures['edits_kept'])}"
        )
    return "\n".join(lines)
