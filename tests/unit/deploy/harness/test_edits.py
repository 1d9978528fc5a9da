"""What an edit changed and how much of it stands, against hand-worked values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.harness.edits import Edit, changed, common_affixes, size, sketch, survival
from pipelines.events import unpack_ids

TEXTS = st.text(alphabet="ab\n #=", max_size=40)


def test_a_changed_constant_counts_one_line_and_only_its_own_characters() -> None:
    counts = size(Edit(path="a.py", before="A = 3\nB = 4\n", after="A = 17\nB = 4\n"))
    assert (counts.lines_added, counts.lines_removed, counts.chars_added, counts.chars_removed) == (1, 1, 2, 1)


def test_a_new_file_adds_all_its_lines() -> None:
    counts = size(Edit(path="a.py", before=None, after="x\ny\n"))
    assert (counts.lines_added, counts.lines_removed, counts.chars_added, counts.chars_removed) == (2, 0, 4, 0)


def test_an_added_comment_line_removes_nothing() -> None:
    counts = size(Edit(path="a.py", before="A = 3\n", after="# T-1\nA = 3\n"))
    assert (counts.lines_added, counts.lines_removed, counts.chars_added, counts.chars_removed) == (1, 0, 6, 0)


def test_a_kept_edit_survives_whole() -> None:
    edit = Edit(path="a.py", before="A = 3\n", after="A = 7\n")
    assert survival(edit, "A = 7\n") == (1.0, 1.0)


def test_an_undone_edit_does_not_survive() -> None:
    edit = Edit(path="a.py", before="LIMIT = 3\n", after="LIMIT = 12345\n")
    four_gram, no_revert = survival(edit, "LIMIT = 3\n")
    assert no_revert == 0.0
    assert four_gram == 0.0


def test_going_half_way_back_is_half_a_revert() -> None:
    # before and after share no gram, so sim(after, before) = 0 and only sim(now, before) counts
    edit = Edit(path="a.py", before="aaaaaa", after="bbbbbb")
    now = "aaaaab"  # aaaa aaaa aaab against aaaa aaaa aaaa: 2 shared of 3 and 3 -> 4/6
    assert survival(edit, now)[1] == pytest.approx(1 - 4 / 6)


def test_building_further_on_an_edit_is_no_revert() -> None:
    edit = Edit(path="a.py", before="one\n", after="one\ntwo three\n")
    assert survival(edit, "one\ntwo three\nfour five six\n")[1] == 1.0


def test_a_sketch_holds_hash_and_count_of_each_gram() -> None:
    pairs = unpack_ids(sketch(Edit(path="a.py", before="", after="aaaaaXaaaaa")))
    counts = sorted(pairs[1::2].tolist(), reverse=True)
    assert counts == [4, 1, 1, 1, 1]


@given(TEXTS, TEXTS)
def test_affixes_and_middle_make_the_text_again(before: str, after: str) -> None:
    prefix, suffix = common_affixes(before, after)
    removed, added = changed(before, after)
    assert before[:prefix] + removed + before[len(before) - suffix :] == before
    assert after[:prefix] + added + after[len(after) - suffix :] == after
    assert before[:prefix] == after[:prefix]
    assert before[len(before) - suffix :] == after[len(after) - suffix :]


@given(TEXTS, TEXTS, TEXTS)
def test_survival_stays_between_nothing_and_all(before: str, after: str, now: str) -> None:
    four_gram, no_revert = survival(Edit(path="a", before=before, after=after), now)
    assert 0.0 <= four_gram <= 1.0
    assert 0.0 <= no_revert <= 1.0
