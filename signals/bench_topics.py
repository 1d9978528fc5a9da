"""Topics full of made-up events for the bench: made once in a work folder, kept for the next run, gone on with after a kill.

Records are generated in Spark's Python workers and sent by Spark's own Kafka sink. Measured on two cores, kafka-python sends 18,000 of
these records a second and core, the sink 30,000 generation included; ten million records are the difference between nine minutes and three.
The broker stores them as lz4 in about 720 bytes a record (1,360 before compression).

Takes: Spark, settings, sizes. Gives: topics and how many records they hold. Leaves out: what is in the records (`generator.py`).
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipelines import kafka
from pipelines.errors import StorageFull
from pipelines.storage import Home, write_atomic
from pipelines.terminal import progress
from signals import generator
from signals.config import SignalsConfig

RECORDS_A_CHUNK: Final = 10_300
"""About what one chunk holds; the topic's real number is counted."""
CHUNKS_A_JOB: Final = 20
"""One Spark job, after which the work done is written down."""
ROWS_A_BATCH: Final = 1_000
TOPIC_BYTES: Final = 800
"""Disk of one record in the topic."""
LAKE_BYTES: Final = 2_000
"""Disk that one record may take in the lake at the worst moment of a measurement, files that were replaced included."""
KAFKA_PARTITIONS: Final = 4
GENERATION: Final = 2
"""Goes up when the generator makes other events: topics that were kept are then made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One topic as it is."""

    topic: str
    size: int
    """Records asked for."""
    chunks: int
    """Chunks sent so far."""
    records: int
    """Records that it holds."""


def topic_name(size: int, seed: int) -> str:
    """Return the topic of a size."""
    return f"bench{GENERATION}-{seed}-{size}"


def with_topic(config: SignalsConfig, topic: str) -> SignalsConfig:
    """Return the settings that read and write a bench topic."""
    own = {"topic": topic, "partitions": KAFKA_PARTITIONS, "max_event_bytes": generator.MAX_EVENT_BYTES}
    return config.model_copy(update={"kafka": config.kafka.model_copy(update=own)})


def require_space(folder: Path, records: int, bytes_a_record: int) -> None:
    """Refuse a run that would fill the disk.

    Raises:
        StorageFull: Less is free than the records may take.
    """
    free, needed = shutil.disk_usage(folder).free, records * bytes_a_record
    if free < needed:
        raise StorageFull(f"{records} events may take {needed / 1e9:.0f} GB in {folder}, {free / 1e9:.0f} GB are free; use smaller --sizes")


def fill(spark: SparkSession, config: SignalsConfig, home: Home, *, size: int, seed: int) -> Filled:
    """Make sure that a topic holds (about) `size` records, and return what it holds.

    A run that was killed goes on after the last job that was written down; what the job it died in had sent is sent again, and counted.

    Args:
        spark: The session.
        config: Settings; the topic is the bench's own.
        home: The work folder, with a running broker or configured servers.
        size: Records wanted; above ten thousand rounded to whole chunks of about that.
        seed: Of the generator.

    Raises:
        BrokerUnavailable: See `pipelines.kafka`.
        StorageFull: Not enough disk.
    """
    own = with_topic(config, topic_name(size, seed))
    state = home.root / "topics" / f"{own.kafka.topic}.json"
    wanted = max(1, round(size / RECORDS_A_CHUNK))
    states = kafka.ensure_topics(own, home)
    done = 0
    if state.exists() and not any(found.created for found in states if found.name == own.kafka.topic):
        done = json.loads(state.read_text(encoding="utf-8"))["chunks"]
    if done < wanted:
        require_space(home.root, (wanted - done) * RECORDS_A_CHUNK, TOPIC_BYTES + LAKE_BYTES)
        with progress(f"generating {size} events", total=wanted * RECORDS_A_CHUNK) as advance:
            advance(done * RECORDS_A_CHUNK)
            sessions = min(generator.SESSIONS_A_CHUNK, -(-size * generator.SESSIONS_A_CHUNK // RECORDS_A_CHUNK))
            for begin in range(done, wanted, CHUNKS_A_JOB):
                end = min(begin + CHUNKS_A_JOB, wanted)
                _send(spark, own, home, range(begin, end), seed=seed, sessions=sessions)
                write_atomic(state, json.dumps({"chunks": end}).encode())
                advance((end - begin) * RECORDS_A_CHUNK)
    ends, begins = kafka.end_offsets(own, home), kafka.begin_offsets(own, home)
    filled = Filled(topic=own.kafka.topic, size=size, chunks=wanted, records=sum(ends.values()) - sum(begins.values()))
    write_atomic(state, json.dumps(asdict(filled)).encode())
    return filled


def _send(spark: SparkSession, config: SignalsConfig, home: Home, chunks: range, *, seed: int, sessions: int) -> None:
    def records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from as_batches(generator.chunk(number, seed=seed, sessions=sessions))

    numbers = spark.range(chunks.start, chunks.stop, 1, min(len(chunks), 2))
    send_frame(config, home, numbers.mapInArrow(records, "key binary, value binary"))


def as_batches(records: Iterator[generator.Record]) -> Iterator[pa.RecordBatch]:
    """Yield records as Arrow batches with the columns `key` and `value`."""
    waiting: list[generator.Record] = []
    for record in records:
        waiting.append(record)
        if len(waiting) == ROWS_A_BATCH:
            yield _batch(waiting)
            waiting = []
    if waiting:
        yield _batch(waiting)


def _batch(records: list[generator.Record]) -> pa.RecordBatch:
    columns = [pa.array([record.key for record in records], pa.binary()), pa.array([record.value for record in records], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value"])


def send_frame(config: SignalsConfig, home: Home, frame: DataFrame) -> None:
    """Send the columns `key` and `value` to the configured topic, as the recorder would: acknowledged, lz4, in large batches."""
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap(config, home),
        "topic": config.kafka.topic,
        "kafka.compression.type": "lz4",
        "kafka.acks": "all",
        "kafka.linger.ms": "20",
        # A batch that compresses badly must still fit the topic's largest message.
        "kafka.batch.size": str(min(kafka.BATCH_BYTES, config.kafka.max_event_bytes)),
    }
    frame.write.format("kafka").options(**options).save()
