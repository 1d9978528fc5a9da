"""From Kafka records to events or quarantine.

What is an event says `pipelines.codec.decode`, for a client and for the stream alike. Spark's columns only know what is one beyond doubt:
`plain` parses a batch and gives the rows that are, nearly all of them, without a reason for any other. `judged` asks the codec itself, in
Python, about records that were left over: it gives the reason, or the event as the codec read it. Judged by the record's own time, so that
reading a record twice decides alike. Only transport faults are faults: an invalid tool call or a truncated answer is a fact and passes.

Takes: the columns of Spark's Kafka source. Gives: rows of `events`, or every record with its parsed columns and a `reason` (null: it is an
event). Leaves out: writing (`stream.py`).
"""

import functools
import operator
import uuid
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipelines import codec
from pipelines.codec import FUTURE_TOLERANCE_MS
from pipelines.errors import Rejected
from pipelines.events import PAYLOADS, SCHEMA_VERSION, Envelope
from signals import shape
from signals.tables import EVENTS, INSTANT, QUARANTINE
from signals.wire import Rule, envelope_rules, json_ddl, payload_rules

CORRUPT: Final = "_corrupt"
PARSE: Final = {
    "columnNameOfCorruptRecord": CORRUPT, "mode": "PERMISSIVE", "allowNonNumericNumbers": "false", "allowSingleQuotes": "false",
}  # fmt: skip
DEFAULTS: Final = {name: Envelope.model_fields[name].default for name in ("schema_version", "arm", "consent")}
"""What the envelope says when a field is absent."""
PLACE: Final = ("topic", "partition", "offset")
VERDICT: Final = (
    "key binary, raw binary, topic string, partition int, offset bigint, arrived_at timestamp, date date, reason string, detail string, "
    "original binary, sent string"
)
NAMED_FAULTS: Final = ("missing_field", "invalid_field", "bad_packed_array")
"""Reasons whose detail is the field at fault."""


def _all(conditions: list[Column]) -> Column:
    """Return whether all conditions hold; null, where a value is not there, counts as no."""
    return functools.reduce(operator.and_, conditions, F.lit(True))


def _meets(rule: Rule) -> list[Column]:
    """Return the conditions of one field; an absent value meets all but that it be there."""
    value = F.col(rule.field)
    checks = [value.isNotNull()] if rule.required else []
    bounds = [value.isin(*rule.values)] if rule.values else []
    bounds += [value >= F.lit(rule.at_least)] if rule.at_least is not None else []
    bounds += [value <= F.lit(rule.at_most)] if rule.at_most is not None else []
    bounds += [F.length(value) >= rule.min_chars] if rule.min_chars is not None else []
    bounds += [F.length(value) <= rule.max_chars] if rule.max_chars is not None else []
    return checks + [bound if rule.required else F.coalesce(bound, F.lit(True)) for bound in bounds]


def _packed(kind: str) -> list[Column]:
    """Return the conditions of a type's packed arrays: base64 of whole numbers (pairs of them), as many values as ids."""

    def size(name: str) -> Column:
        text = F.col(f"payload.{name}")
        padding = F.when(F.endswith(text, F.lit("==")), 2).when(F.endswith(text, F.lit("=")), 1).otherwise(0)
        decodes = (F.octet_length(text) % 4 == 0) & text.rlike(shape.BASE64)
        return F.when(text.isNotNull(), F.when(decodes, F.shiftright(F.octet_length(text) * 3, 2) - padding).otherwise(1))

    if kind == "edit_proposed":
        return [F.coalesce(size("sketch") % 8 == 0, F.lit(True))]
    if kind != "completion":
        return []
    whole = [F.coalesce(size(name) % 4 == 0, F.lit(True)) for name in ("prompt_ids", "response_ids", "behaviour_logprobs")]
    return [*whole, F.coalesce(size("response_ids") == size("behaviour_logprobs"), F.lit(True))]


def _is_plain(text: Column) -> Column:
    """Return whether a parsed record is an event beyond doubt, with nothing in it but what was parsed."""
    own = F.lit(False)
    for kind, rules in payload_rules().items():
        as_written = (F.col("_sent") == text) | text.rlike(shape.plain(kind))
        conditions = [*[condition for rule in rules for condition in _meets(rule)], *_packed(kind), as_written]
        own = F.when(F.col("type") == kind, _all(conditions)).otherwise(own)
    top = [condition for rule in envelope_rules() for condition in _meets(rule)]
    return _all([F.col(CORRUPT).isNull(), F.col("schema_version") == SCHEMA_VERSION, *top, own])


def _parsed(frame: DataFrame, text: Column) -> DataFrame:
    """Add an event's columns, read from its text (null: nothing to read), with the envelope's defaults."""
    found = frame.withColumn("_event", F.from_json(text, json_ddl(CORRUPT), PARSE)).select("*", "_event.*").drop("_event")
    return found.withColumns({name: F.coalesce(F.col(name), F.lit(default)) for name, default in DEFAULTS.items()})


def _sent() -> Column:
    """Return an event as the recorder writes it (`pipelines.codec.encode`), but for numbers and characters that Java writes otherwise."""
    envelope = [name for name in Envelope.model_fields if name != "client"]
    texts = F.lit(None).cast("string")
    for kind, model in PAYLOADS.items():
        payload = F.struct(*[F.col(f"payload.{name}") for name in model.model_fields]).alias("payload")
        texts = F.when(F.col("type") == kind, F.to_json(F.struct(*envelope, "client", "type", payload))).otherwise(texts)
    return texts


