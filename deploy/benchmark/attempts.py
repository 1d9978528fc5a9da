"""One attempt at one task folder: set up, act, then verify.

Takes: a task, who acts, the sandbox. Gives: an `AttemptRow`: pass, fail, or infra_error when our own machinery failed; never silently 0.
The policy acts through the very loop, tools and sandbox that serve sessions. Tests are mounted, read-only, only after it has
stopped and with all its processes gone, in a fresh run of the sandbox. There is no network and no git history to look an answer up in.
Leaves out: many attempts (`runner.py`).
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deploy.benchmark.folders import FolderTask
from deploy.harness.agent import Agent, Ending, Turn, run_turn
from deploy.harness.client import Caller
from deploy.harness.config import HarnessConfig
from deploy.harness.demonstrations import SYSTEM
from deploy.harness.sandbox import Limits, Mount, Sandbox, limits_of
from deploy.harness.session import Services, facts_of, is_scored, settle, tested
from deploy.harness.stamps import SessionLog
from pipelines.errors import EngineUnavailable
from pipelines.events import InterruptedPayload, SessionEndedPayload, SessionStartedPayload, TurnStartedPayload, new_id
from pipelines.reading import edit_expected

Outcome = Literal["pass", "fail", "infra_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt, in figures: a line of results.jsonl (read by `deploy.release`)."""

    suite: str
    task: str
    attempt: int
    user_key: str
    """Unit of every rate: attempts of one user, or at one task folder, resemble each other."""
    outcome: Outcome
    solved: bool
    turns: int = 0
    scored_turns: int = 0
    unscored_turns: int = 0
    calls: int = 0
    invalid_calls: int = 0
    asks: int = 0
    edits_proposed: int = 0
    edits_kept: int = 0
    response_tokens: int = 0
    seconds: float = 0.0
    session_id: str = ""
    policy_version: int | None = None
    detail: str = ""
    """Why infra_error; empty otherwise."""

    def row(self) -> dict[str, Any]:
        """Return the line."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The folders of one attempt."""

    workspace: Path
    agent_logs: Path
    """Where the policy's last words are put (answer.txt), for tasks that ask a question."""
    verifier_logs: Path


Actor = Callable[[FolderTask, Stage], None]
"""Acts on a task in place of a policy."""


def verify(task: FolderTask, stage: Stage, sandbox: Sandbox, harness: HarnessConfig) -> tuple[Outcome, str]:
    """Run the task's tests.

    Returns:
        The outcome, and why it is an infra_error ("" otherwise).
    """
    limits = _limits(task, harness)
    mounts = {
        "/tests": Mount(source=task.folder / "tests"),
        "/logs/agent": Mount(source=stage.agent_logs),
        "/logs/verifier": Mount(source=stage.verifier_logs, writable="yes"),
    }
    finished = sandbox.run(["sh", "/tests/test.sh"], stage.workspace, mounts=mounts, limits=limits)
    if finished.stopped is not None:
        return "infra_error", f"the tests passed their limit of {finished.stopped.replace('_', ' ')}"
    reward = stage.verifier_logs / "reward.txt"
    if not reward.is_file():
        return "infra_error", f"the tests wrote no reward (exit code {finished.exit_code}): {finished.output.strip()[:200]}"
    text = reward.read_text(encoding="utf-8", errors="replace").strip()
    if text not in ("0", "1"):
        return "infra_error", f"the tests wrote the reward {text[:20]!r}; 0 or 1 is known"
    return ("pass" if text == "1" else "fail"), ""


def _limits(task: FolderTask, harness: HarnessConfig) -> Limits:
    return replace(limits_of(harness), wall_s=task.verifier_timeout_s, memory_bytes=task.memory_bytes)


def oracle(sandbox: Sandbox, harness: HarnessConfig) -> Actor:
    """Act by the task's own solution; proves that the task can be solved."""

    def act(task: FolderTask, stage: Stage) -> None:
        mounts = {"/solution": Mount(source=task.folder / "solution"), "/logs/agent": Mount(source=stage.agent_logs, writable="yes")}
        sandbox.run(["sh", "/solution/solve.sh"], stage.workspace, mounts=mounts, limits=_limits(task, harness))

    return act


def null(_task: FolderTask, _stage: Stage) -> None:
    """Do nothing; a task that passes so measures nothing."""


