"""One session of a simulated user: requests, turns, verdicts, and the events that tell them.

Takes: a plan (user, tasks, seeds) and the harness's parts. Gives: a `SessionRecord` for machines and a transcript for people.
The user's check is really executed in the sandbox after each turn; an edit that is not kept is really taken back. Simulated
time is compressed: what becomes of an edit at its horizons is known as soon as the user has decided, so all horizons are told
at once. An `EngineUnavailable` ends the session as infra_error; the policy is not to blame.

Leaves out: many sessions (`runner.py`), rates over them (`summary.py`).
"""

import random
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deploy.harness.agent import Agent, Ending, Message, Proposal, Turn, run_turn
from deploy.harness.client import Caller, GatewayClient
from deploy.harness.config import HarnessConfig, SimulationConfig
from deploy.harness.demonstrations import SYSTEM
from deploy.harness.edits import size, survival
from deploy.harness.sandbox import Sandbox
from deploy.harness.stamps import SessionLog, Sink
from deploy.harness.tasks import Split, Task, check_program, form_of, make_task
from deploy.harness.tools import put_back, read_text
from deploy.harness.users import Move, User, Verdict, draw_user, judge, next_move
from pipelines.errors import EngineUnavailable
from pipelines.events import (
    EditDecidedPayload,
    EditSurvivalPayload,
    InterruptedPayload,
    Origin,
    SessionEndedPayload,
    SessionStartedPayload,
    TestRunPayload,
    TurnStartedPayload,
)
from pipelines.reading import edit_expected
from signals import components, rewards
from signals.config import RewardsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts that all sessions of a run share."""

    client: GatewayClient
    sandbox: Sandbox
    sink: Sink
    key_of: Callable[[str], str]
    """Raw user name to keyed hash, as the gateway does it."""
    harness: HarnessConfig
    simulation: SimulationConfig
    api_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which session this is."""

    index: int
    attempt: int
    """0 the first time; a session that was cut off is done again under the next number and another id."""
    session_id: str
    seed: int
    split: Split
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn, in figures."""

    turn_id: str
    kind: str
    try_number: int
    """0: the request's first turn; 1: after the first complaint."""
    ending: str
    keeps: Literal["yes", "no"]
    fault: str | None
    form: str | None
    check: str
    calls: int
    invalid_calls: int
    edits_proposed: int
    edits_kept: int
    response_tokens: int
    seconds: float
    scored: bool = False
    """Whether the signal stage finds evidence in it (`signals.rewards.is_evidence`)."""


