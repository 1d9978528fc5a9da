"""Every component against numbers worked by hand, and what no change of behaviour may gain."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from signals.components import Checks, Edit, Evidence, components, conventions, evaluation_score, explicit, is_deferred
from signals.config import RewardsConfig
from signals.maturity import Maturity, Truth, states, truth_of, truth_of_turn
from signals.rewards import COSTS, OUTCOMES, is_evidence, pieces, scalar
from signals.samples import COMPONENTS

CONFIG = RewardsConfig(latency_medians_ms={"*": 1000.0})


def edit(kept: float, number: int = 1, chars: int = 100) -> Edit:
    return Edit(edit_id=f"d{number}", chars_added=chars, decision="accepted", survival=kept)


def of(evidence: Evidence) -> float | None:
    present = components(evidence, CONFIG)
    said = explicit(evidence)
    return scalar(present, CONFIG, explicit_mass=1.0 if said is None else said[1])


def test_repeats_and_serial_look_ups_cost_a_fraction_of_an_invalid_call_and_all_costs_are_capped() -> None:
    assert components(Evidence(calls=5, repeats=2, serial_calls=1), CONFIG)["tool_calls"] == pytest.approx(-(0.25 * 2 + 0.1))
    assert components(Evidence(calls=9, invalid_calls=1, repeats=9), CONFIG)["tool_calls"] == -1.0


def test_effort_follows_the_published_curve_and_never_reaches_minus_one() -> None:
    # x = 2 + 0.1 * 10 + 0.1 * 8 = 3.8; with k = .5, q = 2: 1 / (1 + .5 * 3.8) - 1.
    found = components(Evidence(response_tokens=2000, calls=10, completions=8), CONFIG)["effort"]
    assert found == pytest.approx(1 / 2.9 - 1)
    k, q, x = 0.5, 2.0, 3.8
    assert found == pytest.approx(-k * (q - 1) * ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)))
    assert -1.0 < components(Evidence(response_tokens=10**9), CONFIG)["effort"] < -0.99


def test_conventions_are_the_mean_of_what_was_checked() -> None:
    assert conventions(Checks(), CONFIG) is None
    assert conventions(Checks(issues_before=2, issues_after=5), CONFIG) == pytest.approx(-math.tanh(1.0))
    assert conventions(Checks(passed_after=3, failed_after=1), CONFIG) == pytest.approx(0.5)
    assert conventions(Checks(rules_checked=4, rules_broken=1), CONFIG) == pytest.approx(0.5)
    both = Checks(passed_after=4, failed_after=0, rules_checked=2, rules_broken=2)
    assert conventions(both, CONFIG) == 0.0


def test_deleting_the_tests_that_fail_is_as_bad_as_failing_them() -> None:
    before = {"passed_before": 4, "failed_before": 1}
    assert conventions(Checks(**before, passed_after=4, failed_after=1), CONFIG) == pytest.approx(0.6)
    assert conventions(Checks(**before, passed_after=4, failed_after=0), CONFIG) == pytest.approx(0.6)
    assert conventions(Checks(**before, passed_after=0, failed_after=0), CONFIG) == -1.0


def test_a_claim_costs_by_the_share_of_files_that_were_not_looked_at() -> None:
    assert components(Evidence(claims=4, claims_unread=1), CONFIG)["evidence"] == -0.25
    assert components(Evidence(claims=4), CONFIG)["evidence"] == 0.0
    assert "evidence" not in components(Evidence(), CONFIG)


@pytest.mark.parametrize(
    ("value", "label", "score"),
    [(0.75, None, 0.5), (None, " Pass ", 1.0), (0.9, "failed", -1.0), (7.0, None, None), (None, "meh", None), (0.0, "meh", -1.0)],
)
def test_an_evaluation_is_read_by_its_label_or_by_a_value_between_zero_and_one(
    value: float | None, label: str | None, score: float | None
) -> None:
    assert evaluation_score(value, label) == score


def test_what_was_said_of_the_session_counts_by_the_turns_share() -> None:
    # 1 * 1.0 for the turn and .4 * (-1) for the session, over 1.4.
    assert explicit(Evidence(said=1.0, shared=((0.4, -1.0),))) == pytest.approx((0.6 / 1.4, 1.4))
    assert explicit(Evidence()) is None


ELIGIBLE = Evidence(edits_observed=True, edit_expected=0.9, followed_up=True)


def test_an_eligible_turn_without_an_edit_is_charged_what_edits_usually_keep_asked_or_not() -> None:
    assert components(ELIGIBLE, CONFIG)["deferral"] == -0.5
    cheap = RewardsConfig(expected_kept=0.02)
    assert components(ELIGIBLE, cheap)["deferral"] == -0.1
    assert components(replace(ELIGIBLE, followed_up=False), CONFIG)["deferral"] == -1.0
    assert "deferral" not in components(replace(ELIGIBLE, followed_up=False, final=False), CONFIG)


@pytest.mark.parametrize(
    "change", [{"edits_observed": False}, {"edit_expected": 0.2}, {"edit_expected": None}, {"edits": (edit(1.0),)}, {"completions": 0}]
)
def test_asking_is_not_charged_where_no_edit_was_expected_or_none_would_have_been_seen(change: dict[str, object]) -> None:
    found = replace(ELIGIBLE, **change)  # type: ignore[arg-type]
    assert not is_deferred(found, CONFIG)
    assert "deferral" not in components(found, CONFIG)


def test_a_friendly_answer_to_a_question_does_not_pay_for_the_edit_that_was_not_made() -> None:
    asked = {"deferral": -0.5, "follow_up": 0.9, "latency": 0.8, "conventions": 1.0}
    assert scalar(asked, CONFIG) == -0.5
    # A complaint is a cost: (-.5 - .5 * .6) / (1 + .5 * .6).
    assert scalar({"deferral": -0.5, "follow_up": -0.6}, CONFIG) == pytest.approx(-0.8 / 1.3)


def test_a_cost_pulls_by_its_size_and_a_cost_of_nothing_changes_nothing() -> None:
    assert pieces({"edits_kept": 1.0, "effort": -0.5}, CONFIG) == {"edits_kept": (1.0, 1.0), "effort": (0.025, -1.0)}
    assert scalar({"edits_kept": -1.0, "effort": -0.2, "tool_calls": 0.0, "evidence": 0.0}, CONFIG) == -1.0
    assert scalar({"tool_calls": -0.25, "evidence": -0.5, "effort": -0.9, "latency": 1.0}, CONFIG) == -0.5


def test_neither_latency_nor_effort_is_evidence() -> None:
    assert scalar({"latency": 1.0, "effort": -0.1}, CONFIG) is None


unit = st.floats(-1, 1)
costs = st.floats(-1, 0)
presents = st.fixed_dictionaries({}, optional={name: costs if name in (*COSTS, "deferral") else unit for name in COMPONENTS})
scales = st.one_of(
    st.none(), st.fixed_dictionaries({name: st.tuples(unit, st.floats(0, 1)) for name in ("edits_kept", "follow_up", "explicit")})
)


@settings(deadline=None, max_examples=150)
@given(presents, scales, st.floats(0.01, 2))
def test_the_reward_is_bounded_whatever_is_present(
    present: dict[str, float], scale: dict[str, tuple[float, float]] | None, mass: float
) -> None:
    value = scalar(present, CONFIG, scale=scale, explicit_mass=mass)
    assert (value is not None) == is_evidence(present)
    assert value is None or -1.0 <= value <= 1.0


@settings(deadline=None, max_examples=150)
@given(presents, st.sampled_from(COMPONENTS), unit, scales)
def test_a_better_value_of_any_component_never_lowers_the_reward(
    present: dict[str, float], name: str, better: float, scale: dict[str, tuple[float, float]] | None
) -> None:
    assume(name in present)
    better = min(better, 0.0) if name in (*COSTS, "deferral") else better
    assume(better > present[name])
    before, after = scalar(present, CONFIG, scale=scale), scalar(present | {name: better}, CONFIG, scale=scale)
    assume(before is not None and after is not None)
    assert after >= before - 1e-12  # type: ignore[operator]


evidences = st.builds(
    Evidence,
    edits=st.lists(st.builds(edit, st.floats(0, 1), st.integers(1, 9)), max_size=3, unique_by=lambda e: e.edit_id).map(tuple),
    edits_observed=st.booleans(),
    edit_expected=st.one_of(st.none(), st.floats(0, 1)),
    followed_up=st.booleans(),
    response_tokens=st.integers(0, 5000),
    completions=st.integers(1, 5),
    sampling_ms=st.one_of(st.none(), st.floats(1, 1e5)),
    calls=st.integers(0, 5),
    repeats=st.integers(0, 2),
    claims=st.integers(0, 3),
    claims_unread=st.integers(0, 3),
    said=st.one_of(st.none(), unit),
)


@settings(deadline=None, max_examples=80)
@given(evidences)
def test_one_more_invalid_call_never_raises_a_reward_and_never_hides_a_turn(evidence: Evidence) -> None:
    before, after = of(evidence), of(replace(evidence, calls=evidence.calls + 1, invalid_calls=evidence.invalid_calls + 1))
    assert after is not None
    assert before is None or after <= before + 1e-12


@settings(deadline=None, max_examples=80)
@given(evidences, st.floats(0.5, 1), st.booleans())
def test_asking_or_not_answering_in_place_of_an_edit_that_is_usually_kept_never_pays_and_never_hides_the_turn(
    evidence: Evidence, kept: float, replied: bool
) -> None:
    base = replace(evidence, edits_observed=True, edit_expected=0.9, said=None, followed_up=replied)
    honest, silent = replace(base, edits=(edit(kept),)), replace(base, edits=())
    made, put_off = of(honest), of(silent)
    assert made is not None
    assert put_off is not None
    assert put_off < made


@settings(deadline=None, max_examples=80)
@given(evidences, st.floats(0.5, 1))
def test_breaking_the_call_of_an_edit_that_would_be_kept_never_pays_whatever_the_client_records(evidence: Evidence, kept: float) -> None:
    base = replace(evidence, calls=evidence.calls + 1, said=None)
    made = of(replace(base, edits=(edit(kept),)))
    broken = of(replace(base, edits=(), invalid_calls=1))
    assert made is not None
    assert broken is not None
    assert broken <= made + 1e-12


def test_a_policy_that_breaks_its_calls_and_one_that_only_asks_earn_less_than_an_honest_one() -> None:
    """The two published hacks. The honest policy keeps seven edits in ten."""
    turns = [replace(ELIGIBLE, calls=1, response_tokens=200, edits=(edit(1.0 if at % 10 < 7 else 0.0, at),)) for at in range(100)]
    honest = [of(turn) for turn in turns]
    broken = [of(replace(turn, edits=(), invalid_calls=1)) for turn in turns]
    asking = [of(replace(turn, edits=(), calls=0, response_tokens=30)) for turn in turns]
    # It only asks where its edit would not be kept: deferring risky prompts raises the mean over observed edits to 1.
    choosy = [of(turn) if at % 10 < 7 else of(replace(turn, edits=(), calls=0)) for at, turn in enumerate(turns)]

    def mean(rewards: list[float | None]) -> float:
        assert None not in rewards, "a turn left `scored`"
        return sum(value for value in rewards if value is not None) / len(rewards)

    assert mean(broken) < mean(asking) < mean(honest)
    assert mean(choosy) - mean(honest) < 0.3 * 0.51, "what risky turns cost when asked is what edits usually keep, not nothing"


def test_maturity_says_whether_a_component_was_seen_defaulted_or_cut_off() -> None:
    edited = Evidence(edits=(edit(1.0),), calls=1, completions=1)
    present = components(edited, CONFIG)
    full = states(present, edited, CONFIG, closed_early=False)
    assert full == {
        "edits_kept": Maturity.OBSERVED, "follow_up": Maturity.DEFAULTED, "tool_calls": Maturity.OBSERVED, "effort": Maturity.OBSERVED,
        "conventions": Maturity.DEFAULTED, "explicit": Maturity.DEFAULTED,
    }  # fmt: skip
    assert states(present, edited, CONFIG, closed_early=True)["follow_up"] is Maturity.CENSORED
    open_still = replace(edited, final=False)
    assert set(states(components(open_still, CONFIG), open_still, CONFIG, closed_early=False).values()) == {Maturity.PENDING}
    left = replace(ELIGIBLE, followed_up=False)
    assert states(components(left, CONFIG), left, CONFIG, closed_early=False)["deferral"] is Maturity.DEFAULTED


def test_truth_takes_the_first_measurement_after_a_day_and_a_week_and_the_last_commit() -> None:
    rows = [
        {"horizon_s": 900, "survival_no_revert": 1.0},
        {"horizon_s": 86_400, "survival_no_revert": 0.75},
        {"horizon_s": 172_800, "survival_no_revert": 0.25},
        {"horizon_s": 604_800, "survival_no_revert": 0.5},
        {"horizon_s": 50, "survival_no_revert": 0.9, "milestone": "commit"},
    ]
    assert truth_of(rows, "accepted") == Truth(commit=0.9, day=0.75, week=0.5)
    assert truth_of(rows[:1], None) == Truth()
    assert truth_of(rows[:2], "undone") == Truth(commit=0.0, day=0.75, week=0.0)
    # Roots of 100 and 25 characters weigh 10 and 5: (10 * .75 + 5 * 0) / 15.
    small = edit(1.0, 2, chars=25)
    found = truth_of_turn([(edit(1.0), Truth(day=0.75)), (small, Truth(day=0.0)), (edit(1.0, 3), Truth())])
    assert found.day == pytest.approx(0.5)
    assert (found.commit, found.week) == (None, None)


def test_every_component_is_an_outcome_a_cost_or_latency() -> None:
    assert {*OUTCOMES, *COSTS, "latency"} == set(COMPONENTS) == set(CONFIG.weights)