def _fingerprint() -> Column:
    """Return the identity of an event's content: all but the recorder's clock, whatever the order and spacing it was written in."""
    mark = ',"recorded_at_ms":'
    before = F.substring_index("_sent", mark, 1)
    after = F.substr("_sent", F.length(before) + len(mark) + 1 + F.length(F.col("recorded_at_ms").cast("string")))
    return F.sha2(F.concat(before, after), 256)


def _once(frame: DataFrame) -> DataFrame:
    """Put up a barrier: without it Spark pushes a condition below the projections, and parses and judges every record twice."""
    return frame.observe(f"judged {uuid.uuid4()}", F.count(F.lit(1)))


def plain(records: DataFrame, *, max_bytes: int, future_ms: int = FUTURE_TOLERANCE_MS) -> DataFrame:
    """Parse Kafka records and return those that are events beyond doubt, with the columns of the table `events`.

    Arguments as `judged`, which gives each of these rows the same columns and no reason.
    """
    text = F.col("value").cast("string")
    readable = (F.octet_length("value") <= max_bytes) & F.is_valid_utf8(text)
    stamped = records.withColumns({"arrived_at": F.col("timestamp"), "date": F.to_date("timestamp")})
    parsed = _parsed(stamped, F.when(readable, text)).withColumn("_sent", _sent())
    timely = F.col("occurred_at_ms") <= F.unix_millis("arrived_at") + future_ms
    keyed = F.col("key") == F.encode("session_id", "utf-8")
    sure = F.coalesce(timely & keyed & _is_plain(text), F.lit(False))
    known = parsed.withColumns({"_sure": sure, "original": F.lit(None).cast("binary")})
    known = known.withColumn("fingerprint", F.when(F.col("_sure"), _fingerprint()))
    return _once(known.select("_sure", *EVENTS.schema.names)).where("_sure").drop("_sure")


def judged(records: DataFrame, *, max_bytes: int, future_ms: int = FUTURE_TOLERANCE_MS) -> DataFrame:
    """Ask the codec about Kafka records, whatever they are.

    Args:
        records: `key`, `value` (binary), `topic`, `partition`, `offset`, `timestamp` of Spark's Kafka source.
        max_bytes: Larger values are `oversized` and not parsed.
        future_ms: How far an event may be ahead of its record.

    Returns:
        The columns of the table `events`, then `reason`, `detail`, `key`, `raw`.
    """
    asked = records.select("key", "value", *PLACE, F.col("timestamp").alias("arrived_at"), F.to_date("timestamp").alias("date"))
    told = asked.mapInArrow(_verdicts(max_bytes=max_bytes, future_ms=future_ms), VERDICT)
    parsed = _parsed(told, F.col("sent"))
    lost = F.col("sent").isNotNull() & (F.col(CORRUPT).isNotNull() | F.col("type").isNull())
    reason = F.coalesce(F.col("reason"), F.when(lost, F.lit("invalid_field")))
    found = parsed.withColumns({"reason": reason, "_sent": _sent()})
    found = found.withColumn("fingerprint", F.when(F.col("reason").isNull(), _fingerprint()))
    found = found.withColumns({name: F.when(F.col("reason").isNotNull(), F.col(name)) for name in ("key", "raw")})
    return _once(found.select(*EVENTS.schema.names, "reason", "detail", "key", "raw"))


def _verdicts(*, max_bytes: int, future_ms: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def verdict(key: bytes | None, raw: bytes | None, arrived_at_us: int) -> tuple[str | None, str | None, bytes | None, str | None]:
        """Return reason, detail, the record where it has unknown fields, and the event's text."""
        found = codec.decode(raw or b"", max_bytes, now_ms=arrived_at_us // 1000, key=key or b"", ahead_ms=future_ms)
        if isinstance(found, Rejected):
            return found.reason, found.detail if found.reason in NAMED_FAULTS else None, None, None
        return None, None, raw if codec.has_unknown_fields(raw or b"", found) else None, codec.as_sent(found).decode()

    def verdicts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kinds = {"reason": pa.string(), "detail": pa.string(), "original": pa.binary(), "sent": pa.string()}
        for batch in batches:
            arrived_us = batch.column("arrived_at").cast(INSTANT).cast(pa.int64()).to_pylist()
            rows = zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), arrived_us, strict=True)
            told = [verdict(*row) for row in rows]
            answers = [pa.array([row[place] for row in told], kind) for place, kind in enumerate(kinds.values())]
            given = [name if name != "value" else "raw" for name in batch.schema.names]
            yield pa.RecordBatch.from_arrays([*batch.columns, *answers], names=[*given, *kinds])

    return verdicts


def accepted(frame: DataFrame) -> DataFrame:
    """Return the rows of `judged` that are events, with the columns of the table `events`."""
    return frame.where(F.col("reason").isNull()).select(*EVENTS.schema.names)


def refused(frame: DataFrame) -> DataFrame:
    """Return the rows of `judged` that are not, with the columns of the table `quarantine`."""
    return frame.where(F.col("reason").isNotNull()).select(*QUARANTINE.schema.names)
