"""The judge of records: the codec's verdict, record by record, and an event's columns as the codec read it."""

import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime
from functools import cache
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipelines import codec
from pipelines.errors import Rejected
from signals import fuzz, generator, intake
from signals.tables import EVENTS, QUARANTINE
from tests.support.events_for_tests import generated_session

NOW_MS = generator.START_MS + generator.LIFETIME_MS
LIMITS = intake.Limits(max_bytes=generator.MAX_EVENT_BYTES)
Pair = tuple[bytes | None, bytes | None]


def batch(records: list[Pair], *, now_ms: int = NOW_MS) -> pa.RecordBatch:
    at = datetime.fromtimestamp(now_ms / 1000, UTC)
    rows = [
        {"key": key, "value": value, "topic": "t", "partition": 3, "offset": number, "arrived_at": at, "date": at.date()}
        for number, (key, value) in enumerate(records)
    ]
    kinds = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
    kinds |= {"arrived_at": pa.timestamp("us", "UTC"), "date": pa.date32()}
    return pa.RecordBatch.from_pylist(rows, schema=pa.schema([*kinds.items()]))


def judged(records: list[Pair]) -> list[dict[str, Any]]:
    return intake.judge(batch(records), LIMITS).to_pylist()


def verdict(key: bytes | None, value: bytes | None) -> Any:
    return codec.decode(value or b"", LIMITS.max_bytes, now_ms=NOW_MS, key=key or b"")


@cache
def one_of_each() -> dict[str, Pair]:
    seen: dict[str, Pair] = {}
    for number in range(30):
        for record in generated_session(f"s{number}", seed=1):
            seen.setdefault(json.loads(record.value)["type"], (record.key, record.value))
    return seen


def unfit() -> Iterator[Pair]:
    """Yield every field of every event type with values that may not fit it, and events that are written in other ways."""
    numbers = (b"5", b"-1", b"-0", b"1.0", b"1e999", b"1e-3", b"9" * 30, b"NaN", str(2**63 - 1).encode(), str(-(2**63)).encode())
    others = (b"null", b"true", b'""', b'"x"', b"[1]", b"{}", b'"\\u00e9\\u0000\\ud83d\\ude00"', b'"\\ud800"')
    for key, value in one_of_each().values():
        event = json.loads(value or b"")
        for path in [*[(name,) for name in event], *[("payload", name) for name in (*event["payload"], "sketch")], ("client", "name")]:
            for unlike in numbers + others:
                changed = json.loads(value or b"")
                (changed if len(path) == 1 else changed[path[0]])[path[-1]] = "@@"
                yield key, json.dumps(changed, separators=(",", ":")).encode().replace(b'"@@"', unlike)
            changed = json.loads(value or b"")
            (changed if len(path) == 1 else changed[path[0]]).pop(path[-1], None)
            yield key, json.dumps(changed).encode()
        yield key, json.dumps(event, indent=1).encode()


def given_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return what an event's columns say, without what is null."""

    def present(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: present(value) if isinstance(value, dict) else value for name, value in fields.items() if value is not None}

    return present({name: row[name] for name in intake.SENT.names})


def told(row: dict[str, Any]) -> Any:
    """Return what a judged row says: why the record is no event, or its columns."""
    if row["reason"] is None:
        return (given_of(row), row["detail"], row["key"], row["raw"])
    return (row["reason"], row["key"], row["raw"], {row[name] for name in (*intake.SENT.names, "fingerprint", "original")})


def expected(key: bytes | None, value: bytes | None) -> Any:
    """Return what `told` has to give of a record, from the codec."""
    found = verdict(key, value)
    if isinstance(found, Rejected):
        return (found.reason, key, value, {None})
    said = found.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return ({name: getattr(found, name) for name in codec.DEFAULTED} | said, None, None, None)


def test_a_record_is_what_the_codec_says_and_its_columns_are_what_the_codec_read() -> None:
    hostile: list[Pair] = [(item.record.key, item.record.value) for item in fuzz.fuzz_chunk(3, records=1_000)]
    for records in (hostile, [*unfit(), (b"k", None), (None, None), (b"k", b"")]):
        assert [told(row) for row in judged(records)] == [expected(*record) for record in records]


