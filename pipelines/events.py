"""Session events: the contract of the first stage (topic `session-events`, keyed by session id).

An event is a fact that a client or the gateway saw. It says what happened, never what it is worth: outcomes, evidence and
rewards are made of events later and can be made again. On the wire an event is one JSON object, `Envelope` fields at the top
and the type's own fields under `payload`. Token ids and log-probabilities travel packed (base64 of little-endian int32 and
float32), because a JSON array of 256 numbers costs more to parse than the rest of the event.

Evolution: within a schema version fields are only added, always with a default. A committed sample file for every version
must load for ever (tests/support/events/).

Leaves out: transport (`kafka.py`), bytes (`codec.py`), privacy (`redaction.py`).
"""

import base64
import os
import time
import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SCHEMA_VERSION: Final = 1

Origin = Literal["live", "simulated", "benchmark", "imported"]
Consent = Literal["train", "measure", "none"]


class ResultClass(StrEnum):
    """How a tool call ended. `unknown_tool` and `invalid_arguments` are the policy's doing; the rest are not."""

    OK = "ok"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    UNEXPECTED_ENVIRONMENT = "unexpected_environment"
    PROVIDER_ERROR = "provider_error"
    USER_ABORTED = "user_aborted"
    TIMEOUT = "timeout"


class Payload(BaseModel):
    """Fields of one event type. Unknown fields are ignored here and survive in the raw bytes."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)


class Client(Payload):
    """Who recorded the event."""

    name: str
    """Program that recorded it: gateway, tracker, an importer's name."""
    version: str = "0"
    """Its version."""


class SessionStartedPayload(Payload):
    """A person, a simulated user or an importer opened a session."""

    surface: str
    """Where: cli, ide, api, simulator, or the importer's name."""
    task_bucket: str | None = None
    """Kind of task, for baselines and medians; None when unknown."""
    repository: str | None = None
    """Keyed fingerprint of the repository, never its name."""
    edits_observed: bool | None = None
    """Whether the client records every change that the policy makes, so that a turn without an edit event had none. None or false: it may
    have changed things unseen, and the absence of an edit means nothing."""


class SessionEndedPayload(Payload):
    """The session is over; what is still open can be decided."""

    reason: Literal["done", "abandoned", "idle"]
    """done: the user finished; abandoned: left in the middle; idle: nothing happened for long."""


class TurnStartedPayload(Payload):
    """A user message that opens a turn."""

    turn_index: int = Field(ge=0)
    """Position in the session, from 0."""
    message: str | None = None
    """Redacted text; None without consent."""
    message_chars: int = Field(ge=0)
    """Length of the message before redaction, characters."""
    language: str | None = None
    """ISO 639-1, None when unknown."""
    stack_traces: int = 0
    """Stack traces pasted into the message."""
    diffs: int = 0
    """Diffs pasted into the message."""
    images: int = 0
    """Images attached."""
    reply_delay_ms: int | None = None
    """Time since the previous turn's last completion; None on the first turn."""
    edit_expected: float | None = Field(default=None, ge=0, le=1)
    """P(the message asks for something to be changed), from the message alone (`reading.edit_expected`); None when not read."""


