"""From Kafka records to events or quarantine, as Spark columns.

The same judgement as `pipelines.codec.decode`, with the same reasons, so that a client and the stream agree on what an event is (but for a
number where a text belongs, which Spark reads as text). Only
transport faults are faults: an invalid tool call or a truncated answer is a fact and passes. Judged by the record's own time, so that
reading a record twice decides alike.

Takes: the columns of Spark's Kafka source. Gives: every record with its parsed columns and a `reason` (null: it is an event).
Leaves out: writing (`stream.py`).
"""

import uuid
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipelines.codec import FUTURE_TOLERANCE_MS
from pipelines.events import PAYLOADS, SCHEMA_VERSION, Envelope
from signals.tables import EVENTS, QUARANTINE
from signals.wire import Rule, envelope_rules, json_ddl, known_fields, payload_rules

CORRUPT: Final = "_corrupt"
PARSE: Final = {
    "columnNameOfCorruptRecord": CORRUPT, "mode": "PERMISSIVE", "allowNonNumericNumbers": "false", "allowSingleQuotes": "false",
}  # fmt: skip
ARRAYS: Final = ("prompt_ids", "response_ids", "behaviour_logprobs")
DEFAULTS: Final = {name: Envelope.model_fields[name].default for name in ("schema_version", "arm", "consent")}
"""What the envelope says when a field is absent."""


def _first_true(cases: list[tuple[Column, str]]) -> Column:
    """Return the text of the first case that holds; null when none does."""
    return F.coalesce(*[F.when(condition, F.lit(text)) for condition, text in cases]) if cases else F.lit(None).cast("string")


def _missing(rule: Rule) -> Column:
    return F.col(rule.field).isNull()


def _invalid(rule: Rule) -> Column | None:
    """Return whether a present value breaks its rule; None when there is nothing to check."""
    value = F.col(rule.field)
    checks: list[Column] = []
    if rule.values:
        checks.append(~value.isin(*rule.values))
    if rule.at_least is not None:
        checks.append(value < F.lit(rule.at_least))
    if rule.at_most is not None:
        checks.append(value > F.lit(rule.at_most))
    if rule.min_chars is not None:
        checks.append(F.length(value) < rule.min_chars)
    if rule.max_chars is not None:
        checks.append(F.length(value) > rule.max_chars)
    if not checks:
        return None
    broken = checks[0]
    for check in checks[1:]:
        broken = broken | check
    return broken


def _by_type(rules: dict[str, list[Rule]], *, missing: bool) -> Column:
    """Return the payload field at fault for the row's type, or null."""
    columns: list[Column] = []
    for kind, own in rules.items():
        cases = [
            (condition, rule.field)
            for rule in own
            if (condition := ((_missing(rule) if rule.required else None) if missing else _invalid(rule))) is not None
        ]
        if cases:
            columns.append(F.when(F.col("type") == kind, _first_true(cases)))
    return F.coalesce(*columns)


def _field_fault(*, missing: bool) -> Column:
    """Return the first envelope or payload field at fault, or null."""
    top = [
        (condition, rule.field)
        for rule in envelope_rules()
        if (condition := ((_missing(rule) if rule.required else None) if missing else _invalid(rule))) is not None
    ]
    if missing:
        top = [(F.col("type").isNull(), "type"), *top, (F.col("payload").isNull(), "payload")]
    return F.coalesce(_first_true(top), _by_type(payload_rules(), missing=missing))


def _packed_sizes() -> dict[str, Column]:
    """Return the decoded length of each packed array by helper column; null where it is absent, of another type's event, or no base64.

    Columns of their own, because decoding is dear and Spark evaluates an expression inside a condition each time it appears.
    """
    owner = dict.fromkeys(ARRAYS, "completion") | {"sketch": "edit_proposed"}
    return {
        f"_{name}_bytes": F.when(F.col("type") == kind, F.octet_length(F.try_to_binary(F.col(f"payload.{name}"), F.lit("base64"))))
        for name, kind in owner.items()
    }


def _packed_fault() -> Column:
    """Return the packed array at fault, or null: not base64, not whole 32-bit numbers, or ids and log-probabilities of unequal number."""

    def broken(name: str, unit: int) -> Column:
        size = F.col(f"_{name}_bytes")
        return F.col(f"payload.{name}").isNotNull() & (size.isNull() | (size % unit != 0))

    cases = [(broken(name, 4), f"payload.{name}") for name in ARRAYS]
    cases.append((F.col("_response_ids_bytes") != F.col("_behaviour_logprobs_bytes"), "payload.behaviour_logprobs"))
    return F.when(F.col("type") == "completion", _first_true(cases)).when(
        F.col("type") == "edit_proposed", _first_true([(broken("sketch", 8), "payload.sketch")])
    )


def _present() -> Column:
    """Count the known fields that a parsed event has, containers included."""
    known = known_fields()
    names = [*known[""], *[f"{part}.{name}" for part in known if part for name in known[part]]]
    total = F.lit(0)
    for name in names:
        total = total + F.col(name).isNotNull().cast("int")
    return total


