"""The follow-up classifier as a column: all distinct messages of a frame are scored together, by a model that its process loads once.

Held equal to `followups.py` by a property test. Where there is no message the model is not loaded, so a process that never meets one never
pays for it. A process remembers embeddings, so the message of one turn is not embedded again as the previous one of the next.

Takes: turns with the next message, the previous one and how the reply came. Gives: the same rows with `dissatisfied`.
Leaves out: what is done with it (`judgement.py`).
"""

from collections.abc import Mapping
from typing import Final

import polars as pl

from signals.judge import NOT_JUDGED, Judged, mixed

TOLD: Final = {
    "message": pl.String, "previous": pl.String, "stack_traces": pl.Int64, "reply_delay_ms": pl.Int64, "interrupted": pl.Boolean,
}  # fmt: skip
"""What the classifier is told of a follow-up, see `followup_scoring.Row`."""


def with_dissatisfied(frame: pl.DataFrame, told: Mapping[str, pl.Expr], judged: Judged = NOT_JUDGED) -> pl.DataFrame:
    """Add `dissatisfied`; null where there is no message. The same as `followups.features` and `followups.dissatisfied`.

    Args:
        frame: Turns.
        told: Each of `TOLD`. `message`: the next user message, null when there is none; `previous`: the turn's own, null when its text was
            not kept; `stack_traces`: attached to the next message; `reply_delay_ms`: from the turn's end to the next message, null when
            unknown; `interrupted`: whether the user stopped the turn.
        judged: The judge's verdicts in force.
    """
    helpers = {f"_{name}": told[name].cast(kind) for name, kind in TOLD.items()}
    asked = frame.with_columns(**helpers)
    distinct = asked.filter(pl.col("_message").is_not_null()).select(*helpers).unique()
    scores = pl.Series("dissatisfied", _scored(distinct, judged), pl.Float64)
    # Nulls are equal to nulls here: a delay that is unknown is a value of its own.
    return asked.join(distinct.with_columns(scores), on=list(helpers), how="left", nulls_equal=True).drop(*helpers)


def _scored(distinct: pl.DataFrame, judged: Judged) -> list[float]:
    """Return P(dissatisfied) of each row of distinct follow-ups."""
    if distinct.is_empty():
        return []
    from signals.followup_scoring import Row, scorer  # it brings the model's libraries: only where there is something to score

    asked = [
        Row(message=message, previous=previous, stack_traces=traces or 0, reply_delay_ms=delay, interrupted=bool(stopped))
        for message, previous, traces, delay, stopped in distinct.iter_rows()
    ]
    scores = scorer().score(asked)
    if not judged.verdicts:
        return scores
    verdicts = [judged.of(row.message, row.previous) for row in asked]
    return [p if verdict is None else mixed(p, verdict, judged.share) for p, verdict in zip(scores, verdicts, strict=True)]
