"""The monitors: at the end of each hour, what each policy version does differently from the one before, and whose doing that is.

Every metric (`monitors_metrics.py`) of a policy is compared with its reference on the same mix of traffic, with a sequence that is valid
however often one looks. The traffic itself is compared by shape. A change that the mix explains is traffic's, one that remains is the
policy's; a policy compared with its own past cannot have changed, so there it is always traffic's.

Takes: the lake, settings, `now`. Gives: rows of the table `drift`, replaced by hour, and `monitors_alarms.Latest`.
Leaves out: the statistics (`drift.py`, `drift_compare.py`), plots (`monitors_plot.py`), and who is told.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import polars as pl
import pyarrow as pa
from deltalake import write_deltalake

from pipelines.errors import StageError
from pipelines.storage import Home
from signals import lake, monitors_alarms
from signals.config import SignalsConfig
from signals.monitors_alarms import Latest
from signals.monitors_facts import Facts, load
from signals.monitors_metrics import METRICS, prepared
from signals.monitors_rows import Pair, Row, rows_of
from signals.tables import DRIFT

LOG: Final = logging.getLogger(__name__)
HOUR: Final = timedelta(hours=1)
FIRST_HOURS: Final = 24
"""Hours that the first run looks at; `--since` asks for more."""
SHARES: Final = frozenset(metric.name for metric in METRICS if metric.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What one run of the monitors found."""

    rows: list[Row]
    """Rows of the table `drift`, by hour, policy and metric."""
    latest: Latest


def floor_hour(at: datetime) -> datetime:
    """Return the start of the hour."""
    return at.replace(minute=0, second=0, microsecond=0)


def reference_of(facts: Facts, version: int, *, config: SignalsConfig, until: datetime) -> int | None:
    """Return the policy version to compare with: the one that is set, else the newest earlier one with enough turns that was not rolled
    back, else the policy itself when it has a past before the window, else None.
    """
    seen = facts.turns.filter(pl.col("started_at") < until)
    counted = dict(seen.group_by("policy_version").len().iter_rows())
    fixed = config.monitors.reference_version
    if fixed is not None and fixed != version:
        return fixed if counted.get(fixed, 0) >= config.monitors.min_n else None
    earlier = [v for v, n in counted.items() if v < version and n >= config.monitors.min_n and v not in facts.tombstoned]
    if earlier:
        return max(earlier)
    own = seen.filter((pl.col("policy_version") == version) & (pl.col("started_at") < _window(config, until)))
    return version if len(own) >= config.monitors.min_n else None


def history(config: SignalsConfig, until: datetime) -> datetime:
    """Return from where on turns are read."""
    return until - timedelta(days=config.monitors.history_days)


def _window(config: SignalsConfig, until: datetime) -> datetime:
    return until - timedelta(hours=config.monitors.window_hours)


def look(facts: Facts, version: int, *, hour: datetime, until: datetime, config: SignalsConfig) -> list[Row]:
    """Return all rows of one policy version at the end of one hour.

    Args:
        facts: Turns, prepared (`monitors_metrics.prepared`).
        version: The policy version.
        hour: Start of the hour.
        until: End of the hour, or the present.
        config: Settings.
    """
    before = reference_of(facts, version, config=config, until=until)
    seen = facts.turns.filter(pl.col("started_at") < until)
    own = seen.filter(pl.col("policy_version") == version)
    start = _window(config, until)
    if before == version:
        current, reference = own.filter(pl.col("started_at") >= start), own.filter(pl.col("started_at") < start)
    else:
        current, reference = own, seen.filter(pl.col("policy_version") == before) if before is not None else own.clear()
    pair = Pair(
        current=current, reference=reference, recent=own.filter(pl.col("started_at") >= start), version=version, reference_version=before,
        hour=hour, until=until,
    )  # fmt: skip
    return rows_of(pair, config.monitors)


def examine(home: Home, config: SignalsConfig, *, now: datetime, since: datetime) -> Drift:
    """Look at every hour from `since` to now, and every policy version that had turns in it, without writing anything.

    Raises:
        ContractViolation: A table is damaged.
    """
    found = load(home, config.monitors, since=history(config, min(since, now)), until=now)
    facts = Facts(turns=prepared(found.turns), tombstoned=found.tombstoned)
    hours = (
        facts.turns.select(pl.col("started_at").dt.truncate("1h").alias("hour"), "policy_version").unique().sort("hour", "policy_version")
    )
    rows: list[Row] = []
    for hour, version in hours.filter(pl.col("hour") >= floor_hour(since)).iter_rows():
        rows += look(facts, version, hour=hour, until=min(hour + HOUR, now), config=config)
    return Drift(rows=rows, latest=summary(rows, now=now, tombstoned=facts.tombstoned))


