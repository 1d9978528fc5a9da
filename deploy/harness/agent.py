"""The agent loop: one turn, from a user's message to an answer, bounded in steps, tokens and patience.

Takes: a conversation, a workspace, a place in a session. Gives: `Turn`, with how it ended and every step; the conversation
grows by what was said. Assistant text goes back verbatim, so each prompt is a token prefix of the next. Every call is answered and
recorded, also one that is no call at all. Leaves out: what the user makes of it (`session.py`).
"""

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from deploy.harness.client import Caller, ContextFull, GatewayClient, Place, Reply, Sampling
from deploy.harness.config import HarnessConfig
from deploy.harness.edits import Edit, size, sketch
from deploy.harness.sandbox import Sandbox
from deploy.harness.stamps import SessionLog
from deploy.harness.tools import KINDS, Answer, Call, call_tool, check_call
from pipelines.commands import destroys_by_call
from pipelines.events import EditProposedPayload, InterruptedPayload, ResultClass, ToolCallPayload, ToolResultPayload
from pipelines.reading import independent

Message = dict[str, Any]


class Ending(StrEnum):
    """How a turn ended."""

    ANSWERED = "answered"
    """The policy said something and called no tool."""
    ASKED = "asked"
    """It ended in a question and had edited nothing."""
    STUCK = "stuck"
    """Completion after completion called tools and got no call right."""
    STEP_LIMIT = "step_limit"
    TOKEN_LIMIT = "token_limit"
    CONTEXT_LIMIT = "context_limit"
    """The conversation no longer fits what the model can read."""
    CUT = "cut"
    """Its last text ran into the token limit of one completion."""
    INTERRUPTED = "interrupted"
    """The user stopped waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An edit and its id."""

    edit_id: str
    edit: Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One completion and the answers to its calls."""

    reply: Reply
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What happened between a user's message and the end of the answer."""

    turn_id: str
    ending: Ending
    steps: tuple[Step, ...]
    proposals: tuple[Proposal, ...]
    seconds: float

    @property
    def calls(self) -> int:
        """Tool calls, well formed or not."""
        return sum(len(step.answers) for step in self.steps)

    @property
    def invalid_calls(self) -> int:
        """Calls that failed by the policy's own doing."""
        return sum(answer.invalid for step in self.steps for answer in step.answers)

    @property
    def response_tokens(self) -> int:
        """Sampled tokens."""
        return sum(step.reply.response_tokens for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What a session's turns have in common."""

    client: GatewayClient
    sandbox: Sandbox
    workspace: Path
    log: SessionLog
    caller: Caller
    config: HarnessConfig
    seed_key: str
    """Sampling seeds follow from it, the turn and the step, so that two policies are sampled alike."""
    now_s: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class _Progress:
    said_before: int = 0
    """Messages of the conversation up to the user's."""
    steps: list[Step] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    tokens: int = 0


def sampling_seed(seed_key: str, turn_index: int, step: int) -> int:
    """Return a 31-bit seed for one completion."""
    return int.from_bytes(hashlib.sha256(f"{seed_key}/{turn_index}/{step}".encode()).digest()[:4], "big") >> 1


def run_turn(agent: Agent, conversation: list[Message], *, turn_id: str, turn_index: int, patience_s: float = float("inf")) -> Turn:
    """Let the policy act until it answers or a bound is met.

    Args:
        agent: The session's parts.
        conversation: Ends with the user's message; grows by the policy's texts and the tools' answers.
        turn_id: Of this turn.
        turn_index: Of this turn, from 0.
        patience_s: The user interrupts between steps after this long.

    Raises:
        EngineUnavailable: The gateway did not answer (see `GatewayClient.complete`).
    """
    started = agent.now_s()
    progress = _Progress(said_before=len(conversation))
    ending = Ending.STEP_LIMIT
    for step in range(agent.config.max_steps):
        left = agent.config.max_turn_tokens - progress.tokens
        if left <= 0:
            ending = Ending.TOKEN_LIMIT
            break
        sampling = Sampling(
            temperature=agent.config.temperature,
            max_tokens=min(agent.config.max_tokens, left),
            seed=sampling_seed(agent.seed_key, turn_index, step),
        )
        place = Place(turn_id=turn_id, turn_index=turn_index, step=step)
        try:
            reply = agent.client.complete(conversation, sampling, caller=agent.caller, place=place)
        except ContextFull:
            ending = Ending.CONTEXT_LIMIT
            break
        agent.log.stamp(reply.policy_version, reply.arm)
        progress.tokens += reply.response_tokens
        conversation.append(_assistant(reply))
        impatient = agent.now_s() - started > patience_s and bool(reply.calls)
        _answer_calls(agent, reply, conversation, progress, turn_id=turn_id, aborted="yes" if impatient else "no")
        if impatient:
            agent.log.add(InterruptedPayload(by="user"), turn_id=turn_id)
            ending = Ending.INTERRUPTED
            break
        if not reply.calls:
            ending = _ending(reply, progress)
            break
        if _stuck(progress.steps, agent.config.max_invalid_steps):
            ending = Ending.STUCK
            break
    return Turn(
        turn_id=turn_id,
        ending=ending,
        steps=tuple(progress.steps),
        proposals=tuple(progress.proposals),
        seconds=agent.now_s() - started,
    )


def _assistant(reply: Reply) -> Message:
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    return message


def _stuck(steps: Sequence[Step], limit: int) -> bool:
    """Return whether each of the last `limit` completions called tools and got not one call right."""
    last = steps[-limit:]
    return len(last) == limit and all(step.answers and all(answer.invalid for answer in step.answers) for step in last)


def _ending(reply: Reply, progress: _Progress) -> Ending:
    if reply.finish_reason == "length":
        return Ending.CUT
    if not progress.proposals and reply.content.rstrip().endswith("?"):
        return Ending.ASKED
    return Ending.ANSWERED


def _answer_calls(agent: Agent, reply: Reply, conversation: list[Message], progress: _Progress, *, turn_id: str, aborted: str) -> None:
    answers: list[Answer] = []
    for call in reply.calls:
        answer = _abort(call) if aborted == "yes" else call_tool(call, agent.workspace, agent.sandbox)
        answers.append(answer)
        _record(agent.log, call, answer, reply=reply, turn_id=turn_id, place=_place(call, conversation, progress))
        if answer.edit is not None:
            proposal = Proposal(edit_id=f"edit-{uuid.uuid4().hex}", edit=answer.edit)
            progress.proposals.append(proposal)
            _record_edit(agent.log, proposal, tool_call_id=call.tool_call_id, turn_id=turn_id)
        conversation.append({"role": "tool", "tool_call_id": call.tool_call_id, "content": answer.text})
    progress.steps.append(Step(reply=reply, answers=tuple(answers)))


def _abort(call: Call) -> Answer:
    """Answer a call that the user stopped; a call that was no call stays the policy's fault."""
    arguments, fault, message = check_call(call)
    if arguments is None:
        return Answer(result_class=fault, text=message, arguments_valid=False)
    return Answer(result_class=ResultClass.USER_ABORTED, text="the user stopped this")


def _keyed(log: SessionLog, text: str) -> str:
    """Hash a text with the session id as key: enough to see repeats inside a session, nothing across sessions."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=log.session_id.encode()[:64], digest_size=16).hexdigest()


def _place(call: Call, conversation: list[Message], progress: _Progress) -> dict[str, Any]:
    """Say where a call stands among the turn's changes and results."""
    kind, independently = KINDS.get(call.name), None
    if progress.steps and kind in ("read", "search"):
        results = [answer.text for step in progress.steps for answer in step.answers]
        known = "\n".join(str(message.get("content") or "") for message in conversation[: progress.said_before])
        independently = independent(call.arguments, results=results, known=known) if results else None
    return {"kind": kind, "changes_before": len(progress.proposals), "independent": independently}


def _named(call: Call) -> str | None:
    arguments, _, _ = check_call(call)
    return None if arguments is None else arguments.get("path")


def _record(log: SessionLog, call: Call, answer: Answer, *, reply: Reply, turn_id: str, place: dict[str, Any]) -> None:
    path = _named(call)
    log.add(
        ToolCallPayload(
            tool_call_id=call.tool_call_id,
            completion_id=reply.completion_id,
            name=call.name,
            arguments_valid=answer.arguments_valid,
            arguments_hash=_keyed(log, call.arguments),
            parallel_group=0 if len(reply.calls) > 1 else None,
            path_hash=None if path is None else _keyed(log, path),
            destructive=destroys_by_call(call.name, call.arguments) if answer.arguments_valid else None,
            **place,
        ),
        turn_id=turn_id,
    )
    log.add(
        ToolResultPayload(
            tool_call_id=call.tool_call_id,
            result_class=answer.result_class,
            duration_ms=answer.duration_ms,
            exit_code=answer.exit_code,
            output_bytes=answer.output_bytes,
        ),
        turn_id=turn_id,
    )


def _record_edit(log: SessionLog, proposal: Proposal, *, tool_call_id: str, turn_id: str) -> None:
    counts = size(proposal.edit)
    log.add(
        EditProposedPayload(
            edit_id=proposal.edit_id,
            tool_call_id=tool_call_id,
            path_hash=_keyed(log, proposal.edit.path),
            lines_added=counts.lines_added,
            lines_removed=counts.lines_removed,
            chars_added=counts.chars_added,
            chars_removed=counts.chars_removed,
            sketch=sketch(proposal.edit),
        ),
        turn_id=turn_id,
    )
