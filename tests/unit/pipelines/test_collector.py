"""The collector without HTTP: bodies, keys, limits, and what records become."""

import gzip
import json
import os
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import codec
from pipelines import collector_protobuf as protobuf
from pipelines.collector import Intake, Judged
from pipelines.collector_bodies import Unreadable, document, inflate, records
from pipelines.collector_keys import CONSENTS, Caller, Keys, add, file, read, revoke
from pipelines.collector_limits import Bucket, Buckets
from pipelines.collector_serve import is_loopback
from pipelines.errors import ConfigError, Rejected
from pipelines.events import EVENT
from pipelines.storage import Home

NOW = 1_764_000_000_000
JSON_TYPE, LINES_TYPE = "application/json", "application/x-ndjson"


def keyed(kind: str, raw: str) -> str:
    return f"{kind}<{raw}>"


def caller(**fields: Any) -> Caller:
    rights = {
        "name": "app", "origin": "live", "consent": "measure", "default_consent": "measure", "namespace": "app", "tokens": False
    } | fields  # fmt: skip
    return Caller(**rights)


def intake(**fields: Any) -> Intake:
    return Intake(**({"keyed": keyed, "keep_text": True, "max_event_bytes": 100_000} | fields))


def record(**fields: Any) -> dict[str, Any]:
    return {
        "event_id": "e1", "type": "feedback", "session_id": "s1", "occurred_at_ms": NOW, "payload": {"source": "app", "score": 0.5}
    } | fields  # fmt: skip


def taken(judged: Judged) -> dict[str, Any]:
    (line,) = judged.lines
    return json.loads(line)


def reason(judged: Judged) -> str | None:
    return None if judged.rejected is None else judged.rejected.reason


