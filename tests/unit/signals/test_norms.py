"""Norms: what is usual, frozen, with a user's own turns left out."""

from typing import Any

import pytest

from signals.components import Edit, Evidence, components
from signals.config import RewardsConfig
from signals.norms import NO_NORMS, Norms, freeze, load
from signals.rewards import normalised, reward_version, scalar

CONFIG = RewardsConfig()


def turn(number: int, **facts: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("edits_kept", "follow_up", "latency", "conventions", "explicit", "sampling_ms"))
    where = {"surface": "cli", "language": "en", "task_bucket": "edit", "user_key": f"u{number % 2}"}
    return {"session_id": "s", "turn_id": f"t{number:03}"} | where | empty | facts


def frozen(turns: list[dict[str, Any]], min_turns: int = 4) -> Norms:
    return load(freeze(turns, min_turns=min_turns), min_turns=min_turns)


def test_mean_deviation_median_and_tenth_percentile_are_those_of_the_stratum() -> None:
    norms = frozen([turn(at, edits_kept=value, sampling_ms=100.0 * (at + 1)) for at, value in enumerate((-1.0, 0.0, 1.0, 1.0, 1.0))])
    mean, sd = norms.scale_of("cli", "en", "edit")["edits_kept"]
    assert mean == pytest.approx(0.4)
    assert sd == pytest.approx((0.2 * (1.4**2 + 0.4**2 + 3 * 0.6**2)) ** 0.5)
    assert norms.median_ms("edit", CONFIG) == norms.median_ms(None, CONFIG) == 300.0
    # Sorted -1, 0, 1, 1, 1: place .4 between -1 and 0.
    assert norms.abandoned("cli", "en", "edit") == pytest.approx(-0.6)


def test_a_stratum_with_too_few_turns_uses_the_norms_of_all() -> None:
    few = [turn(at, task_bucket="rare", edits_kept=-1.0) for at in range(2)]
    many = [turn(at + 10, edits_kept=1.0) for at in range(6)]
    norms = frozen(few + many)
    assert norms.scale_of("cli", "en", "rare")["edits_kept"][0] == pytest.approx(0.5)
    assert norms.scale_of("cli", "en", "edit")["edits_kept"] == (1.0, 0.0)


def test_what_a_deferral_is_charged_leaves_the_own_users_edits_out() -> None:
    turns = [turn(at, edits_kept=1.0 if at % 2 else -1.0) for at in range(10)]
    norms = frozen(turns)
    assert norms.expected_kept("edit", without="u0") == 1.0
    assert norms.expected_kept("edit", without="u1") == 0.0
    assert norms.expected_kept("edit", without="a stranger") == 0.5
    asked = Evidence(user_key="u1", task_bucket="edit", edits_observed=True, edit_expected=1.0, followed_up=True)
    assert components(asked, CONFIG, norms)["deferral"] == -CONFIG.defer_cost
    assert NO_NORMS.expected_kept("edit", without="u1") is None


def test_an_abandoned_deferral_is_worth_the_tenth_percentile_where_that_is_worse() -> None:
    norms = frozen([turn(at, edits_kept=value) for at, value in enumerate((-0.8, -0.8, 1.0, 1.0, 1.0, 1.0))])
    left = Evidence(surface="cli", language="en", task_bucket="edit", edits_observed=True, edit_expected=1.0)
    assert components(left, CONFIG, norms)["deferral"] == -0.8


def test_a_normalised_value_says_how_much_better_than_usual_and_is_clipped_at_three_deviations() -> None:
    scale = {"edits_kept": (0.4, 0.15)}
    assert normalised("edits_kept", 0.8, scale, 0.05) == pytest.approx(2.0 / 3.0)
    assert normalised("edits_kept", -1.0, scale, 0.05) == -1.0
    assert normalised("deferral", 0.0, scale, 0.05) == pytest.approx(-2.0 / 3.0)
    assert normalised("tool_calls", -0.5, scale, 0.05) == -0.5
    assert scalar({"edits_kept": 0.4}, CONFIG, scale=scale) == 0.0


def test_norms_are_part_of_the_reward_version_and_do_not_depend_on_the_order_of_turns() -> None:
    turns = [turn(at, edits_kept=1.0 - at / 10, sampling_ms=5.0) for at in range(8)]
    one, other = frozen(turns), frozen(turns[::-1])
    assert one == other
    assert reward_version(CONFIG, one) == reward_version(CONFIG, other) != reward_version(CONFIG)
    evidence = Evidence(edits=(Edit(edit_id="d", chars_added=1, decision="accepted", survival=None),))
    assert components(evidence, CONFIG, one)["edits_kept"] == 1.0
