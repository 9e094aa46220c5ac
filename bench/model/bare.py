"""The floor of serving: the model's step alone, without router, rings or HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import numpy as np

from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.__main__ import load
from tgi_trio.shard.cpu_backend.cpu_runner import CpuRunner
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import Runner


class BareModel:
    """A warmed-up runner and the sequences it holds, driven as the worker drives them."""

    def __init__(
        self,
        folder: Path,
        cpu_backend: str = "auto",
        quantize: str | None = None,
        threads: int = 0,
        dtype: str | None = None,
        adapters: ListLike[Path] = (),
    ) -> None:
        """`quantize`, `dtype` and `threads` (`cpu_threads`) as in ShardSettings.

        `adapters`: folders; the rows of a step have them in turns. Without any, rows have none.
        """
        settings = ShardSettings(
            model_path=folder,
            device="cpu",
            cpu_backend=cpu_backend,
            quantize=quantize,
            cpu_threads=threads,
            dtype=dtype,
            max_lora_rank=64 if adapters else 0,
        )
        self.runner: Runner = load(settings)
        memory = self.runner.warm_up(WarmupRequest(512, 1088, 128, 65536))
        info, host = self.runner.info, self.runner.adapters
        self._adapters = len(adapters)
        for number, path in enumerate(adapters, start=1):
            if host is None:
                raise RuntimeError(f"what serves {folder} computes no adapters")
            host.install(number, host.load(AdapterOrder(number, path)))
        self._batch = Batch(
            vocab_size=info.vocab_size,
            block_size=info.block_size,
            blocks=memory.blocks,
            eos_ids=info.eos_ids,
            state_slots=memory.state_slots,
        )
        self._state_slots = memory.state_slots

    def hold(self, contexts: ListLike[int], room: int, *, cached: bool = False) -> None:
        """Replace all sequences by new ones of `contexts` prompt tokens each.

        `room`: tokens that can be generated, besides the one that ends the prefill. `cached`: all
        but the last prompt token count as computed. Their K and V are then zeros, but written
        ones: memory that was never written is one page, read from the cache.
        """
        self._batch.clear()
        rng, block, size = np.random.default_rng(0), 1, self.runner.info.block_size
        for i, context in enumerate(contexts):
            need = -(-(context + room + 1) // size)
            row = PrefillRow(
                sequence=i + 1,
                token_ids=rng.integers(3, self.runner.info.vocab_size, context, dtype=np.int32),
                prompt_length=context,
                cached_length=context - 1 if cached else 0,
                block_ids=list(range(block, block + need)),
                max_new_tokens=room + 1,
                sampling=SamplingParameters(
                    ignore_eos=True, adapter=i % self._adapters + 1 if self._adapters else 0
                ),
                states=self._grant(i, cached) if self._state_slots else None,
            )
            block += need
            self._batch.add(row)
        if cached:
            for stored in _keys_and_values(self.runner):
                stored[:block] = 0

    def _grant(self, row: int, cached: bool) -> StateGrant:
        """Return the slots of a row; what is cached begins with a state of zeros."""
        first = 2 + 2 * row
        return StateGrant((first, first + 1), source=1 if cached else 0)

    def step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Run one step; return its seconds, sampling included."""
        plan = self._batch.plan(512)
        if plan is None:
            raise RuntimeError("the batch does not move")
        start = clock()
        result = self.runner.step(plan)
        seconds = clock() - start
        self._batch.settle(plan, result)
        return seconds

    def decode_ms(
        self,
        contexts: ListLike[int],
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> float:
        """Return the median milliseconds of a decode step of sequences of these contexts."""
        self.hold(contexts, steps + 2, cached=True)
        times = [self.step(clock) for _ in range(steps + 2)]
        return statistics.median(times[2:]) * 1e3

    def prefill_ms(
        self, tokens: int, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
    ) -> float:
        """Return the median milliseconds from a prompt to its first token."""
        times = []
        for _ in range(repeats):
            self.hold([tokens], 1)
            start = clock()
            while any(s.computed < s.prompt_length for s in self._batch.rows):
                self.step()
            times.append(clock() - start)
        return statistics.median(times) * 1e3


def _keys_and_values(runner: Any) -> list[Any]:
    """Return a runner's K and V: of each layer two arrays [blocks, ...]."""
    if isinstance(runner, CpuRunner):
        return [part for layer in runner._forward.program.kv_cache for part in layer]
    import torch

    # Bytes: numpy has no bfloat16, and torch lets nobody write into a tensor of inference.
    cache = runner._cache
    return [part.view(torch.uint8).numpy() for part in (*cache.key_blocks, *cache.value_blocks)]