def _has_unknown_fields(raw: Column) -> Column:
    """Return whether an event holds fields that `from_json` passed over, as one from a newer client does.

    Reading the names costs as much as parsing, so they are read only where there are more keys than known fields. Counting `":` can count
    too many (one inside a text), which costs time, and not too few in JSON that is written without a space before the colon.
    """
    keys = (F.length(raw) - F.length(F.replace(raw, F.lit('":'), F.lit("")))) / 2
    known = known_fields()
    nested = F.from_json(raw, ", ".join(f"{part} MAP<STRING, STRING>" for part in known if part))

    def unknown(names: Column, part: str) -> Column:
        return F.coalesce(F.size(F.array_except(names, F.array(*map(F.lit, known[part])))) > 0, F.lit(False))

    found = unknown(F.json_object_keys(raw), "")
    for part in ("client", "payload"):
        found = found | unknown(F.map_keys(nested[part]), part)
    return F.when(keys == F.col("_present"), F.lit(False)).otherwise(found)


def _goes_on(raw: Column) -> Column:
    """Return whether text comes after the object that `from_json` read, as where two events stand in one record: the second would be lost.

    Parsing again tells, and is only done where counting braces does not: an event is three objects, and ends with the last of them.
    """

    def count(brace: str) -> Column:
        return F.octet_length(raw) - F.octet_length(F.replace(raw, F.lit(brace), F.lit("")))

    plain = F.endswith(raw, F.lit("}")) & (count("{") == 3) & (count("}") == 3)
    return F.when(plain, F.lit(False)).otherwise(F.coalesce(F.json_array_length(F.concat(F.lit("["), raw, F.lit("]"))) != 1, F.lit(True)))


def judged(records: DataFrame, *, max_bytes: int, future_ms: int = FUTURE_TOLERANCE_MS) -> DataFrame:
    """Parse and judge Kafka records.

    Args:
        records: `key`, `value` (binary), `topic`, `partition`, `offset`, `timestamp` of Spark's Kafka source.
        max_bytes: Larger values are `oversized` and not parsed.
        future_ms: How far an event may be ahead of its record.

    Returns:
        The columns of the table `events`, then `reason`, `detail`, `key`, `raw`.
    """
    raw = F.col("value")
    fits = F.octet_length(raw) <= max_bytes
    parsed = records.select(
        "key",
        F.col("value").alias("raw"),
        "topic",
        "partition",
        "offset",
        F.col("timestamp").alias("arrived_at"),
        F.to_date("timestamp").alias("date"),
        fits.alias("_fits"),
        F.when(fits & F.is_valid_utf8(raw.cast("string")), F.from_json(raw.cast("string"), json_ddl(CORRUPT), PARSE)).alias("_event"),
    )
    flat = parsed.select("*", "_event.*").drop("_event").withColumns({"value": F.col("raw"), "_present": _present()})
    flat = flat.withColumns({name: F.coalesce(F.col(name), F.lit(default)) for name, default in DEFAULTS.items()})
    anything = F.coalesce(*[F.col(name) for name in ("event_id", "type", "session_id", "user_key")]).isNotNull()
    flat = flat.withColumns(_packed_sizes())
    flat = flat.withColumns({"_missing": _field_fault(missing=True), "_invalid": _field_fault(missing=False), "_packed": _packed_fault()})
    missing, invalid, packed = F.col("_missing"), F.col("_invalid"), F.col("_packed")
    future = F.col("occurred_at_ms") > F.unix_millis("arrived_at") + future_ms
    keyed = F.coalesce(F.col("key") != F.encode("session_id", "utf-8"), F.lit(True))
    reason = _first_true(
        [
            (F.coalesce(~F.col("_fits"), F.lit(False)), "oversized"),
            (~anything | (F.col(CORRUPT).isNotNull() & F.json_object_keys(raw.cast("string")).isNull()), "malformed_json"),
            (F.col(CORRUPT).isNull() & _goes_on(raw.cast("string")), "malformed_json"),
            (F.col("schema_version") != SCHEMA_VERSION, "unknown_version"),
            (F.col("type").isNotNull() & ~F.col("type").isin(*PAYLOADS), "unknown_type"),
            (F.col(CORRUPT).isNotNull(), "invalid_field"),
            (missing.isNotNull(), "missing_field"),
            (invalid.isNotNull(), "invalid_field"),
            (future, "future_dated"),
            (keyed, "wrong_key"),
            (packed.isNotNull(), "bad_packed_array"),
        ]
    )
    detail = (
        F.when(F.col("reason") == "missing_field", missing)
        .when((F.col("reason") == "invalid_field") & F.col(CORRUPT).isNull(), invalid)
        .when(F.col("reason") == "bad_packed_array", packed)
    )
    content = ["type", *[rule.field for rule in envelope_rules() if "." not in rule.field and rule.field != "recorded_at_ms"]]
    return (
        flat.withColumn("reason", reason)
        .withColumn("detail", detail)
        .withColumn("original", F.when(F.col("reason").isNull() & _has_unknown_fields(raw.cast("string")), raw))
        .withColumn("fingerprint", F.when(F.col("reason").isNull(), F.sha2(F.to_json(F.struct(*content, "client", "payload")), 256)))
        .withColumns({name: F.when(F.col("reason").isNotNull(), F.col(name)) for name in ("key", "raw")})
        .select(*EVENTS.schema.names, "reason", "detail", "key", "raw")
        # A barrier: without it Spark pushes `reason IS NULL` below the projections, and parses and judges every record twice.
        .observe(f"judged {uuid.uuid4()}", F.count(F.lit(1)))
    )


def accepted(frame: DataFrame) -> DataFrame:
    """Return the rows of `judged` that are events, with the columns of the table `events`."""
    return frame.where(F.col("reason").isNull()).select(*EVENTS.schema.names)


def refused(frame: DataFrame) -> DataFrame:
    """Return the rows of `judged` that are not, with the columns of the table `quarantine`."""
    return frame.where(F.col("reason").isNotNull()).select(*QUARANTINE.schema.names)
