"""What is kept of a request for those who watch: its metrics, access log line and trace."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import trio

from tgi_trio.logs import show_path
from tgi_trio.router.http.call import Route
from tgi_trio.router.request import Timings
from tgi_trio.router.telemetry.metric_table import ROUTES
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.telemetry.request_stats import RequestStats
from tgi_trio.router.telemetry.tracing import RequestSpan, Tracer

CLIENT_LEFT = 499  # nginx's status for a request whose client left before there was an answer

access = logging.getLogger("tgi_trio.access")  # one line per request, at INFO

_COUNTED = frozenset(ROUTES)  # the other routes are counted together


class RequestAccount:
    """One request's times and generations, which its route adds to, until it is answered."""

    def __init__(self, request_id: str, headers: Mapping[bytes, bytes]) -> None:
        """Begin at the current time; `headers` are the request's, with names in lower case."""
        self.request_id = request_id
        self.headers = headers
        self.began = trio.current_time()
        self.generations: list[Timings] = []
        self.all_stats: list[RequestStats] = []  # of the generations that have ended well

    def close(
        self,
        scope: Mapping[str, Any],
        route: Route | None,
        status: int,
        metrics: Metrics,
        tracer: Tracer | None,
        left: bool = False,
    ) -> None:
        """Count, log and trace the request; `scope` is ASGI's, and `route` the one that answered.

        Only POST is counted and traced: pages and probes are not. `left`: the client did, before
        its answer was complete.
        """
        if route is not None and route.method == "POST":
            self._count(route, status, metrics)
        if access.isEnabledFor(logging.INFO) or tracer is not None:
            self._log_and_trace(scope, route, status, tracer, left)

    def _count(self, route: Route, status: int, metrics: Metrics) -> None:
        name = route.path if route.path in _COUNTED else "other"
        metrics.inc("tgi_route_requests", route=name)
        if 400 <= status != CLIENT_LEFT or self._failed:
            metrics.inc("tgi_route_errors", route=name)
        metrics.observe("tgi_route_duration", trio.current_time() - self.began, route=name)

    @property
    def _failed(self) -> bool:
        """Whether a generation has ended, and not well."""
        ended = sum(each.finished is not None for each in self.generations)
        return ended > len(self.all_stats)

    def _log_and_trace(
        self,
        scope: Mapping[str, Any],
        route: Route | None,
        status: int,
        tracer: Tracer | None,
        left: bool,
    ) -> None:
        client, ended = scope.get("client"), trio.current_time()
        cost = RequestStats.sum(self.all_stats).fields() if self.all_stats else {}
        cost |= {"client_left": True} if left else {}
        extra = {
            "request_id": self.request_id,
            "client": client[0] if client else "local",
            "seconds": round(ended - self.began, 6),
            **cost,
        }
        if tracer is not None and scope["method"] == "POST":
            span = RequestSpan(
                method=scope["method"],
                path=scope["path"],
                route=None if route is None else route.path,
                scheme=scope["scheme"],
                status=status,
                headers=self.headers,
                began=self.began,
                ended=ended,
                generations=self.generations,
                attributes={"request_id": self.request_id, **cost},
                failed=self._failed,
            )
            if trace_id := tracer.record(span):
                extra["trace_id"] = trace_id
        access.info("%s %s %d", scope["method"], show_path(scope["path"]), status, extra=extra)
