"""The table of metrics."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.router.telemetry.metrics import METRICS
from tools.docs.markdown import table


def render() -> str:
    """Return a row per metric: type, labels, buckets (by name) and meaning."""
    return table(("metric", "type", "labels", "buckets", "meaning"), _rows())


def _rows() -> Iterator[tuple[str, ...]]:
    for metric in METRICS:
        labels = f"`{metric.label}`: {', '.join(metric.values)}" if metric.label else ""
        yield f"`{metric.name}`", metric.kind, labels, metric.buckets, metric.help
