"""The append job: Kafka to the tables `events`, `quarantine` and `offset_ledger`, each record exactly once.

A micro-batch is three commits, each carrying (stream, batch) as a Delta transaction, so that a batch that is run again after a kill is
written once to each table, wherever the kill fell. Between them it is accounted for by what the table holds: per partition, rows kept and
refused must equal end minus start and be as many as there are distinct offsets, or the ledger does not name the batch and the stream stops.
Nothing is cached: Spark's cache of parsed events costs more than parsing them, so the few that were refused are read a second time.

Takes: a Spark session, settings, the deployment's home. Gives: how many rows went where. Leaves out: what is an event
(`intake.py`), whether the start is allowed (`offsets.py`), rewards (`distil.py`).
"""

import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import claims as claim_files
from pipelines import kafka
from pipelines.errors import ConfigError, ContractViolation, StageError
from pipelines.storage import Home
from signals import checks, claims, intake, lake, offsets
from signals.config import SignalsConfig

LOG: Final = logging.getLogger(__name__)
STREAM: Final = "append"
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
class Counts:
    """Records of one partition."""

    kept: int
    quarantined: int
    distinct: int
    """Different offsets among both."""
    claims: int
    """Records that name a file."""


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
        # 1. Events, in one pass and without a cache; skipped by Delta when (stream, batch) was committed before.
        self._commit(intake.accepted(self._judged(records, self.config.kafka.max_event_bytes)), "events", identity, batch)
        # 2. What the table does not hold now was refused, names a file, or is missing: read again, by its place.
        kept = self._kept(planned)
        refused = self._refuse(records, planned, kept, identity, batch)
        rows = [self._booked(batch, partition, bounds, kept[partition], refused) for partition, bounds in planned.items()]
        # 3. The ledger last: what it names lies in the lake.
        lake.append(self.home, "offset_ledger", [row | {"stream": stream, "batch": batch} for row in rows], transaction=(identity, batch))
        self.after("offset_ledger")
        self.totals.batches += 1
        self.totals.rows += sum(row["kept"] for row in rows)
        self.totals.quarantined += sum(row["quarantined"] for row in rows)

    def _kept(self, planned: Mapping[int, tuple[int, int]]) -> dict[int, np.ndarray]:
        """Return the planned offsets that lie in the table of events, by partition."""
        inside = [
            (ds.field("partition") == partition) & (ds.field("offset") >= start) & (ds.field("offset") < end)
            for partition, (start, end) in planned.items()
        ]
        condition = (ds.field("topic") == self.config.kafka.topic) & functools.reduce(operator.or_, inside)
        found = lake.scan(self.home, "events", ["partition", "offset"], condition)
        partitions, places = found["partition"].to_numpy(), found["offset"].to_numpy()
        return {partition: places[partitions == partition] for partition in planned}

    def _refuse(
        self, records: DataFrame, planned: Mapping[int, tuple[int, int]], kept: Mapping[int, np.ndarray], identity: str, batch: int
    ) -> dict[int, Counts]:
        """Judge again what is not among the events, write it to quarantine, and redeem what names a file; returns counts by partition."""
        rest = {partition: np.setdiff1d(np.arange(*bounds), kept[partition]) for partition, bounds in planned.items()}
        if not any(map(len, rest.values())):
            return {}
        again = self._judged(_at(records, rest), self.config.kafka.max_event_bytes).persist()
        try:
            counts = _counts(again)
            if any(found.claims for found in counts.values()):
                small, again = again, self._with_claims(records.sparkSession, again).persist()
                counts = _counts(again)
                small.unpersist()
                self._commit(intake.accepted(again), "events", f"{identity}:claims", batch)
            if any(found.quarantined for found in counts.values()):
                self._commit(intake.refused(again), "quarantine", identity, batch)
        finally:
            again.unpersist()
        return counts

    def _booked(
        self, batch: int, partition: int, bounds: tuple[int, int], kept: np.ndarray, refused: Mapping[int, Counts]
    ) -> dict[str, Any]:
        """Return the ledger's row of one partition.

        Raises:
            ContractViolation: Rows are missing from the batch, or came twice.
        """
        start, end = bounds
        other = refused.get(partition, Counts(kept=0, quarantined=0, distinct=0, claims=0))
        rows, distinct = len(kept) + other.kept + other.quarantined, len(np.unique(kept)) + other.distinct
        if not rows == distinct == end - start:
            raise ContractViolation(
                f"batch {batch}, partition {partition}: offsets {start} to {end} held {rows} records, {distinct} of them distinct, "
                f"instead of {end - start}; a compacted or transactional topic cannot be accounted for, use a plain one"
            )
        return {
            "topic": self.config.kafka.topic, "partition": partition, "start": start, "end": end, "kept": len(kept) + other.kept,
            "quarantined": other.quarantined, "committed_at": datetime.now(UTC),
        }  # fmt: skip

    def _judged(self, records: DataFrame, max_bytes: int) -> DataFrame:
        return intake.judged(records, max_bytes=max_bytes, future_ms=int(self.config.signals.future_allowance_s * 1000))

    def _with_claims(self, spark: SparkSession, judged: DataFrame) -> DataFrame:
        """Put events that lie in files in the place of the records that name them."""
        claim = claims.is_claim("raw") & F.col("reason").isNotNull()
        columns = ("topic", "partition", "offset")
        records = judged.where(claim).select("key", F.col("raw").alias("value"), *columns, F.col("arrived_at").alias("timestamp"))
        whole, lost = claims.redeem(spark, records, root=claim_files.root(self.config.kafka, self.home))
        found = judged.where(~claim).unionByName(self._judged(whole, self.config.kafka.max_claim_bytes))
        for fault, frame in lost.items():
            found = found.unionByName(self._judged(frame, self.config.kafka.max_event_bytes).withColumn("reason", F.lit(fault)))
        return found

    def _commit(self, frame: DataFrame, name: str, identity: str, batch: int) -> None:
        writer = frame.write.format("delta").mode("append").option("txnAppId", identity).option("txnVersion", str(batch))
        writer.option("mergeSchema", "true").save(str(lake.path(self.home, name)))
        self.after(name)


def _counts(judged: DataFrame) -> dict[int, Counts]:
    """Count judged records by partition."""
    is_event = F.col("reason").isNull()
    counted = judged.groupBy("partition").agg(
        F.count_if(is_event).alias("kept"),
        F.count_if(~is_event).alias("quarantined"),
        F.count_distinct("offset").alias("distinct"),
        F.count_if(~is_event & claims.is_claim("raw")).alias("claims"),
    )
    return {
        row["partition"]: Counts(**{name: row[name] for name in ("kept", "quarantined", "distinct", "claims")}) for row in counted.collect()
    }


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