def prepare(task: FolderTask, folder: Path) -> Stage:
    """Copy the task's files into fresh folders."""
    stage = Stage(workspace=folder / "workspace", agent_logs=folder / "agent", verifier_logs=folder / "verifier")
    shutil.copytree(task.workspace, stage.workspace, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    stage.agent_logs.mkdir()
    stage.verifier_logs.mkdir()
    return stage


def try_task(task: FolderTask, actor: Actor, sandbox: Sandbox, harness: HarnessConfig) -> tuple[Outcome, str]:
    """Let an actor that is no policy act, then verify."""
    with tempfile.TemporaryDirectory(prefix="tidegate-attempt-") as folder:
        stage = prepare(task, Path(folder))
        actor(task, stage)
        return verify(task, stage, sandbox, harness)


def attempt_task(task: FolderTask, attempt: int, services: Services, *, seed: int) -> tuple[AttemptRow, list[dict[str, Any]]]:
    """Let the policy try a task once.

    Args:
        task: The task.
        attempt: From 0; with `seed` it decides the sampling seeds, so that two policies are sampled alike.
        services: Client, sandbox, events.
        seed: Of the run.

    Returns:
        The row, and the conversation for people.
    """
    session_id = f"benchmark-{new_id()}"
    user = f"benchmark-{task.name}"
    key = services.key_of(user)
    log = SessionLog(sink=services.sink, session_id=session_id, origin="benchmark", user_key=key, consent="measure")
    caller = Caller(
        session_id=session_id,
        user=user,
        origin="benchmark",
        consent="measure",
        surface="benchmark",
        task_bucket=f"benchmark.{task.suite}",
        api_key=services.api_key,
    )
    row = AttemptRow(
        suite=task.suite, task=task.name, attempt=attempt, user_key=key, outcome="infra_error", solved=False, session_id=session_id
    )
    conversation: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
    turn_id = f"{session_id}-t0"
    log.add(SessionStartedPayload(surface="benchmark", task_bucket=caller.task_bucket, edits_observed=True))
    opening = TurnStartedPayload(
        turn_index=0, message=task.instruction, message_chars=len(task.instruction), language="en",
        edit_expected=edit_expected(task.instruction),
    )  # fmt: skip
    log.add(opening, turn_id=turn_id)
    with tempfile.TemporaryDirectory(prefix="tidegate-attempt-") as folder:
        stage = prepare(task, Path(folder))
        agent = Agent(
            client=services.client,
            sandbox=services.sandbox,
            workspace=stage.workspace,
            log=log,
            caller=caller,
            config=services.harness,
            seed_key=f"folder/{seed}/{task.name}/{attempt}",
        )
        try:
            turn = run_turn(agent, conversation, turn_id=turn_id, turn_index=0, patience_s=task.agent_timeout_s)
        except EngineUnavailable as error:
            log.add(InterruptedPayload(by="system"), turn_id=turn_id)
            row = replace(row, detail=str(error))
        else:
            answer = turn.steps[-1].reply.content if turn.steps and turn.ending in (Ending.ANSWERED, Ending.ASKED, Ending.CUT) else ""
            (stage.agent_logs / "answer.txt").write_text(answer, encoding="utf-8", errors="replace")
            row = _score(row, task, turn, stage, services, log=log, turn_id=turn_id)
    log.add(SessionEndedPayload(reason="idle" if row.outcome == "infra_error" else "done"))
    log.close()
    return replace(row, policy_version=log.policy_version), conversation


def _score(row: AttemptRow, task: FolderTask, turn: Turn, stage: Stage, services: Services, *, log: SessionLog, turn_id: str) -> AttemptRow:
    """Verify and tell: the one who brings a benchmark task keeps an edit when the tests pass."""
    outcome, detail = verify(task, stage, services.sandbox, services.harness)
    tests = None
    if outcome == "infra_error":
        log.add(InterruptedPayload(by="system"), turn_id=turn_id)
    else:
        tests = tested("passed" if outcome == "pass" else "failed")
        log.add(tests, turn_id=turn_id)
    kept: Literal["yes", "no"] = "yes" if outcome == "pass" else "no"
    edits = settle(log, turn.proposals, stage.workspace, kept=kept, turn_id=turn_id, horizons_s=services.simulation.horizons_s)
    scored = is_scored(facts_of(turn, edits, message=task.instruction, tests=tests))
    return replace(
        row,
        outcome=outcome,
        solved=outcome == "pass",
        turns=1,
        scored_turns=int(scored),
        unscored_turns=int(not scored),
        calls=turn.calls,
        invalid_calls=turn.invalid_calls,
        asks=int(turn.ending is Ending.ASKED),
        edits_proposed=len(turn.proposals),
        edits_kept=len(turn.proposals) if kept == "yes" else 0,
        response_tokens=turn.response_tokens,
        seconds=turn.seconds,
        detail=detail,
    )


def unsound(tasks: Sequence[FolderTask], sandbox: Sandbox, harness: HarnessConfig) -> list[str]:
    """Say which tasks measure nothing: the oracle does not pass, or doing nothing does."""
    faults: list[str] = []
    for task in tasks:
        outcome, detail = try_task(task, oracle(sandbox, harness), sandbox, harness)
        if outcome != "pass":
            faults.append(f"{task.name}: its own solution ends in {outcome} {detail}".rstrip())
        outcome, detail = try_task(task, null, sandbox, harness)
        if outcome != "fail":
            faults.append(f"{task.name}: doing nothing ends in {outcome} {detail}".rstrip())
    return faults
