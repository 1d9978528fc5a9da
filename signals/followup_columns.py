"""The follow-up classifier as Spark columns: mirror of `followups.py`, held equal by a property test.

Takes: turns with the next message, the previous one and how the reply came. Gives: the same rows with `dissatisfied`.
Leaves out: what is done with it (`judgement.py`).
"""

from dataclasses import astuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals import followups


def normalised(text: Column) -> Column:
    """Mirror of `followups.normalise`."""
    plain = F.regexp_replace(F.lower(F.substring(text, 1, followups.MAX_CHARS)), followups.APOSTROPHES, "")
    return F.concat(F.lit(" "), F.trim(F.regexp_replace(plain, followups.SEPARATORS, " ")), F.lit(" "))


def _trigrams(text: Column) -> Column:
    """Return the distinct trigrams of the start of a normalised text column."""
    size = F.least(F.length(text), F.lit(followups.TRIGRAM_CHARS))
    starts = F.when(size >= 3, F.sequence(F.lit(1), size - 2)).otherwise(F.array().cast("array<int>"))
    return F.array_distinct(F.transform(starts, lambda i: F.substring(text, i, F.lit(3))))


def with_dissatisfied(
    frame: DataFrame, message: Column, previous: Column, *, stack_traces: Column, reply_delay_ms: Column, interrupted: Column
) -> DataFrame:
    """Add `dissatisfied`; null where there is no message. Mirror of `followups.features` and `followups.dissatisfied`.

    Step by step through helper columns: written as one expression, the text would be normalised a dozen times over.
    """
    text, before, after = F.col("_text"), F.col("_before"), F.col("_after")

    def has(phrases: tuple[str, ...]) -> Column:
        return text.rlike(followups.pattern(phrases)).cast("double")

    cap = F.lit(followups.DELAY_CAP_LOG)
    seconds = F.greatest(reply_delay_ms, F.lit(0)) / F.lit(1000.0)
    union = F.size(F.array_union(before, after))
    columns = {
        "missed": has(followups.MISSED),
        "redo": has(followups.REDO),
        "praise": has(followups.PRAISE),
        "onward": has(followups.ONWARD),
        "failure": F.when(stack_traces > 0, F.lit(1.0)).otherwise(has(followups.FAILURE)),
        "repeat": F.when(before.isNull() | (union == 0), F.lit(0.0)).otherwise(F.size(F.array_intersect(before, after)) / union),
        "interrupted": interrupted.cast("double"),
        "delay": F.when(reply_delay_ms.isNull(), F.lit(0.5)).otherwise(F.least(F.log1p(seconds), cap) / cap),
    }
    score = F.lit(followups.INTERCEPT)
    for name, weight in zip(followups.Features.__dataclass_fields__, astuple(followups.COEFFICIENTS), strict=True):
        score = score + F.lit(weight) * columns[name]
    helpers = frame.withColumns({"_text": normalised(message), "_was": normalised(previous)})
    helpers = helpers.withColumns({"_after": _trigrams(text), "_before": _trigrams(F.col("_was"))}).withColumn("_score", score)
    probability = F.when(text.isNotNull(), F.lit(1.0) / (F.lit(1.0) + F.exp(-F.col("_score"))))
    return helpers.withColumn("dissatisfied", probability).drop("_text", "_was", "_after", "_before", "_score")
