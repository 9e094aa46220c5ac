"""Writes deploy/grafana.json, the Grafana dashboard, from the table below.

python deploy/grafana.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

TARGET: Final = Path(__file__).with_name("grafana.json")
RATE: Final = "[$__rate_interval]"
COLUMNS: Final = 3
WIDTH, HEIGHT = 24 // COLUMNS, 8

Queries = dict[str, str]  # legend -> expression


def per_second(metric: str, by: str = "") -> str:
    """Return the growth of a counter per second."""
    return f"sum{f' by ({by})' if by else ''}(rate({metric}{RATE}))"


def quantiles(metric: str) -> Queries:
    """Return the percentiles of a histogram."""
    return {
        f"p{q}": f"histogram_quantile({q / 100:g}, sum by (le) (rate({metric}_bucket{RATE})))"
        for q in (50, 90, 99)
    }


# title -> (unit, queries), in the order of the dashboard
PANELS: Final[dict[str, tuple[str, Queries]]] = {
    "Time to first token": ("s", quantiles("tgi_request_time_to_first_token_duration")),
    "Inter-token latency": ("s", quantiles("tgi_request_inter_token_latency_duration")),
    "Time in the queue": ("s", quantiles("tgi_request_queue_duration")),
    "Requests": (
        "reqps",
        {
            "finished": per_second("tgi_request_finished"),
            "failed": per_second("tgi_request_failed"),
            "left in {{phase}}": per_second("tgi_request_cancelled", "phase"),
            "refused, {{err}}": per_second("tgi_request_failure", "err"),
        },
    ),
    "Tokens per second": (
        "short",
        {
            "decoded": per_second("tgi_request_inter_token_latency_duration_count"),
            "prompt": per_second("tgi_batch_prefill_tokens"),
        },
    ),
    "Streams": (
        "short",
        {"running": "sum(tgi_batch_current_size)", "waiting": "sum(tgi_queue_size)"},
    ),
    "KV cache": (
        "percentunit",
        {"in use": "max(tgi_kv_cache_usage)"},
    ),
    "Prefix cache hits": (
        "percentunit",
        {
            "prompt tokens": f"{per_second('tgi_prefix_cache_hit_tokens')} / "
            f"{per_second('tgi_prefix_cache_lookup_tokens')}"
        },
    ),
    "Preemptions and stalled rows": (
        "short",
        {
            "preemptions": per_second("tgi_batch_preemptions"),
            "stalled rows": per_second("tgi_batch_stalled_rows"),
        },
    ),
    "Step gap": ("s", quantiles("tgi_batch_step_gap_duration")),
    "Whole step, by kind": (
        "s",
        {
            "{{method}} p50": "histogram_quantile(0.5, sum by (le, method) "
            f"(rate(tgi_batch_inference_duration_bucket{RATE})))"
        },
    ),
    "Shard": (
        "short",
        {"ready": "min(tgi_shard_ready)", "restarts": "sum(tgi_shard_restarts)"},
    ),
}


def panel(number: int, title: str, unit: str, queries: Queries) -> dict[str, Any]:
    """Return one time series at its place in the grid."""
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(queries.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard as Grafana imports it."""
    panels = enumerate(PANELS.items())
    return {
        "title": "tgi-trio",
        "uid": "tgi-trio",
        "schemaVersion": 39,
        "tags": ["tgi-trio"],
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": [panel(n, title, unit, queries) for n, (title, (unit, queries)) in panels],
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