class CompletionPayload(Payload):
    """Tokens sampled in one request, exactly as sampled."""

    completion_id: str
    """Identity of the request, unique in the session."""
    step: int = Field(default=0, ge=0)
    """Position of this completion inside its turn."""
    model: str = ""
    """Name of the model as the provider gives it; empty when unknown."""
    prompt_ids: str | None = None
    """Packed int32; None where the provider gives no token ids."""
    response_ids: str | None = None
    """Packed int32, as sampled, end token included; None where the provider gives no token ids."""
    behaviour_logprobs: str | None = None
    """Packed float32, nats, at logits / temperature, one per response id."""
    temperature: float | None = None
    """Sampling temperature; None when unknown."""
    top_p: float | None = None
    """Nucleus share, 1 or None: the whole vocabulary."""
    top_k: int | None = None
    """0 or None: the whole vocabulary."""
    tokenizer_sha: str | None = None
    """sha256 of the tokenizer's files; None when unknown."""
    template_sha: str | None = None
    """sha256 of the chat template; None when unknown."""
    finish_reason: str | None = None
    """stop, length, tool_calls, error."""
    ttft_ms: float | None = None
    """Time to the first token, ms; None when unknown."""
    duration_ms: float | None = None
    """Time from request to last token, ms, tools excluded; None when unknown."""
    prompt_tokens: int = 0
    """Tokens of the prompt, cached ones included."""
    response_tokens: int = 0
    """Tokens sampled."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had cached."""
    capture_error: str | None = None
    """Why this completion cannot be trained on; None when the capture is complete."""
    ends_in_question: bool | None = None
    """Whether the text for the user ends in a question; None when not read or when the completion calls tools."""
    refused: bool | None = None
    """Whether the text for the user declines what was asked (`declining.declines`); None when not read or when tools are called."""
    claims: int | None = Field(default=None, ge=0)
    """Files that the text for the user speaks of, each once; None when not read or when the completion calls tools."""
    claims_unread: int | None = Field(default=None, ge=0)
    """Of those, files that no earlier tool call named and no earlier result showed."""


class ToolCallPayload(Payload):
    """The policy called a tool, well or badly formed."""

    tool_call_id: str
    """Identity of the call, unique in the session."""
    completion_id: str | None = None
    """Completion that made it; None when unknown."""
    name: str
    """Name of the tool as the policy wrote it."""
    arguments_valid: bool
    """Whether the tool exists and its arguments fit its schema."""
    arguments_hash: str | None = None
    """Keyed hash of the arguments, to see repeats."""
    parallel_group: int | None = None
    """Calls of one completion share it; None when the call was alone."""
    kind: Literal["read", "search", "edit", "run", "other"] | None = None
    """What the tool does; None when the client does not say."""
    path_hash: str | None = None
    """Keyed hash of the file or thing that the call names, as in `edit_proposed`; None when it names none."""
    changes_before: int | None = Field(default=None, ge=0)
    """Changes that the turn had made before this call: the same call again after a change is no repeat. None when unknown."""
    independent: bool | None = None
    """Whether the call looked something up in a later completion although nothing in its arguments came from an earlier result, so that
    it could have gone out in parallel (`reading.independent`); None when not read."""
    destructive: bool | None = None
    """Whether the command that the call runs takes away what nothing can make again (`commands.destroys`); the command itself is not kept.
    None when the call runs no command that can be seen."""


class ToolResultPayload(Payload):
    """A tool answered, or could not."""

    tool_call_id: str
    """The call that is answered."""
    result_class: ResultClass
    """How it ended."""
    duration_ms: float | None = None
    """Run time of the tool, ms; None when unknown."""
    exit_code: int | None = None
    """Exit code of a command; None for other tools."""
    output_bytes: int | None = None
    """Size of the output, bytes; None when unknown."""


class EditProposedPayload(Payload):
    """A tool call changed a file, or asked to."""

    edit_id: str
    """Identity of the edit, unique in the session."""
    tool_call_id: str | None = None
    """Call that made it; None when it came without one."""
    path_hash: str
    """Keyed hash of the path."""
    lines_added: int = 0
    """Lines added."""
    lines_removed: int = 0
    """Lines removed."""
    chars_added: int = 0
    """Characters added."""
    chars_removed: int = 0
    """Characters removed."""
    sketch: str | None = None
    """Packed int32 pairs (hash, count) of the added text's character 4-grams; None when not taken."""


class EditDecidedPayload(Payload):
    """What the user did with an edit at once."""

    edit_id: str
    """The edit decided on."""
    decision: Literal["accepted", "rejected", "partly", "undone"]
    """What the user did; partly: kept some of it."""


