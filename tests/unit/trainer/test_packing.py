"""Packing loses and invents no token, and balances what bins cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.packing import PackedRow, chains, cost, pack, plan, plan_rows, reply_row, tokens_of


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 512), st.integers(1, 4))
def test_every_row_is_in_exactly_one_bin_and_bins_hold_what_they_may(lengths, limit, ranks):
    bins = plan(lengths, max_tokens=limit, bins_multiple_of=ranks)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert len(bins) % ranks == 0
    for rows in bins:
        assert sum(lengths[row] for row in rows) <= limit or len(rows) == 1


def test_first_fit_decreasing_finds_the_two_bins_that_suffice():
    assert len(plan([6, 5, 3, 3, 2, 1], max_tokens=10)) == 2


def test_costs_are_balanced_over_ranks():
    bins = plan([100] * 8, max_tokens=10_000, bins_multiple_of=2)
    assert [len(rows) for rows in bins] == [4, 4]


def test_bins_that_ranks_work_on_at_the_same_time_cost_alike():
    bins = plan([90, 90, 10, 10], max_tokens=100, bins_multiple_of=2)
    assert bins == [[0, 2], [1, 3]]
    bins = plan([10, 100, 20, 90], max_tokens=100, bins_multiple_of=2)
    assert [sum([10, 100, 20, 90][row] for row in rows) for rows in bins] == [100, 90, 20, 10]


def test_attention_makes_one_long_segment_cost_more_than_two_halves():
    assert cost(6000) == pytest.approx(12_000)
    assert cost(6000) > 2 * cost(3000)


@st.composite
def packed_rows(draw):
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8))
        response = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8))
        rows.append(reply_row(np.asarray(prompt), np.asarray(response), temperature=draw(st.floats(0.5, 2))))
    return rows


@given(packed_rows())
def test_packing_invents_and_loses_no_token(rows):
    found = pack(rows, range(len(rows)))
    expected = np.concatenate([np.concatenate([row.prompt_ids, row.response_ids]) for row in rows])
    assert found.input_ids.tolist() == expected.tolist()
    assert sum(found.lengths) == len(expected)
    assert found.targets.tolist() == np.concatenate([row.response_ids for row in rows]).tolist()
    # a target stands right behind the position that is read for it, inside the same segment
    assert (found.input_ids[found.read_at + 1] == found.targets).all()
    starts = np.cumsum([0, *found.lengths])
    for position in range(len(rows)):
        read = found.read_at[found.segment == position]
        assert (read >= starts[position]).all()
        assert (read + 1 < starts[position + 1]).all()
        assert found.position_ids[starts[position] : starts[position + 1]].tolist() == list(range(found.lengths[position]))
        assert (found.temperatures[found.segment == position] == rows[position].temperature).all()


def test_only_the_named_offsets_are_trained():
    row = PackedRow(prompt_ids=np.asarray([5, 6]), response_ids=np.asarray([7, 8, 9]), trained=np.asarray([2, 4]), temperature=1.0)
    found = pack([row], [0])
    assert found.targets.tolist() == [7, 9]
    assert found.read_at.tolist() == [1, 3]


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        reply_row(np.asarray([], dtype=int), np.asarray([1]))


def test_an_empty_micro_batch_has_no_tokens():
    assert pack([], []).input_ids.tolist() == []


def turns(*lengths, group="s", seed=0):
    """Make completions that continue each other: 3 new tokens are read, then `lengths[k]` are sampled."""
    rng = np.random.default_rng(seed)
    history = np.zeros(0, dtype=int)
    rows = []
    for length in lengths:
        prompt = np.concatenate([history, rng.integers(0, 99, 3)])
        rows.append(reply_row(prompt, rng.integers(0, 99, length), group=group))
        history = np.concatenate([prompt, rows[-1].response_ids])
    return rows


def test_completions_that_continue_each_other_are_one_sequence_with_a_span_each():
    rows = turns(2, 1, 4)
    assert chains(rows, range(3)) == [[0, 1, 2]]
    found = pack(rows, [2, 0, 1])
    assert found.lengths == (16,)
    assert found.rows == (0, 1, 2)
    assert found.read_at.tolist() == [2, 3, 7, 11, 12, 13, 14]
    assert found.segment.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert found.targets.tolist() == [int(x) for row in rows for x in row.response_ids]


def test_a_session_whose_prefix_breaks_falls_back_to_a_row_of_its_own():
    rows = turns(2, 1, 4, 2)
    broken = rows[2].prompt_ids.copy()
    broken[4] += 1  # one token of the first response was written otherwise
    rows[2] = reply_row(broken, rows[2].response_ids, group="s")
    assert chains(rows, range(4)) == [[0, 1, 3], [2]]
    assert pack(rows, range(4)).lengths == (tokens_of(rows[3]), tokens_of(rows[2]))


def test_other_sessions_other_temperatures_and_rows_without_a_group_share_nothing():
    first, second = turns(2, 2)
    other = reply_row(second.prompt_ids, second.response_ids, group="another")
    warmer = reply_row(second.prompt_ids, second.response_ids, group="s", temperature=0.7)
    assert chains([first, other, warmer], range(3)) == [[0], [1], [2]]
    alone = [reply_row(row.prompt_ids, row.response_ids) for row in (first, second)]
    assert chains(alone, range(2)) == [[0], [1]]


def test_two_answers_to_one_prompt_are_two_chains_and_each_is_continued_by_its_own():
    first, second = turns(2, 2)
    retry = reply_row(first.prompt_ids, first.response_ids + 1, group="s")
    assert chains([first, retry, second], range(3)) == [[0, 2], [1]]


@st.composite
def sessions(draw):
    """Rows of several sessions as a tree of prompts: continued, retried and broken, in any order."""
    rows = []
    for number in range(draw(st.integers(1, 3))):
        ends = [np.zeros(0, dtype=int)]
        for _ in range(draw(st.integers(1, 5))):
            before = draw(st.sampled_from(ends))
            prompt = np.concatenate([before, draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))]).astype(int)
            if draw(st.booleans()):
                prompt[draw(st.integers(0, len(prompt) - 1))] = 3
            rows.append(reply_row(prompt, np.asarray(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))), group=f"s{number}"))
            ends.append(np.concatenate([prompt, rows[-1].response_ids]))
    return draw(st.permutations(rows))


@given(sessions())
def test_merging_trains_every_response_token_once_behind_exactly_its_own_context(rows):
    found = pack(rows, range(len(rows)))
    starts = np.cumsum([0, *found.lengths])
    assert sorted(found.rows) == list(range(len(rows)))
    assert len(found.targets) == sum(len(row.response_ids) for row in rows)
    assert len({int(at) for at in found.read_at}) == len(found.read_at)
    for position, index in enumerate(found.rows):
        row, read = rows[index], found.read_at[found.segment == position]
        assert found.targets[found.segment == position].tolist() == row.response_ids.tolist()
        start = starts[np.searchsorted(starts, read[0], side="right") - 1]
        context = found.input_ids[start : read[-1] + 2]
        assert context.tolist() == [*row.prompt_ids, *row.response_ids]
    assert sum(found.lengths) <= sum(tokens_of(row) for row in rows)


@given(sessions(), st.integers(1, 40), st.integers(1, 3))
def test_bins_hold_whole_chains_and_every_row_once(rows, limit, ranks):
    bins = plan_rows(rows, range(len(rows)), max_tokens=limit, bins_multiple_of=ranks)
    assert sorted(row for rows_of_bin in bins for row in rows_of_bin) == list(range(len(rows)))
    whole = chains(rows, range(len(rows)))
    apart = [chain for rows_of_bin in bins for chain in chains(rows, rows_of_bin)]
    assert sorted(apart) == sorted(whole)
