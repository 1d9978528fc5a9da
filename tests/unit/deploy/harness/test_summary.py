"""Rates and intervals against hand-worked numbers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.harness.summary import ratio_interval, summarise, wilson


def test_wilson_agrees_with_a_published_value() -> None:
    # 1 of 10 at 95 %: [0.0179, 0.4042] (Newcombe 1998, Table I)
    low, high = wilson(1, 10)
    assert (low, high) == (pytest.approx(0.0179, abs=1e-4), pytest.approx(0.4042, abs=1e-4))
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_holds_the_proportion(successes: int, more: int) -> None:
    n = successes + more
    low, high = wilson(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0


def test_the_bootstrap_knows_that_requests_of_one_user_resemble_each_other() -> None:
    # 20 users who always or never keep, 10 edits each: as wide as 20 coins, not as 200
    pairs = [(10.0 * (user % 2), 10.0) for user in range(20)]
    low, high = ratio_interval(pairs, random.Random(0))
    assert high - low > 0.3
    assert wilson(100, 200)[1] - wilson(100, 200)[0] < 0.15


def row(user: str, kept: int, proposed: int, **more):
    turn = {
        "try_number": 0,
        "keeps": "yes" if kept else "no",
        "form": "ref",
        "seconds": 2.0,
        "fault": None if kept else "convention",
    }
    base = {
        "outcome": "done", "user_key": user, "policy_version": 1, "response_tokens": 5, "edits_kept": kept, "edits_proposed": proposed,
        "dissatisfied": 0, "invalid_calls": 1, "calls": 4, "asks": 0, "solved": kept, "requests": 1, "unscored_turns": 0, "turns": [turn],
    }  # fmt: skip
    return base | more


def test_rates_are_sums_over_sums_and_infra_errors_stay_out() -> None:
    rows = [row("a", 1, 1), row("b", 0, 3), row("c", 5, 5, outcome="infra_error")]
    result = summarise(rows)
    assert (result["sessions"], result["infra_errors"]) == (3, 1)
    assert (result["kept_edits"]["rate"], result["kept_edits"]["n"], result["kept_edits"]["users"]) == (0.25, 4, 2)
    assert result["invalid_calls"]["rate"] == 0.25
    assert result["kept_edits"]["interval"] == "wilson"
    assert result["latency_s"] == {"median": 2.0, "p95": 2.0, "n": 2}
    assert result["verdicts"] == {"convention": 1, "kept": 1}


def test_without_data_there_is_no_rate() -> None:
    result = summarise([])
    assert result["kept_edits"]["rate"] is None
    assert (result["kept_edits"]["low"], result["kept_edits"]["high"]) == (0.0, 1.0)
