"""The table of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tgi_trio.cluster.front_metrics import FRONT_METRICS
from tgi_trio.router.telemetry.metric_table import METRICS, Metric
from tools.docs.markdown import Sections, table


def render(metrics: Sequence[Metric]) -> str:
    """Return a row per metric: type, labels, buckets (by name) and meaning."""
    return table(("metric", "type", "labels", "buckets", "meaning"), _rows(metrics))


def _rows(metrics: Sequence[Metric]) -> Iterator[tuple[str, ...]]:
    for metric in metrics:
        labels = f"`{metric.label}`: {', '.join(metric.values)}" if metric.label else ""
        yield f"`{metric.name}`", metric.kind, labels, metric.buckets, metric.help


SECTIONS: Final[Sections] = {
    "metrics": lambda: render(METRICS),
    "front-metrics": lambda: render(FRONT_METRICS),
}