# -- bodies --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 70_000, 500_000])
def test_gzip_and_zstd_come_back_as_they_were(size: int) -> None:
    data = os.urandom(size // 2) + b"a" * (size - size // 2)
    assert inflate(gzip.compress(data), "gzip", limit_bytes=size) == data
    assert inflate(pa.compress(data, "zstd", asbytes=True) if size else b"", "zstd", limit_bytes=size) == data
    assert inflate(data, None, limit_bytes=size) == inflate(data, "identity", limit_bytes=size) == data
    assert inflate(gzip.compress(data) + gzip.compress(data), "gzip", limit_bytes=2 * size) == data + data


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_stopped_at_the_bound_and_a_cut_or_foreign_body_is_named(encoding: str) -> None:
    data = b" " * 3_000_000
    packed = gzip.compress(data) if encoding == "gzip" else pa.compress(data, "zstd", asbytes=True)
    for body, limit, status, code in (
        (packed, 2_999_999, 413, "body_too_large"), (packed[: len(packed) // 2], 10**7, 400, "truncated_body"),
        (b"no such thing", 100, 400, "damaged_body"),
    ):  # fmt: skip
        with pytest.raises(Unreadable) as caught:
            inflate(body, encoding, limit_bytes=limit)
        assert (caught.value.status, caught.value.code) == (status, code)
    assert len(inflate(packed, encoding, limit_bytes=3_000_000)) == 3_000_000


def test_unknown_encodings_are_refused() -> None:
    with pytest.raises(Unreadable, match="use gzip, zstd or none") as caught:
        inflate(b"", "br", limit_bytes=1)
    assert caught.value.status == 415


def test_records_of_every_native_form() -> None:
    one, two = b'{"a": 1}', b'{"b": 2}'
    assert records(b"[" + one + b"," + two + b"]", JSON_TYPE) == [{"a": 1}, {"b": 2}]
    assert records(b'{\n "a": 1\n}', JSON_TYPE) == [{"a": 1}]
    assert records(one + b"\n" + two, JSON_TYPE) == records(one + b"\r\n\n" + two + b"\n", LINES_TYPE) == [{"a": 1}, {"b": 2}]
    assert records(b"", LINES_TYPE) == []
    broken = records(one + b"\n{" + two, LINES_TYPE)
    assert broken[0] == {"a": 1}
    assert isinstance(broken[1], Rejected)


@pytest.mark.parametrize("body", [b"", b"{", b"[1,]", b"NaN", b"[Infinity]", b"\xff", b"[" * 5_000, b'"\\ud800"', b"{} {}", b"1" * 50_000])
def test_what_is_not_json_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable) as caught:
        document(body)
    assert (caught.value.status, caught.value.code) == (400, "malformed_json")


def test_a_hundred_thousand_random_bodies_are_read_or_refused_and_nothing_else() -> None:
    rng, own, made = random.Random(7), caller(), intake()
    good = json.dumps([record(), record(type="completion", payload={"completion_id": "c"})]).encode()
    outcomes = {"read": 0, "refused": 0}
    for number in range(100_000):
        if number % 5:
            body = rng.randbytes(rng.randrange(40))
        else:
            altered = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                altered[rng.randrange(len(altered))] = rng.randrange(256)
            body = bytes(altered)
        encoding = ("identity", "gzip", "zstd")[number % 997 % 3] if number % 997 < 3 else None
        try:
            found = records(inflate(body, encoding, limit_bytes=10_000), LINES_TYPE if number % 2 else JSON_TYPE)
        except Unreadable:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        for item in found:
            judged = made.native(item, own, now_ms=NOW)
            assert bool(judged.lines) != (judged.rejected is not None)
    assert outcomes["read"] > 1_000
    assert outcomes["refused"] > 10_000


def test_random_protobuf_is_a_request_or_refused() -> None:
    rng, outcomes = random.Random(3), Counter[str]()
    for number in range(6_000):
        try:
            found = protobuf.request(rng.randbytes(rng.randrange(60)), traces=bool(number % 2), max_records=100)
        except Unreadable as refusal:
            outcomes[refusal.code] += 1
        else:
            outcomes["request" if found else "empty"] += 1
            assert len(list(intake().telemetry(found, caller(), now_ms=NOW, limit=100))) <= 100
    assert outcomes.total() == 6_000
    assert outcomes["malformed_protobuf"] > 3_000
    assert outcomes["empty"] > 10, "no bytes, or fields that nobody knows"


@pytest.mark.parametrize(("code", "text"), [(3, ""), (8, "x" * 300), (14, "größe")])
def test_a_status_message_has_its_two_fields(code: int, text: str) -> None:
    data = protobuf.status(code, text)
    assert data[:3] == bytes([8, code, 0x12])
    assert data.endswith(text.encode())
    size = data[3] if len(text.encode()) < 128 else (data[3] & 0x7F) | data[4] << 7
    assert size == len(text.encode())


# -- records -------------------------------------------------------------------------------------------------------------------------


def test_a_record_may_leave_out_what_the_collector_knows() -> None:
    event = taken(intake().native(record(), caller(), now_ms=NOW + 5))
    assert (event["origin"], event["consent"], event["user_key"], event["recorded_at_ms"], event["schema_version"]) == (
        "live", "measure", "user<app/key:app>", NOW + 5, 1,
    )  # fmt: skip
    assert event["client"] == {"name": "collector:app", "version": "1"}


@given(st.sampled_from(CONSENTS), st.sampled_from([*CONSENTS, None, "all", 7, ["train"]]), st.sampled_from(CONSENTS))
def test_consent_never_exceeds_the_keys(ceiling: Any, claimed: Any, default: Any) -> None:
    own = caller(consent=ceiling, default_consent=default)
    event = taken(intake().native(record(consent=claimed), own, now_ms=NOW))
    expected = min(CONSENTS.index(claimed if claimed in CONSENTS else default), CONSENTS.index(ceiling))
    assert CONSENTS.index(event["consent"]) == expected


def test_a_user_of_one_name_space_is_nobody_elses() -> None:
    keys = {
        taken(intake().native(record(user_key="b"), caller(name=name, namespace=space), now_ms=NOW))["user_key"]
        for name, space in (("one", "one"), ("two", "two"), ("three", ""), ("four", "one"))
    }
    assert keys == {"user<one/b>", "user<two/b>", "user<b>"}


def test_another_origin_is_refused_and_the_own_one_may_be_named() -> None:
    for origin in ("simulated", "imported", None, 7, {}):
        assert reason(intake().native(record(origin=origin), caller(), now_ms=NOW)) == "origin_not_allowed"
    assert taken(intake().native(record(origin="benchmark"), caller(origin="benchmark"), now_ms=NOW))["origin"] == "benchmark"


def test_token_ids_are_believed_of_trusted_keys_only() -> None:
    payload = {"completion_id": "c", "response_ids": "AQAAAA==", "behaviour_logprobs": "AACAvw=="}
    sent = record(type="completion", payload=payload)
    trusted = taken(intake().native(sent, caller(tokens=True), now_ms=NOW))["payload"]
    assert {name: trusted[name] for name in payload} == payload
    dropped = taken(intake().native(sent, caller(), now_ms=NOW))["payload"]
    assert "response_ids" not in dropped
    assert dropped["capture_error"] == "not_captured_by_us"
    bare = taken(intake().native(record(type="completion", payload={"completion_id": "c"}), caller(), now_ms=NOW))["payload"]
    assert bare["capture_error"] == "no_token_ids"
    told = record(type="completion", payload={"completion_id": "c", "capture_error": "truncated"})
    assert taken(intake().native(told, caller(), now_ms=NOW))["payload"]["capture_error"] == "truncated"


def test_text_is_redacted_and_unknown_fields_are_dropped() -> None:
    message = {"turn_index": 0, "message": "AKIAABCDEFGHIJKLMNOP", "message_chars": 20, "note": "AKIAABCDEFGHIJKLMNOP"}
    sent = record(type="turn_started", payload=message, extra="AKIAABCDEFGHIJKLMNOP")
    (line,) = intake().native(sent, caller(), now_ms=NOW).lines
    assert b"AKIA" not in line
    assert json.loads(line)["payload"]["message"] == "<redacted:aws_key>"
    (kept,) = intake(keep_text=False).native(sent, caller(), now_ms=NOW).lines
    assert "message" not in json.loads(kept)["payload"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"occurred_at_ms": "1"}, "invalid_field"),
        ({"occurred_at_ms": 2**63}, "invalid_field"),
        ({"policy_version": -(2**70)}, "invalid_field"),
        ({"payload": {"source": "app", "score": 0.5, "extra": [{"deep": 10**30}]}}, "invalid_field"),
        ({"occurred_at_ms": NOW + 10**8}, "future_dated"),
        ({"schema_version": 2}, "unknown_version"),
        ({"user_key": 7}, "invalid_field"),
        ({"client": "x"}, "invalid_field"),
        ({"session_id": "x" * 200}, "invalid_field"),
        ({"type": "nonsense"}, "unknown_type"),
        ({"payload": {"source": "x" * 100_000, "score": 0}}, "oversized"),
    ],
)
def test_a_record_that_is_no_event_has_a_reason(fields: dict[str, Any], expected: str) -> None:
    judged = intake().native(record(**fields), caller(), now_ms=NOW)
    assert (judged.lines, reason(judged)) == ((), expected)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=10,
)
FIELDS = st.sampled_from([
    "event_id", "type", "session_id", "turn_id", "occurred_at_ms", "origin", "consent", "user_key", "client", "payload", "schema_version",
    "policy_version", "arm", "x",
])  # fmt: skip


