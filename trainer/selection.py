"""Decide which rows of the table `samples` may be trained on: refuse, count, never repair. Pure.

Takes records as the lake gives them. Gives rows with unpacked tokens, and a count for every record that is not among them.
A log-probability is never padded, a missing reward never filled, a reply never tokenised again. In open systems exactly those
repairs are the most reported cause of collapse. Leaves out: advantages, packing.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int

LOGPROB_SLACK: Final = 1e-6
"""A log-softmax in fp32 can end this far above 0 for a token of probability 1."""


class Code(StrEnum):
    """Why a record is not trained on. Every record gets at most one, the first that applies in this order."""

    ORIGIN = "origin"
    """Benchmark or imported session."""
    NO_CONSENT = "no_consent"
    NOT_SCORED = "not_scored"
    """No reward (pending, no evidence, infra error, not trainable): masked, in no mean, never 0."""
    NONFINITE_REWARD = "nonfinite_reward"
    NO_TOKEN_IDS = "no_token_ids"
    LEN_MISMATCH = "len_mismatch"
    NONFINITE_LOGPROB = "nonfinite_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    ALL_ZERO_LOGPROBS = "all_zero_logprobs"
    UNKNOWN_POLICY = "unknown_policy"
    TOKENIZER_DRIFT = "tokenizer_drift"
    TRUNCATED_SAMPLING = "truncated_sampling"
    STALE_VERSIONS = "stale_versions"
    STALE_HOURS = "stale_hours"
    TOO_LONG = "too_long"
    CONSUMED = "consumed"
    """An ancestor of this update was already trained on it."""
    DUPLICATE = "duplicate"
    """The same completion came earlier in the window."""
    OVER_LIMIT = "over_limit"
    """More rows than `trainer.max_rows`; the oldest are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion to train on."""

    completion_id: str
    session_id: str
    turn_id: str
    turn_index: int
    user_key: str
    task_bucket: str | None
    language: str | None
    policy_version: int
    served_at: datetime
    prompt_ids: Int[np.ndarray, " P"]
    response_ids: Int[np.ndarray, " R"]
    mu: Float[np.ndarray, " R"]
    """Log-probabilities that the response was sampled with, nats."""
    temperature: float
    reward: float
    reward_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this update accepts."""

    tokenizer_sha: str
    vocabulary: int
    policy_version: int
    """The serving policy's version."""
    known_versions: Set[int] | None = None
    """Versions that the ledger knows; None: every version up to the serving one."""
    max_stale_versions: int
    max_stale_hours: float
    max_row_tokens: int
    max_rows: int
    origins: Set[str]
    consumed: Set[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows and the account of all others."""

    rows: list[Row]
    """In order of completion id, so that the result does not depend on the order of records."""
    rejected: dict[str, int]
    """Records by code; rows + rejected = records seen."""
    seen: int


def _ids(packed: bytes | None) -> np.ndarray | None:
    return None if packed is None or len(packed) % 4 else np.frombuffer(packed, "<i4")


def _token_fault(record: Mapping[str, Any], limits: Limits) -> Code | None:
    prompt, response, packed = _ids(record["prompt_ids"]), _ids(record["response_ids"]), record["behaviour_logprobs"]
    if prompt is None or response is None or not len(prompt) or not len(response):
        return Code.NO_TOKEN_IDS
    if packed is None or len(packed) != 4 * len(response):
        return Code.LEN_MISMATCH
    logprobs = np.frombuffer(packed, "<f4")
    if not np.isfinite(logprobs).all():
        return Code.NONFINITE_LOGPROB
    if (logprobs > LOGPROB_SLACK).any():
        return Code.POSITIVE_LOGPROB
    if not logprobs.any():
        return Code.ALL_ZERO_LOGPROBS
    outside = min(prompt.min(), response.min()) < 0 or max(prompt.max(), response.max()) >= limits.vocabulary
    if record["tokenizer_sha"] != limits.tokenizer_sha or outside:
        return Code.TOKENIZER_DRIFT
    return Code.TOO_LONG if len(prompt) + len(response) > limits.max_row_tokens else None


def _sampling_fault(record: Mapping[str, Any]) -> Code | None:
    temperature, top_p, top_k = record["temperature"], record["top_p"], record["top_k"]
    whole = (top_p is None or top_p >= 1) and not top_k
    return None if whole and temperature is not None and temperature > 0 else Code.TRUNCATED_SAMPLING


def _age_fault(record: Mapping[str, Any], limits: Limits, now: datetime) -> Code | None:
    version = record["policy_version"]
    if version is None or version > limits.policy_version:
        return Code.UNKNOWN_POLICY
    if limits.known_versions is not None and version not in limits.known_versions:
        return Code.UNKNOWN_POLICY
    if limits.policy_version - version > limits.max_stale_versions:
        return Code.STALE_VERSIONS
    return Code.STALE_HOURS if now - record["served_at"] > timedelta(hours=limits.max_stale_hours) else None


def fault(record: Mapping[str, Any], limits: Limits, *, now: datetime) -> Code | None:
    """Return the first reason not to train on a record, None when there is none."""
    if record["origin"] not in limits.origins:
        return Code.ORIGIN
    if record["consent"] != "train" or record["outcome_reason"] == "no_consent":
        return Code.NO_CONSENT
    if record["outcome"] != "scored" or record["reward"] is None:
        return Code.NOT_SCORED
    if not np.isfinite(record["reward"]):
        return Code.NONFINITE_REWARD
    found = _token_fault(record, limits) or _sampling_fault(record) or _age_fault(record, limits, now)
    if found is None and record["completion_id"] in limits.consumed:
        return Code.CONSUMED
    return found


def _row(record: Mapping[str, Any]) -> Row:
    return Row(
        prompt_ids=np.frombuffer(record["prompt_ids"], "<i4"), response_ids=np.frombuffer(record["response_ids"], "<i4"),
        mu=np.minimum(np.frombuffer(record["behaviour_logprobs"], "<f4"), 0.0),
        **{key: record[key] for key in (
            "completion_id", "session_id", "turn_id", "turn_index", "user_key", "task_bucket", "language", "policy_version",
            "served_at", "temperature", "reward", "reward_version",
        )},
    )  # fmt: skip


def select(records: Iterable[Mapping[str, Any]], limits: Limits, *, now: datetime) -> Selection:
    """Split records into rows to train on and counted rejections.

    Args:
        records: Rows of the table `samples` as dictionaries.
        limits: What this update accepts.
        now: Aware UTC; ages are taken from it.
    """
    rejected: Counter[str] = Counter()
    rows: dict[str, Row] = {}
    seen = 0
    for record in records:
        seen += 1
        code = fault(record, limits, now=now)
        if code is None and record["completion_id"] in rows:
            code = Code.DUPLICATE
        if code is not None:
            rejected[code.value] += 1
            continue
        rows[record["completion_id"]] = _row(record)
    kept = sorted(rows.values(), key=lambda row: (row.served_at, row.completion_id), reverse=True)[: limits.max_rows]
    if len(rows) > len(kept):
        rejected[Code.OVER_LIMIT.value] += len(rows) - len(kept)
    return Selection(rows=sorted(kept, key=lambda row: row.completion_id), rejected=dict(sorted(rejected.items())), seen=seen)
