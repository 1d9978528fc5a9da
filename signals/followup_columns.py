"""The follow-up classifier as a Spark column: batches of turns go to Python workers as Arrow, where the model is loaded once.

Held equal to `followups.py` by a property test. The driver never loads the model. Turns without a next message cross as nulls and cost
next to nothing; a worker remembers embeddings, so the message of one turn is not embedded again as the previous one of the next.

Takes: turns with the next message, the previous one and how the reply came. Gives: the same rows with `dissatisfied`.
Leaves out: what is done with it (`judgement.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from signals.judge import mixed, verdict_key


def with_dissatisfied(
    frame: DataFrame,
    message: Column,
    previous: Column,
    *,
    stack_traces: Column,
    reply_delay_ms: Column,
    interrupted: Column,
    verdicts: Mapping[str, float] | None = None,
    share: float = 0.5,
) -> DataFrame:
    """Add `dissatisfied`; null where there is no message. The same as `followups.features` and `followups.dissatisfied`.

    Args:
        frame: Turns.
        message: The next user message; null when there is none.
        previous: The turn's own user message; null when its text was not kept.
        stack_traces: Stack traces attached to the next message.
        reply_delay_ms: From the turn's end to the next message; null when unknown.
        interrupted: Whether the user stopped the turn.
        verdicts: Frozen verdicts of the optional judge (`judge.Verdicts.frozen`); none by default.
        share: How much a verdict counts, see `judge.mixed`.
    """
    judged = dict(verdicts or {})

    def scored(batches: Iterator[tuple[pa.Array, pa.Array, pa.Array, pa.Array, pa.Array]]) -> Iterator[pa.Array]:
        from signals.followup_scoring import Row, scorer  # in the worker: the driver has no model

        for messages, earlier, traces, delays, stops in batches:
            out: list[float | None] = [None] * len(messages)
            present = [index for index, valid in enumerate(messages.is_valid().to_pylist()) if valid]
            if present:
                taken = [column.take(pa.array(present)).to_pylist() for column in (messages, earlier, traces, delays, stops)]
                rows = [
                    Row(message=text, previous=old, stack_traces=trace or 0, reply_delay_ms=delay, interrupted=bool(stop))
                    for text, old, trace, delay, stop in zip(*taken, strict=True)
                ]
                for index, row, p in zip(present, rows, scorer().score(rows), strict=True):
                    verdict = judged.get(verdict_key(row.message, row.previous)) if judged else None
                    out[index] = p if verdict is None else mixed(p, verdict, share)
            yield pa.array(out, pa.float64())

    make = cast("Callable[[Any, str], Callable[..., Column]]", F.arrow_udf)  # its overloads know only functions of one column
    udf = make(scored, "double")
    return frame.withColumn(
        "dissatisfied",
        udf(
            message.cast("string"),
            F.when(message.isNotNull(), previous.cast("string")),
            stack_traces.cast("int"),
            reply_delay_ms.cast("long"),
            interrupted.cast("boolean"),
        ),
    )