@given(st.dictionaries(FIELDS, VALUES, max_size=5), st.booleans())
def test_whatever_a_record_holds_it_is_one_valid_event_or_one_reason(fields: dict[str, Any], whole: bool) -> None:
    own = caller()
    judged = intake().native(record(**fields) if whole else fields, own, now_ms=NOW)
    if judged.rejected is None:
        event = EVENT.validate_json(judged.lines[0], strict=True)
        assert (event.origin, event.recorded_at_ms) == (own.origin, NOW)
        assert event.consent in ("none", "measure")
        assert event.user_key.startswith("user<app/")
    else:
        assert judged.lines == ()
        assert judged.rejected.reason in codec.REASONS | {"origin_not_allowed"}


# -- keys ----------------------------------------------------------------------------------------------------------------------------


def new(home: Home, name: str, **rights: Any) -> str:
    return add(home, name, now_ms=NOW, **({"origin": "live", "consent": "measure", "namespace": None, "tokens": False} | rights))


def test_a_key_opens_until_it_is_revoked_and_is_never_stored(home: Home) -> None:
    keys = Keys(home, default_consent="measure")
    assert not keys.any
    key = new(home, "app", consent="train", tokens=True)
    keys.refresh()
    found = keys.who(f"Bearer {key}")
    assert found == caller(consent="train", tokens=True)
    assert key.encode() not in file(home).read_bytes()
    for wrong in (None, "", key, f"Basic {key}", f"Bearer {key}x", "Bearer ", "Bearer é"):
        assert keys.who(wrong) is None
    revoke(home, "app", now_ms=NOW)
    keys.refresh()
    assert keys.who(f"bearer {key}") is None
    assert keys.any, "a collector whose last key was revoked is not open to everybody"


