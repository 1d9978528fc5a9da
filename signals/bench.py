"""`tidegate bench signals`: how fast one core turns events into rewards, against what Spark can do at most, in one run on the same events.

Four subjects read the same topic through the same source in batches of the same size, on one task slot (`local[1]`):
- raw: Kafka to nowhere;
- passthrough: Kafka, `from_json` with the stage's schema, Delta: the limit of anything that keeps events;
- pipeline: the stage itself, append and then distil, through the code that `signals run` runs;
- per_group_python: the same rules as stateful Python (`bench_python.py`), on the smallest size only.

The subjects take turns, so that a busy neighbour meets all of them; the first round, of every subject, is a warm-up and dropped. Rates are
records of the topic (hostile ones and duplicates included) a second of wall time; processor seconds stand beside them. Per-group Python
writes rewards only, neither events nor samples nor a ledger, so it is also set against the distil part of the pipeline alone.

Takes: a plan, settings, a work folder. Gives: one dict, the command's JSON. Leaves out: words and the plot (`bench_report.py`).
"""

import importlib.metadata
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipelines import kafka
from pipelines.broker import EmbeddedBroker
from pipelines.broker import running as running_broker
from pipelines.errors import ConfigError, ContractViolation
from pipelines.storage import Home, exclusive
from pipelines.terminal import progress
from signals import bench_live, bench_python, bench_topics, distil, job, spark, stream, wire
from signals.bench_meter import Meter
from signals.config import SignalsConfig

