"""Metrics of client connections."""

from __future__ import annotations

from functools import partial

from tgi_trio.process.accepting import Acceptor
from tgi_trio.router.telemetry.metrics import Metrics


def counted_acceptor(metrics: Metrics, most: int, prefix: str) -> Acceptor:
    """Return an acceptor for `most` clients, with metrics whose names begin with `prefix`."""
    acceptor = Acceptor(most, note=partial(metrics.inc, f"{prefix}_connection_shortages"))
    metrics.gauge(f"{prefix}_connections_limit", most)
    metrics.before_render(lambda: metrics.gauge(f"{prefix}_connections", acceptor.open))
    return acceptor
