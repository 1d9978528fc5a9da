"""The expression of a plain event: what it lets through the contract takes, and nothing in it goes unread."""

import json
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import codec
from pipelines.errors import Rejected
from pipelines.events import PAYLOADS
from signals import fuzz, shape
from tests.support.events_for_tests import generated_session

PLAIN = {kind: re.compile(shape.plain(kind)) for kind in PAYLOADS}
HONEST = [record.value.decode() for record in generated_session("s", seed=4)]
LIMIT = 1_000_000


def is_plain(text: str) -> bool:
    return any(pattern.search(text) for pattern in PLAIN.values())


def test_an_honest_event_is_plain_as_this_type_and_no_other() -> None:
    for text in HONEST:
        assert [kind for kind, pattern in PLAIN.items() if pattern.search(text)] == [json.loads(text)["type"]]


def test_an_event_as_any_json_writer_spaces_it_is_plain() -> None:
    for text in HONEST:
        assert is_plain(json.dumps(json.loads(text)))


@pytest.mark.parametrize(
    "member",
    [
        '"later":1', '"later":null', '"arm":5', '"arm":["a"]', '"arm":{"a":1}', '"arm":true', '"arm":"\\ud800"', '"arm":null',
        '"policy_version":1.0', '"policy_version":99999999999999999999', '"policy_version":"1"', '"client":{"name":"c","region":"x"}',
        '"client":{"name":5}', '"payload":[]', '"payload":{"reason":"done","surface":"cli"}', '"payload":{"reason":1}', '"type":"feedback"',
        '"payload":{"reason":"done","horizon_s":5}', '"policy_version" :1',
    ],
)  # fmt: skip
def test_what_the_contract_does_not_know_or_refuses_is_not_plain(member: str) -> None:
    text = HONEST[-1]
    assert '"type":"session_ended"' in text
    assert is_plain(f'{text[:-1]},"arm":"b"}}')
    assert not is_plain(f"{text[:-1]},{member}}}")


@pytest.mark.parametrize("tail", ["{}", "}", "\n{}", "\u2028", "\x00", " "])
def test_nothing_comes_after_a_plain_event(tail: str) -> None:
    assert not is_plain(HONEST[0] + tail)


def spoilt(seed: int) -> str:
    rng = random.Random(seed)
    return rng.choice(tuple(fuzz.FUZZ.values()))(rng, rng.choice(HONEST).encode())[:20_000].decode("utf-8", "replace")


@given(st.integers(min_value=0))
def test_a_spoilt_event_that_is_still_plain_json_breaks_a_rule_of_values_at_most(seed: int) -> None:
    text = spoilt(seed)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return
    if not is_plain(text):
        return
    found = codec.decode(text.encode(), LIMIT)
    if isinstance(found, Rejected):
        assert found.reason in {"missing_field", "invalid_field", "bad_packed_array", "unknown_version"}
        if found.reason == "invalid_field":
            assert found.detail.split(".")[-1] not in ("schema_version", "client")
    else:
        assert not codec.has_unknown_fields(text.encode(), found)


@pytest.mark.parametrize(
    "text",
    [
        '{"arm":"' + "\\n" * 400_000, '{"arm":"' + "a" * 900_000, '{"arm":"a",' * 80_000, '{"payload":{' * 80_000,
        '{"policy_version":' + "1" * 900_000,
        '{"payload":{"prompt_ids":"' + "A" * 900_000, '{"event_id":"' + "\\" * 900_000, '{"arm":"' + 'a\\"' * 300_000 + '"',
    ],
)  # fmt: skip
def test_a_hostile_text_is_turned_down_in_time_that_grows_with_its_length_only(text: str) -> None:
    begun = time.process_time()
    assert not is_plain(text)
    assert time.process_time() - begun < 5
