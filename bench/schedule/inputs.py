"""What a scheduler is made of and given: the limits of a large server, greedy requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.scheduling import SchedulingLimits


def limits(**changes: Any) -> SchedulingLimits:
    """Limits of a large server; `changes` replace some of them."""
    values: dict[str, Any] = {
        "blocks": 40_000,
        "block_size": 16,
        "max_batch_size": None,
        "max_batch_prefill_tokens": 1 << 20,
        "max_batch_total_tokens": 0,
        "max_total_tokens": 1 << 17,
        "waiting_served_ratio": 0.3,
        "max_waiting_tokens": 20,
        "max_queued_requests": 10_000,
        "max_queued_tokens": 1 << 30,
        "token_budget": 2048,
        "reserve": False,
        "prefix_caching": True,
    }
    return SchedulingLimits(**{**values, **changes})


def request(prompt: np.ndarray, max_new: int, **changes: Any) -> Request:
    """Return a greedy request."""
    return Request(prompt, SamplingParameters(), StoppingCriteria(max_new), **changes)
