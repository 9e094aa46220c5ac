"""The metrics of many replicas as one page, as Prometheus' own client reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tgi_trio.cluster.metrics_view import label_series
from tgi_trio.router.telemetry.metrics import Metrics


def pages(*names: str) -> dict[str, bytes]:
    """Return the page of a server for each name, with a number of requests that is its place."""
    found: dict[str, bytes] = {}
    for number, name in enumerate(names, start=1):
        metrics = Metrics()
        metrics.inc("tgi_request_count", number)
        metrics.observe("tgi_request_duration", number)
        metrics.inc("tgi_request_failure", number, err="dropped")
        found[name] = metrics.render()
    return found


def test_each_replica_keeps_its_series_under_its_name() -> None:
    names = ["one:3000", "[::1]:3000", 'unix:/run/"two"\\s', "unix:/\u00e9\nb"]
    own = pages(*names)
    families = list(text_string_to_metric_families(label_series(own).decode()))
    assert len({family.name for family in families}) == len(families)  # each has one HELP and TYPE
    samples = [sample for family in families for sample in family.samples]
    alone = {
        name: [
            sample
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
        ]
        for name, page in own.items()
    }
    assert len(samples) == sum(map(len, alone.values()))
    for name in names:
        found = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for sample in samples
            if sample.labels["replica"] == name
        }
        assert found == {
            (sample.name, *sorted({**sample.labels, "replica": name}.items())): sample.value
            for sample in alone[name]
        }


def test_a_replica_without_a_page_has_no_series() -> None:
    assert label_series({}) == b""
    assert label_series({"one:3000": b""}) == b""
