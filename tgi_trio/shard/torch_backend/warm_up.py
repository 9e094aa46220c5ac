"""The synthetic steps of the warm-up, which measure activations for `kv_sizing.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.startup import BLOCK_SIZE, ShardInfo, WarmupRequest
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.machine.accelerator import synchronize
from tgi_trio.shard.machine.device_memory import peak_bytes, reset_peak

# On a CPU activations grow only with a step's tokens, so a part of the largest step is enough to
# compute the whole; running all of it would take seconds at every start.
_CPU_PROBE_TOKENS = 512
_REHEARSED = 512  # tokens of a step that launches the same kernels as the largest ones


@dataclass(frozen=True, slots=True)
class LargestStep:
    """A synthetic step, and the factor from its activations to those of the largest step."""

    plan: StepPlan
    blocks: int
    factor: float

    def measure(self, device: torch.device, run: Callable[[], None]) -> int:
        """Run the step; return the bytes that activations of the largest step take."""
        before = reset_peak(device)
        run()
        synchronize(device)
        return int(max(0, peak_bytes(device) - before) * self.factor)


@dataclass(frozen=True, slots=True)
class WarmSteps:
    """Runs synthetic steps, each in memory of its own."""

    info: ShardInfo
    device: torch.device
    make_room: Callable[[int], None]  # for so many blocks, and one slot of states
    run: Callable[[StepPlan], None]

    def measure(self, request: WarmupRequest) -> int:
        """Return the bytes that activations of the largest step take."""
        largest = warm_up_plan(request, self.info, self.device)
        if largest is None:
            return 0
        self.make_room(largest.blocks)
        return largest.measure(self.device, lambda: self.run(largest.plan))

    def run_short(self, request: WarmupRequest, longest: int) -> None:
        """Run a large step of rows that have no more than `longest` tokens."""
        longest = min(request.max_total_tokens or longest, longest)
        short = warm_up_plan(replace(request, max_total_tokens=longest), self.info, self.device)
        if short is not None:
            self.make_room(short.blocks)
            self.run(short.plan)


def warm_up_plan(
    request: WarmupRequest, info: ShardInfo, device: torch.device
) -> LargestStep | None:
    """Return the largest step that the limits allow, or the part of it that a CPU needs to run.

    Its last row has one token, like a decode beside prompts.
    """
    largest = request.max_prefill_tokens
    tokens = min(largest, _CPU_PROBE_TOKENS) if device.type == "cpu" else largest
    longest = min(filter(None, (request.max_total_tokens, info.max_positions, tokens)), default=0)
    if longest <= 0:
        return None
    whole, left = divmod(tokens - 1, longest)
    counts = [*([longest] * whole), *([left] if left else []), 1]
    widths = [-(-count // BLOCK_SIZE) for count in counts]
    tables = np.zeros((len(counts), max(widths)), dtype=np.int32)
    slots, block = [], 1
    for row, (count, width) in enumerate(zip(counts, widths, strict=True)):
        tables[row, :width] = np.arange(block, block + width)
        slots.append(block * BLOCK_SIZE + np.arange(count))
        block += width
    plan = StepPlan(
        rows=[_sequence(i, count) for i, count in enumerate(counts)],
        token_ids=np.arange(tokens, dtype=np.int64) % max(1, info.vocab_size),
        positions=np.concatenate([np.arange(count) for count in counts]),
        kv_slots=np.concatenate(slots).astype(np.int64),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lengths=np.array(counts, dtype=np.int32),
        block_tables=tables,
        samples=np.zeros(len(counts), dtype=np.bool_),
    )
    return LargestStep(plan, block, largest / tokens)


def rehearsal_plan(
    request: WarmupRequest, info: ShardInfo, device: torch.device
) -> LargestStep | None:
    """Return a step of few tokens that launches the same kernels as the largest one."""
    tokens = min(_REHEARSED, request.max_prefill_tokens)
    return warm_up_plan(replace(request, max_prefill_tokens=tokens), info, device)


def _sequence(index: int, count: int) -> ShardSequence:
    ids = np.zeros(count, dtype=np.int32)
    return ShardSequence(index, ids, count, count, 0, [], 0, 0, SamplingParameters())
