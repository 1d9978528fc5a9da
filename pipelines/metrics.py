"""Counters, gauges and histograms in the Prometheus text format, each declared once.

Takes: names, help texts and label names at declaration, numbers in between. Gives: `Registry.render()`, the body of `/metrics`.
Leaves out: time series, push, exemplars, and any process-wide default registry: whoever serves `/metrics` owns the registry.
Source: Prometheus text exposition format 0.0.4.
"""

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES: Final = 1_000
"""Label combinations one metric may have. More is a fault in the caller (an id used as a label), so it raises."""
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets for durations in seconds, from a cached lookup to a long generation."""

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class _Metric:
    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        if not all(_NAME.match(part) for part in (name, *labels)):
            raise ValueError(f"metric {name!r} with labels {list(labels)}: names are letters, digits and underscores")
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], list[float]] = {}

    def _cell(self, labels: dict[str, str], width: int = 1) -> list[float]:
        """Return the numbers of one label combination; the caller holds the lock."""
        if labels.keys() != set(self.labels):
            raise ValueError(f"metric {self.name} takes the labels {list(self.labels)}, not {sorted(labels)}")
        key = tuple(str(labels[name]) for name in self.labels)
        if key not in self._series:
            if len(self._series) >= MAX_SERIES:
                raise ValueError(f"metric {self.name} has {MAX_SERIES} label combinations; a label must not hold an id")
            self._series[key] = [0.0] * width
        return self._series[key]

    def _text(self, key: tuple[str, ...], extra: str = "") -> str:
        parts = [f'{name}="{_escape(value)}"' for name, value in zip(self.labels, key, strict=True)]
        joined = ",".join([*parts, extra] if extra else parts)
        return "{" + joined + "}" if joined else ""

    def value(self, **labels: str) -> float:
        """Return the current number of one label combination (a histogram's count of observations)."""
        with self._lock:
            return self._cell(labels)[0]

    def lines(self) -> Iterator[str]:
        """Yield the samples, one a line."""
        for key, cell in sorted(self._series.items()):
            yield f"{self.name}{self._text(key)} {_number(cell[0])}"


class Counter(_Metric):
    """A number that only grows; by custom its name ends in `_total`."""

    kind = "counter"

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Add `amount` (>= 0)."""
        if amount < 0:
            raise ValueError(f"counter {self.name} cannot fall by {-amount}")
        with self._lock:
            self._cell(labels)[0] += amount


class Gauge(_Metric):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        """Replace the number."""
        with self._lock:
            self._cell(labels)[0] = float(value)

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Add `amount`, which may be negative."""
        with self._lock:
            self._cell(labels)[0] += amount


class Histogram(_Metric):
    """How often observations fell at or below each bucket's bound."""

    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = SECONDS) -> None:
        super().__init__(name, help, labels)
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise ValueError(f"histogram {name}: buckets must rise")
        self.buckets = tuple(buckets)

    def observe(self, value: float, **labels: str) -> None:
        """Count one observation."""
        with self._lock:
            cell = self._cell(labels, 2 + len(self.buckets) + 1)
            cell[0] += 1
            cell[1] += value
            cell[2 + bisect_left(self.buckets, value)] += 1

    def value(self, **labels: str) -> float:
        """Return how many observations one label combination has."""
        with self._lock:
            return self._cell(labels, 2 + len(self.buckets) + 1)[0]

    def lines(self) -> Iterator[str]:
        """Yield cumulative buckets, sum and count."""
        for key, cell in sorted(self._series.items()):
            running = 0.0
            for bound, count in zip([*map(_number, self.buckets), "+Inf"], cell[2:], strict=True):
                running += count
                le = f'le="{bound}"'
                yield f"{self.name}_bucket{self._text(key, le)} {_number(running)}"
            yield f"{self.name}_sum{self._text(key)} {_number(cell[1])}"
            yield f"{self.name}_count{self._text(key)} {_number(cell[0])}"


AnyMetric = TypeVar("AnyMetric", Counter, Gauge, Histogram)


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def _add(self, metric: AnyMetric) -> AnyMetric:
        if metric.name in self._metrics:
            raise ValueError(f"metric {metric.name} is declared twice")
        self._metrics[metric.name] = metric
        return metric

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter."""
        return self._add(Counter(name, help, labels))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge."""
        return self._add(Gauge(name, help, labels))

    def histogram(self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = SECONDS) -> Histogram:
        """Declare a histogram."""
        return self._add(Histogram(name, help, labels, buckets=buckets))

    def names(self) -> list[str]:
        """Return every declared name."""
        return sorted(self._metrics)

    def metrics(self) -> list[Counter | Gauge | Histogram]:
        """Return every metric, by name."""
        return [self._metrics[name] for name in self.names()]

    def render(self) -> str:
        """Return all samples in the text format."""
        lines: list[str] = []
        for name, metric in sorted(self._metrics.items()):
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
            with metric._lock:
                lines += metric.lines()
        return "\n".join(lines) + "\n" if lines else ""
