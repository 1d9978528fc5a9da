"""`tidegate bench fuzz`: hostile records only, through the real stream; none may stop it, each has to lie in quarantine with a reason.

Every record is one that `pipelines.codec.decode` refuses. Spark's parser is milder in one way that is known (it reads a number where a text
belongs as text), so a few may be accepted as events: they are counted and listed, not hidden. At the end an honest session is sent and has
to arrive, which shows that the stream still lives.

Takes: how many, a seed, settings, a work folder. Gives: counts by reason. Leaves out: the records (`generator.py`).
"""

import shutil
import time
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from pipelines import kafka
from pipelines.errors import ConfigError, ContractViolation
from pipelines.storage import Home, exclusive
from pipelines.terminal import progress
from signals import bench, bench_topics, generator, job, lake, spark, stream
from signals.config import SignalsConfig

CHUNKS_A_JOB: Final = 8
LISTED: Final = 20
"""Accepted records that are named in the result."""


def run(records: int, config: SignalsConfig, work: Home, *, seed: int = 0) -> dict[str, Any]:
    """Send hostile records and read them with the append job.

    Args:
        records: How many (rounded up to whole chunks).
        config: Settings.
        work: Folder for broker and lake; the fuzz's own part of it is made anew.
        seed: Other seeds give other records.

    Raises:
        ConfigError: Fewer than one record.
        ContractViolation: A record is neither in quarantine nor among the events, or the honest session did not arrive.
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
            honest = [record for _, record in generator.honest_session("honest", seed=seed)]
            frame = running.createDataFrame(pa.Table.from_batches(list(bench_topics.as_batches(iter(honest)))))
            bench_topics.send_frame(settings, work, frame)
            totals = stream.Totals()
            stream.prepare(settings, home, resume=False, accept_gap=False)
            with progress("reading hostile records", total=sent) as advance:
                job.append_once(running, settings, home, totals)
                advance(sent)
        return _result(home, totals, sent=sent, honest=len(honest), seconds=time.monotonic() - begun)


def _send(running: SparkSession, config: SignalsConfig, home: Home, records: int, seed: int) -> None:
    def hostile(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from bench_topics.as_batches(generator.fuzz_chunk(number, seed=seed))

    chunks = -(-records // generator.FUZZ_A_CHUNK)
    with progress("sending hostile records", total=chunks * generator.FUZZ_A_CHUNK) as advance:
        for begin in range(0, chunks, CHUNKS_A_JOB):
            end = min(begin + CHUNKS_A_JOB, chunks)
            numbers = running.range(begin, end, 1, min(end - begin, 2))
            bench_topics.send_frame(config, home, numbers.mapInArrow(hostile, "key binary, value binary"))
            advance((end - begin) * generator.FUZZ_A_CHUNK)


def _result(home: Home, totals: stream.Totals, *, sent: int, honest: int, seconds: float) -> dict[str, Any]:
    quarantine = lake.read(home, "quarantine", columns=["reason"])
    events = lake.read(home, "events", columns=["session_id", "type", "event_id", "partition", "offset"])
    is_honest = pc.equal(events["session_id"], "honest")
    accepted = events.filter(pc.invert(is_honest))
    arrived = events.num_rows - accepted.num_rows
    silent = quarantine["reason"].null_count
    if quarantine.num_rows + accepted.num_rows != sent or silent or arrived != honest:
        raise ContractViolation(
            f"{sent} hostile records: {quarantine.num_rows} in quarantine ({silent} without a reason), {accepted.num_rows} accepted; "
            f"of {honest} honest events {arrived} arrived; look at {home.lake}"
        )
    reasons = quarantine.group_by("reason").aggregate([("reason", "count")]).to_pylist()
    return {
        "records": sent,
        "quarantined": quarantine.num_rows,
        "accepted": accepted.num_rows,
        "accepted_examples": accepted.slice(0, LISTED).to_pylist(),
        "honest_arrived": arrived,
        "batches": totals.batches,
        "reasons": {row["reason"]: row["reason_count"] for row in sorted(reasons, key=lambda row: -row["reason_count"])},
        "seconds": round(seconds, 1),
    }
