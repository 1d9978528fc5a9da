"""Training samples: the contract of the signal stage (table `samples`, read by the trainer).

One row is one completion: the tokens that were sampled, the log-probabilities they were sampled with, and the reward of the
turn they belong to. Rows are facts; nothing is padded, filled or re-tokenised. A row without a reward has `reward` null and
says why in `outcome`. Token columns are packed binary (little-endian int32, float32) so that a reader maps them without
parsing: `numpy.frombuffer(row["prompt_ids"], "<i4")`.

Leaves out: how rewards come about (`rewards.py`, `credit.py`) and which rows a training step takes (trainer `selection.py`).
"""

from enum import StrEnum
from typing import Final

import pyarrow as pa


class Outcome(StrEnum):
    """What became of a turn. Every turn has exactly one."""

    SCORED = "scored"
    """There is evidence and it has matured: the turn has a reward."""
    PENDING = "pending"
    """The window is still open."""
    NO_EVIDENCE = "no_evidence"
    """The window closed and nothing was observed: stated, never 0."""
    NOT_TRAINABLE = "not_trainable"
    """Scored or not, it must not be trained on; `outcome_reason` says why."""
    INFRA_ERROR = "infra_error"
    """Our own machinery failed the turn; the policy is not to blame."""


NOT_TRAINABLE_REASONS: Final = ("no_consent", "no_token_ids", "truncated_sampling", "stale", "quarantined_release", "capture_error")

COMPONENTS: Final = (
    "edits_kept", "follow_up", "latency", "tool_calls", "effort", "conventions", "evidence", "explicit", "deferral",
)  # fmt: skip
"""Reward components in the order in which they are summed; each in [-1, 1], absent when there is no evidence for it."""

SAMPLES: Final = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False, metadata={"doc": "session"}),
        pa.field("turn_id", pa.string(), nullable=False, metadata={"doc": "turn"}),
        pa.field("completion_id", pa.string(), nullable=False, metadata={"doc": "completion: the tokens of one request"}),
        pa.field("turn_index", pa.int32(), nullable=False, metadata={"doc": "position of the turn in its session"}),
        pa.field("attempt", pa.int32(), nullable=False, metadata={"doc": "position of the completion in its turn"}),
        pa.field("user_key", pa.string(), nullable=False, metadata={"doc": "keyed hash of the user"}),
        pa.field("origin", pa.string(), nullable=False, metadata={"doc": "live, simulated, benchmark or imported"}),
        pa.field("arm", pa.string(), nullable=False, metadata={"doc": "experiment arm: serving, candidate, anchor or none"}),
        pa.field("consent", pa.string(), nullable=False, metadata={"doc": "train, measure or none: strictest seen in the turn"}),
        pa.field("task_bucket", pa.string(), metadata={"doc": "kind of task; null when unknown"}),
        pa.field("language", pa.string(), metadata={"doc": "ISO 639-1; null when unknown"}),
        pa.field("policy_version", pa.int64(), metadata={"doc": "policy that sampled it; null for foreign policies"}),
        pa.field("served_at", pa.timestamp("us", tz="UTC"), nullable=False, metadata={"doc": "when the completion was sampled"}),
        pa.field("tokenizer_sha", pa.string(), metadata={"doc": "sha256 of the tokenizer's files; null when unknown"}),
        pa.field("template_sha", pa.string(), metadata={"doc": "sha256 of the chat template; null when unknown"}),
        pa.field("prompt_ids", pa.binary(), metadata={"doc": "little-endian int32; null when not captured"}),
        pa.field("response_ids", pa.binary(), metadata={"doc": "little-endian int32; null when not captured"}),
        pa.field("behaviour_logprobs", pa.binary(), metadata={"doc": "little-endian float32, nats, one per response id"}),
        pa.field("temperature", pa.float64(), metadata={"doc": "sampling temperature; null when unknown"}),
        pa.field("top_p", pa.float64(), metadata={"doc": "nucleus share; 1 or null: the whole vocabulary"}),
        pa.field("top_k", pa.int32(), metadata={"doc": "0 or null: the whole vocabulary"}),
        pa.field("finish_reason", pa.string(), metadata={"doc": "stop, length, tool_calls or error; null when unknown"}),
        pa.field("tool_calls_valid", pa.bool_(), metadata={"doc": "all calls of this completion are valid; null without calls"}),
        pa.field("outcome", pa.string(), nullable=False, metadata={"doc": "one of Outcome, of the turn"}),
        pa.field("outcome_reason", pa.string(), metadata={"doc": "detail of the outcome, e.g. no_consent"}),
        pa.field("reward", pa.float64(), metadata={"doc": "reward of the turn after credit, in [-1, 1]; null when not scored"}),
        pa.field("components", pa.map_(pa.string(), pa.float64()), metadata={"doc": "present components of the turn, each in [-1, 1]"}),
        pa.field("reward_version", pa.string(), metadata={"doc": "digest of reward code and weights"}),
        pa.field("matured_at", pa.timestamp("us", tz="UTC"), metadata={"doc": "when the reward became final; null before"}),
    ]
)
"""Arrow schema of the table `samples`."""
