"""What Kafka records are worth: events as columns, or records with a reason why they are none.

There is one judge, `pipelines.codec.decode`, asked record by record in Spark's Python workers, so that a client and the stream cannot
differ. An event's columns are then read, many at a time, from the text that the codec writes for it, whatever the spacing and order it came
in. Judged by the record's own time, so that reading a record twice decides alike. Only transport faults are faults: an invalid tool call or
a truncated answer is a fact and passes. Measured on one core: the same rules as Spark columns cost three times as much, for `from_json`,
base64, sha256 and Parquet are each several times faster in C than in a Java process that has just started.

Takes: Arrow batches of Spark's Kafka source. Gives: rows of `events` and `quarantine`. Leaves out: files (`parts.py`), batches and commits
(`stream.py`).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipelines import codec
from pipelines.codec import FUTURE_TOLERANCE_MS
from pipelines.errors import Rejected
from signals.config import SignalsConfig
from signals.tables import EVENTS, INSTANT, QUARANTINE
from signals.wire import arrow_fields

SENT: Final = pa.schema(arrow_fields())
"""What is read from an event's text."""
JUDGED: Final = pa.schema([*EVENTS.schema, *[QUARANTINE.schema.field(name) for name in ("reason", "detail", "key", "raw")]])
"""Columns of a judged record: those of an event, null where it is none, and those of a refused one."""
PLACE: Final = ("topic", "partition", "offset")
NAMED_FAULTS: Final = ("missing_field", "invalid_field", "bad_packed_array")
"""Reasons whose detail is the field at fault."""
CLOCK: Final = b',"recorded_at_ms":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What makes a record no event although its text is one."""

    max_bytes: int
    """Larger values are `oversized` and not read."""
    future_ms: int = FUTURE_TOLERANCE_MS
    """How far an event may be ahead of its record."""


def limits(config: SignalsConfig) -> Limits:
    """Return the limits of a deployment's records; what a claim's file holds may be larger."""
    return Limits(max_bytes=config.kafka.max_event_bytes, future_ms=int(config.signals.future_allowance_s * 1000))


def fingerprint(sent: bytes) -> str:
    """Return the identity of an event's content, from the text that the codec writes for it: sha256 of all but the recorder's clock."""
    begin = sent.index(CLOCK)  # Not inside a text: there a quote has a backslash before it.
    return hashlib.sha256(sent[:begin] + sent[sent.index(b",", begin + 1) :]).hexdigest()


def judge(batch: pa.RecordBatch, limits: Limits) -> pa.Table:
    """Judge records.

    Args:
        batch: What `asked` selects; `value` is the record, `arrived_at` its time.
        limits: See `Limits`.

    Returns:
        The same rows with the columns `JUDGED`; `reason` is null where a record is an event.
    """
    arrived_us = batch.column("arrived_at").cast(INSTANT).cast(pa.int64()).to_pylist()
    sent: list[bytes] = []
    places: list[int | None] = []
    told: dict[str, list[str | bytes | None]] = {name: [] for name in ("fingerprint", "original", "reason", "detail", "key", "raw")}
    for key, raw, at_us in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), arrived_us, strict=True):
        found = codec.decode(raw or b"", limits.max_bytes, now_ms=at_us // 1000, key=key or b"", ahead_ms=limits.future_ms)
        if isinstance(found, Rejected):
            row = (None, None, found.reason, found.detail if found.reason in NAMED_FAULTS else None, key, raw)
            places.append(None)
        else:
            text = codec.as_sent(found)
            row = (fingerprint(text), raw if text != raw and codec.has_unknown_fields(raw, found) else None, None, None, None, None)
            places.append(len(sent))
            sent.append(text)
        for column, value in zip(told.values(), row, strict=True):
            column.append(value)
    columns = {name: pa.array(column, JUDGED.field(name).type) for name, column in told.items()}
    columns |= {name: batch.column(name) for name in (*PLACE, "arrived_at", "date")}
    events = _columns(sent).take(pa.array(places, pa.int64()))
    columns |= {name: events.column(name) for name in events.schema.names}
    return pa.table([columns[name] for name in JUDGED.names], schema=JUDGED)


def _columns(sent: list[bytes]) -> pa.Table:
    """Read events from their texts."""
    if not sent:
        return SENT.empty_table()
    text = b"\n".join(sent)
    reading = json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parsing = json.ParseOptions(explicit_schema=SENT, unexpected_field_behavior="error")
    return json.read_json(pa.BufferReader(text), read_options=reading, parse_options=parsing).select(SENT.names).combine_chunks()


def events_of(judged: pa.Table) -> pa.Table:
    """Return the rows of `events` among judged records."""
    return judged.filter(pc.is_null(judged["reason"])).select(EVENTS.schema.names)


def refused_of(judged: pa.Table) -> pa.Table:
    """Return the rows of `quarantine` among judged records."""
    return judged.filter(pc.is_valid(judged["reason"])).select(QUARANTINE.schema.names)


def asked(records: DataFrame) -> DataFrame:
    """Return what `judge` takes of Spark's Kafka source: `key`, `value`, `topic`, `partition`, `offset`, `timestamp`."""
    return records.select("key", "value", *PLACE, F.col("timestamp").alias("arrived_at"), F.to_date("timestamp").alias("date"))


def judged(records: DataFrame, limits: Limits) -> DataFrame:
    """Return Kafka records judged, as a frame with the columns `JUDGED`."""
    schema = records.sparkSession.createDataFrame(JUDGED.empty_table()).schema
    return asked(records).mapInArrow(_judging(limits), schema)


def _judging(limits: Limits) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def judging(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from judge(batch, limits).combine_chunks().to_batches()

    return judging


def accepted(frame: DataFrame) -> DataFrame:
    """Return the rows of `judged` that are events, with the columns of the table `events`."""
    return frame.where(F.col("reason").isNull()).select(*EVENTS.schema.names)


def refused(frame: DataFrame) -> DataFrame:
    """Return the rows of `judged` that are not, with the columns of the table `quarantine`."""
    return frame.where(F.col("reason").isNotNull()).select(*QUARANTINE.schema.names)
