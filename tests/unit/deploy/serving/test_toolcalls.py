"""Tool calls in the policy's text: valid ones round-trip, broken ones stay visible, nothing raises."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.serving.toolcalls import OPEN, openai_calls, parse, write

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
ARGUMENTS = st.dictionaries(st.text(max_size=10), VALUES, max_size=4)
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
PROSE = st.text(max_size=40).filter(lambda text: OPEN not in text)


@given(st.lists(st.tuples(PROSE, NAMES, ARGUMENTS), max_size=4), PROSE)
def test_well_formed_calls_round_trip_in_order(calls: list[tuple[str, str, dict[str, Any]]], tail: str) -> None:
    text = "".join(prose + "\n" + write(name, arguments) for prose, name, arguments in calls) + "\n" + tail
    found = parse(text)
    assert [(call.name, json.loads(call.arguments), call.well_formed) for call in found] == [(n, a, True) for _, n, a in calls]


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "grep"', ', "arguments": {', "}", '"', "\\", "[", "NaN", "1e999", " x"])


@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join))
def test_no_text_raises_and_every_opening_outside_a_call_is_answered(text: str) -> None:
    found = parse(text)
    assert (len(found) > 0) == (OPEN in text)
    assert len(found) <= text.count(OPEN)
    json.dumps(openai_calls(found, completion_id="c")).encode()


@pytest.mark.parametrize(
    ("inside", "name"),
    [
        ('{"name": "grep", "arguments": {"pattern": "x"}', "grep"),  # a brace is missing
        ('{"name": "grep", "arguments": "x"}', "grep"),
        ('{"name": "grep"}', "grep"),
        ('{"name": "two words", "arguments": {}}', ""),
        ('{"name": "grep", "arguments": {"x": NaN}}', "grep"),
        ("grep for x", ""),
        ("", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_broken_call_keeps_its_raw_text_and_what_can_be_seen_of_its_name(inside: str, name: str) -> None:
    (call,) = parse(f"I look. <tool_call>{inside}</tool_call>")
    assert (call.name, call.arguments, call.well_formed) == (name, inside, False)


def test_a_call_that_never_ends_is_broken_and_does_not_swallow_the_next_one() -> None:
    first, second = parse(f'<tool_call>{{"name": "grep", {write("read_file", {"path": "a"})}')
    assert (first.name, first.well_formed) == ("grep", False)
    assert (second.name, second.well_formed) == ("read_file", True)
    (cut,) = parse('<tool_call>{"name": "grep", "arguments": {}}')
    assert (cut.name, cut.well_formed) == ("grep", False)


def test_a_closing_tag_inside_an_argument_is_text() -> None:
    (call,) = parse(write("edit_file", {"new": "</tool_call> and <tool_call>"}))
    assert json.loads(call.arguments) == {"new": "</tool_call> and <tool_call>"}


def test_ids_of_calls_derive_from_the_completion() -> None:
    found = openai_calls(parse(write("a", {}) + write("b", {})), completion_id="c1")
    assert [call["id"] for call in found] == ["call_c1_0", "call_c1_1"]
    assert found[1] == {"id": "call_c1_1", "type": "function", "function": {"name": "b", "arguments": "{}"}}
