"""A shard process for step-gap measurements: the real worker loop on a model that only takes time.

python -m bench.busy_shard CHANNEL_SPEC '{"step_ms": 1.0, "cpu": 1}'
"""

from __future__ import annotations

import json
import os
import sys
import time

from tgi_trio.ipc.death import start_shard_end
from tgi_trio.shard.step import (
    ModelInfo,
    RowResult,
    Sequence,
    StepPlan,
    StepResult,
    WarmupRequest,
    WarmupResult,
)
from tgi_trio.shard.worker import run

VOCAB = 256
TOKEN = 97


class BusyRunner:
    """Spins for `step_ms` per step; every row that samples gets the same token."""

    def __init__(self, step_ms: float) -> None:
        self._step_ns = int(step_ms * 1e6)
        self._one = RowResult((TOKEN,), (-0.5,), ((),))
        self._none = RowResult()
        self.info = ModelInfo(VOCAB, 16, 1, 4, 0, (), "none", "cpu", "busy", 0)

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        return WarmupResult(1 + request.max_batch_total_tokens // 16, 16, 0, 0, 0, 0, 0)

    def step(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter_ns()
        rows = [self._one if s else self._none for s in plan.samples.tolist()]
        while time.perf_counter_ns() - start < self._step_ns:
            pass
        return StepResult(rows, self._step_ns, 0)

    def drop(self, sequence: Sequence) -> None:
        pass


def main() -> None:
    """Serve the channel named on the command line."""
    spec, settings = sys.argv[1], json.loads(sys.argv[2])
    end = start_shard_end(spec)
    if "cpu" in settings:
        os.sched_setaffinity(0, {settings["cpu"]})
    run(end, lambda: BusyRunner(settings["step_ms"]))


if __name__ == "__main__":
    main()
