"""The floor of serving: the model's decode step alone, without router, rings or HTTP."""

from __future__ import annotations

import statistics
import time

import numpy as np

from tgi_trio.hub import resolve_model
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StepReport
from tgi_trio.shard.batch import Batch
from tgi_trio.shard.step import Runner, WarmupRequest


def load(model_id: str | None) -> tuple[Runner, Batch]:
    """Return a warmed-up runner for a folder, hub id or None (the embedded model), and no rows."""
    from tgi_trio.shard.model_runner import TorchRunner

    runner: Runner = TorchRunner.load(resolve_model(model_id, None))
    memory = runner.warm_up(WarmupRequest(512, 1024, 128, 65536))
    info = runner.info
    return runner, Batch(
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        blocks=memory.blocks,
        eos_ids=info.eos_ids,
    )


def prefill(runner: Runner, state: Batch, batch: int, context: int, room: int) -> None:
    """Add `batch` sequences of `context` prompt tokens and compute them."""
    size = runner.info.block_size
    need = -(-(context + room) // size)
    rng = np.random.default_rng(0)
    rows = [
        PrefillRow(
            sequence=i + 1,
            token_ids=rng.integers(0, runner.info.vocab_size, context, dtype=np.int32),
            prompt_length=context,
            cached_length=0,
            block_ids=list(range(1 + i * need, 1 + (i + 1) * need)),
            max_new_tokens=room,
            sampling=SamplingParameters(ignore_eos=True),
        )
        for i in range(batch)
    ]
    for row in rows:
        state.add(row)
    while any(sequence.computed < context for sequence in state.rows):
        plan = state.plan(512)
        if plan is None:
            raise RuntimeError("the batch does not move")
        state.advance(plan, runner.step(plan), StepReport(1, 1))


def decode_step_ms(model_id: str | None, batch: int, context: int, steps: int = 40) -> float:
    """Return the median milliseconds of a decode step of `batch` sequences of `context` tokens."""
    runner, state = load(model_id)
    prefill(runner, state, batch, context, steps + 8)
    times = []
    for _ in range(steps):
        plan = state.plan(batch)
        if plan is None:
            break
        start = time.perf_counter()
        result = runner.step(plan)
        times.append(time.perf_counter() - start)
        state.advance(plan, result, StepReport(1, 1))
    return statistics.median(times[3:]) * 1e3
