"""The follow-up classifier as a column: the same as the pure rules, whatever else the frame holds."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from signals import followups
from signals.fitting import labelled
from signals.followup_columns import TOLD, with_dissatisfied
from signals.judge import NOT_JUDGED, Judged, mixed, verdict_key

Given = Sequence[tuple[Any, ...]]


def rows() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for place, item in enumerate(labelled()[::5]):
        found.append((item.text, item.previous, item.stack_traces, item.reply_delay_ms, item.interrupted, 2 * place))
        found.append((None, item.text, 0, None, False, 2 * place + 1))
    return found


def scored(given: Given, judged: Judged = NOT_JUDGED) -> dict[int, float | None]:
    frame = pl.DataFrame(given, schema=TOLD | {"place": pl.Int64}, orient="row")
    done = with_dissatisfied(frame, {name: pl.col(name) for name in TOLD}, judged)
    assert done.columns == [*frame.columns, "dissatisfied"]
    return dict(done.select("place", "dissatisfied").iter_rows())


def pure(given: Given) -> dict[int, float | None]:
    return {
        place: None
        if message is None
        else followups.dissatisfied(
            followups.features(message, previous=previous, stack_traces=traces, reply_delay_ms=delay, interrupted=stopped)
        )
        for message, previous, traces, delay, stopped, place in given
    }


def test_the_column_equals_the_pure_rules_in_any_order_and_cut_into_any_parts() -> None:
    given = rows()
    wanted = pure(given)
    assert len(given) > 200
    assert scored(given) == wanted
    assert scored(given[::-1]) == wanted
    assert scored(given[:7]) | scored(given[7:40]) | scored(given[40:]) == wanted


def test_a_message_that_stands_there_twice_is_told_apart_by_what_came_before_it_and_how() -> None:
    given = [
        ("still red", None, None, None, None, 0),
        ("still red", "still red", 0, None, False, 1),
        ("still red", None, 0, None, False, 2),
        ("still red", None, 1, 4_000, True, 3),
        ("still red", None, 1, 4_000, True, 4),
        ("still red", None, 1, 400_000, True, 5),
        (None, "still red", 1, 400_000, True, 6),
    ]
    found = scored(given)
    said = [(place, (traces or 0, delay, bool(stopped))) for _, _, traces, delay, stopped, place in given]
    told = {place: (given[place][0], given[place][1], *how) for place, how in said}
    assert found == pure([(*told[place], place) for place in told])
    assert found[0] == found[2]
    assert found[3] == found[4]
    assert len({found[place] for place in (0, 1, 3, 5)}) == 4


def test_frozen_verdicts_mix_into_the_column_by_the_stated_rule() -> None:
    given = rows()[:4]
    plain = scored(given)
    key = verdict_key(given[0][0], given[0][1])
    judged = Judged(verdicts={key: 0.875}, share=0.25, version="v")
    assert scored(given, judged) == plain | {0: mixed(plain[0] or 0.0, 0.875, 0.25)}


def test_a_frame_without_a_message_and_one_without_a_row_have_the_column_too() -> None:
    assert scored([(None, "x", 0, None, False, 0)]) == {0: None}
    empty = pl.DataFrame(schema=TOLD)
    assert with_dissatisfied(empty, {name: pl.col(name) for name in TOLD}).schema["dissatisfied"] == pl.Float64
