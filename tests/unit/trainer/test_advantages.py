"""Returns, baselines and advantages against numbers worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import ScoredTurn, bucket, estimate, returns, updated_ema, user_weights


def turn(session, reward, *, user=None, index=0, group="a"):
    return ScoredTurn(session_id=session, user_key=user or f"user-{session}", turn_index=index, reward=reward, bucket=group)


def run(turns, **changes):
    return estimate(turns, **({"ema": {}, "gamma": 0.9, "kappa": 8.0, "clip": 5.0} | changes))


def test_a_return_discounts_later_turns_of_its_session_by_distance():
    turns = [turn("s", 1.0, index=0), turn("s", -1.0, index=1), turn("s", 0.5, index=3), turn("t", 7.0)]
    # G3 = .5; G1 = -1 + .81 * .5 = -.595; G0 = 1 + .9 * -.595 = .4645
    assert returns(turns, gamma=0.9) == pytest.approx([0.4645, -0.595, 0.5, 7.0])


def test_the_baseline_shrinks_the_leave_out_mean_towards_the_running_mean():
    turns = [turn("s", 1.0), turn("t", 0.0), turn("u", 0.5)]
    found = run(turns, ema={"a": 0.2})
    # for s: n = 2, mean of others .25: (2 * .25 + 8 * .2) / 10 = .21
    assert found[0].baseline == pytest.approx(0.21)
    assert found[0].others == 2
    # std of (1, 0, .5) = .408248: (1 - .21) / .408248
    assert found[0].advantage == pytest.approx(0.79 / (math.sqrt(1 / 6) + 1e-6))


def test_a_bucket_without_a_running_mean_takes_the_leave_out_mean_of_all_buckets():
    turns = [turn("s", 1.0), turn("t", 0.0), turn("u", 0.6, group="b")]
    # for s in bucket a: one other (0), prior = mean(0, .6) = .3: (1 * 0 + 8 * .3) / 9
    assert run(turns)[0].baseline == pytest.approx(2.4 / 9)


def test_the_whole_session_and_the_whole_user_are_left_out():
    turns = [turn("s", 1.0, user="x"), turn("s", 9.0, user="x", index=1), turn("t", 5.0, user="x"), turn("u", 0.0, user="y")]
    found = run(turns, gamma=0.0, kappa=0.0)
    assert found[0].others == 1
    assert found[0].baseline == 0.0


def test_a_single_user_has_no_leave_out_mean_and_no_invented_one():
    turns = [turn("s", 1.0, user="x"), turn("t", 0.0, user="x")]
    found = run(turns)
    assert [entry.others for entry in found] == [0, 0]
    assert [entry.baseline for entry in found] == [0.0, 0.0]


def test_one_turn_and_equal_returns_are_centred_but_not_scaled():
    assert run([turn("s", 0.7)], ema={"a": 0.2})[0].advantage == pytest.approx(0.5)
    same = run([turn("s", 0.7), turn("t", 0.7)], ema={"a": 0.2})
    # n = 1: (.7 + 8 * .2) / 9 = .25556
    assert same[0].advantage == pytest.approx(0.7 - 2.3 / 9)


def test_advantages_are_clipped_at_five():
    turns = [turn(str(k), 0.0) for k in range(60)] + [turn("rare", 1.0)]
    assert run(turns)[-1].advantage == 5.0


def test_running_means_move_by_one_minus_decay_and_new_buckets_start_at_their_mean():
    turns = [turn("s", 1.0), turn("t", 0.0), turn("u", 0.6, group="b")]
    fresh = updated_ema(turns, run(turns), ema={"a": 0.1, "z": 0.9}, decay=0.8)
    assert fresh == pytest.approx({"a": 0.8 * 0.1 + 0.2 * 0.5, "b": 0.6, "z": 0.9})


def test_a_bucket_names_task_position_band_and_language():
    assert [bucket("rename", k, "en") for k in (0, 1, 2, 4, 5, 40)] == [
        "rename/0/en", "rename/1/en", "rename/2/en", "rename/2/en", "rename/5/en", "rename/5/en",
    ]  # fmt: skip
    assert bucket(None, 0, None) == "unknown/0/unknown"


def test_a_user_with_many_rows_weighs_no_more_than_the_cap():
    weights = user_weights(["x"] * 4 + ["y"], cap=2.0)
    assert weights.tolist() == [0.5, 0.5, 0.5, 0.5, 1.0]


sessions = st.lists(
    st.tuples(st.sampled_from("stuvw"), st.sampled_from("xyz"), st.floats(-1, 1, allow_subnormal=False)), min_size=2, max_size=12
)


def build(entries):
    seen: dict[str, int] = {}
    turns = []
    for session, user, reward in entries:
        turns.append(turn(session + user, reward, user=user, index=seen.get(session + user, 0)))
        seen[session + user] = seen.get(session + user, 0) + 1
    return turns


@given(sessions, st.floats(-1, 1))
def test_a_baseline_does_not_depend_on_the_own_users_rewards(entries, other):
    turns = build(entries)
    changed = [
        ScoredTurn(session_id=t.session_id, user_key=t.user_key, turn_index=t.turn_index, reward=other, bucket=t.bucket)
        if t.user_key == turns[0].user_key
        else t
        for t in turns
    ]
    assert run(changed)[0].baseline == pytest.approx(run(turns)[0].baseline, abs=1e-9)


@given(sessions, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_turns(entries, random):
    turns = build(entries)
    key = {(t.session_id, t.turn_index): e.advantage for t, e in zip(turns, run(turns), strict=True)}
    shuffled = turns[:]
    random.shuffle(shuffled)
    for t, found in zip(shuffled, run(shuffled), strict=True):
        assert found.advantage == pytest.approx(key[t.session_id, t.turn_index], abs=1e-6)


def test_sessions_of_one_prompt_are_compared_with_each_other_alone():
    rewards = {"s": 1.0, "t": 0.0, "u": 0.5}
    turns = [
        ScoredTurn(session_id=name, user_key=f"user-{name}", turn_index=0, reward=reward, bucket="a", prompt="p")
        for name, reward in rewards.items()
    ]
    found = run([*turns, turn("v", -3.0)], ema={"a": 0.2})
    # others of the prompt: (0 + .5) / 2, (1 + .5) / 2, (1 + 0) / 2; v has a prompt of its own: (3 * .5 + 8 * .2) / 11
    assert [entry.baseline for entry in found] == pytest.approx([0.25, 0.75, 0.5, 3.1 / 11])
    assert [entry.others for entry in found] == [2, 2, 2, 3]


def test_a_prompt_repeated_in_one_session_is_no_group():
    turns = [ScoredTurn(session_id="s", user_key="u", turn_index=k, reward=1.0, bucket="a", prompt="p") for k in (0, 1)]
    assert [entry.baseline for entry in run(turns, ema={"a": 0.2})] == pytest.approx([0.2, 0.2])
