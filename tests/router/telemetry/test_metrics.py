"""Metrics: the table, the numbers, and a text that a Prometheus parser reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import tgi_trio.router
from tgi_trio.router.telemetry.metric_table import METRICS, bucket_sets
from tgi_trio.router.telemetry.metrics import Histogram, Metrics

TGI_NAMES = (
    "tgi_request_count",
    "tgi_request_success",
    "tgi_request_failure",
    "tgi_request_duration",
    "tgi_request_validation_duration",
    "tgi_request_queue_duration",
    "tgi_request_inference_duration",
    "tgi_request_mean_time_per_token_duration",
    "tgi_request_generated_tokens",
    "tgi_request_input_length",
    "tgi_request_max_new_tokens",
    "tgi_request_skipped_tokens",
    "tgi_queue_size",
    "tgi_batch_next_size",
    "tgi_batch_current_size",
    "tgi_batch_current_max_tokens",
    "tgi_batch_concat",
    "tgi_batch_inference_count",
    "tgi_batch_inference_success",
    "tgi_batch_inference_failure",
    "tgi_batch_inference_duration",
    "tgi_batch_forward_duration",
    "tgi_batch_decode_duration",
    "tgi_batch_max_total_tokens",
)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of the rendered text as (name, labels) -> value."""
    read = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            name = sample.name
            if family.type == "counter":  # the parser adds the suffix that we leave out
                name = name.removesuffix("_total")
            read[name, tuple(sorted(sample.labels.items()))] = sample.value
    return read


NAMED_LATER = {"tgi_adapter_request_count"}  # whose label has the names of what is asked for


def test_the_table_is_sound() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert set(TGI_NAMES) <= set(names)
    sets = bucket_sets(1000, 2000)
    for metric in METRICS:
        assert metric.kind in ("counter", "gauge", "histogram", "summary")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.buckets in sets
        assert bool(metric.label) == bool(metric.values) or metric.name in NAMED_LATER


def test_bucket_sets_are_tgis() -> None:
    sets = bucket_sets(max_input_tokens=1000, max_total_tokens=2000)
    assert len(sets["D"]) == 35
    assert sets["D"][0] == 0.00015000000000000001
    assert math.isclose(sets["D"][-1], 145.61096060497135, rel_tol=1e-12)
    assert (len(sets["I"]), sets["I"][0], sets["I"][-1]) == (100, 10, 1000)
    assert (len(sets["T"]), sets["T"][0], sets["T"][-1]) == (100, 20, 2000)
    assert sets["B"] == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert sets["G"][0] == 1e-6
    assert all(list(bounds) == sorted(set(bounds)) for bounds in sets.values())


def test_everything_is_there_from_the_start_and_zero() -> None:
    read = samples(Metrics())
    assert set(read.values()) == {0.0}
    found = {name for name, _ in read}
    for metric in METRICS:
        if metric.name in NAMED_LATER:
            continue
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        for suffix in suffixes.get(metric.kind, ("",)):
            assert metric.name + suffix in found
        for value in metric.values:
            assert any(labels and dict(labels).get(metric.label) == value for _, labels in read)


def test_counters_keep_their_plain_names() -> None:
    text = Metrics().render().decode()
    assert "# TYPE tgi_request_count counter\ntgi_request_count 0\n" in text
    gauges = [each.name for each in METRICS if each.kind == "gauge"]
    totals = [f"{name} " for name in gauges if name.endswith("_total")]
    assert totals and text.count("_total ") == sum(map(text.count, totals))


def test_numbers_arrive_in_the_text() -> None:
    metrics = Metrics(max_input_tokens=1000)
    metrics.inc("tgi_request_count")
    metrics.inc("tgi_request_count", 2)
    metrics.inc("tgi_request_failure", err="dropped")
    metrics.gauge("tgi_kv_cache_usage", 0.25)
    metrics.observe("tgi_batch_forward_duration", 0.5, method="decode")
    metrics.observe("tgi_request_input_length", 10)  # bounds are inclusive
    metrics.observe("tgi_request_input_length", 5000)
    metrics.observe("tgi_request_skipped_tokens", 3)
    read = samples(metrics)
    assert read["tgi_request_count", ()] == 3
    assert read["tgi_request_failure", (("err", "dropped"),)] == 1
    assert read["tgi_request_failure", (("err", "overloaded"),)] == 0
    assert read["tgi_kv_cache_usage", ()] == 0.25
    assert read["tgi_batch_forward_duration_count", (("method", "decode"),)] == 1
    assert read["tgi_batch_forward_duration_sum", (("method", "decode"),)] == 0.5
    assert read["tgi_batch_forward_duration_count", (("method", "prefill"),)] == 0
    assert read["tgi_request_input_length_bucket", (("le", "10"),)] == 1
    assert read["tgi_request_input_length_bucket", (("le", "1000"),)] == 1
    assert read["tgi_request_input_length_bucket", (("le", "+Inf"),)] == 2
    assert read["tgi_request_input_length_sum", ()] == 5010
    assert read["tgi_request_skipped_tokens_sum", ()] == 3