@given(st.integers(min_value=0), st.binary(max_size=40))
def test_spoilt_events_are_judged_alike_whatever_else_is_in_the_batch(seed: int, noise: bytes) -> None:
    rng = random.Random(seed)
    key, value = rng.choice(list(one_of_each().values()))
    spoilt = rng.choice(tuple(fuzz.FUZZ.values()))(rng, value or b"")[: LIMITS.max_bytes]
    records: list[Pair] = [(key, spoilt), (key, noise), (key, value)]
    assert [told(row) for row in judged(records)] == [expected(*record) for record in records]


@given(st.text(max_size=30), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**63 - 1))
def test_any_text_and_number_comes_through_unchanged(text: str, number: float, whole: int) -> None:
    key, value = one_of_each()["completion"]
    event = json.loads(value or b"")
    event["user_key"], event["payload"]["temperature"], event["payload"]["top_k"] = text, number, whole
    try:
        raw = json.dumps(event, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    (row,) = judged([(key, raw)])
    assert row["reason"] is None
    assert (row["user_key"], row["payload"]["temperature"], row["payload"]["top_k"]) == (text, number, whole)


def test_an_event_has_one_fingerprint_however_it_is_written_and_whenever_it_was_recorded() -> None:
    for key, value in one_of_each().values():
        event = json.loads(value or b"")
        members = list(event.items())
        random.Random(1).shuffle(members)
        same = [value, json.dumps(event, indent=2).encode(), json.dumps(dict(members)).encode(), json.dumps(event | {"later": 1}).encode()]
        same += [json.dumps(event | {"recorded_at_ms": event["recorded_at_ms"] + 5}).encode()]
        same += [json.dumps({name: item for name, item in event.items() if name != "schema_version"}).encode()]
        other = [
            json.dumps(event | {"user_key": "other"}).encode(),
            json.dumps(event | {"occurred_at_ms": event["occurred_at_ms"] - 1}).encode(),
        ]
        other += [json.dumps(event | {"user_key": 'a","recorded_at_ms":7,"b'}).encode()]
        prints = [row["fingerprint"] for row in judged([(key, raw) for raw in same + other])]
        assert len(set(prints[: len(same)])) == 1
        assert len(set(prints)) == 1 + len(other)
        assert {len(found) for found in prints} == {64}


def test_only_a_record_with_fields_that_nobody_knows_is_kept_whole_beside_its_columns() -> None:
    key, value = one_of_each()["turn_started"]
    event = json.loads(value or b"")
    spaced, newer = json.dumps(event, indent=1).encode(), json.dumps(event | {"later": None}).encode()
    inner = json.dumps(event | {"client": event["client"] | {"region": "x"}}).encode()
    foreign = json.dumps(event | {"payload": event["payload"] | {"horizon_s": 5}}).encode()
    assert [row["original"] for row in judged([(key, raw) for raw in (value, spaced, newer, inner, foreign)])] == [
        None, None, newer, inner, foreign,
    ]  # fmt: skip


def test_the_field_at_fault_is_named_for_faults_of_fields_only() -> None:
    key, value = one_of_each()["completion"]
    event = json.loads(value or b"")
    payload = event["payload"]
    cases = {
        "payload.step": event | {"payload": payload | {"step": -1}},
        "payload.response_ids": event | {"payload": payload | {"response_ids": "AAA"}},
        "payload.behaviour_logprobs": event | {"payload": payload | {"behaviour_logprobs": "AAAAAA=="}},
        "payload.completion_id": event | {"payload": {}},
        "user_key": {name: item for name, item in event.items() if name != "user_key"},
        None: event | {"schema_version": 99},
    }
    assert [row["detail"] for row in judged([(key, json.dumps(changed).encode()) for changed in cases.values()])] == list(cases)


def test_a_record_is_judged_by_its_own_time() -> None:
    key, value = one_of_each()["feedback"]
    at_ms = json.loads(value or b"")["occurred_at_ms"]
    limits = intake.Limits(max_bytes=100_000, future_ms=500)
    for early_ms, reason in ((500, None), (501, "future_dated")):
        assert intake.judge(batch([(key, value)], now_ms=at_ms - early_ms), limits)["reason"].to_pylist() == [reason]


def test_judged_rows_are_rows_of_the_two_tables() -> None:
    found = intake.judge(batch([next(iter(one_of_each().values())), (b"k", b"{")]), LIMITS)
    events, refused = intake.events_of(found), intake.refused_of(found)
    assert events.schema.equals(EVENTS.schema)
    assert refused.schema.equals(QUARANTINE.schema)
    assert (events["offset"].to_pylist(), refused["offset"].to_pylist()) == ([0], [1])
    assert refused["date"].to_pylist() == [date(2027, 5, 29)]
