"""What stands of an edit: hand-worked numbers, and what holds for any texts."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipelines.events import unpack_ids
from pipelines.regions import carry, follow, gaps
from pipelines.survival import (
    SKETCH_GRAMS,
    Hunk,
    added_grams,
    advance,
    grams,
    plain,
    reverted,
    score,
    similarity,
    sketch,
    sketch_contained,
    sketch_similarity,
    survival,
    track,
)  # fmt: skip

UNHURRIED = settings(deadline=None)
"""The machine may be busy."""
TEXTS = st.text(alphabet="ab\n (=é𝄞", max_size=40)
LINES = st.lists(st.text(alphabet="abc (=é", max_size=8), max_size=6)
ELSEWHERE = st.lists(st.text(alphabet="xyz", max_size=4), max_size=6)


def both(before: str | None, after: str, now: str | None) -> tuple[float, float]:
    found = survival(before, after, now)
    return found.four_gram, found.no_revert


def test_similarity_of_hand_counted_grams() -> None:
    # abcde: abcd bcde; abcdf: abcd bcdf -> one of two shared on both sides
    assert similarity("abcde", "abcdf") == pytest.approx(2 * 1 / 4)
    assert similarity("", "") == 1.0
    assert similarity("abcd", "") == 0.0
    assert grams("aaaaa") == {"aaaa": 2}
    assert similarity("abc", "abc") == 1.0  # shorter than a gram: equal or not
    assert similarity("abc", "abcd") == 0.0
    assert similarity("aaaaaa", "aaaa") == pytest.approx(2 * 1 / 4)  # three grams of one kind against one: a multiset


CASES = {
    "untouched": ("A = 3\n", "A = 7\n", "A = 7\n", 1.0, 1.0),
    "taken back": ("LIMIT = 3\n", "LIMIT = 12345\n", "LIMIT = 3\n", 0.0, 0.0),
    # aaaa aaaa aaab against aaaa aaaa aaaa: 2 of 3 and 3 shared; sim(ai, before) = 0
    "half way back": ("aaaaaa", "bbbbbb", "aaaaab", 0.0, 1 - 4 / 6),
    # hunk "one two" -> "one two three four" keeps "one two " in front; the region is " three four" (8 grams), now " three five":
    # the first five grams, up to "ee f", are shared: 5 of 8 and 8
    "built upon": ("one two\n", "one two three four\n", "one two three five\n", 2 * 5 / 16, 1.0),
    "more text after it": ("one\n", "one\ntwo three\n", "one\ntwo three\nfour five six\n", 1.0, 1.0),
    "more text before it": ("one\n", "one\ntwo three\n", "zero\none\nhalf\ntwo three\n", 1.0, 1.0),
    "new file deleted": (None, "x = 1\n", None, 0.0, 0.0),
    "edited file deleted": ("old text\n", "new things\n", None, 0.0, 1.0),
    "new file emptied": (None, "x = 1\n", "", 0.0, 0.0),
    "deletion kept": ("a\nlong line b\nc\n", "a\nc\n", "a\nc\nd\n", 1.0, 1.0),
    "deletion taken back": ("a\nlong line b\nc\n", "a\nc\n", "top\na\nlong line b\nc\n", 0.0, 0.0),
    # "long line b\n" (9 grams) against "long line c\n" (9 grams): long ong_ ng_l g_li _lin line ine_ shared, 7 of 9
    "deletion taken back with a change": ("a\nlong line b\nz\n", "a\nz\n", "a\nlong line c\nz\n", 1 - 7 / 9, 1 - 7 / 9),
    "deletion filled with something else": ("a\nlong line b\nz\n", "a\nz\n", "a\n12345678\nz\n", 1.0, 1.0),
    "line ends": ("a = 1\r\nb = 2\r\n", "a = 1\r\nb = 20\r\n", "a = 1\nb = 20\n", 1.0, 1.0),
    "byte order mark": ("a\n", "a\nbcdef\n", "\ufeffa\nbcdef\n", 1.0, 1.0),
    "only line ends changed by the policy": ("a\r\nb\r\n", "a\nb\n", "anything\n", 1.0, 1.0),
    "nothing changed by the policy": ("a\n", "a\n", "b\n", 1.0, 1.0),
    "white space by the policy, taken back": ("if x:\n  pass\n", "if x:\n    pass\n", "if x:\n  pass\n", 0.0, 0.0),
    # "foo(alpha)\n" -> "    foo(alpha)\n": the tokens are followed, so the blanks in front are beside the region
    "reindented by the user": ("if x:\n", "if x:\nfoo(alpha)\n", "if x:\n    foo(alpha)\n", 1.0, 1.0),
    "unicode": ("naïve\n", "naïve 🎉🎊🎈🎁 été\n", "naïve 🎉🎊🎈🎁 été\n# ok\n", 1.0, 1.0),
    # the old line comes back beside the new one: abcdef (3 grams) against "abcdef\nuvwxyz" (10): 2 * 3 / 13
    # the heading is reworded under new lines with headings of its kind; "# 1.2 (May)\nfixed a\n" is followed: 8 grams shared of 11 and 17
    "a reworded line among many new ones": (
        "Changes\n",
        "Changes\n# 1.2\nfixed a\n",
        "Changes\n" + "".join(f"# 1.{n}\nnew {n}\n" for n in range(60, 3, -1)) + "# 1.2 (May)\nfixed a\n",
        2 * 8 / (11 + 17),
        1.0,
    ),
    # the diff sees "def g\n\n\n" go in after the two blank lines that the policy wrote; as well it went in before them
    "a block inserted in front, blank lines and all": (
        "def e\n",
        "def e\n\n\ndef f\n",
        "def e\n\n\ndef g\n\n\ndef f\n",
        1.0,
        1.0,
    ),
    "a block deleted behind, blank lines and all": (
        "def e\n\n\ndef g\n\n\ndef h\n",
        "def e\n\n\ndef f\n\n\ndef g\n\n\ndef h\n",
        "def e\n\n\ndef f\n\n\ndef h\n",
        1.0,
        1.0,
    ),
    "old line put back beside the new one": ("abcdef\n", "uvwxyz\n", "abcdef\nuvwxyz\n", 1.0, None),
}


@pytest.mark.parametrize("name", CASES)
def test_hand_worked_cases(name: str) -> None:
    before, after, now, four_gram, no_revert = CASES[name]
    found = survival(before, after, now)
    assert found.four_gram == pytest.approx(four_gram)
    if no_revert is not None:
        assert found.no_revert == pytest.approx(no_revert)


def test_an_old_line_put_back_beside_the_new_one_is_a_revert_in_part() -> None:
    # region "uvwxyz", beside it "abcdef\n": "abcdef\nuvwxyz" has 10 grams, "abcdef" 3, all of them shared
    assert survival("abcdef\n", "uvwxyz\n", "abcdef\nuvwxyz\n").no_revert == pytest.approx(1 - 2 * 3 / 13)


def test_a_revert_of_one_of_two_hunks_counts_by_its_size() -> None:
    before = "aaaaaaaa\nkeep\nbbbb\n"
    after = "cccccccc\nkeep\ndddd\n"
    # the hunk of 8 characters is taken back, that of 4 stands
    assert both(before, after, "aaaaaaaa\nkeep\ndddd\n") == (pytest.approx(4 / 12), pytest.approx(4 / 12))
    assert both(before, after, "cccccccc\nkeep\nbbbb\n") == (pytest.approx(8 / 12), pytest.approx(8 / 12))


def test_an_insertion_that_was_deleted_again_is_a_revert_although_it_replaced_nothing() -> None:
    assert both("a\nb\n", "a\nnew line\nb\n", "a\nb\nc\n") == (0.0, 0.0)


def test_a_deleted_replacement_is_gone_but_not_taken_back() -> None:
    assert both("start\nold thing\nend\n", "start\nbrand new\nend\n", "start\nend\n") == (0.0, 1.0)


def test_a_region_given_by_the_client_is_taken_and_a_wrong_one_is_not() -> None:
    tracked = track("x = f(a)\r\n", "x = f(a, b)\r\n", region=(7, 10))
    assert tracked.hunks == (Hunk(before="", after=", b", start=7, end=10),)
    assert track("one\r\ntwo\r\n", "one\r\nnew\r\ntwo\r\n", region=(5, 10)).hunks == (Hunk(before="", after="new\n", start=4, end=8),)
    assert track("one\n", "two\n", region=(2, 3)).hunks == track("one\n", "two\n").hunks


def test_regions_follow_an_edit_through_later_edits_of_the_same_file() -> None:
    tracked = track("def f():\n    pass\n", "def f():\n    return 1\n")
    assert tracked.hunks == (Hunk(before="pass", after="return 1", start=13, end=21),)
    tracked = advance(tracked, "import os\n\n\ndef f():\n    return 1\n")
    assert [(hunk.start, hunk.end) for hunk in tracked.hunks] == [(25, 33)]
    tracked = advance(tracked, "import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    pass\n")
    assert score(tracked, "import os\n\n\ndef f():\n    pass\n\n\ndef g():\n    pass\n").no_revert == 0.0
    assert score(tracked, "import os\n\n\ndef f():\n    return 1\n").no_revert == 1.0


def test_undoing_what_came_later_restores_the_region() -> None:
    tracked = track("a\n", "a\nbrand new line\n")
    emptied = advance(tracked, "")
    assert score(emptied, "a\nbrand new line\n").four_gram == 1.0
    assert advance(emptied, "a\nbrand new line\n").hunks == tracked.hunks


@pytest.mark.parametrize(
    ("change", "beside", "region"),
    [
        ((0, 2, 0, 5), False, (8, 13)),  # before it: shifted
        ((5, 5, 5, 7), False, (7, 12)),  # inserted at its start: not in it
        ((5, 5, 5, 7), True, (5, 12)),
        ((10, 10, 10, 12), False, (5, 10)),  # inserted at its end
        ((10, 10, 10, 12), True, (5, 12)),
        ((6, 7, 6, 10), False, (5, 13)),  # inside it: grown
        ((3, 7, 3, 4), False, (3, 7)),  # over its start: the replacement belongs to it
        ((8, 12, 8, 9), False, (5, 9)),
        ((0, 20, 0, 0), False, (0, 0)),  # all gone
        ((11, 15, 11, 11), False, (5, 10)),  # after it
    ],
)
def test_a_region_over_one_change(change: tuple[int, int, int, int], beside: bool, region: tuple[int, int]) -> None:
    assert follow(5, 10, [change], beside=beside) == region


def test_an_empty_region_takes_what_is_inserted_at_its_place() -> None:
    assert follow(5, 5, [(5, 5, 5, 9)]) == (5, 9)
    assert follow(5, 5, [(0, 0, 0, 3)]) == (8, 8)


def test_a_large_file_of_equal_lines_is_compared_in_bounded_time() -> None:
    old = "x\n" + "}\n" * 30_000 + "y\n"
    new = "z\n" + "}\n" * 15_000 + "w\n" + "}\n" * 15_000 + "y\n"
    assert survival(None, "\n".join(map(str, range(20_000))), new).four_gram < 0.1
    assert survival(old, new, old).no_revert == 0.0


@UNHURRIED
@given(TEXTS, TEXTS)
def test_what_lies_between_changes_is_equal(old: str, new: str) -> None:
    at_old = at_new = 0
    for o_from, o_to, n_from, n_to in gaps(old, new):
        assert old[at_old:o_from] == new[at_new:n_from]
        assert (o_from, n_from) >= (at_old, at_new)
        at_old, at_new = o_to, n_to
    assert old[at_old:] == new[at_new:]


@UNHURRIED
@given(TEXTS, TEXTS, st.lists(st.integers(0, 40), min_size=2, max_size=2), st.booleans())
def test_a_carried_region_lies_in_the_new_text(old: str, new: str, ends: list[int], beside: bool) -> None:
    start, end = sorted(min(place, len(old)) for place in ends)
    low, high = carry(start, end, (old, new), gaps(old, new), beside=beside)
    assert 0 <= low <= high <= len(new)
    if old == new:
        assert (low, high) == (start, end)


@UNHURRIED
@given(TEXTS, TEXTS)
def test_hunks_make_the_text_again(before: str, after: str) -> None:
    tracked = track(before, after)
    rest, at = [], 0
    for hunk in tracked.hunks:
        rest += [tracked.text[at : hunk.start], hunk.before]
        assert tracked.text[hunk.start : hunk.end] == hunk.after
        at = hunk.end
    assert "".join(rest) + tracked.text[at:] == plain(before)


@UNHURRIED
@given(st.none() | TEXTS, TEXTS, st.none() | TEXTS)
def test_survival_stays_between_nothing_and_all(before: str | None, after: str, now: str | None) -> None:
    four_gram, no_revert = both(before, after, now)
    assert 0.0 <= four_gram <= 1.0
    assert 0.0 <= no_revert <= 1.0


@UNHURRIED
@given(st.none() | TEXTS, TEXTS)
def test_an_untouched_edit_stands_whole(before: str | None, after: str) -> None:
    assert both(before, after, after) == (1.0, 1.0)


@UNHURRIED
@given(TEXTS, TEXTS)
def test_a_full_revert_leaves_nothing(before: str, after: str) -> None:
    assume(plain(before) != plain(after))
    assert survival(before, after, before).no_revert == 0.0


@UNHURRIED
@given(ELSEWHERE, LINES, LINES, LINES, ELSEWHERE)
def test_changes_elsewhere_in_the_file_change_nothing(
    top: list[str], old: list[str], new: list[str], now: list[str], end: list[str]
) -> None:
    """Lines that occur nowhere else fence the region off, so every diff must see the same."""

    def whole(middle: list[str], first: list[str], last: list[str]) -> str:
        return "".join(f"{line}\n" for line in [*first, "#1#", "#2#", *middle, "#3#", "#4#", *last])

    plainly = both(whole(old, [], []), whole(new, [], []), whole(now, [], []))
    assume(whole(now, [], []) != whole(old, [], []))  # known again as a whole, however the diff would place it
    assert both(whole(old, [], []), whole(new, [], []), whole(now, top, end)) == pytest.approx(plainly)


@UNHURRIED
@given(TEXTS, TEXTS, TEXTS)
def test_what_is_as_far_from_the_old_text_as_the_edit_is_no_revert(before: str, after: str, now: str) -> None:
    gone = reverted(before, after, now)
    assert 0.0 <= gone <= 1.0
    if after != before and now != before and similarity(now, before) <= similarity(after, before):
        assert gone == 0.0


@UNHURRIED
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_of_two_texts_the_one_nearer_to_the_old_one_is_never_the_smaller_revert(before: str, after: str, one: str, two: str) -> None:
    assume(after != before)
    near, far = sorted((one, two), key=lambda text: similarity(text, before), reverse=True)
    if far != before:
        assert reverted(before, after, near) >= reverted(before, after, far)


@UNHURRIED
@given(st.lists(st.integers(0, 30), min_size=2, max_size=2), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 4))))
def test_a_followed_region_lies_in_the_new_text_and_keeps_what_did_not_change(ends: list[int], moves: list[tuple[int, int, int]]) -> None:
    start, end = sorted(ends)
    changes, at, shift = [], 0, 0
    for place, removed, added in sorted(moves):
        if place <= at:
            continue
        changes.append((place, place + removed, place + shift, place + shift + added))
        at, shift = place + removed, shift + added - removed
    low, high = follow(start, end, changes)
    assert 0 <= low <= high <= max(at, end) + shift
    if not any(o_from <= end and o_to >= start for o_from, o_to, _, _ in changes):
        assert high - low == end - start


@UNHURRIED
@given(TEXTS, TEXTS)
def test_sketches_of_texts_under_the_limit_give_the_exact_similarity(one: str, two: str) -> None:
    assert sketch_similarity(sketch(grams(one)), sketch(grams(two))) == pytest.approx(similarity(one, two))
    assert sketch_contained(sketch(grams(one)), one) == 1.0


def test_a_sketch_is_pairs_of_hash_and_count() -> None:
    pairs = unpack_ids(sketch(grams("aaaaaXaaaaa")))
    assert sorted(pairs[1::2].tolist(), reverse=True) == [4, 1, 1, 1, 1]
    assert sketch(grams("")) == ""
    with pytest.raises(ValueError, match="pairs"):
        sketch_similarity("AAAAAA==", "")


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_sketches_of_long_texts_estimate_the_similarity(seed: int, share: float) -> None:
    rng = random.Random(seed)
    words = [f"{rng.getrandbits(40):x}" for _ in range(3000)]
    one = " ".join(words)
    two = " ".join(word if rng.random() < share else f"{rng.getrandbits(40):x}" for word in words)
    packed = sketch(grams(one)), sketch(grams(two))
    assert len(unpack_ids(packed[0])) == 2 * SKETCH_GRAMS
    # 512 of some 30,000 grams: a standard error of at most sqrt(.25 / 512) = .022
    assert sketch_similarity(*packed) == pytest.approx(similarity(one, two), abs=0.11)


def test_a_sketch_without_bias_and_contained_shares() -> None:
    half = sketch(grams("abcdefgh"))  # five grams
    assert sketch_contained(half, "xxabcdefxx") == pytest.approx(3 / 5)
    assert sketch_contained(half, "") == 0.0


def test_added_text_is_counted_hunk_by_hunk() -> None:
    tracked = track("aaaa\nkeep\nbbbb\n", "cccc\nkeep\ndddd\n")
    assert added_grams(tracked) == {"cccc": 1, "dddd": 1}


@UNHURRIED
@given(TEXTS, TEXTS)
def test_similarity_is_symmetric_and_one_for_equal_texts(one: str, two: str) -> None:
    assert similarity(one, two) == similarity(two, one)
    assert similarity(one, one) == 1.0
