"""Every rejection has its code, and records always add up."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signals.samples import SAMPLES
from trainer.selection import Code, Limits, select

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
LIMITS = Limits(
    tokenizer_sha="tok", vocabulary=100, policy_version=5, max_stale_versions=2, max_stale_hours=24, max_row_tokens=16, max_rows=100,
    origins=frozenset({"live", "simulated"}), consumed=frozenset({"old"}),
)  # fmt: skip


def ids(*values):
    return np.asarray(values, "<i4").tobytes()


def logprobs(*values):
    return np.asarray(values, "<f4").tobytes()


def record(**changes):
    return {
        "session_id": "s", "turn_id": "t", "completion_id": "c", "turn_index": 0, "attempt": 0, "user_key": "u", "origin": "live",
        "arm": "serving", "consent": "train", "task_bucket": None, "language": None, "policy_version": 5, "served_at": NOW,
        "tokenizer_sha": "tok", "template_sha": "tem", "prompt_ids": ids(1, 2), "response_ids": ids(3, 4),
        "behaviour_logprobs": logprobs(-0.5, 0.0), "temperature": 1.0, "top_p": 1.0, "top_k": 0, "finish_reason": "stop",
        "tool_calls_valid": None, "outcome": "scored", "outcome_reason": None, "reward": 0.5, "components": {}, "reward_version": "r",
        "matured_at": NOW,
    } | changes  # fmt: skip


CASES = {
    Code.ORIGIN: {"origin": "benchmark"},
    Code.NO_CONSENT: {"consent": "measure"},
    Code.NOT_SCORED: {"outcome": "pending", "reward": None},
    Code.NONFINITE_REWARD: {"reward": float("nan")},
    Code.NO_TOKEN_IDS: {"prompt_ids": None},
    Code.LEN_MISMATCH: {"behaviour_logprobs": logprobs(-0.5)},
    Code.NONFINITE_LOGPROB: {"behaviour_logprobs": logprobs(-0.5, float("-inf"))},
    Code.POSITIVE_LOGPROB: {"behaviour_logprobs": logprobs(-0.5, 0.1)},
    Code.ALL_ZERO_LOGPROBS: {"behaviour_logprobs": logprobs(0.0, 0.0)},
    Code.UNKNOWN_POLICY: {"policy_version": 6},
    Code.TOKENIZER_DRIFT: {"tokenizer_sha": "another"},
    Code.TRUNCATED_SAMPLING: {"top_p": 0.9},
    Code.STALE_VERSIONS: {"policy_version": 2},
    Code.STALE_HOURS: {"served_at": NOW - timedelta(hours=25)},
    Code.TOO_LONG: {"prompt_ids": ids(*range(15))},
    Code.CONSUMED: {"completion_id": "old"},
}


@pytest.mark.parametrize("code", CASES, ids=lambda code: code.value)
def test_each_fault_has_its_own_code(code):
    found = select([record(**CASES[code])], LIMITS, now=NOW)
    assert found.rows == []
    assert found.rejected == {code.value: 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"behaviour_logprobs": None}, {"policy_version": None}, {"top_k": 50}, {"temperature": 0.0}, {"temperature": None},
        {"response_ids": ids(3, 100)}, {"response_ids": ids(3, -1)}, {"response_ids": b""}, {"reward": float("inf")}, {"reward": None},
        {"outcome_reason": "no_consent"},
    ],
    ids=str,
)  # fmt: skip
def test_further_ways_to_be_unfit_are_refused_too(changes):
    assert select([record(**changes)], LIMITS, now=NOW).rows == []


def test_a_sound_row_is_kept_as_it_was_sampled():
    row = select([record()], LIMITS, now=NOW).rows[0]
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4]
    assert row.mu.tolist() == [-0.5, 0.0]
    assert row.reward == 0.5


def test_a_version_the_ledger_does_not_know_is_refused():
    limits = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"known_versions": frozenset({5})})
    assert select([record(policy_version=4)], limits, now=NOW).rejected == {"unknown_policy": 1}


def test_the_same_completion_twice_is_trained_once_and_the_oldest_rows_go_over_the_limit():
    limits = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_rows": 2})
    rows = [record(completion_id=str(k), served_at=NOW - timedelta(hours=k)) for k in range(3)]
    found = select([*rows, rows[0]], limits, now=NOW)
    assert [row.completion_id for row in found.rows] == ["0", "1"]
    assert found.rejected == {"duplicate": 1, "over_limit": 1}


def test_an_empty_window_is_an_empty_selection():
    found = select([], LIMITS, now=NOW)
    assert (found.rows, found.rejected, found.seen) == ([], {}, 0)


def test_a_record_of_the_contract_round_trips_through_arrow():
    table = pa.Table.from_pylist([record()], schema=SAMPLES)
    assert len(select(table.to_pylist(), LIMITS, now=NOW).rows) == 1


@given(st.lists(st.sampled_from([{}, *CASES.values()]), max_size=20), st.randoms(use_true_random=False))
def test_every_record_is_a_row_or_a_counted_rejection_whatever_the_order(faults, random):
    records = [{**record(completion_id=f"c{k}"), **fault} for k, fault in enumerate(faults)]
    found = select(records, LIMITS, now=NOW)
    assert len(found.rows) + sum(found.rejected.values()) == found.seen == len(records)
    shuffled = records[:]
    random.shuffle(shuffled)
    again = select(shuffled, LIMITS, now=NOW)
    assert Counter(row.completion_id for row in again.rows) == Counter(row.completion_id for row in found.rows)
    assert again.rejected == found.rejected
