"""The append job: Kafka to the tables `events`, `quarantine` and `offset_ledger`, each record exactly once.

A micro-batch is a commit to each table, all carrying (stream, batch) as a Delta transaction, so that a batch that is run again after a
kill is written once to each, wherever the kill fell. Before the last it is accounted for by what the tables hold: per partition, rows of
events and quarantine must equal end minus start and be as many as there are distinct offsets, or the ledger does not name the batch and the
stream stops. The files are written by the tasks that read the records, events and refused ones alike; the driver commits them.

Takes: a Spark session, settings, the deployment's home. Gives: how many rows went where. Leaves out: what is an event
(`intake.py`), whether the start is allowed (`offsets.py`), rewards (`distil.py`).
"""

import errno
import functools
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import kafka
from pipelines.errors import ConfigError, ContractViolation, StageError, StorageFull
from pipelines.storage import Home
from signals import checks, claims, intake, lake, offsets, parts
from signals.config import SignalsConfig

LOG: Final = logging.getLogger(__name__)
STREAM: Final = "append"
WRITTEN: Final = pa.schema([("name", pa.string()), ("part", pa.string())])
"""What a task tells of a file: the table, and the part as JSON."""
FULL: Final = "full"
"""In place of a table: the disk is full, and what the task wrote is gone."""
WAITING_BYTES: Final = 4 * parts.FILE_BYTES
"""A task writes the rows it holds when they are so many bytes."""
SECURITY: Final = {"security_protocol": "security.protocol", "sasl_mechanism": "sasl.mechanism"}
SASL_LOGINS: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


@dataclass(slots=True)
class Totals:
    """What one run of the job did so far."""

    batches: int = 0
    rows: int = 0
    quarantined: int = 0
    failure: StageError | None = field(default=None, repr=False)
    """Our own error from inside a batch, which Spark would only hand back as text."""


