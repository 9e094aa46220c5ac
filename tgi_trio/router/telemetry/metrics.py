"""The server's metrics and their Prometheus text form (version 0.0.4).

TGI's counters have plain names, but the official Python client requires a `_total` suffix, so the
text is written here.

Every series of the table exists from the start with value zero (TGI shows a metric only after its
first use, which breaks `rate()`). Label values come from the table as well, so clients cannot add
series. A `Metrics` must be used from one thread only, as there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tgi_trio.router.telemetry.metric_table import METRICS, Metric, bucket_sets

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Observations in buckets; hot paths keep a reference to one."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds  # ascending, inclusive upper bounds; +Inf is implied
        self.counts = [0] * (len(bounds) + 1)  # not cumulative; `render` adds them up
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)


Key = str | tuple[object, ...]  # a name, or (name, (label, value))


class Metrics:
    """All series of a table; see the module's docstring."""

    def __init__(
        self,
        max_input_tokens: int = 1024,
        max_total_tokens: int = 2048,
        table: Sequence[Metric] = METRICS,
    ) -> None:
        """The limits determine the buckets of lengths, as in TGI; `table`: of another program."""
        buckets = bucket_sets(max_input_tokens, max_total_tokens)
        self._table = table
        self._counters: dict[Key, float] = {}
        self._gauges: dict[Key, float] = {}
        self._histograms: dict[Key, Histogram] = {}
        self._refreshers: list[Callable[[], None]] = []
        self._known: dict[str, list[str]] = {}  # label -> further values
        for metric in table:
            for key, _ in _series(metric):
                if metric.kind == "counter":
                    self._counters[key] = 0
                elif metric.kind == "gauge":
                    self._gauges[key] = 0
                else:
                    self._histograms[key] = Histogram(buckets[metric.buckets])

    def know(self, label: str, value: str) -> None:
        """Add a series for another value of a label, which an operator names, never a client.

        Only counters have such labels.
        """
        known = self._known.setdefault(label, [])
        if value in known:
            return
        known.append(value)
        for metric in self._table:
            if metric.label == label:
                self._counters[(metric.name, (label, value))] = 0

    def forget(self, label: str, value: str) -> None:
        """Remove the series of a value that `know` has added."""
        self._known[label].remove(value)
        for metric in self._table:
            if metric.label == label:
                del self._counters[(metric.name, (label, value))]

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add `value` (not negative) to a counter.

        Raises ValueError for a series that is not in the table.
        """
        if value < 0:
            raise ValueError(f"counter {name} cannot go down by {-value}")
        try:
            self._counters[(name, *labels.items()) if labels else name] += value
        except KeyError:
            raise self._unknown("counter", name, labels) from None

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Count an observation of a histogram or summary. Raises ValueError as `inc` does."""
        try:
            histogram = self._histograms[(name, *labels.items()) if labels else name]
        except KeyError:
            raise self._unknown("histogram", name, labels) from None
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.sum += value

    def observe_all(self, name: str, count: int, total: float) -> None:
        """Count `count` observations of a summary whose sum is `total`. Raises ValueError."""
        summary = self.histogram(name)
        summary.counts[-1] += count
        summary.sum += total

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Raises ValueError as `inc` does."""
        key: Key = (name, *labels.items()) if labels else name
        if key not in self._gauges:
            raise self._unknown("gauge", name, labels)
        self._gauges[key] = value

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram itself, for loops with many observations."""
        try:
            return self._histograms[(name, *labels.items()) if labels else name]
        except KeyError:
            raise self._unknown("histogram", name, labels) from None

    def value(self, name: str, **labels: str) -> float:
        """Return a counter's or gauge's value, or a histogram's number of observations.

        For a labelled counter without its label, the sum over all label values.
        """
        key: Key = (name, *labels.items()) if labels else name
        if key in self._counters:
            return self._counters[key]
        if key in self._gauges:
            return self._gauges[key]
        if key in self._histograms:
            return self._histograms[key].count
        parts = (
            [] if labels else [v for k, v in self._counters.items() if k[0] == name and k != name]
        )
        if not parts:
            raise self._unknown("metric", name, labels)
        return sum(parts)

    def before_render(self, refresh: Callable[[], None]) -> None:
        """Have `refresh` set gauges before each rendering, which is cheaper than at every step."""
        self._refreshers.append(refresh)

    def render(self) -> bytes:
        """Return all series in Prometheus text format, families in the table's order."""
        for refresh in self._refreshers:
            refresh()
        lines: list[str] = []
        for metric in self._table:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            for key, labels in _series(metric, self._known.get(metric.label, ())):
                if metric.kind == "counter":
                    lines.append(f"{metric.name}{_braces(labels)} {_number(self._counters[key])}")
                elif metric.kind == "gauge":
                    lines.append(f"{metric.name}{_braces(labels)} {_number(self._gauges[key])}")
                else:
                    lines.extend(_render_histogram(metric, labels, self._histograms[key]))
        lines.append("")
        return "\n".join(lines).encode()

    def _unknown(self, kind: str, name: str, labels: dict[str, str]) -> ValueError:
        for metric in self._table:
            if metric.name == name:
                allowed = f"{metric.label} in {metric.values}" if metric.label else "no labels"
                used = f"used as {kind} {labels}"
                return ValueError(f"{name} is a {metric.kind} with {allowed}, {used}")
        return ValueError(f"no metric is named {name!r}; add it to the table of metrics")


def _series(metric: Metric, known: Sequence[str] = ()) -> Iterator[tuple[Key, str]]:
    """Yield (key, label text) for every series of a family; `known`: further label values."""
    if not metric.label:
        yield metric.name, ""
    for value in (*metric.values, *known):
        yield (metric.name, (metric.label, value)), write_label(metric.label, value)


def write_label(name: str, value: str) -> str:
    """Return a label as it stands in the text form, whatever letters its value has."""
    text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{text}"'


def _render_histogram(metric: Metric, labels: str, histogram: Histogram) -> Iterator[str]:
    cumulative = 0
    comma = "," if labels else ""
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        cumulative += count
        yield f'{metric.name}_bucket{{{labels}{comma}le="{_number(bound)}"}} {cumulative}'
    total = cumulative + histogram.counts[-1]
    if metric.kind == "histogram":
        yield f'{metric.name}_bucket{{{labels}{comma}le="+Inf"}} {total}'
    yield f"{metric.name}_sum{_braces(labels)} {_number(histogram.sum)}"
    yield f"{metric.name}_count{_braces(labels)} {total}"


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _number(value: float) -> str:
    """Return a number with all its digits, whole numbers without a fraction."""
    value = float(value)
    return str(int(value)) if value.is_integer() else repr(value)
