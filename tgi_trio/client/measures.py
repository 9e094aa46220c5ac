"""Formulas of serving metrics, and tables of them.

Tools use the same names for different formulas, so these are printed with every result:

- TTFT: first content event - request start, client clock.
- ITL: each gap between consecutive content events; the distribution is over all gaps.
- TPOT: (latency - TTFT) / (output tokens - 1), one value per request.
- latency: last event - request start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

PERCENTILES: Final = (50, 90, 95, 99, 99.9)
FORMULAS: Final = "ITL: every gap between content events; TPOT: (latency - TTFT) / (tokens - 1)."


@dataclass(frozen=True)
class Summary:
    """A distribution, never only a mean."""

    n: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise `values` (any unit); all zero if there are none."""
        data = np.asarray(values, dtype=float)
        if not len(data):
            return cls(0, 0, 0, 0, 0, 0, 0, 0)
        points = np.percentile(data, PERCENTILES)
        return cls(len(data), float(data.mean()), float(data.std()), *map(float, points))


@dataclass
class RequestRecord:
    """One request as the client saw it; seconds on one clock."""

    start: float
    events: list[float]  # arrival of each content event
    tokens: int = 0
    error: str = ""
    text: str = ""

    @property
    def latency(self) -> float:
        return self.events[-1] - self.start if self.events else 0.0

    @property
    def ttft(self) -> float:
        return self.events[0] - self.start if self.events else 0.0


def summarise(records: Sequence[RequestRecord], seconds: float) -> dict[str, Any]:
    """Return the serving metrics of a run that took `seconds`; times in milliseconds."""
    done = [r for r in records if r.events and not r.error]
    gaps = [b - a for r in done for a, b in zip(r.events, r.events[1:], strict=False)]
    tpot = [(r.latency - r.ttft) / (r.tokens - 1) for r in done if r.tokens > 1]
    tokens = sum(r.tokens for r in done)
    return {
        "requests": len(records),
        "completed": len(done),
        "errors": sorted({r.error for r in records if r.error}),
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(done) / seconds,
        "ttft_ms": asdict(Summary.of([r.ttft * 1e3 for r in done])),
        "itl_ms": asdict(Summary.of([g * 1e3 for g in gaps])),
        "tpot_ms": asdict(Summary.of([t * 1e3 for t in tpot])),
        "latency_ms": asdict(Summary.of([r.latency * 1e3 for r in done])),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(header), *([_cell(v) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