class EditSurvivalPayload(Payload):
    """How much of an edit still stands `horizon_s` after it was made."""

    edit_id: str
    """The edit measured."""
    horizon_s: int = Field(ge=0)
    """Time since the edit, seconds."""
    survival_four_gram: float = Field(ge=0, le=1)
    """Similarity of the edit's text and the text now in its place, in [0, 1]."""
    survival_no_revert: float = Field(ge=0, le=1)
    """Share that was not taken back, in [0, 1]."""
    branch_changed: bool = False
    """Whether another branch is checked out, so that the measurement says nothing."""
    milestone: Literal["commit"] | None = None
    """The event at which it was measured where that is no fixed horizon; None at a horizon."""
    estimated: bool = False
    """Whether the figures were estimated from the edit's sketch, because its text was not at hand; no_revert is then a lower bound."""


class FeedbackPayload(Payload):
    """A person said what they thought."""

    source: str
    """Where it was given: thumb, survey, or a client's own word."""
    score: float = Field(ge=-1, le=1)
    """From -1 (bad) to 1 (good)."""


class InterruptedPayload(Payload):
    """Something was stopped before it was done."""

    by: Literal["user", "policy", "system"]
    """Who stopped it."""
    target: str = "turn"
    """What was stopped: turn, or a tool's name."""


class LintDeltaPayload(Payload):
    """Lint issues before and after the turn's edits."""

    issues_before: int
    """Issues before the turn's edits."""
    issues_after: int
    """Issues after them."""
    rules_checked: int | None = Field(default=None, ge=0)
    """Project rules that were checked on the turn's edits; None when none were."""
    rules_broken: int | None = Field(default=None, ge=0)
    """Of those, rules that the edits break."""


class TestRunPayload(Payload):
    """Tests before and after the turn's edits."""

    passed_before: int | None = None
    """Tests passed before the turn's edits; None when not run."""
    failed_before: int | None = None
    """Tests failed before; None when not run."""
    passed_after: int
    """Tests passed after."""
    failed_after: int
    """Tests failed after."""


class EvaluationPayload(Payload):
    """A label from elsewhere, often late (OpenTelemetry `gen_ai.evaluation.result`)."""

    name: str
    """Name of the evaluation."""
    score_value: float | None = None
    """Its number, in its own scale; None without one."""
    score_label: str | None = None
    """Its word; None without one."""
    explanation: str | None = None
    """Its reason, redacted; None without one or without consent."""
    response_id: str | None = None
    """Completion it is about; None when it is about the turn."""