LIMIT_RECORDS: Final = 2_000_000
"""Up to here all subjects run at a size; above, only the pipeline, whose cost per event is to stay flat."""
PYTHON_RECORDS: Final = 200_000
"""Up to here per-group Python runs at the smallest size: it does about a thousand records a second."""
GOALS: Final = {"passthrough": 0.6, "per_group_python": 10.0, "flat": 0.1, "rss_bytes": 4_000_000_000, "triggers": 2.0}
CORRUPT: Final = "_corrupt"
PARSE: Final = {
    "columnNameOfCorruptRecord": CORRUPT, "mode": "PERMISSIVE", "allowNonNumericNumbers": "false", "allowSingleQuotes": "false",
}  # fmt: skip
SUBJECTS: Final = ("raw", "passthrough", "pipeline", "per_group_python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    sizes: tuple[int, ...]
    repeats: int = 3
    """Of the smallest size; the others run once, as they last long enough to be their own average."""
    seed: int = 0
    trigger_s: float = 10.0
    live_s: float = 60.0
    """How long live sessions are counted; 0 leaves that part out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One subject, once."""

    subject: str
    size: int
    repeat: int
    records: int
    seconds: float
    cpu_s: float
    peak_rss_bytes: int
    parts_s: dict[str, float] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        """Records a second of one task slot."""
        return self.records / self.seconds


def check(plan: Plan) -> None:
    """Refuse a plan that means nothing.

    Raises:
        ConfigError: No sizes, or sizes or repeats below one.
    """
    if not plan.sizes or min(plan.sizes) < 1 or plan.repeats < 1:
        raise ConfigError(f"--sizes {','.join(map(str, plan.sizes))} --repeats {plan.repeats}: give at least one size, all at least 1")


def _stream(running: SparkSession, config: SignalsConfig, home: Home) -> DataFrame:
    return running.readStream.format("kafka").options(**stream.source_options(config, home, starting="earliest")).load()


def _raw(running: SparkSession, config: SignalsConfig, home: Home, _work: Home) -> dict[str, float]:
    writer = _stream(running, config, home).writeStream.option("checkpointLocation", str(home.streams / "raw")).format("noop")
    writer.trigger(availableNow=True).start().awaitTermination()
    return {}


def _passthrough(running: SparkSession, config: SignalsConfig, home: Home, _work: Home) -> dict[str, float]:
    event = F.from_json(F.col("value").cast("string"), wire.json_ddl(CORRUPT), PARSE)
    arrived = F.col("timestamp").alias("arrived_at"), F.to_date("timestamp").alias("date")
    parsed = _stream(running, config, home).select("topic", "partition", "offset", *arrived, event.alias("event"))
    flat = parsed.select("*", "event.*").drop("event", CORRUPT)
    writer = flat.writeStream.option("checkpointLocation", str(home.streams / "passthrough")).format("delta").partitionBy("date")
    writer.trigger(availableNow=True).start(str(home.lake / "passthrough")).awaitTermination()
    return {}


def _forget(_number: int) -> None:
    from signals import followup_scoring

    followup_scoring.forget()


def _pipeline(running: SparkSession, config: SignalsConfig, home: Home, _work: Home) -> dict[str, float]:
    running.sparkContext.parallelize([0], 1).foreach(_forget)  # messages of an earlier round: in life nearly all are new
    clock, totals = job.Clock(), stream.Totals()
    with clock.part("append"):
        stream.prepare(config, home, resume=False, accept_gap=False)
        job.append_once(running, config, home, totals)
    now = distil.utc_now()
    with clock.part("distil"):
        what = distil.touched(home, config, now=now, tombstoned=frozenset())
        summary = distil.distil(running, home, config, what, now=now)
    if not totals.rows or not totals.quarantined or not summary.outcomes.get("scored"):
        raise ContractViolation(f"the bench's events gave {totals} and {summary.outcomes}: a measurement of nothing")
    return clock.seconds


def _per_group_python(running: SparkSession, config: SignalsConfig, home: Home, _work: Home) -> dict[str, float]:
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    rows = bench_python.per_session(
        _stream(running, config, home), config.rewards, max_bytes=config.kafka.max_event_bytes, now_ms=now_ms
    )  # fmt: skip
    writer = rows.writeStream.option("checkpointLocation", str(home.streams / "python")).format("delta").outputMode("append")
    writer.trigger(availableNow=True).start(str(home.lake / "python")).awaitTermination()
    return {}


RUN: Final[dict[str, Callable[[SparkSession, SignalsConfig, Home, Home], dict[str, float]]]] = {
    "raw": _raw,
    "passthrough": _passthrough,
    "pipeline": _pipeline,
    "per_group_python": _per_group_python,
}


@contextmanager
def servers(config: SignalsConfig, work: Home) -> Iterator[tuple[SignalsConfig, frozenset[int]]]:
    """Yield settings that name the brokers, and the broker's process where it is our own: the embedded one of the work folder."""
    if config.kafka.bootstrap_servers:
        yield config, frozenset()
        return
    with EmbeddedBroker(work, config=bench_topics.with_topic(config, "bench").kafka) as broker:
        found = running_broker(work)
        own = config.model_copy(update={"kafka": config.kafka.model_copy(update={"bootstrap_servers": broker.bootstrap})})
        yield own, frozenset({found.pid} if found else ())


def run(plan: Plan, config: SignalsConfig, work: Home) -> dict[str, Any]:
    """Measure everything in the plan.

    Args:
        plan: Sizes, repeats, seed.
        config: Settings of the deployment to be measured; the number of task slots is set to one.
        work: Folder for the broker, the topics (kept for the next run) and lakes (removed).

    Raises:
        Busy: Another bench uses the folder.
        BrokerUnavailable, ConfigError, MissingDependency, StorageFull: See `bench_topics.fill` and `signals.spark.session`.
    """
    check(plan)
    with (
        exclusive(work.run / "bench.lock", what="the bench"),
        servers(config, work) as (own, broker),
        Meter(os.getpid(), without=broker) as meter,
    ):
        filled = _fill(plan, own, work)
        one = own.model_copy(update={"spark": own.spark.model_copy(update={"master": "local[1]"})})
        measures = _measure(plan, one, work, filled, meter)
        live = _live(plan, own, work) if plan.live_s > 0 else None
        # The job of the live part is a deployment of its own: the bench's idle JVM beside it is not counted with it.
        peaks = [item.peak_rss_bytes for item in measures if item.subject == "pipeline"] + ([live.peak_rss_bytes] if live else [])
        return result(plan, config, measures, filled, live, peak_rss_bytes=max(peaks))


def _fill(plan: Plan, config: SignalsConfig, work: Home) -> dict[int, bench_topics.Filled]:
    sizes = sorted(set(plan.sizes))
    with spark.session(config.spark.model_copy(update={"master": "local[2]"}), work) as running, spark.boundary("sending events"):
        return {size: bench_topics.fill(running, config, work, size=size, seed=plan.seed) for size in sizes}


def _rounds(plan: Plan) -> list[tuple[str, int, int]]:
    """Return (subject, size, repeat) in the order they run; repeat -1 is the warm-up."""
    sizes = sorted(set(plan.sizes))
    rounds: list[tuple[str, int, int]] = []
    for size in sizes:
        subjects: tuple[str, ...] = SUBJECTS[:3] if size <= LIMIT_RECORDS else ("pipeline",)
        first = size == sizes[0]
        if first and size <= PYTHON_RECORDS:
            subjects = SUBJECTS
        for repeat in range(-1 if first else 0, plan.repeats if first else 1):
            rounds += [(subject, size, repeat) for subject in subjects]
    return rounds


def _measure(plan: Plan, config: SignalsConfig, work: Home, filled: dict[int, bench_topics.Filled], meter: Meter) -> list[Measure]:
    measures: list[Measure] = []
    rounds = _rounds(plan)
    bench_topics.require_space(work.root, max(found.records for found in filled.values()), bench_topics.LAKE_BYTES)
    total = sum(filled[size].records for _, size, _ in rounds)
    with spark.session(config.spark, work) as running, spark.boundary("measuring"), progress("measuring, events", total=total) as advance:
        for number, (subject, size, repeat) in enumerate(rounds):
            found = filled[size]
            home = Home(work.root / "measuring" / f"{number}-{subject}")
            shutil.rmtree(home.root, ignore_errors=True)
            home.streams.mkdir(parents=True)
            with meter.reading() as reading:
                parts = RUN[subject](running, bench_topics.with_topic(config, found.topic), home, work)
            shutil.rmtree(work.root / "measuring")
            advance(found.records)
            if repeat >= 0:
                measures.append(
                    Measure(
                        subject=subject, size=size, repeat=repeat, records=found.records, seconds=round(reading.seconds, 3),
                        cpu_s=round(reading.cpu_s, 2), peak_rss_bytes=reading.peak_rss_bytes, parts_s=parts,
                    )
                )  # fmt: skip
    return measures


def _live(plan: Plan, config: SignalsConfig, work: Home) -> bench_live.Live:
    home = Home(work.root / "live")
    shutil.rmtree(home.root, ignore_errors=True)
    with progress("measuring the time from event to reward, sessions") as advance:
        live = bench_live.measure(config, home, servers=kafka.bootstrap(config, work), trigger_s=plan.trigger_s, live_s=plan.live_s)
        advance(live.sent)
    shutil.rmtree(home.root)
    return live


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _rates(measures: list[Measure], subject: str, size: int) -> list[float]:
    return [item.per_s for item in measures if (item.subject, item.size) == (subject, size)]


def _ratios(measures: list[Measure], size: int, over: str) -> list[float]:
    """Return pipeline / other, round by round, so that both met the same neighbours."""
    return [a / b for a, b in zip(_rates(measures, "pipeline", size), _rates(measures, over, size), strict=False)]


def _distil_ratios(measures: list[Measure], size: int) -> list[float]:
    """Return the rate of the pipeline's distil part alone / per-group Python, round by round."""
    distil = [item.records / item.parts_s["distil"] for item in measures if (item.subject, item.size) == ("pipeline", size)]
    return [a / b for a, b in zip(distil, _rates(measures, "per_group_python", size), strict=False)]


def result(
    plan: Plan, config: SignalsConfig, measures: list[Measure], filled: dict[int, bench_topics.Filled], live: bench_live.Live | None,
    *, peak_rss_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    """Put the measurements together.

    Args:
        plan: What was asked.
        config: Settings that were measured.
        measures: One entry a subject, size and repeat.
        filled: The topics by size.
        live: Event to reward; None when it was left out.
        peak_rss_bytes: Largest resident memory of the pipeline: one Python driver, its JVM and its workers together.
    """
    sizes = sorted({item.size for item in measures})
    headline = max((size for size in sizes if size <= LIMIT_RECORDS), default=sizes[0])
    speeds = {name: _rates(measures, name, sizes[0] if name == "per_group_python" else headline) for name in SUBJECTS}
    by_size = {size: statistics.median(_rates(measures, "pipeline", size)) for size in sizes}
    to_limit = {size: _ratios(measures, size, "passthrough") for size in sizes if size <= LIMIT_RECORDS}
    to_python, distil_to_python = _ratios(measures, sizes[0], "per_group_python"), _distil_ratios(measures, sizes[0])
    ratios = {
        "pipeline_to_passthrough": {str(size): round(statistics.median(found), 3) for size, found in to_limit.items() if found},
        "pipeline_to_per_group_python": round(statistics.median(to_python), 2) if to_python else None,
        "distil_to_per_group_python": round(statistics.median(distil_to_python), 2) if distil_to_python else None,
        "slowest_to_fastest_size": round(min(by_size.values()) / max(by_size.values()), 3) if len(by_size) > 1 else None,
        "p95_in_triggers": round(_quantile(live.seconds, 0.95) / live.trigger_s, 2) if live and live.seconds else None,
    }
    return {
        "events_per_s_core": {name: round(statistics.median(found), 1) if found else None for name, found in speeds.items()},
        "by_size": {str(size): round(rate, 1) for size, rate in by_size.items()},
        "peak_rss_bytes": peak_rss_bytes,
        "event_to_reward_s": {
            "p50": round(_quantile(live.seconds, 0.5), 2) if live and live.seconds else None,
            "p95": round(_quantile(live.seconds, 0.95), 2) if live and live.seconds else None,
        },
        "trigger_s": plan.trigger_s,
        "ratios": ratios,
        "goals": _goals(ratios, headline, peak_rss_bytes),
        "spread": {name: [round(min(found), 1), round(max(found), 1)] if found else None for name, found in speeds.items()},
        "live": {"sessions": len(live.seconds), "unseen": live.unseen, "peak_rss_bytes": live.peak_rss_bytes} if live else None,
        "measures": [asdict(item) | {"events_per_s_core": round(item.per_s, 1)} for item in measures],
        "records": {str(size): found.records for size, found in filled.items()},
        "headline_size": headline,
        "settings": {"spark": config.spark.model_dump(), "signals": config.signals.model_dump()} | asdict(plan),
        "versions": {name: importlib.metadata.version(name) for name in ("tidegate", "pyspark", "delta-spark", "deltalake", "pyarrow")},
        "machine": machine(),
    }


def _goals(ratios: dict[str, Any], headline: int, peak_rss_bytes: int) -> dict[str, bool | None]:
    """Return for each goal whether it was met; None where it was not measured."""
    limit = ratios["pipeline_to_passthrough"].get(str(headline))
    python, triggers, flat = ratios["pipeline_to_per_group_python"], ratios["p95_in_triggers"], ratios["slowest_to_fastest_size"]
    return {
        "pipeline at least 0.6 of passthrough": None if limit is None else limit >= GOALS["passthrough"],
        "pipeline at least 10 times per-group Python": None if python is None else python >= GOALS["per_group_python"],
        "flat within 10 % over the sizes": None if flat is None else flat >= 1 - GOALS["flat"],
        "driver and executor below 4 GB": peak_rss_bytes < GOALS["rss_bytes"],
        "event to reward, p95, within two triggers": None if triggers is None else triggers <= GOALS["triggers"],
    }


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    return {
        "cpu": model, "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total, "load_1m": round(os.getloadavg()[0], 2),
        "system": platform.platform(), "python": platform.python_version(),
    }  # fmt: skip


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
