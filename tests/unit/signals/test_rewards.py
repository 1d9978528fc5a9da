"""Components and their mean, against numbers worked by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.config import load
from pipelines.errors import ConfigError
from signals.components import Edit, Evidence, FollowUp, components, edits_kept, kept_share, latency
from signals.config import RewardsConfig, SignalsConfig
from signals.rewards import is_evidence, reward_version, scalar
from signals.samples import COMPONENTS

CONFIG = RewardsConfig()


def edit(number: int, chars: int, *, decision: str | None = None, survival: float | None = None) -> Edit:
    return Edit(edit_id=f"d{number}", chars_added=chars, decision=decision, survival=survival)


def test_a_reverted_edit_earns_a_negative_reward() -> None:
    present = components(Evidence(edits=(edit(1, 100, decision="undone", survival=0.9),)), CONFIG)
    assert present["edits_kept"] == -1.0
    assert present.keys() == {"edits_kept", "effort"}
    assert scalar(present, CONFIG) == -1.0


def test_kept_edits_are_weighted_by_the_root_of_their_size() -> None:
    # w = sqrt(100) = 10 and sqrt(25) = 5; kept 1 and 0.4: 2 * (10 + 2) / 15 - 1.
    assert edits_kept([edit(1, 100, survival=1.0), edit(2, 25, survival=0.4)]) == pytest.approx(2 * 12 / 15 - 1)


def test_an_edit_that_nobody_reacted_to_is_no_evidence() -> None:
    assert kept_share(edit(1, 100)) is None
    assert edits_kept([edit(1, 100)]) is None
    assert edits_kept([edit(1, 100), edit(2, 1, decision="accepted")]) == 1.0


@pytest.mark.parametrize(
    ("decision", "survival", "share"),
    [
        ("accepted", None, 1.0),
        ("accepted", 0.25, 0.25),
        ("partly", None, 0.5),
        ("rejected", None, 0.0),
        ("rejected", 1.0, 0.0),
        (None, 0.75, 0.75),
    ],
)
def test_what_counts_as_kept(decision: str | None, survival: float | None, share: float) -> None:
    assert kept_share(edit(1, 10, decision=decision, survival=survival)) == share


def test_latency_is_zero_at_the_median_and_negative_above_it() -> None:
    assert latency(800.0, 800.0) == 0.0
    assert latency(1600.0, 800.0) == pytest.approx(-math.tanh(math.log(2)))
    assert latency(1600.0, None) is None
    assert latency(None, 800.0) is None


def test_a_frozen_median_of_the_bucket_or_of_any_other_is_used() -> None:
    config = RewardsConfig(latency_medians_ms={"edit": 1000.0, "*": 500.0})
    assert components(Evidence(sampling_ms=1000.0, task_bucket="edit"), config)["latency"] == 0.0
    assert components(Evidence(sampling_ms=500.0, task_bucket=None), config)["latency"] == 0.0


def test_a_fast_turn_that_nobody_reacted_to_has_no_reward() -> None:
    config = RewardsConfig(latency_medians_ms={"*": 5000.0})
    present = components(Evidence(sampling_ms=10.0), config)
    assert present["latency"] > 0.9
    assert scalar(present, config) is None


def test_invalid_calls_cost_one_in_all_and_valid_ones_nothing() -> None:
    assert "tool_calls" not in components(Evidence(), CONFIG)
    assert components(Evidence(calls=3), CONFIG)["tool_calls"] == 0.0
    for invalid in (1, 3):
        assert components(Evidence(calls=3, invalid_calls=invalid), CONFIG)["tool_calls"] == -1.0


def test_the_scalar_is_the_weighted_mean_of_what_is_present() -> None:
    # edits 1.0 * (+1) and tool calls 0.5 * (-1) over 1.5.
    assert scalar({"edits_kept": 1.0, "tool_calls": -1.0}, CONFIG) == pytest.approx(0.5 / 1.5)
    assert scalar({"edits_kept": 0.5, "follow_up": -0.5}, CONFIG) == pytest.approx((0.5 - 0.25) / 1.5)


def test_a_spurious_valid_call_does_not_soften_a_bad_reward() -> None:
    assert scalar({"edits_kept": -1.0, "tool_calls": 0.0}, CONFIG) == -1.0


def test_a_turn_with_only_an_invalid_call_has_a_reward_and_one_with_only_valid_calls_has_none() -> None:
    assert scalar({"tool_calls": -1.0}, CONFIG) == -1.0
    assert scalar({"tool_calls": 0.0}, CONFIG) is None


decisions = st.sampled_from([None, "accepted", "partly", "rejected", "undone"])
edits = st.lists(
    st.builds(
        lambda n, chars, decision, survival: edit(n, chars, decision=decision, survival=survival),
        st.integers(0, 10**6), st.integers(0, 10_000), decisions, st.one_of(st.none(), st.floats(0, 1)),
    ),
    max_size=5,
    unique_by=lambda e: e.edit_id,
)  # fmt: skip
follow_ups = st.one_of(
    st.none(),
    st.builds(
        FollowUp, message=st.sampled_from(["thanks", "wrong", "undo it"]), previous=st.none(), stack_traces=st.integers(0, 1),
        reply_delay_ms=st.none(), interrupted=st.booleans(),
    ),
)  # fmt: skip


@settings(deadline=None)
@given(edits, follow_ups, st.one_of(st.none(), st.floats(1, 1e6)), st.integers(0, 5))
def test_every_component_and_the_scalar_lie_between_minus_one_and_one(
    found: list[Edit], reply: FollowUp | None, ms: float | None, calls: int
) -> None:
    config = RewardsConfig(latency_medians_ms={"*": 900.0})
    present = components(Evidence(edits=tuple(found), follow_up=reply, sampling_ms=ms, calls=calls, invalid_calls=calls // 2), config)
    assert all(-1.0 <= value <= 1.0 for value in present.values())
    value = scalar(present, config)
    assert (value is not None) == is_evidence(present)
    assert value is None or -1.0 <= value <= 1.0


@settings(deadline=None)
@given(edits, follow_ups, st.integers(0, 4), st.integers(0, 4))
def test_one_more_invalid_call_never_raises_the_reward_nor_takes_the_turn_out_of_sight(
    found: list[Edit], reply: FollowUp | None, calls: int, invalid: int
) -> None:
    def of(total: int, bad: int) -> float | None:
        return scalar(components(Evidence(edits=tuple(found), follow_up=reply, calls=total, invalid_calls=bad), CONFIG), CONFIG)

    before, after = of(calls + invalid, invalid), of(calls + invalid + 1, invalid + 1)
    assert after is not None
    assert before is None or after <= before


@given(edits, st.randoms())
def test_the_order_of_edits_does_not_change_their_sum_by_a_single_bit(found: list[Edit], rng: object) -> None:
    mixed = list(found)
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    assert edits_kept(found) == edits_kept(mixed)


def test_any_change_of_settings_is_another_reward_version() -> None:
    versions = {
        reward_version(RewardsConfig()),
        reward_version(RewardsConfig(window_s=60)),
        reward_version(RewardsConfig(weights={"edits_kept": 0.9})),
        reward_version(RewardsConfig(latency_medians_ms={"edit": 5.0})),
    }
    assert len(versions) == 4
    assert reward_version(RewardsConfig()) == reward_version(RewardsConfig())


def test_a_weight_that_is_set_alone_leaves_the_others_as_they_were() -> None:
    weights = load(SignalsConfig, overrides=["rewards.weights.latency=0"]).rewards.weights
    assert weights == RewardsConfig().weights | {"latency": 0.0}
    assert set(weights) == set(COMPONENTS)


def test_an_unknown_component_in_the_weights_is_a_config_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="edits_kept, follow_up, latency, tool_calls"):
        load(SignalsConfig, overrides=["rewards.weights={edit_kept = 1.0}"])
