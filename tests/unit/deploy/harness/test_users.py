"""Simulated users: their preference is what the page says, and nothing else decides."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.harness.config import SimulationConfig
from deploy.harness.users import (
    LANGUAGES,
    TELL_BROKEN,
    TELL_CONVENTION,
    TELL_NOTHING,
    Verdict,
    complain,
    draw_user,
    judge,
    next_move,
)

CONFIG = SimulationConfig()
KEPT = Verdict(keeps="yes", fault=None)
WRONG = Verdict(keeps="no", fault="convention")


@pytest.mark.parametrize(
    ("edited", "check", "form", "keeps", "fault"),
    [
        ("yes", "passed", "ref", "yes", None),
        ("yes", "passed", "see", "no", "convention"),
        ("yes", "passed", None, "no", "convention"),
        ("yes", "failed", "ref", "no", "check_failed"),
        ("no", "failed", None, "no", "no_edit"),
    ],
)
def test_an_edit_is_kept_only_when_it_works_and_follows_the_convention(edited, check, form, keeps, fault) -> None:
    verdict = judge(draw_user(CONFIG, 0, 0), edited=edited, check=check, form=form)
    assert (verdict.keeps, verdict.fault) == (keeps, fault)


def test_users_of_the_other_world_want_the_other_form() -> None:
    user = draw_user(SimulationConfig(preference="see"), 0, 0)
    assert judge(user, edited="yes", check="passed", form="see").keeps == "yes"
    assert judge(user, edited="yes", check="passed", form="ref").fault == "convention"


def test_the_same_seed_draws_the_same_person_and_people_take_turns() -> None:
    config = SimulationConfig(users=5)
    assert draw_user(config, 3, 2) == draw_user(config, 3, 7)
    assert len({draw_user(config, 3, index).name for index in range(20)}) == 5


def test_a_user_whose_edit_is_kept_brings_the_next_request_or_is_done() -> None:
    user = draw_user(CONFIG, 0, 0)
    rng = random.Random(0)
    assert next_move(user, KEPT, ticket="T-1", waited_s=1, asked_again=0, requests_left=1, config=CONFIG, rng=rng).kind == "next_request"
    assert next_move(user, KEPT, ticket="T-1", waited_s=1, asked_again=0, requests_left=0, config=CONFIG, rng=rng).kind == "done"


def shares(waited_s: float) -> dict[str, float]:
    user = draw_user(CONFIG, 0, 0)
    rng = random.Random(1)
    kinds = [
        next_move(user, WRONG, ticket="T-1", waited_s=waited_s, asked_again=0, requests_left=1, config=CONFIG, rng=rng).kind
        for _ in range(4000)
    ]
    return {kind: kinds.count(kind) / len(kinds) for kind in ("ask_again", "abandon", "next_request")}


def test_a_displeased_user_asks_again_with_their_persistence_then_leaves_or_moves_on() -> None:
    user = draw_user(CONFIG, 0, 0)
    found = shares(waited_s=0.0)
    assert found["ask_again"] == pytest.approx(user.persistence, abs=0.03)
    assert found["abandon"] == pytest.approx((1 - user.persistence) * 0.4, abs=0.03)


def test_a_user_who_waited_too_long_asks_again_half_as_often() -> None:
    user = draw_user(CONFIG, 0, 0)
    found = shares(waited_s=user.patience_s + 1)
    assert found["ask_again"] == pytest.approx(user.persistence / 2, abs=0.03)
    assert found["abandon"] == pytest.approx((1 - user.persistence / 2) * 0.8, abs=0.03)


def test_nobody_asks_again_more_often_than_the_setting_allows() -> None:
    user = draw_user(CONFIG, 0, 0)
    rng = random.Random(2)
    moves = {
        next_move(user, WRONG, ticket="T-1", waited_s=0, asked_again=1, requests_left=1, config=CONFIG, rng=rng).kind for _ in range(200)
    }
    assert "ask_again" not in moves


@given(st.integers(0, 500), st.sampled_from(["convention", "check_failed", "no_edit"]), st.sampled_from(["ref", "see"]))
def test_complaints_are_in_the_users_own_language_and_name_the_right_fault(index, fault, preference) -> None:
    user = draw_user(SimulationConfig(users=200, preference=preference), 5, index)
    other = "see" if preference == "ref" else "ref"
    tell = {"convention": TELL_CONVENTION, "check_failed": TELL_BROKEN, "no_edit": TELL_NOTHING}[fault]
    said = complain(user, fault, random.Random(index), ticket="T-41")
    assert said in [phrase.format(want=preference, other=other, ticket="T-41") for phrase in tell[user.language]]
    if fault == "convention":
        assert preference in said


def test_every_language_is_spoken() -> None:
    config = SimulationConfig(users=300)
    assert {draw_user(config, 0, index).language for index in range(300)} == set(LANGUAGES)