def test_names_are_used_once_and_have_no_slash(home: Home) -> None:
    new(home, "app")
    for name, namespace in (("app", None), ("a/b", None), ("", None), ("A", None), ("ok", "a/b"), ("x" * 49, None)):
        with pytest.raises(ConfigError):
            new(home, name, namespace=namespace)
    assert [key.name for key in read(home)] == ["app"]
    new(home, "gateway-like", namespace="")
    assert read(home)[1].namespace == ""
    with pytest.raises(ConfigError, match="valid ones: app, gateway-like"):
        revoke(home, "nobody", now_ms=NOW)


def test_a_damaged_key_file_is_an_error_and_a_running_collector_keeps_its_keys(home: Home) -> None:
    key = new(home, "app")
    keys = Keys(home, default_consent="measure")
    file(home).write_text("{")
    with pytest.raises(ConfigError, match="holds no collector keys"):
        keys.refresh()
    assert keys.who(f"Bearer {key}") is not None


# -- limits --------------------------------------------------------------------------------------------------------------------------


def test_a_bucket_lets_a_burst_in_and_then_the_rate() -> None:
    bucket = Bucket(rate_per_s=10, burst=20, room=20, at_s=0)
    assert bucket.wait_s(0) == 0
    bucket.take(25)
    assert bucket.wait_s(0) == 1
    assert bucket.wait_s(0.7) == 0
    bucket.take(2)
    assert bucket.wait_s(0.7) == 1
    assert bucket.wait_s(1_000) == 0
    assert bucket.room == 20


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 50)), max_size=60))
def test_no_key_gets_more_than_its_burst_its_rate_and_one_batch(requests: list[tuple[float, int]]) -> None:
    bucket, now, let_in = Bucket(rate_per_s=7, burst=30, room=30, at_s=0), 0.0, 0
    for pause, count in requests:
        now += pause
        if bucket.wait_s(now) == 0:
            bucket.take(count)
            let_in += count
    assert let_in <= 30 + 7 * now + 50


def test_each_key_has_its_own_bucket() -> None:
    buckets = Buckets(rate_per_s=1, burst=1)
    buckets.of("a", 0).take(5)
    assert (buckets.of("a", 0).wait_s(0), buckets.of("b", 0).wait_s(0)) == (5, 0)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
        ("example.org", False),
    ],
)  # fmt: skip
def test_loopback_addresses(host: str, own: bool) -> None:
    assert is_loopback(host) is own