def source_options(config: SignalsConfig, home: Home, *, starting: str) -> dict[str, str]:
    """Return the options of Spark's Kafka source.

    Raises:
        BrokerUnavailable: No servers are configured and the embedded broker is not running.
        ConfigError: A security setting that this job cannot hand to Spark.
    """
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap(config, home),
        "subscribe": config.kafka.topic,
        "startingOffsets": starting,
        "failOnDataLoss": "true",
        "maxOffsetsPerTrigger": str(config.signals.max_offsets_per_trigger),
        # A batch knows where it ends, yet its last fetch of each partition waits for more: half a second each by Kafka's default.
        "kafka.fetch.max.wait.ms": "20",
    }
    security = dict(config.kafka.security)
    if certificate := security.pop("ssl_cafile", None):
        options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": certificate}
    for name, value in security.items():
        if name not in SECURITY:
            raise ConfigError(f"kafka.security.{name} is not supported by the append job; it takes {', '.join([*SECURITY, 'ssl_cafile'])}")
        options[f"kafka.{SECURITY[name]}"] = value
    user, password = os.environ.get("TIDEGATE_KAFKA_SASL_PLAIN_USERNAME"), os.environ.get("TIDEGATE_KAFKA_SASL_PLAIN_PASSWORD")
    if user and password and (module := SASL_LOGINS.get(security.get("sasl_mechanism", "PLAIN"))):
        options["kafka.sasl.jaas.config"] = f'{module} required username="{user}" password="{password}";'
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Writes one micro-batch."""

    home: Home
    config: SignalsConfig
    checkpoint: Path
    totals: Totals
    after: Callable[[str], None] = lambda _step: None
    """Told the name of each commit once it is done."""

    def __call__(self, records: DataFrame, batch: int) -> None:
        """Judge, write and count a batch; the order of the commits is events, quarantine, ledger."""
        try:
            self._write(records, batch)
        except StageError as error:
            self.totals.failure = error
            raise

    def _write(self, records: DataFrame, batch: int) -> None:
        topic = self.config.kafka.topic
        stream = offsets.stream_id(self.checkpoint)
        starts, ends = offsets.planned_starts(self.checkpoint, batch, topic), offsets.planned_ends(self.checkpoint, batch, topic)
        if all(ends[partition] == starts.get(partition, 0) for partition in ends):
            return
        planned = {partition: (starts.get(partition, 0), end) for partition, end in sorted(ends.items())}
        identity = offsets.transaction_id(stream)
        limits = intake.limits(self.config)
        # 1. Events and what is refused, in one pass without a cache; what (stream, batch) committed before is not written again.
        self._write_parts(records, limits, (identity, batch))
        # 2. What no table holds now names a file, or was lost from a table: read again, by its place, and written where it belongs.
        held = self._held(planned)
        rest = {partition: np.setdiff1d(np.arange(*bounds), np.concatenate(held[partition])) for partition, bounds in planned.items()}
        if any(map(len, rest.values())):
            self._write_rest(intake.judged(_at(records, rest), limits), identity, batch)
            held = self._held(planned)
        rows = [self._booked(batch, partition, bounds, *held[partition]) for partition, bounds in planned.items()]
        # 3. The ledger last: what it names lies in the lake.
        lake.append(self.home, "offset_ledger", [row | {"stream": stream, "batch": batch} for row in rows], transaction=(identity, batch))
        self.after("offset_ledger")
        self.totals.batches += 1
        self.totals.rows += sum(row["kept"] for row in rows)
        self.totals.quarantined += sum(row["quarantined"] for row in rows)

    def _held(self, planned: Mapping[int, tuple[int, int]]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return by partition the planned offsets that lie in `events`, and those that lie in `quarantine`."""
        topic = self.config.kafka.topic
        inside = [lake.offsets_between(topic, partition, start=start, end=end) for partition, (start, end) in planned.items()]
        condition = functools.reduce(operator.or_, inside)
        kept, refused = (
            (found["partition"].to_numpy(), found["offset"].to_numpy())
            for found in (lake.scan(self.home, name, ["partition", "offset"], condition) for name in ("events", "quarantine"))
        )
        return {part: (kept[1][kept[0] == part], refused[1][refused[0] == part]) for part in planned}

    def _write_parts(self, records: DataFrame, limits: intake.Limits, transaction: tuple[str, int]) -> None:
        """Write events and quarantine where the records are read, and add the files to each table that lacks the batch."""
        lacking = [name for name in ("events", "quarantine") if not parts.is_added(self.home, name, transaction)]
        if not lacking:
            return
        folders = {name: lake.path(self.home, name) for name in lacking}
        told = intake.asked(records).mapInArrow(_writing(folders, limits), "name string, part string").collect()
        written = {name: [parts.Part(**json.loads(row["part"])) for row in told if row["name"] == name] for name in lacking}
        if full := next((row["part"] for row in told if row["name"] == FULL), None):
            for name in lacking:
                for part in written[name]:
                    (folders[name] / part.path).unlink(missing_ok=True)
            raise StorageFull(f"no space left to write events to {self.home.lake} ({full}); free some and run the same command again")
        for name in lacking:
            if written[name] or name == "events":
                parts.add(self.home, name, written[name], transaction=transaction)
                self.after(name)

    def _write_rest(self, judged: DataFrame, identity: str, batch: int) -> None:
        """Write to quarantine what is no event, and to events what is one after all or what a claim's file holds.

        Under a transaction of its own: Delta passes over a second commit of the batch's, and both tables may have had one for the files.
        """
        rest = f"{identity}:rest"
        judged = judged.persist()
        try:
            kinds = {(row["event"], row["claim"]) for row in judged.groupBy(
                F.col("reason").isNull().alias("event"), F.coalesce(claims.is_claim("raw"), F.lit(False)).alias("claim")
            ).count().collect()}  # fmt: skip
            if (False, True) in kinds:
                whole = claims.redeemed(judged, self.config, self.home).persist()
                judged.unpersist()
                judged = whole
            if kinds - {(False, False)}:
                self._commit(intake.accepted(judged), "events", rest, batch)
            self._commit(intake.refused(judged), "quarantine", rest, batch)
        finally:
            judged.unpersist()

    def _booked(self, batch: int, partition: int, bounds: tuple[int, int], kept: np.ndarray, refused: np.ndarray) -> dict[str, Any]:
        """Return the ledger's row of one partition.

        Args:
            batch: Its number, for the message.
            partition: The partition.
            bounds: Start and end of the batch.
            kept: Offsets that lie in `events`.
            refused: Offsets that lie in `quarantine`.

        Raises:
            ContractViolation: Rows are missing from the lake, or came twice.
        """
        start, end = bounds
        rows, distinct = len(kept) + len(refused), len(np.union1d(kept, refused))
        if not rows == distinct == end - start:
            raise ContractViolation(
                f"batch {batch}, partition {partition}: offsets {start} to {end} are {rows} rows of the lake, {distinct} of them distinct, "
                f"instead of {end - start}; a compacted or transactional topic cannot be accounted for, use a plain one; with a plain one, "
                f"{offsets.WAY_OUT}"
            )
        return {
            "topic": self.config.kafka.topic, "partition": partition, "start": start, "end": end, "kept": len(kept),
            "quarantined": len(refused), "committed_at": datetime.now(UTC),
        }  # fmt: skip

    def _commit(self, frame: DataFrame, name: str, identity: str, batch: int) -> None:
        writer = frame.write.format("delta").mode("append").option("txnAppId", identity).option("txnVersion", str(batch))
        writer.option("mergeSchema", "true").save(str(lake.path(self.home, name)))
        self.after(name)