@dataclass(slots=True, kw_only=True)
class SessionRecord:
    """One session, in figures: a line of sessions.jsonl."""

    index: int
    attempt: int
    session_id: str
    user_key: str
    origin: str
    outcome: Literal["done", "abandoned", "infra_error"] = "done"
    policy_version: int | None = None
    arm: str = "none"
    kinds: list[str] = field(default_factory=list)
    requests: int = 0
    solved: int = 0
    """Requests whose edit was kept in the end."""
    follow_ups: int = 0
    """User messages after a session's first."""
    dissatisfied: int = 0
    """Those that asked again."""
    asks: int = 0
    """Turns that ended in a question without an edit."""
    turns: list[TurnRecord] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return the line: figures by turn and their sums."""
        sums = {
            name: sum(getattr(turn, name) for turn in self.turns)
            for name in ("calls", "invalid_calls", "edits_proposed", "edits_kept", "response_tokens")
        }
        scored = sum(turn.scored for turn in self.turns)
        return asdict(self) | sums | {"scored_turns": scored, "unscored_turns": len(self.turns) - scored}


@dataclass(slots=True, kw_only=True)
class _Run:
    """A session while it runs."""

    services: Services
    plan: Plan
    user: User
    rng: random.Random
    workspace: Path
    agent: Agent
    log: SessionLog
    record: SessionRecord
    conversation: list[Message]
    transcript: list[dict[str, Any]] = field(default_factory=list)
    judged: list[tuple[str, components.Evidence, bool]] = field(default_factory=list)
    """By turn: the user's message, the turn's facts but for its follow-up, interrupted."""


def run_session(services: Services, plan: Plan) -> tuple[SessionRecord, list[dict[str, Any]]]:
    """Play one session to its end.

    Returns:
        The figures, and the transcript: one entry a turn with message, steps and verdict.
    """
    user = draw_user(services.simulation, plan.seed, plan.index)
    key = services.key_of(user.name)
    log = SessionLog(sink=services.sink, session_id=plan.session_id, origin=plan.origin, user_key=key, consent=_consent(plan))
    rng = random.Random(f"session/{plan.seed}/{plan.index}")
    count = rng.randint(1, services.simulation.requests_per_session)
    tasks = [make_task(plan.split, plan.seed, plan.index * services.simulation.requests_per_session + at) for at in range(count)]
    surface = "simulator" if plan.origin == "simulated" else "benchmark"
    caller = Caller(
        session_id=plan.session_id,
        user=user.name,
        origin=plan.origin,
        consent=_consent(plan),
        surface=surface,
        task_bucket=f"edit.{tasks[0].kind}",
        api_key=services.api_key,
    )
    record = SessionRecord(index=plan.index, attempt=plan.attempt, session_id=plan.session_id, user_key=key, origin=plan.origin)
    log.add(SessionStartedPayload(surface=surface, task_bucket=caller.task_bucket, edits_observed=True))
    with tempfile.TemporaryDirectory(prefix="tidegate-session-") as folder:
        agent = Agent(
            client=services.client,
            sandbox=services.sandbox,
            workspace=Path(folder),
            log=log,
            caller=caller,
            config=services.harness,
            seed_key=f"{plan.split}/{plan.seed}/{plan.index}",
        )
        run = _Run(
            services=services,
            plan=plan,
            user=user,
            rng=rng,
            workspace=Path(folder),
            agent=agent,
            log=log,
            record=record,
            conversation=[{"role": "system", "content": SYSTEM}],
        )
        try:
            _bring_requests(run, tasks)
        except EngineUnavailable as error:
            record.outcome = "infra_error"
            run.transcript.append({"infra_error": str(error)})
        reasons: dict[str, Literal["done", "abandoned", "idle"]] = {"done": "done", "abandoned": "abandoned"}
        log.add(SessionEndedPayload(reason=reasons.get(record.outcome, "idle")))
        log.close()
        _mark_scored(run)
    record.policy_version, record.arm = log.policy_version, log.arm
    record.seconds = sum(turn.seconds for turn in record.turns)
    return record, run.transcript


def _consent(plan: Plan) -> Literal["train", "measure"]:
    """Simulated users let their sessions be trained on; what a benchmark measures is never trained on."""
    return "train" if plan.origin == "simulated" else "measure"


def _bring_requests(run: _Run, tasks: list[Task]) -> None:
    lead = ""
    for position, task in enumerate(tasks):
        run.record.requests += 1
        run.record.kinds.append(task.kind)
        put_back(run.workspace, task.path, task.text)
        move = _work_on(run, task, f"{lead} {task.message()}".strip(), requests_left=len(tasks) - position - 1)
        if move.kind == "abandon":
            run.record.outcome = "abandoned"
        if move.kind != "next_request":
            return
        lead = move.text


def _work_on(run: _Run, task: Task, message: str, *, requests_left: int) -> Move:
    """Bring one request and repeat it until the user keeps an edit or does something else."""
    try_number = 0
    language = "en"
    while True:
        if run.judged:
            run.record.follow_ups += 1
        turn, verdict = _turn(run, task, message, try_number=try_number, language=language)
        if verdict.keeps == "yes":
            run.record.solved += 1
        move = next_move(
            run.user,
            verdict,
            ticket=task.ticket,
            waited_s=turn.seconds,
            asked_again=try_number,
            requests_left=requests_left,
            config=run.services.simulation,
            rng=run.rng,
        )
        run.transcript[-1]["next"] = move.kind
        if move.kind != "ask_again":
            return move
        run.record.dissatisfied += 1
        again = f"{move.text}\n{task.message()}" if verdict.fault == "no_edit" else move.text
        message, language = again, run.user.language
        try_number += 1


def _turn(run: _Run, task: Task, message: str, *, try_number: int, language: str) -> tuple[Turn, Verdict]:
    turn_id = f"{run.plan.session_id}-t{len(run.judged)}"
    delay = round(run.rng.uniform(4_000, 30_000)) if run.judged else None
    started = TurnStartedPayload(
        turn_index=len(run.judged),
        message=message,
        message_chars=len(message),
        language=language,
        reply_delay_ms=delay,
        edit_expected=edit_expected(message),
    )
    run.log.add(started, turn_id=turn_id)
    run.conversation.append({"role": "user", "content": message})
    before = read_text(run.workspace, task.path)
    try:
        turn = run_turn(run.agent, run.conversation, turn_id=turn_id, turn_index=len(run.judged), patience_s=run.user.patience_s)
    except EngineUnavailable:
        run.log.add(InterruptedPayload(by="system"), turn_id=turn_id)
        raise
    after = read_text(run.workspace, task.path)
    edited: Literal["yes", "no"] = "yes" if after != before else "no"
    check = _check(run, task) if edited == "yes" else "failed"
    form = form_of(before, after, task.ticket) if edited == "yes" else None
    verdict = judge(run.user, edited=edited, check=check, form=form)
    tests = tested(check) if edited == "yes" else None
    if tests is not None:
        run.log.add(tests, turn_id=turn_id)
    edits = settle(
        run.log, turn.proposals, run.workspace, kept=verdict.keeps, turn_id=turn_id, horizons_s=run.services.simulation.horizons_s
    )
    if verdict.keeps == "no" and edited == "yes":
        put_back(run.workspace, task.path, before)
    run.judged.append((message, facts_of(turn, edits, message=message, tests=tests), turn.ending is Ending.INTERRUPTED))
    run.record.asks += turn.ending is Ending.ASKED
    run.record.turns.append(_figures(turn, task, verdict, try_number=try_number, form=form, check=check))
    run.transcript.append(_retell(message, turn, verdict, form=form, check=check))
    return turn, verdict


def _check(run: _Run, task: Task) -> Literal["passed", "failed"]:
    mark = uuid.uuid4().hex
    finished = run.services.sandbox.run(["python3", "-c", check_program(task)], run.workspace, stdin=f"{mark}\n".encode())
    lines = finished.output.rstrip().splitlines()
    return "passed" if finished.exit_code == 0 and lines and lines[-1] == mark else "failed"


def settle(
    log: SessionLog,
    proposals: tuple[Proposal, ...],
    workspace: Path,
    *,
    kept: Literal["yes", "no"],
    turn_id: str,
    horizons_s: tuple[int, ...],
) -> tuple[components.Edit, ...]:
    """Keep or take back a turn's edits, and tell what became of them at every horizon.

    Returns:
        The edits as the signal stage will see them.
    """
    if kept == "no":
        for proposal in reversed(proposals):
            put_back(workspace, proposal.edit.path, proposal.edit.before)
    settled: list[components.Edit] = []
    for proposal in proposals:
        decision: Literal["accepted", "undone"] = "accepted" if kept == "yes" else "undone"
        log.add(EditDecidedPayload(edit_id=proposal.edit_id, decision=decision), turn_id=turn_id)
        four_gram, no_revert = survival(proposal.edit, read_text(workspace, proposal.edit.path))
        for horizon_s in horizons_s:
            told = EditSurvivalPayload(
                edit_id=proposal.edit_id, horizon_s=horizon_s, survival_four_gram=four_gram, survival_no_revert=no_revert
            )
            log.add(told, turn_id=turn_id)
        chars = size(proposal.edit).chars_added
        settled.append(components.Edit(edit_id=proposal.edit_id, chars_added=chars, decision=decision, survival=no_revert))
    return tuple(settled)


def _figures(turn: Turn, task: Task, verdict: Verdict, *, try_number: int, form: str | None, check: str) -> TurnRecord:
    return TurnRecord(
        turn_id=turn.turn_id,
        kind=task.kind,
        try_number=try_number,
        ending=turn.ending,
        keeps=verdict.keeps,
        fault=verdict.fault,
        form=form,
        check=check,
        calls=turn.calls,
        invalid_calls=turn.invalid_calls,
        edits_proposed=len(turn.proposals),
        edits_kept=len(turn.proposals) if verdict.keeps == "yes" else 0,
        response_tokens=turn.response_tokens,
        seconds=turn.seconds,
    )


def _retell(message: str, turn: Turn, verdict: Verdict, *, form: str | None, check: str) -> dict[str, Any]:
    steps = [
        {"policy": step.reply.content, "tools": [{"class": answer.result_class, "text": answer.text} for answer in step.answers]}
        for step in turn.steps
    ]
    judgement = {"kept": verdict.keeps, "fault": verdict.fault, "check": check, "form": form}
    return {"turn_id": turn.turn_id, "user": message, "steps": steps, "ending": turn.ending, "seconds": turn.seconds} | judgement


def tested(outcome: Literal["passed", "failed"]) -> TestRunPayload:
    """Return the test run of a task whose one check failed before."""
    passed = int(outcome == "passed")
    return TestRunPayload(passed_before=0, failed_before=1, passed_after=passed, failed_after=1 - passed)


def facts_of(turn: Turn, edits: tuple[components.Edit, ...], *, message: str, tests: TestRunPayload | None) -> components.Evidence:
    """Return a turn as the signal stage will see it once its window has closed, if nobody comes back."""
    checks = components.Checks()
    if tests is not None:
        checks = components.Checks(
            passed_before=tests.passed_before, failed_before=tests.failed_before, passed_after=tests.passed_after,
            failed_after=tests.failed_after,
        )  # fmt: skip
    return components.Evidence(
        edits=edits, edits_observed=True, edit_expected=edit_expected(message), completions=len(turn.steps), calls=turn.calls,
        invalid_calls=turn.invalid_calls, checks=checks,
    )  # fmt: skip


def is_scored(facts: components.Evidence) -> bool:
    """Ask the signal stage's own rules whether a turn's facts are evidence."""
    return rewards.is_evidence(components.components(facts, RewardsConfig()))


def _mark_scored(run: _Run) -> None:
    """Say of each turn whether it will have a reward, now that its follow-up is known."""
    marked: list[TurnRecord] = []
    for at, turn in enumerate(run.record.turns):
        message, facts, interrupted = run.judged[at]
        if at + 1 < len(run.judged):
            said = run.judged[at + 1][0]
            reply = components.FollowUp(message=said, previous=message, stack_traces=0, reply_delay_ms=None, interrupted=interrupted)
            facts = replace(facts, follow_up=reply, followed_up=True)
        marked.append(replace(turn, scored=is_scored(facts)))
    run.record.turns = marked