def test_value_reads_what_was_written() -> None:
    metrics = Metrics()
    metrics.inc("tgi_request_cancelled", phase="queue")
    metrics.inc("tgi_request_cancelled", 2, phase="decode")
    metrics.gauge("tgi_queue_size", 7)
    metrics.observe("tgi_request_duration", 1.0)
    metrics.histogram("tgi_request_duration").observe(2.0)
    assert metrics.value("tgi_request_cancelled", phase="decode") == 2
    assert metrics.value("tgi_request_cancelled") == 3  # over all phases
    assert metrics.value("tgi_queue_size") == 7
    assert metrics.value("tgi_request_duration") == 2  # observations


def test_mistakes_raise_and_say_what_is_allowed() -> None:
    metrics = Metrics()
    for wrong in (
        lambda: metrics.inc("tgi_no_such_thing"),
        lambda: metrics.gauge("tgi_no_such_thing", 1),
        lambda: metrics.observe("tgi_no_such_thing", 1),
        lambda: metrics.histogram("tgi_no_such_thing"),
        lambda: metrics.value("tgi_no_such_thing"),
    ):
        with pytest.raises(ValueError, match="no metric is named 'tgi_no_such_thing'"):
            wrong()
    with pytest.raises(ValueError, match="tgi_queue_size is a gauge with no labels"):
        metrics.inc("tgi_queue_size")
    with pytest.raises(ValueError, match="err in"):
        metrics.inc("tgi_request_failure", err="bad luck")
    with pytest.raises(ValueError, match="err in"):
        metrics.inc("tgi_request_failure")
    with pytest.raises(ValueError, match="err in"):
        metrics.inc("tgi_request_failure", why="dropped")
    with pytest.raises(ValueError, match="cannot go down"):
        metrics.inc("tgi_request_count", -1)
    assert set(samples(metrics).values()) == {0.0}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_odd_numbers_do_not_break_the_page(value: float) -> None:
    metrics = Metrics()
    metrics.gauge("tgi_kv_cache_usage", value)
    assert str(samples(metrics)["tgi_kv_cache_usage", ()]) == str(value)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_buckets_count_what_is_at_most_their_bound(values: list[float]) -> None:
    metrics = Metrics()
    for value in values:
        metrics.observe("tgi_batch_step_gap_duration", value)
    read = samples(metrics)
    for (name, labels), count in read.items():
        if name == "tgi_batch_step_gap_duration_bucket":
            bound = float(dict(labels)["le"])
            assert count == sum(value <= bound for value in values)
    assert read["tgi_batch_step_gap_duration_count", ()] == len(values)
    assert math.isclose(read["tgi_batch_step_gap_duration_sum", ()], sum(values), abs_tol=1e-9)


def test_histogram_counts() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum, histogram.count) == ([2, 1, 1], 12.0, 4)


def test_every_metric_is_fed_by_something() -> None:
    router = Path(tgi_trio.router.__file__).parent
    code = "".join(p.read_text() for p in router.rglob("*.py") if p.name != "metrics.py")
    assert [m.name for m in METRICS if f'"{m.name}"' not in code] == []


def test_tgis_metrics_that_are_missing_are_listed_with_a_reason() -> None:
    compat = (Path(__file__).parents[3] / "docs" / "tgi-compat.md").read_text()
    ours = {metric.name for metric in METRICS}
    for name in ("concat_duration", "filter_duration", "total_tokens"):
        assert f"tgi_batch_{name}" not in ours
        assert f"`tgi_batch_{name}`" in compat