class Envelope(BaseModel):
    """Fields that every event has."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    event_id: str = Field(min_length=1, max_length=64)
    """UUIDv7; the same event sent twice has the same id."""
    schema_version: int = SCHEMA_VERSION
    """Version of this contract."""
    session_id: str = Field(min_length=1, max_length=128)
    """The session; key of the Kafka record."""
    turn_id: str | None = Field(default=None, max_length=128)
    """None on session_started and session_ended."""
    occurred_at_ms: int = Field(ge=0)
    """Client clock, UTC epoch milliseconds."""
    recorded_at_ms: int = Field(ge=0)
    """Recorder clock, UTC epoch milliseconds."""
    origin: Origin
    """Who was on the other side: a person, a simulated user, a benchmark task, or a foreign transcript."""
    policy_version: int | None = Field(default=None, ge=0)
    """Monotonic id of the policy that served the turn; None for foreign policies."""
    arm: str = "serving"
    """Experiment arm: serving, candidate, anchor, or none."""
    user_key: str
    """Keyed hash of the user."""
    consent: Consent = "measure"
    """What the user allows: training, measuring only, or neither (text is not kept then)."""
    client: Client
    """Who recorded it."""


class SessionStarted(Envelope):
    type: Literal["session_started"] = "session_started"
    payload: SessionStartedPayload


class SessionEnded(Envelope):
    type: Literal["session_ended"] = "session_ended"
    payload: SessionEndedPayload


class TurnStarted(Envelope):
    type: Literal["turn_started"] = "turn_started"
    payload: TurnStartedPayload


class Completion(Envelope):
    type: Literal["completion"] = "completion"
    payload: CompletionPayload


class ToolCall(Envelope):
    type: Literal["tool_call"] = "tool_call"
    payload: ToolCallPayload


class ToolResult(Envelope):
    type: Literal["tool_result"] = "tool_result"
    payload: ToolResultPayload


class EditProposed(Envelope):
    type: Literal["edit_proposed"] = "edit_proposed"
    payload: EditProposedPayload


class EditDecided(Envelope):
    type: Literal["edit_decided"] = "edit_decided"
    payload: EditDecidedPayload


class EditSurvival(Envelope):
    type: Literal["edit_survival"] = "edit_survival"
    payload: EditSurvivalPayload


class Feedback(Envelope):
    type: Literal["feedback"] = "feedback"
    payload: FeedbackPayload


class Interrupted(Envelope):
    type: Literal["interrupted"] = "interrupted"
    payload: InterruptedPayload


class LintDelta(Envelope):
    type: Literal["lint_delta"] = "lint_delta"
    payload: LintDeltaPayload


class TestRun(Envelope):
    type: Literal["test_run"] = "test_run"
    payload: TestRunPayload

    __test__: ClassVar[bool] = False


class Evaluation(Envelope):
    type: Literal["evaluation"] = "evaluation"
    payload: EvaluationPayload


TestRunPayload.__test__ = False  # type: ignore[attr-defined]

Event = Annotated[
    SessionStarted | SessionEnded | TurnStarted | Completion | ToolCall | ToolResult | EditProposed | EditDecided
    | EditSurvival | Feedback | Interrupted | LintDelta | TestRun | Evaluation,
    Field(discriminator="type"),
]  # fmt: skip
EVENT: Final[TypeAdapter[Event]] = TypeAdapter(Event)

PAYLOADS: Final[dict[str, type[Payload]]] = {
    "session_started": SessionStartedPayload,
    "session_ended": SessionEndedPayload,
    "turn_started": TurnStartedPayload,
    "completion": CompletionPayload,
    "tool_call": ToolCallPayload,
    "tool_result": ToolResultPayload,
    "edit_proposed": EditProposedPayload,
    "edit_decided": EditDecidedPayload,
    "edit_survival": EditSurvivalPayload,
    "feedback": FeedbackPayload,
    "interrupted": InterruptedPayload,
    "lint_delta": LintDeltaPayload,
    "test_run": TestRunPayload,
    "evaluation": EvaluationPayload,
}
"""Payload model of each event type. A field name used by two types has the same JSON type in both, so that one flat
column schema can hold them all (held by a test)."""


def new_id(now_ms: int | None = None) -> str:
    """Return a UUIDv7: 48 bits of milliseconds, then random bits, so that ids sort by time.

    Source: RFC 9562, section 5.7.
    """
    milliseconds = int(time.time() * 1000) if now_ms is None else now_ms
    value = (milliseconds & (2**48 - 1)) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return str(uuid.UUID(int=value))


def pack_ids(ids: Sequence[int] | np.ndarray) -> str:
    """Pack token ids: base64 of little-endian int32."""
    return base64.b64encode(np.asarray(ids, dtype="<i4").tobytes()).decode("ascii")


def unpack_ids(text: str | bytes) -> np.ndarray:
    """Unpack `pack_ids`: [N] int32.

    Raises:
        ValueError: Not base64, or not a whole number of int32.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | np.ndarray) -> str:
    """Pack log-probabilities in nats: base64 of little-endian float32."""
    return base64.b64encode(np.asarray(logprobs, dtype="<f4").tobytes()).decode("ascii")


def unpack_logprobs(text: str | bytes) -> np.ndarray:
    """Unpack `pack_logprobs`: [N] float32, nats.

    Raises:
        ValueError: Not base64, or not a whole number of float32.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