def _writing(folders: Mapping[str, Path], limits: intake.Limits) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what a task does: judge its records and write them into files of the tables; those that name a file are left for later."""

    def written(batches: Iterator[pa.RecordBatch], undo: ExitStack) -> Iterator[dict[str, str]]:
        waiting: dict[str, list[pa.Table]] = {name: [] for name in folders}

        def write(name: str) -> Iterator[dict[str, str]]:
            for part in parts.write(folders[name], pa.concat_tables(waiting[name])):
                undo.callback((folders[name] / part.path).unlink, missing_ok=True)
                yield {"name": name, "part": json.dumps(part.dumped())}
            waiting[name].clear()

        for batch in batches:
            judged = intake.judge(batch, limits)
            refused = intake.refused_of(judged)
            found = {"events": intake.events_of(judged), "quarantine": refused.filter(pc.invert(claims.are_claims(refused["raw"])))}
            for name, rows in waiting.items():
                rows.append(found[name])
                if sum(table.nbytes for table in rows) >= WAITING_BYTES:
                    yield from write(name)
        for name, rows in waiting.items():
            if rows:
                yield from write(name)

    def writing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with ExitStack() as undo:
            try:
                done = list(written(batches, undo))
                undo.pop_all()
            except OSError as error:  # Told and not raised: what a worker raises fills the logs, which are on the same disk.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                done = [{"name": FULL, "part": str(error)}]
        yield pa.RecordBatch.from_pylist(done, schema=WRITTEN)

    return writing


def _at(records: DataFrame, places: Mapping[int, np.ndarray]) -> DataFrame:
    """Return the records at these offsets by partition."""
    columns = {
        "partition": np.concatenate([np.full(len(found), partition, np.int32) for partition, found in places.items()]),
        "offset": np.concatenate([np.asarray(found, np.int64) for found in places.values()]),
    }
    wanted = records.sparkSession.createDataFrame(pa.table(columns))
    return records.join(F.broadcast(wanted), ["partition", "offset"], "left_semi")


def prepare(config: SignalsConfig, home: Home, *, resume: bool, accept_gap: bool) -> offsets.Position:
    """Check everything that can be checked before Spark starts.

    Args:
        config: Settings.
        home: The deployment.
        resume: Whether a new stream state may be started where the lake ends.
        accept_gap: Whether offsets that the broker no longer has may be written off, in the table `gaps`.

    Returns:
        The broker's next offset by partition.

    Raises:
        BrokerUnavailable: The broker does not answer.
        ConfigError: The topic keeps records too short.
        ContractViolation: State and lake disagree, or offsets are lost; the message names the flag.
    """
    topic = config.kafka.topic
    lake.create_missing(home)
    for state in kafka.ensure_topics(config, home):
        kept_ms = float(state.drift.get("retention.ms", ("", str(config.kafka.retention_hours * 3_600_000)))[1].replace("-1", "inf"))
        needed_ms = 3000.0 * (config.signals.cycle_s + config.rewards.window_s)
        if kept_ms < needed_ms:
            raise ConfigError(
                f"topic {state.name!r} keeps records {kept_ms / 3.6e6:.1f} h, less than three times a cycle and a reward window "
                f"({needed_ms / 3.6e6:.1f} h): a stop could lose events; raise its retention.ms"
            )
    begin, end = kafka.begin_offsets(config, home), kafka.end_offsets(config, home)
    number = int(time.time())
    if resume:
        offsets.restart(home, topic, number=number)
    else:
        offsets.verify(home, topic)
    checks.not_fewer(home)
    gaps = offsets.find_gaps(offsets.ledger_position(home, topic), begin, end)
    if gaps and not accept_gap:
        lost = "; ".join(f"partition {gap.partition}: {gap.start} to {gap.end}" for gap in gaps)
        raise ContractViolation(f"Kafka deleted events before they were read ({lost}); to go on without them add --accept-gap")
    if gaps:
        offsets.restart(home, topic, number=number + 1)  # first, for rows of an interrupted batch may lie inside the gap
        now = datetime.now(UTC)
        lake.append(home, "gaps", [
            {"topic": topic, "partition": gap.partition, "start": gap.start, "end": gap.end, "accepted_at": now} for gap in gaps
        ])  # fmt: skip
        offsets.restart(home, topic, number=number + 2)
    return end


def start(
    spark: SparkSession, config: SignalsConfig, home: Home, totals: Totals, *, once: bool, after: Callable[[str], None] = lambda _step: None
) -> StreamingQuery:
    """Start the stream.

    Args:
        spark: The session.
        config: Settings.
        home: The deployment; `prepare` has run.
        totals: Where the stream adds what it did.
        once: Whether to read what is there now and end, instead of going on.
        after: Told the name of each commit.
    """
    checkpoint = offsets.checkpoint(home)
    partitions = kafka.end_offsets(config, home)
    options = source_options(config, home, starting=offsets.starting_offsets(home, config.kafka.topic, partitions))
    sink = Sink(home=home, config=config, checkpoint=checkpoint, totals=totals, after=after)
    writer = (
        spark.readStream.format("kafka").options(**options).load()
        .writeStream.queryName(STREAM).option("checkpointLocation", str(checkpoint)).foreachBatch(sink)
    )  # fmt: skip
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=f"{config.signals.trigger_s} seconds")
    return writer.start()
