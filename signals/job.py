"""`signals run`: append, then distil, in one Spark process; once, or for as long as it is let.

Everything that can refuse does so before Spark starts, and when nothing arrived and no window closed Spark is not started at all.

Takes: settings, flags. Gives: the result as a dict, the same that `--json` prints. Leaves out: the two jobs themselves.
"""

import json
import logging
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from pipelines.errors import ConfigError, ContractViolation
from pipelines.storage import Home, exclusive
from pipelines.terminal import progress
from signals import checks, counts, distil, lake, offsets, spark, stream
from signals.config import SignalsConfig
from signals.monitors import after_distil

LOG: Final = logging.getLogger(__name__)
LOOK_S: Final = 0.5
"""How often the continuous job looks for a new batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """How a run was asked for."""

    once: bool = True
    resume_from_ledger: bool = False
    accept_gap: bool = False
    everything: bool = False
    """Whether to recompute all sessions."""
    tombstoned: Path | None = None
    """JSON list of policy versions whose release was rolled back; read again before each distil."""


@dataclass(slots=True)
class Clock:
    """Seconds by part of a run."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to a part."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begun, 2)


def read_tombstoned(path: Path | None) -> frozenset[int]:
    """Read the policy versions that were rolled back: a JSON list of whole numbers; None means none.

    Raises:
        ConfigError: The file is missing or holds something else.
    """
    if path is None:
        return frozenset()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tombstoned {path}: cannot be read as JSON ({error})") from error
    if not isinstance(found, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        raise ConfigError(f"--tombstoned {path}: expected a JSON list of policy versions, such as [3, 7]")
    return frozenset(found)


def run(config: SignalsConfig, home: Home, flags: Flags) -> dict[str, Any]:
    """Run the stage once, or until SIGTERM or Ctrl-C.

    Raises:
        Busy: Another process runs it for this home.
        BrokerUnavailable, ConfigError, ContractViolation, MissingDependency, StorageFull: See `stream.prepare` and `spark.session`.
    """
    clock, totals = Clock(), stream.Totals()
    begun = time.monotonic()
    with exclusive(home.run / "signals.lock", what="the signals job"):
        shutil.rmtree(home.streams / "tmp", ignore_errors=True)  # What a killed run left behind.
        with clock.part("prepare"):
            read_tombstoned(flags.tombstoned)
            end = stream.prepare(config, home, resume=flags.resume_from_ledger, accept_gap=flags.accept_gap)
        summary = _once(config, home, flags, totals, clock, end) if flags.once else _forever(config, home, flags, totals, clock)
        if flags.once and summary is not None:
            with clock.part("monitors"):
                after_distil(home, config, now=distil.utc_now(), hourly=False)
    clock.seconds["total"] = round(time.monotonic() - begun, 2)
    done = counts.outcomes(home)
    checks.quick(home)
    return {
        "append": {"rows": totals.rows, "quarantined": totals.quarantined, "batches": totals.batches},
        "distil": asdict(summary) if summary else {"sessions": 0, "turns": 0, "outcomes": done, "conflicts": 0},
        "lake_versions": lake.versions(home),
        "frontier": lake.frontier(home),
        "gaps": lake.read(home, "gaps").to_pylist(),
        "quarantine_share": round(checks.quarantine_share(home, now=distil.utc_now()), 6),
        "seconds": clock.seconds,
    }


def _behind(home: Home, topic: str, end: offsets.Position) -> bool:
    position = offsets.ledger_position(home, topic)
    return any(offset > position.get(partition, 0) for partition, offset in end.items())


def _once(
    config: SignalsConfig, home: Home, flags: Flags, totals: stream.Totals, clock: Clock, end: offsets.Position
) -> distil.Summary | None:
    append = _behind(home, config.kafka.topic, end)
    if not append and not distil.touched(
        home, config, now=distil.utc_now(), tombstoned=read_tombstoned(flags.tombstoned), everything=flags.everything
    ).sessions:  # fmt: skip
        return None
    with progress("reading events and computing rewards") as advance, ExitStack() as stack:
        with clock.part("spark"):
            running = stack.enter_context(spark.session(config.spark, home))
        if append:
            with clock.part("append"):
                append_once(running, config, home, totals)
            advance(totals.rows)
        with clock.part("distil"):
            return _distil(running, config, home, flags)


def append_once(running: SparkSession, config: SignalsConfig, home: Home, totals: stream.Totals) -> None:
    """Read what the topic holds now; `stream.prepare` has run.

    Raises:
        BrokerUnavailable, ContractViolation, StorageFull: As `spark.boundary` and the sink say.
    """
    with spark.boundary("reading events"):
        try:
            stream.start(running, config, home, totals, once=True).awaitTermination()
        except StreamingQueryException:
            if totals.failure is not None:
                raise totals.failure from None
            raise


def _distil(running: SparkSession, config: SignalsConfig, home: Home, flags: Flags) -> distil.Summary | None:
    now = distil.utc_now()
    tombstoned = read_tombstoned(flags.tombstoned)
    what = distil.touched(home, config, now=now, tombstoned=tombstoned, everything=flags.everything)
    if not what.news:
        return None
    with spark.boundary("computing rewards"):
        return distil.distil(running, home, config, what, now=now, tombstoned=tombstoned)


def _work_comes(stop: threading.Event, totals: stream.Totals, seen: int, timeout_s: float) -> bool:
    """Wait until a batch was appended since `seen`, or for `timeout_s` (windows close without events); False once told to stop."""
    deadline = time.monotonic() + timeout_s
    while totals.batches == seen and time.monotonic() < deadline:
        if stop.wait(LOOK_S):
            return False
    return not stop.is_set()


def _forever(config: SignalsConfig, home: Home, flags: Flags, totals: stream.Totals, clock: Clock) -> distil.Summary | None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    summary: distil.Summary | None = None
    seen = 0
    with spark.session(config.spark, home) as running, spark.boundary("reading events"):
        query = stream.start(running, config, home, totals, once=False)
        try:
            while _work_comes(stop, totals, seen, config.signals.distil_s):
                seen = totals.batches
                if not query.isActive:
                    if totals.failure is not None:
                        raise totals.failure
                    query.awaitTermination()
                with clock.part("distil"):
                    summary = _distil(running, config, home, flags) or summary
                with clock.part("monitors"):
                    after_distil(home, config, now=distil.utc_now(), hourly=True)
                LOG.info("distilled", extra={"fields": {"rows": totals.rows, "quarantined": totals.quarantined}})
                _look(home, config)
        finally:
            query.stop()
    return summary


def _look(home: Home, config: SignalsConfig) -> None:
    """Say when too many records are no events; stop when the ledger does not add up.

    Raises:
        ContractViolation: Offsets are missing from the ledger, or booked twice.
    """
    if (problem := next(checks.booked(home), None)) is not None:
        raise ContractViolation(f"the offset ledger of {home.lake} does not add up: {problem.found}; {problem.do}")
    share = checks.quarantine_share(home, now=distil.utc_now())
    if share > config.signals.quarantine_alert_share:
        LOG.warning(
            "too many records are no valid events",
            extra={"fields": {"share": round(share, 4), "limit": config.signals.quarantine_alert_share}},
        )
