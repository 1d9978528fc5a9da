"""The memory of prompts already read: exact, longest, bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deploy.serving.scheduler import PrefixMemory, common_prefix

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(IDS, IDS)
def test_common_prefix_agrees_with_a_slow_loop(left: list[int], right: list[int]) -> None:
    slow = 0
    while slow < min(len(left), len(right)) and left[slow] == right[slow]:
        slow += 1
    assert common_prefix(np.array(left), np.array(right)) == slow


@given(st.lists(IDS, max_size=12), IDS)
def test_what_is_found_is_the_longest_known_beginning_and_leaves_one_token(kept: list[list[int]], wanted: list[int]) -> None:
    memory = PrefixMemory(max_bytes=10_000, token_bytes=1)
    for ids in kept:
        memory.keep(ids, ids)
    best = max((common_prefix(np.array(ids), np.array(wanted[:-1])) for ids in kept), default=0)
    found = memory.find(wanted)
    assert (found.length if found else 0) == best
    if found:
        assert found.stored[:best] == wanted[:best]
        assert best < len(wanted)


@given(st.lists(IDS, max_size=30))
def test_the_memory_never_exceeds_its_bound(kept: list[list[int]]) -> None:
    memory = PrefixMemory(max_bytes=200, token_bytes=10)
    for ids in kept:
        memory.keep(ids, None)
        assert memory.tokens <= 20


def test_the_entry_used_last_stays_longest_and_a_continuation_replaces_what_it_continues() -> None:
    memory = PrefixMemory(max_bytes=6, token_bytes=1)
    memory.keep([1, 1], "a")
    memory.keep([2, 2], "b")
    memory.keep([3, 3], "c")
    assert memory.find([1, 1, 9]) is not None
    memory.keep([4, 4], "d")
    assert memory.find([2, 2, 9]) is None
    assert memory.find([1, 1, 9]) is not None
    memory.keep([1, 1, 5], "longer")
    assert memory.tokens <= 6
    found = memory.find([1, 1, 5, 9])
    assert found is not None
    assert (found.stored, found.length) == ("longer", 3)
    assert not memory.wants([1, 1])
    assert memory.wants([1, 1, 6])


def test_a_memory_of_no_bytes_remembers_nothing() -> None:
    memory = PrefixMemory(max_bytes=0, token_bytes=4)
    memory.keep([1, 2, 3], "x")
    assert memory.find([1, 2, 3, 4]) is None
    assert not memory.wants([1])