def summary(rows: Sequence[Row], *, now: datetime, tombstoned: frozenset[int] = frozenset()) -> Latest:
    """Return what the newest hour's rows amount to; a policy that was rolled back has stopped being news.

    Args:
        rows: Rows of any hours.
        now: The present.
        tombstoned: Policy versions that were rolled back.
    """
    serving = [row for row in rows if row["policy_version"] not in tombstoned]
    newest = max((row["window_start"] for row in serving), default=None)
    last = [{**row, "share": row["metric"] in SHARES} for row in serving if row["window_start"] == newest]
    state, sentence, do = monitors_alarms.conclude(last)
    versions = {row["policy_version"] for row in last}
    keep = ("metric", "policy_version", "reference_version", "value", "expected", "effect", "n", "m", "share")
    figures = [
        {key: row[key] for key in keep} for row in last if row["kind"] in ("mean", "correlation") and row["policy_version"] == max(versions)
    ]  # fmt: skip
    return Latest(computed_at=now, state=state, sentence=sentence, do=do, alarms=[row for row in last if row["alarm"]], figures=figures)


def run(home: Home, config: SignalsConfig, *, now: datetime, since: datetime | None = None) -> Drift:
    """Look, replace the hours looked at in the table `drift`, and write the newest look for `status` and `/metrics`.

    A run without `since` goes on `recompute_hours` before the last hour in the table, so that turns whose windows closed meanwhile count.

    Raises:
        ContractViolation: A table is damaged.
        StorageFull: No space left.
    """
    if not lake.exists(home, "turns"):
        return Drift(rows=[], latest=summary([], now=now))
    lake.create_missing(home)  # a lake of an earlier release has no table `drift`
    start = floor_hour(since or _resume(home, config, now))
    found = examine(home, config, now=now, since=start)
    _replace(home, found.rows, start)
    monitors_alarms.write(home, found.latest)
    return found


def _resume(home: Home, config: SignalsConfig, now: datetime) -> datetime:
    newest = lake.last(lake.read(home, "drift", columns=["window_start"]), "window_start")
    if newest is None:
        return now - timedelta(hours=FIRST_HOURS)
    return min(newest["window_start"], now) - timedelta(hours=config.monitors.recompute_hours)


def _replace(home: Home, rows: Sequence[Row], start: datetime) -> None:
    """Replace all rows from `start` on, in one commit; the same rows again leave the table as it is."""
    fresh = pa.Table.from_pylist([dict(row) for row in rows], schema=lake.nullable(DRIFT.schema))
    if lake.read(home, "drift", filters=[("window_start", ">=", start)]).sort_by(_ORDER).equals(fresh.sort_by(_ORDER)):
        return
    # As text: a TIMESTAMP literal has nanoseconds, which Delta's reader does not compare with its microseconds.
    predicate = f"window_start >= '{start:%Y-%m-%dT%H:%M:%S}Z'"
    with lake.boundary(lake.path(home, "drift")):
        write_deltalake(lake.open_table(home, "drift"), fresh, mode="overwrite", predicate=predicate)


_ORDER: Final = [("window_start", "ascending"), ("policy_version", "ascending"), ("metric", "ascending"), ("kind", "ascending")]


def after_distil(home: Home, config: SignalsConfig, *, now: datetime, hourly: bool) -> None:
    """Run the monitors after a distil; what goes wrong in them is logged and never stops the events.

    Args:
        home: The deployment.
        config: Settings.
        now: The present.
        hourly: Whether to do nothing when they have run in this hour already, as the continuous job wants.
    """
    before = monitors_alarms.latest(home)
    if hourly and before is not None and floor_hour(before.computed_at) == floor_hour(now):
        return
    try:
        found = run(home, config, now=now)
    except (StageError, pl.exceptions.PolarsError, ArithmeticError, ValueError) as error:
        LOG.warning("monitors failed", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
        return
    level = logging.WARNING if found.latest.state in ("policy", "traffic") else logging.INFO
    LOG.log(level, "drift", extra={"fields": {"state": found.latest.state, "sentence": found.latest.sentence}})


def of_latest_hour(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows of the newest hour."""
    listed = list(rows)
    newest = max((row["window_start"] for row in listed), default=None)
    return [dict(row) for row in listed if row["window_start"] == newest]
