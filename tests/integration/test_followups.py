"""The follow-up classifier as a Spark column and as a command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from signals.fitting import labelled
from signals.followup_scoring import Row, scorer
from signals.judge import mixed, verdict_key

pytestmark = pytest.mark.spark

FIELDS = "message string, previous string, stack_traces int, reply_delay_ms bigint, interrupted boolean, place int"


def rows() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for place, item in enumerate(labelled()[::12]):
        found.append((item.text, item.previous, item.stack_traces, item.reply_delay_ms, item.interrupted, 2 * place))
        found.append((None, item.text, 0, None, False, 2 * place + 1))
    return found


def scored(spark: Any, given: list[tuple[Any, ...]], partitions: int, **judge: Any) -> dict[int, float | None]:
    from pyspark.sql import functions as F  # noqa: N812

    from signals.followup_columns import with_dissatisfied

    frame = spark.createDataFrame(given, FIELDS).repartition(partitions)
    done = with_dissatisfied(
        frame, F.col("message"), F.col("previous"), stack_traces=F.col("stack_traces"), reply_delay_ms=F.col("reply_delay_ms"),
        interrupted=F.col("interrupted"), **judge,
    )  # fmt: skip
    return {row["place"]: row["dissatisfied"] for row in done.select("place", "dissatisfied").collect()}


def test_the_column_equals_the_pure_rules_in_any_order_and_cut_into_any_partitions(spark: Any) -> None:
    given = rows()
    present = [row for row in given if row[0] is not None]
    pure = scorer().score([Row(message=m, previous=p, stack_traces=t, reply_delay_ms=d, interrupted=i) for m, p, t, d, i, _ in present])
    wanted = {row[5]: None for row in given} | {row[5]: p for row, p in zip(present, pure, strict=True)}
    assert scored(spark, given, 1) == wanted
    assert scored(spark, given[::-1], 3) == wanted


def test_frozen_verdicts_mix_into_the_column_by_the_stated_rule(spark: Any) -> None:
    given = rows()[:4]
    plain = scored(spark, given, 1)
    key = verdict_key(given[0][0], given[0][1])
    judged = scored(spark, given, 1, verdicts={key: 0.875}, share=0.25)
    assert judged == plain | {0: mixed(plain[0] or 0.0, 0.875, 0.25)}


def test_scoring_a_file_prints_one_line_for_each_follow_up_and_names_bad_lines(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": "a", "previous": "Fix the parser", "text": "still broken"}),
        "not json",
        json.dumps({"id": 7, "text": "thanks, now add a test", "interrupted": False, "reply_delay_ms": 60000}),
        json.dumps({"id": "c", "previous": None}),
        "",
    ]
    file = tmp_path / "follow-ups.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "signals", "followup", "score"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["id"] for item in found] == ["a", 7]
    assert found[0]["p_dissatisfied"] > 0.7 > 0.3 > found[1]["p_dissatisfied"]
    assert "line 2: no JSON" in done.stderr
    assert "line 4: text is no string" in done.stderr
    assert "2 scored, 2 bad lines" in done.stderr
    piped = subprocess.run([*command, "-"], input=file.read_text(encoding="utf-8"), capture_output=True, text=True, check=True)
    assert piped.stdout == done.stdout
