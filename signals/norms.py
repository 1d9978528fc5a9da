"""Frozen normalisation: what was usual in an earlier cycle, so that a reward says how much better than usual a turn was.

Frozen, never of the data being scored: else one turn's reward would depend on which others arrived. Made by `signals baselines --freeze`
from turns of an accepted cycle, kept in the table `norms`, applied when present. A stratum with too few turns uses the norms of all.

Takes: rows of finished turns, or of the table. Gives: `Norms`. Leaves out: reading and writing (`lake.py`), and the reward (`rewards.py`).
"""

import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from signals.config import RewardsConfig

ANY: Final = "*"
"""Stands for all values of a stratum's part, of a bucket or of a user."""
NORMALISED: Final = ("edits_kept", "follow_up", "latency", "conventions", "explicit")
"""Components that are brought to the scale of their stratum. Costs keep their own: their 0 means that nothing was wrong. A deferral
stands on the scale of kept edits, in whose place it stands."""
CLIP: Final = 3.0
"""Largest normalised value, standard deviations."""

Stratum = tuple[str, str, str]
"""Surface, language, task bucket; "" where unknown."""


def stratum(surface: str | None, language: str | None, task_bucket: str | None) -> Stratum:
    """Name the group whose usual values a turn is compared with."""
    return surface or "", language or "", task_bucket or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """What was usual."""

    version: str = ""
    """Digest of everything below; "" when nothing was frozen."""
    scale: Mapping[Stratum, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Stratum -> component -> mean and standard deviation."""
    low: Mapping[Stratum, float] = field(default_factory=dict)
    """Stratum -> tenth percentile of the kept-edit value, in [-1, 1]."""
    medians_ms: Mapping[str, float] = field(default_factory=dict)
    """Task bucket -> median sampling time of a turn."""
    kept: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Task bucket -> sum of kept shares and number of turns with judged edits."""
    kept_by_user: Mapping[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    """The same by bucket and user, so that a user's own can be left out."""
    min_turns: int = 30

    def scale_of(self, surface: str | None, language: str | None, task_bucket: str | None) -> Mapping[str, tuple[float, float]]:
        """Return mean and deviation by component for a turn; empty when nothing was frozen."""
        everything = self.scale.get((ANY, ANY, ANY), {})
        return {**everything, **self.scale.get(stratum(surface, language, task_bucket), {})}

    def abandoned(self, surface: str | None, language: str | None, task_bucket: str | None) -> float | None:
        """Return the tenth percentile of a turn's stratum, or None."""
        return self.low.get(stratum(surface, language, task_bucket), self.low.get((ANY, ANY, ANY)))

    def median_ms(self, task_bucket: str | None, config: RewardsConfig) -> float | None:
        """Return the frozen median of a task bucket, or of any other; from the settings until one was frozen; or None."""
        medians = self.medians_ms or config.latency_medians_ms
        return medians.get(task_bucket or ANY, medians.get(ANY))

    def expected_kept(self, task_bucket: str | None, *, without: str) -> float | None:
        """Return the mean kept share of a bucket's turns by other users, in [0, 1]; of all buckets where that are too few; or None."""
        for bucket in (task_bucket or "", ANY):
            total, turns = self.kept.get(bucket, (0.0, 0))
            own_total, own_turns = self.kept_by_user.get((bucket, without), (0.0, 0))
            if turns - own_turns >= self.min_turns:
                return min(1.0, max(0.0, (total - own_total) / (turns - own_turns)))
        return None


NO_NORMS: Final = Norms()


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRow:
    """One row of the table `norms`."""

    kind: str
    """scale, low, median_ms, kept or kept_by_user."""
    surface: str = ANY
    language: str = ANY
    task_bucket: str = ANY
    user_key: str = ANY
    component: str = ANY
    turns: int
    total: float | None = None
    """Sum of kept shares (kept, kept_by_user)."""
    mean: float | None = None
    sd: float | None = None
    value: float | None = None
    """The percentile (low) or median in ms (median_ms)."""


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value at the share of sorted values, linearly between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _groups(rows: Sequence[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], Any], total: Any) -> dict[Any, list[Mapping[str, Any]]]:
    grouped: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[key(row)].append(row)
        grouped[total].append(row)
    return dict(sorted(grouped.items()))


def freeze(turns: Iterable[Mapping[str, Any]], *, min_turns: int) -> list[NormRow]:
    """Compute the norms of finished turns.

    Args:
        turns: Rows with session_id, turn_id, surface, language, task_bucket, user_key, sampling_ms and the components (None when absent).
        min_turns: A stratum or bucket with fewer values gets no norms of its own.

    Returns:
        Rows of the table, in a fixed order. The whole (all parts "*") is always among them where there is a value at all.
    """
    rows = sorted(turns, key=lambda row: (row["session_id"], row["turn_id"]))
    found: list[NormRow] = []
    strata = _groups(rows, lambda row: stratum(row["surface"], row["language"], row["task_bucket"]), (ANY, ANY, ANY))
    for (surface, language, task_bucket), own in strata.items():
        where = {"surface": surface, "language": language, "task_bucket": task_bucket}
        enough = 1 if surface == ANY else min_turns
        for name in NORMALISED:
            values = [row[name] for row in own if row[name] is not None]
            if len(values) >= max(enough, 2):
                mean, sd = statistics.fmean(values), statistics.pstdev(values)
                found.append(NormRow(kind="scale", component=name, turns=len(values), mean=mean, sd=sd, **where))
                if name == "edits_kept":
                    found.append(NormRow(kind="low", turns=len(values), value=_percentile(values, 0.1), **where))
    for bucket, own in _groups(rows, lambda row: row["task_bucket"] or "", ANY).items():
        enough = 1 if bucket == ANY else min_turns
        times = [row["sampling_ms"] for row in own if row["sampling_ms"] is not None and row["sampling_ms"] > 0]
        if len(times) >= enough:
            found.append(NormRow(kind="median_ms", task_bucket=bucket, turns=len(times), value=statistics.median(times)))
        judged = [row for row in own if row["edits_kept"] is not None]
        for user, theirs in _groups(judged, lambda row: row["user_key"], ANY).items():
            total = math.fsum((row["edits_kept"] + 1.0) / 2.0 for row in theirs)
            kind = "kept" if user == ANY else "kept_by_user"
            found.append(NormRow(kind=kind, task_bucket=bucket, user_key=user, turns=len(theirs), total=total))
    return found


def load(rows: Iterable[NormRow], *, min_turns: int) -> Norms:
    """Make norms of the rows of one version; no rows give `NO_NORMS`."""
    listed = sorted(rows, key=lambda r: (r.kind, r.surface, r.language, r.task_bucket, r.user_key, r.component))
    if not listed:
        return NO_NORMS
    scale: defaultdict[Stratum, dict[str, tuple[float, float]]] = defaultdict(dict)
    low: dict[Stratum, float] = {}
    medians: dict[str, float] = {}
    kept: dict[str, tuple[float, int]] = {}
    kept_by_user: dict[tuple[str, str], tuple[float, int]] = {}
    for row in listed:
        where = (row.surface, row.language, row.task_bucket)
        match row.kind:
            case "scale":
                scale[where][row.component] = (row.mean or 0.0, row.sd or 0.0)
            case "low":
                low[where] = row.value or 0.0
            case "median_ms":
                medians[row.task_bucket] = row.value or 0.0
            case "kept":
                kept[row.task_bucket] = (row.total or 0.0, row.turns)
            case "kept_by_user":
                kept_by_user[row.task_bucket, row.user_key] = (row.total or 0.0, row.turns)
            case other:
                raise ValueError(f"{other!r} is no kind of norm")
    text = json.dumps([[repr(getattr(row, name)) for name in NormRow.__slots__] for row in listed])
    return Norms(
        version=hashlib.sha256(f"{min_turns}{text}".encode()).hexdigest()[:12], scale=dict(scale), low=low, medians_ms=medians,
        kept=kept, kept_by_user=kept_by_user, min_turns=min_turns,
    )  # fmt: skip
