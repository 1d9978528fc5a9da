"""The bench's made-up events: the same ones each time, honest ones that are events, hostile ones that are not, lengths as stated."""

import random
import statistics

import numpy as np

from pipelines import codec
from pipelines.errors import Rejected
from pipelines.events import Completion, Event, unpack_ids, unpack_logprobs
from signals import fuzz, generator
from signals.config import RewardsConfig
from signals.generator import HOSTILE, MAX_EVENT_BYTES, START_MS, Mix, Record
from signals.sessions import distil

NOW_MS = START_MS + generator.LIFETIME_MS
HONEST = Mix(duplicates=0, delayed=0, hostile=0)


def decoded(record: Record) -> Event | Rejected:
    return codec.decode(record.value, MAX_EVENT_BYTES, now_ms=NOW_MS, key=record.key or b"")


def test_a_chunk_is_a_function_of_its_seed_and_number() -> None:
    first = list(generator.chunk(3, seed=1, sessions=4))
    assert first == list(generator.chunk(3, seed=1, sessions=4))
    assert first != list(generator.chunk(4, seed=1, sessions=4))
    assert first != list(generator.chunk(3, seed=2, sessions=4))


def test_without_disorder_every_record_is_an_event_once_in_order_of_time() -> None:
    events = [decoded(record) for record in generator.chunk(0, sessions=30, mix=HONEST)]
    assert not [event for event in events if isinstance(event, Rejected)]
    moments = [event.occurred_at_ms for event in events if not isinstance(event, Rejected)]
    assert moments == sorted(moments)
    assert len({event.event_id for event in events if not isinstance(event, Rejected)}) == len(events) > 1_000


def test_every_kind_of_hostile_record_is_refused_for_the_reason_that_is_stated() -> None:
    rng = random.Random(5)
    honest = [record for record in generator.chunk(0, sessions=4, mix=HONEST) if b'"type":"turn_started"' in record.value]
    for kind, (make, reasons) in HOSTILE.items():
        for record in honest:
            found = decoded(make(rng, record))
            assert isinstance(found, Rejected), kind
            assert found.reason in reasons, kind


def test_fuzzed_records_say_whether_they_are_events_and_most_are_none() -> None:
    fuzzed = list(fuzz.fuzz_chunk(0, records=400))
    assert [isinstance(decoded(item.record), Rejected) for item in fuzzed] == [not item.event for item in fuzzed]
    assert sum(not item.event for item in fuzzed) == 400
    refused = {found.reason for item in fuzzed if isinstance(found := decoded(item.record), Rejected)}
    assert len(refused) >= 6
    assert {item.event for item in fuzzed if item.kind == "honest"} == {True}
    assert not [item for item in fuzzed if item.event and item.kind in HOSTILE]


def test_completions_carry_whole_arrays_with_the_stated_lengths() -> None:
    events = [decoded(record) for record in generator.chunk(1, sessions=150, mix=HONEST)]
    payloads = [event.payload for event in events if isinstance(event, Completion)]
    for payload in payloads:
        ids, logprobs = unpack_ids(payload.response_ids or ""), unpack_logprobs(payload.behaviour_logprobs or "")
        assert len(ids) == len(logprobs) == payload.response_tokens
        assert len(unpack_ids(payload.prompt_ids or "")) == payload.prompt_tokens
        assert np.all((ids >= 0) & (ids < 49_152))
        assert np.all(logprobs <= 0)
    lengths = [payload.response_tokens for payload in payloads]
    low, high = generator.TOKENS_RANGE
    assert low <= min(lengths) < max(lengths) <= high
    assert 135 < statistics.median(lengths) < 165
    assert 195 < statistics.mean(lengths) < 250


def test_shares_of_hostile_repeated_and_late_records_are_the_stated_ones() -> None:
    records = list(generator.chunk(2, sessions=400))
    events = [event for record in records if not isinstance(event := decoded(record), Rejected)]
    hostile = 1 - len(events) / len(records)
    repeated = 1 - len({event.event_id for event in events}) / len(events)
    assert 0.007 < hostile < 0.013
    assert 0.007 < repeated < 0.013
    rows: dict[str, list[dict[str, object]]] = {}
    for event in events:
        rows.setdefault(event.session_id, []).append(event.model_dump(mode="json"))
    turns = [turn for own in rows.values() for turn in distil(own, RewardsConfig(), now_ms=NOW_MS)]
    assert 1_200 < len(turns) < 2_000
    assert {turn.outcome.value for turn in turns} >= {"scored", "not_trainable", "no_evidence", "infra_error"}
    assert sum(turn.late for turn in turns) > 0


def test_one_later_message_in_five_is_a_remark() -> None:
    events = [decoded(record) for record in generator.chunk(3, sessions=300, mix=HONEST)]
    opening = ("no, that", "still fails", "thanks", "das geht", "perfect", "you changed", "non, l'autre")
    messages = [event.payload.message or "" for event in events if not isinstance(event, Rejected) and event.type == "turn_started"
                and event.payload.turn_index > 0]  # fmt: skip
    share = sum(message.startswith(opening) for message in messages) / len(messages)
    assert 0.16 < share < 0.24


def test_records_travel_as_batches_of_key_and_value() -> None:
    from signals.bench_topics import ROWS_A_BATCH, as_batches

    records = [Record(b"k", b"v"), Record(None, b"")] * (ROWS_A_BATCH // 2) + [Record(b"last", b"x")]
    batches = list(as_batches(iter(records)))
    assert [batch.num_rows for batch in batches] == [ROWS_A_BATCH, 1]
    assert batches[0].column("key").to_pylist()[:2] == [b"k", None]
    assert batches[1].to_pylist() == [{"key": b"last", "value": b"x"}]
