"""Bytes and events: nothing is lost one way, every fault has its reason the other way."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import codec
from pipelines.errors import Rejected
from pipelines.events import EVENT, PAYLOADS, Envelope, pack_ids, pack_logprobs
from tests.support.events_for_tests import feedback, message

SAMPLES = Path(__file__).parents[2] / "support" / "events"
LIMIT = 1_000_000
NOW = 1_764_600_000_000


def lines(version: int = 1) -> list[bytes]:
    return [line for path in sorted((SAMPLES / f"v{version}").glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def test_every_committed_sample_of_every_version_still_loads() -> None:
    for folder in sorted(SAMPLES.iterdir()):
        for line in lines(int(folder.name[1:])):
            event = codec.decode(line, LIMIT, now_ms=NOW)
            assert isinstance(event, Envelope), event


def test_the_samples_show_every_event_type_and_packed_arrays_mean_the_same_for_ever() -> None:
    by_type = {json.loads(line)["type"]: json.loads(line)["payload"] for line in lines()[-15:]}
    assert set(by_type) == set(PAYLOADS)
    completion = by_type["completion"]
    assert completion["prompt_ids"] == "AQAAAP0PAADGAAAAewoAAPoBAAAFAAAA"  # 1, 4093, 198, 2683, 506, 5
    assert completion["behaviour_logprobs"] == "AACAvgAAwL8AAAC9"  # -1/4, -3/2, -1/32


def test_an_event_survives_encoding_and_decoding_unchanged() -> None:
    for line in lines():
        event = EVENT.validate_json(line)
        assert codec.decode(codec.encode(event), LIMIT) == event


@given(st.text(), st.floats(-1, 1))
def test_any_text_and_score_survives_the_round_trip(text: str, score: float) -> None:
    for event in (message(text), feedback(score=score)):
        assert codec.decode(codec.encode(event), LIMIT) == event


def test_encoding_is_compact_and_leaves_absent_fields_out() -> None:
    raw = codec.encode(feedback())
    assert b'": ' not in raw
    assert b"null" not in raw
    assert b"policy_version" not in raw


def good(**changes: object) -> dict[str, object]:
    return json.loads(codec.encode(feedback())) | changes


def completion(**payload: object) -> bytes:
    return json.dumps(good(type="completion", payload={"completion_id": "c"} | payload)).encode()


ODD_SKETCH = {"edit_id": "e", "path_hash": "p", "sketch": pack_ids([1])}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "malformed_json"),
        (b"{", "malformed_json"),
        (b"[1]", "malformed_json"),
        (b"7", "malformed_json"),
        (b"\xff\xfe", "malformed_json"),
        (json.dumps(good())[:-20].encode(), "malformed_json"),
        (json.dumps(good(type="poem")).encode(), "unknown_type"),
        (json.dumps({k: v for k, v in good().items() if k != "type"}).encode(), "missing_field"),
        (json.dumps({k: v for k, v in good().items() if k != "session_id"}).encode(), "missing_field"),
        (json.dumps(good(payload={"source": "x"})).encode(), "missing_field"),
        (json.dumps(good(payload={"source": "x", "score": 2})).encode(), "invalid_field"),
        (json.dumps(good(occurred_at_ms="12")).encode(), "invalid_field"),
        (json.dumps(good(origin="dreamt")).encode(), "invalid_field"),
        (json.dumps(good(schema_version=2)).encode(), "unknown_version"),
        (json.dumps(good(schema_version=2, type="poem", payload=None)).encode(), "unknown_version"),
        (json.dumps(good(occurred_at_ms=NOW + codec.FUTURE_TOLERANCE_MS + 1)).encode(), "future_dated"),
        (b" " * (LIMIT + 1), "oversized"),
        (completion(response_ids="not base64!"), "bad_packed_array"),
        (completion(prompt_ids="AAA="), "bad_packed_array"),
        (completion(response_ids=pack_ids([1, 2, 3]), behaviour_logprobs=pack_logprobs([-1.0, -2.0])), "bad_packed_array"),
        (json.dumps(good(type="edit_proposed", payload=ODD_SKETCH)).encode(), "bad_packed_array"),
    ],
)  # fmt: skip
def test_a_faulty_record_is_a_value_with_its_reason_and_its_bytes(raw: bytes, reason: str) -> None:
    verdict = codec.decode(raw, LIMIT, now_ms=NOW)
    assert isinstance(verdict, Rejected)
    assert (verdict.reason, verdict.raw) == (reason, raw)
    assert reason in codec.REASONS


def test_a_record_keyed_by_another_session_is_rejected_and_the_right_key_passes() -> None:
    raw = codec.encode(feedback(session="a"))
    wrong = codec.decode(raw, LIMIT, key=b"b")
    assert isinstance(wrong, Rejected)
    assert wrong.reason == "wrong_key"
    assert isinstance(codec.decode(raw, LIMIT, key=b"a"), Envelope)


def test_a_completion_whose_arrays_agree_passes() -> None:
    raw = completion(response_ids=pack_ids([1, 2]), behaviour_logprobs=pack_logprobs([-1.0, -2.0]))
    assert isinstance(codec.decode(raw, LIMIT), Envelope)


def test_the_detail_of_a_rejection_never_repeats_what_the_record_said() -> None:
    verdict = codec.decode(json.dumps(good(origin="my secret plan")).encode(), LIMIT)
    assert isinstance(verdict, Rejected)
    assert "secret" not in verdict.detail


KEYS = st.sampled_from(["type", "schema_version", "payload", "session_id"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


@given(st.binary(max_size=200) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_decoding_raise(raw: bytes) -> None:
    verdict = codec.decode(raw, LIMIT, now_ms=NOW, key=b"k")
    assert isinstance(verdict, Rejected)
    assert verdict.reason in codec.REASONS


@given(st.integers(0, 10_000))
def test_cutting_a_record_anywhere_never_gives_another_event(cut: int) -> None:
    raw = codec.encode(message("hello there"))
    part = raw[: cut % len(raw)]
    assert isinstance(codec.decode(part, LIMIT), Rejected)


def test_a_field_name_used_by_two_types_has_one_json_type() -> None:
    kinds: dict[str, set[str]] = {}
    for model in PAYLOADS.values():
        schema = model.model_json_schema()
        for name, field in schema["properties"].items():
            options = field.get("anyOf", [field])
            types = {schema["$defs"][o["$ref"].split("/")[-1]]["type"] if "$ref" in o else o["type"] for o in options} - {"null"}
            kinds.setdefault(name, set()).update(types)
    assert {name: types for name, types in kinds.items() if len(types) > 1} == {}
