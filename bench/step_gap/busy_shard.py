"""A shard process for step-gap measurements: the real worker loop on a model that only takes time.

python -m bench.step_gap.busy_shard CHANNEL_SPEC '{"step_ms": 1.0, "cpu": 1}' SHARD_SETTINGS

With several ranks, rank 0's forward time includes telling the others what to compute.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.shard import process
from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.prefixes.kept_prefixes import PrefixParts, RankPrefixes
from tgi_trio.shard.ranks.leader import Followers, GroupRunner
from tgi_trio.shard.runner import (
    Computed,
    Pending,
    Runner,
)

VOCAB = 256
TOKEN = 97


class BusyRunner:
    """Spins for `step_ms` per step; every row that samples gets the same token."""

    def __init__(self, step_ms: float) -> None:
        self._step_ns = int(step_ms * 1e6)
        self.adapters = None
        self.prefixes = RankPrefixes(PrefixParts)  # none are kept
        self.host_copies = None
        self.info = ShardInfo(
            vocab_size=VOCAB,
            block_size=16,
            layers=1,
            kv_bytes_per_token=4,
            max_positions=0,
            eos_ids=(),
            dtype="none",
            device="cpu",
            backend="busy",
            load_ns=0,
        )

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        return WarmupResult(1 + request.max_batch_total_tokens // 16, 16, 0, 0, 0, 0, 0)

    def step(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter_ns()
        counts = plan.samples.astype(np.int64)
        tokens = int(counts.sum())
        choices = Choices(counts, np.full(tokens, TOKEN), np.full(tokens, -0.5))
        while time.perf_counter_ns() - start < self._step_ns:
            pass
        return StepResult(choices, self._step_ns, 0)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Pending:
        return Computed(self.step(plan))

    def drafter(self, most: int) -> None:
        return None

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None:
        pass

    def prove_sound(self) -> None:
        pass


class TimedGroup(GroupRunner):
    """Counts what the other ranks are told as a part of the step."""

    def launch(self, plan: StepPlan) -> Pending:
        start = time.perf_counter_ns()
        result = super().launch(plan).result()
        return Computed(StepResult(result.choices, time.perf_counter_ns() - start, 0))


def main() -> int:
    """Serve the channel named on the command line."""
    spec, options, told = sys.argv[1], json.loads(sys.argv[2]), ShardSettings.parse(sys.argv[3])
    if "cpu" in options:
        os.sched_setaffinity(0, {options["cpu"] - told.rank})

    def factory() -> Runner:
        runner: Runner = BusyRunner(options["step_ms"])
        if not told.followers:
            return runner
        followers = Followers.attach(told.followers)
        followers.greet()
        return TimedGroup(runner, followers)

    return process.serve(spec, factory, told, world_size=told.world_size)


if __name__ == "__main__":
    sys.exit(main())
