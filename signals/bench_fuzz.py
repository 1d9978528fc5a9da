"""`tidegate bench fuzz`: spoilt records through the real stream; none may stop it, and each ends where the contract says.

So many records are sent that `pipelines.codec.decode` refuses: each has to lie in quarantine with the codec's reason. What is an event in
spite of what was done to it, and honest records among the others, have to arrive as events. Both are asked again afterwards, record by
record: the topic is read once more, judged in plain Python by the record's own time, and compared with the tables by offset.

Takes: how many, a seed, settings, a work folder. Gives: counts by reason and by what was done. Leaves out: the records (`fuzz.py`).
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipelines import codec, kafka
from pipelines.errors import ConfigError, ContractViolation, Rejected
from pipelines.storage import Home, exclusive
from pipelines.terminal import progress
from signals import bench, bench_topics, fuzz, job, lake, spark, stream
from signals.config import SignalsConfig

CHUNKS_A_JOB: Final = 8
LISTED: Final = 5
"""Records that are named where a verdict is wrong."""
KIND: Final = "fuzz"
"""Header of a record: what was done to it."""


def run(records: int, config: SignalsConfig, work: Home, *, seed: int = 0) -> dict[str, Any]:
    """Send hostile records, and some that are none, read them with the append job and compare every verdict with the codec's.

    Args:
        records: How many hostile ones; a few more that are events come along.
        config: Settings.
        work: Folder for broker and lake; the fuzz's own part of it is made anew.
        seed: Other seeds give other records.

    Raises:
        ConfigError: Fewer than one record.
        ContractViolation: A record is in no table, in the wrong one, or in quarantine for another reason than the codec's.
    """
    if records < 1:
        raise ConfigError(f"--records {records}: at least 1")
    with exclusive(work.run / "bench.lock", what="the bench"), bench.servers(config, work) as (own, _):
        home = Home(work.root / "fuzz")
        shutil.rmtree(home.root, ignore_errors=True)
        settings = bench_topics.with_topic(own, f"fuzz-{seed}-{time.time_ns()}")
        kafka.ensure_topics(settings, work)
        begun = time.monotonic()
        with spark.session(own.spark, home) as running, spark.boundary("reading hostile records"):
            _send(running, settings, work, records, seed)
            sent = sum(kafka.end_offsets(settings, work).values())
            totals = stream.Totals()
            stream.prepare(settings, home, resume=False, accept_gap=False)
            with progress("reading hostile records", total=sent) as advance:
                job.append_once(running, settings, home, totals)
                advance(sent)
            seconds = time.monotonic() - begun
            expected = _expected(running, settings, work)
        return result(home, totals, expected, seconds=seconds)


def _send(running: SparkSession, config: SignalsConfig, home: Home, records: int, seed: int) -> None:
    def spoilt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                hostile = min(fuzz.FUZZ_A_CHUNK, records - number * fuzz.FUZZ_A_CHUNK)
                made = list(fuzz.fuzz_chunk(number, seed=seed, records=hostile))
                columns = {
                    "kind": pa.array([item.kind for item in made]),
                    "key": pa.array([item.record.key for item in made], pa.binary()),
                    "value": pa.array([item.record.value for item in made], pa.binary()),
                }
                yield pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])

    chunks = -(-records // fuzz.FUZZ_A_CHUNK)
    headers = F.array(F.struct(F.lit(KIND).alias("key"), F.encode("kind", "utf-8").alias("value"))).alias("headers")
    with progress("sending hostile records", total=records) as advance:
        for begin in range(0, chunks, CHUNKS_A_JOB):
            end = min(begin + CHUNKS_A_JOB, chunks)
            numbers = running.range(begin, end, 1, min(end - begin, 2))
            made = numbers.mapInArrow(spoilt, "kind string, key binary, value binary")
            bench_topics.send_frame(config, home, made.select("key", "value", headers))
            advance(min(end * fuzz.FUZZ_A_CHUNK, records) - begin * fuzz.FUZZ_A_CHUNK)


def _expected(running: SparkSession, config: SignalsConfig, work: Home) -> pa.Table:
    """Return for each record of the topic what was done to it and what the codec says: partition, offset, kind, expected (null: event)."""
    limit, ahead_ms = config.kafka.max_event_bytes, int(config.signals.future_allowance_s * 1000)

    def verdicts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            reasons: list[str | None] = []
            for key, value, now_ms in zip(*(batch.column(name).to_pylist() for name in ("key", "value", "now_ms")), strict=True):
                found = codec.decode(value, limit, now_ms=now_ms, key=key or b"", ahead_ms=ahead_ms)
                reasons.append(found.reason if isinstance(found, Rejected) else None)
            kept = [batch.column(name) for name in ("partition", "offset", "kind")]
            yield pa.RecordBatch.from_arrays([*kept, pa.array(reasons, pa.string())], names=["partition", "offset", "kind", "expected"])

    options = stream.source_options(config, work, starting="earliest") | {"endingOffsets": "latest", "includeHeaders": "true"}
    options.pop("maxOffsetsPerTrigger")
    kind = F.col("headers")[0]["value"].cast("string").alias("kind")
    records = running.read.format("kafka").options(**options).load()
    asked = records.select("key", "value", F.unix_millis("timestamp").alias("now_ms"), "partition", "offset", kind)
    return asked.mapInArrow(verdicts, "partition int, offset bigint, kind string, expected string").toArrow()


def result(home: Home, totals: stream.Totals, expected: pa.Table, *, seconds: float) -> dict[str, Any]:
    """Compare the tables with what was expected, record by record.

    Args:
        home: The deployment.
        totals: Of the append job.
        expected: One row a record sent: partition, offset, kind, expected (the codec's reason; null: it is an event).
        seconds: Of sending and reading.

    Raises:
        ContractViolation: A verdict differs; the first few are named.
    """
    refused = lake.read(home, "quarantine", columns=["partition", "offset", "reason"])
    kept = lake.read(home, "events", columns=["partition", "offset"])
    found: dict[tuple[int, int], list[str | None]] = {}
    for row in refused.to_pylist():
        found.setdefault((row["partition"], row["offset"]), []).append(row["reason"] or "")
    for row in kept.to_pylist():
        found.setdefault((row["partition"], row["offset"]), []).append(None)
    kinds: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for row in expected.to_pylist():
        verdict = found.pop((row["partition"], row["offset"]), [])
        kinds.setdefault(row["kind"], Counter())["events" if row["expected"] is None else "refused"] += 1
        if verdict != [row["expected"]]:
            wrong.append(f"{row['kind']} at {row['partition']}:{row['offset']} is {verdict}, the codec says {row['expected']}")
    if wrong or found:
        raise ContractViolation(
            f"of {expected.num_rows} records {len(wrong)} were judged otherwise than by the codec, {len(found)} were never sent: "
            f"{'; '.join(wrong[:LISTED])}; look at {home.lake}"
        )
    reasons = Counter(refused["reason"].to_pylist())
    return {
        "records": expected.num_rows,
        "quarantined": refused.num_rows,
        "accepted": kept.num_rows,
        "judged_otherwise": len(wrong),
        "batches": totals.batches,
        "reasons": dict(reasons.most_common()),
        "kinds": {kind: {"events": counts["events"], "refused": counts["refused"]} for kind, counts in sorted(kinds.items())},
        "seconds": round(seconds, 1),
    }
