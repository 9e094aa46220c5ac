"""The front's own metrics."""

from __future__ import annotations

from typing import Final

from tgi_trio.cluster.members import MemberState
from tgi_trio.router.telemetry.metric_table import Metric

_STATES: Final = tuple(each.value for each in MemberState if each is not MemberState.GONE)

FRONT_METRICS: Final[tuple[Metric, ...]] = (
    Metric("tgi_front_requests", "counter", "Requests that were to be sent to a replica"),
    Metric("tgi_front_running", "gauge", "Requests that are under way"),
    Metric("tgi_front_cancelled", "counter", "Requests whose client left before the end"),
    Metric(
        "tgi_front_passed_over",
        "counter",
        "Answers after which another replica was asked: 429, 503, 529, or x-tgi-elsewhere",
    ),
    Metric("tgi_front_lost", "counter", "Times that a request lost its replica"),
    Metric("tgi_front_resumed", "counter", "Streams that went on at another replica"),
    Metric("tgi_front_unserved", "counter", "Requests, begun streams too, that no replica served"),
    Metric(
        "tgi_front_first_byte_duration",
        "histogram",
        "Body received to the head of the replica's answer, seconds",
        "D",
    ),
    Metric("tgi_front_pause_duration", "histogram", "Replica lost to stream resumed, seconds", "D"),
    Metric("tgi_front_peers", "gauge", "Addresses of other fronts, perhaps its own among them"),
    Metric("tgi_front_news_sent", "counter", "Datagrams sent to other fronts"),
    Metric("tgi_front_news_unsent", "counter", "Datagrams that the way to a front did not take"),
    Metric("tgi_front_news_heard", "counter", "Datagrams heard from other fronts"),
    Metric("tgi_front_news_refused", "counter", "Datagrams that the cluster's secret did not sign"),
    Metric("tgi_front_connections", "gauge", "Connections of clients"),
    Metric("tgi_front_connections_limit", "gauge", "Connections that clients may have at a time"),
    Metric(
        "tgi_front_connection_shortages",
        "counter",
        "Times that no more connections could be accepted for a while",
    ),
    Metric(
        "tgi_front_differing",
        "gauge",
        "Replicas whose model, names or limits are not those of most others",
    ),
    Metric("tgi_front_replicas", "gauge", "Replicas by state", label="state", values=_STATES),
)
