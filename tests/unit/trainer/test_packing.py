"""Packing loses and invents no token, and balances what bins cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.packing import PackedRow, cost, pack, plan, reply_row


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
