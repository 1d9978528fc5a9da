"""What other weights would have meant: hand-worked rankings, correlations and losses."""

from datetime import date

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import ConfigError
from signals import backfill


def rows(*rewards: tuple[str, int | None, float | None]) -> pa.Table:
    return pa.table({
        "session_id": pa.array(["s"] * len(rewards), pa.string()),
        "turn_id": pa.array([turn for turn, _, _ in rewards], pa.string()),
        "policy_version": pa.array([policy for _, policy, _ in rewards], pa.int64()),
        "reward": pa.array([reward for _, _, reward in rewards], pa.float64()),
    })  # fmt: skip


def test_policies_are_ranked_by_both_rewards_on_the_same_turns() -> None:
    trained = rows(("a", 1, 0.8), ("b", 1, 0.6), ("c", 2, 0.4), ("d", 2, 0.2), ("e", 3, 0.1), ("f", 3, -0.1), ("g", 1, None))
    other = rows(("a", 1, 0.0), ("b", 1, 0.2), ("c", 2, 0.5), ("d", 2, 0.7), ("e", 3, -0.5), ("f", 3, None), ("g", 1, 0.9))
    found = backfill.compare(trained, other)
    assert (found.turns, found.only_trained, found.only_backfilled) == (5, 1, 1)
    ranks = [(p.policy_version, p.turns, p.trained_rank, p.backfilled_rank) for p in found.policies]
    assert ranks == [(1, 2, 1, 2), (2, 2, 2, 1), (3, 1, None, None)], "one turn is too few to be ranked"
    assert found.kendall_tau == -1.0
    assert found.swapped == ((1, 2),)
    assert found.policies[0].trained == pytest.approx(0.7)
    assert found.policies[0].backfilled == pytest.approx(0.1)
    assert found.sign_changes == pytest.approx(2 / 5), "a: 0.8 to 0.0, e: 0.1 to -0.5"


def test_the_same_reward_agrees_with_itself() -> None:
    same = rows(("a", 1, 0.8), ("b", 1, 0.6), ("c", 2, 0.4), ("d", 2, 0.2))
    found = backfill.compare(same, same)
    assert (found.correlation, found.kendall_tau, found.swapped, found.sign_changes) == (pytest.approx(1.0), 1.0, (), 0.0)


def test_what_cannot_be_said_is_none() -> None:
    found = backfill.compare(rows(("a", 1, 0.5)), rows(("a", 1, 0.5)))
    assert (found.turns, found.correlation, found.kendall_tau) == (1, None, None)
    nothing = backfill.compare(rows(), rows())
    assert (nothing.turns, nothing.policies, nothing.sign_changes) == (0, (), 0.0)


def test_an_empty_range_of_days_is_refused() -> None:
    with pytest.raises(ConfigError, match="--to is the day after the last"):
        backfill.check_range(date(2026, 3, 2), date(2026, 3, 2))


@given(st.permutations(range(1, 6)))
def test_tau_is_one_minus_the_share_of_turned_pairs_twice(order: list[int]) -> None:
    policies = [
        backfill.PolicyRank(policy_version=rank, turns=2, trained=-rank, backfilled=-now, trained_rank=rank, backfilled_rank=now)
        for rank, now in enumerate(order, start=1)
    ]
    tau, turned = backfill.agreement(policies)
    inversions = sum(order[i] > order[j] for i in range(5) for j in range(i + 1, 5))
    assert len(turned) == inversions
    assert tau == pytest.approx(1 - 2 * inversions / 10)
