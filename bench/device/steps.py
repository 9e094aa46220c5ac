"""Steps of one model: decodes, prefills, both in one step, the gap between steps, the warm-up.

What is random is as in a server that many use. Every row has tokens of its own, so a mixture's rows
choose their experts each for itself, all of them with equal odds, as `roofline.py` counts. K and V
that count as computed are there: normal numbers, what random weights make of hidden states. States
are there as well, where layers keep such: all rows go on from the same ones.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.device.models import PLAIN, bytes_of_weight, config_of, make_runner
from bench.device.roofline import Ceiling, Size, Work
from bench.device.timing import Timer
from bench.device.warm_up import timed_warm_up
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.machine.accelerator import synchronize
from tgi_trio.shard.runner import Pending
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    StepKind,
)
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

_SETTLE = 2  # steps that nobody counts
_MIXED = 8  # steps with prompts, at most
_LEAST_S = 1e-9  # a stand-in's clock stands still


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a shape."""

    batches: tuple[int, ...]
    context: int
    prompt: int
    steps: int  # of each decode
    graphs: tuple[int, ...]
    rounded: str = PLAIN  # what linear layers hold
    invariant: bool = False  # batch invariance is kept


@dataclass(slots=True)
class Bench:
    """One model, warmed up."""

    shape: str
    runner: TorchRunner
    plan: Plan
    warm_up: dict[str, float]  # see `timed_warm_up`
    draw: np.random.Generator  # of tokens
    state_slots: int  # 0: no layer keeps states

    @classmethod
    def start(
        cls, shape: str, device: torch.device, dtype: torch.dtype, plan: Plan, adapters: int = 0
    ) -> Bench:
        """Make the model and warm it up for the largest of what is measured.

        `adapters`: how many may be loaded.
        """
        runner = make_runner(
            *(shape, device, dtype, plan.graphs, plan.rounded, adapters), invariant=plan.invariant
        )
        longest = max(plan.context + plan.steps + _SETTLE + 2, plan.prompt + 2)
        most = max(plan.batches)
        blocks = max(most * _blocks(plan.context + plan.steps + _SETTLE + 2), _blocks(longest))
        request = WarmupRequest(plan.prompt, longest, most, blocks * BLOCK_SIZE)
        synchronize(device)
        with timed_warm_up() as parts:
            slots = runner.warm_up(request).state_slots
            synchronize(device)
        _fill_cache(runner, (1 + blocks) * BLOCK_SIZE)  # block 0 is nobody's
        return cls(shape, runner, plan, parts, np.random.default_rng(0), slots)

    def decode(
        self, rows: int, ceiling: Ceiling, trace: Path | None = None, adapters: int | None = None
    ) -> dict[str, Any]:
        """Decode `rows` sequences, each step launched before the one before is read.

        `adapters`: from 1 to this number they have one in turn.
        """
        batch = self._batch(
            rows, self.plan.context, self.plan.steps + _SETTLE + 1, adapters=adapters or 0
        )
        work = self._work(rows, 1, self.plan.context)
        if trace is not None:
            self._trace(batch, trace)
            return {}
        took, busy, _ = self._run(batch, self.plan.steps + _SETTLE)
        step, device = statistics.median(took[_SETTLE:]), statistics.median(busy[_SETTLE:])
        found = {
            "what": f"decode {rows} x {self.plan.context}{_told(adapters)}",
            "step_ms": step * 1e3,
            "device_ms": device * 1e3,
            **_beside(work, ceiling, step),
        }
        replay = self._replay(rows, adapters=bool(adapters))
        if replay is None:
            return found
        return found | {"replay_ms": replay * 1e3, "gap_us": (step - replay) * 1e6}

    def _replay(self, rows: int, *, adapters: bool) -> float | None:
        """Return the seconds of the bare recording that the last decodes of `rows` rows took.

        Of what it has been told last, again and again: nothing goes up or comes down in between.
        None: there is none.
        """
        graphs = self.runner._graphs
        recorded = None if graphs is None else graphs._recorded.get(rows)
        step = None if recorded is None else recorded.steps.get(StepKind(adapted=adapters))
        if step is None:
            return None
        timer = Timer(self.runner.device, self.plan.steps)
        return timer.median(step.graph.replay)

    def prefill(self, ceiling: Ceiling, trace: Path | None = None) -> dict[str, Any]:
        """Prefill one prompt, several times; once where only a trace is wanted."""
        if trace is not None:
            self._trace(self._batch(1, 0, 2, self.plan.prompt), trace, 1)
            return {}
        took: list[float] = []
        for _ in range(3):
            batch = self._batch(1, 0, 2, self.plan.prompt)
            took.append(self._run(batch, 1)[1][0])
        prompt = self.plan.prompt
        work = self._work(1, prompt, prompt)
        step = max(min(took), _LEAST_S)
        return {
            "what": f"prefill {prompt}",
            "step_ms": step * 1e3,
            "device_ms": step * 1e3,
            "gap_us": 0.0,
            **_beside(work, ceiling, step),
        }

    def mixed(self, chunk: int, ceiling: Ceiling, *, recorded: bool) -> dict[str, Any]:
        """Decode half of the largest batch beside chunks of a prompt, `chunk` tokens each.

        If not `recorded`, all of it is launched kernel by kernel.
        """
        rows, steps = max(1, max(self.plan.batches) // 2), min(_MIXED, self.plan.steps) + _SETTLE
        new = self.plan.steps + _SETTLE + 1
        batch = self._batch(rows, self.plan.context, new)
        ids = self.draw.integers(self.runner.info.vocab_size, size=chunk * steps, dtype=np.int32)
        first = 1 + rows * _blocks(self.plan.context + 1 + new)
        blocks = list(range(first, first + _blocks(len(ids) + 2)))
        asked, states = SamplingParameters(), self._grant(rows, 0)
        batch.add(PrefillRow(rows, ids, len(ids), 0, blocks, 2, sampling=asked, states=states))
        launches: Any = self.runner._steps
        with nullcontext() if recorded else mock.patch.object(launches, "_mixed", None):
            took, busy, host = (
                statistics.median(each[_SETTLE:]) for each in self._run(batch, steps, rows + chunk)
            )
        work = self._work(rows, 1, self.plan.context)
        prompt = self._work(1, chunk, chunk * (steps + _SETTLE) // 2)
        work = Work(work.moved, work.operations + prompt.operations)
        return {
            "what": f"decode {rows} beside {chunk}{'' if recorded else ', launched'}",
            "step_ms": took * 1e3,
            "device_ms": busy * 1e3,
            "host_ms": host * 1e3,
            **_beside(work, ceiling, took),
        }

    def _work(self, rows: int, queries: int, context: int) -> Work:
        """Return what a step needs at least, by the bytes that are stored."""
        size, dtype = Size.of(config_of(self.shape)), self.runner.dtype
        stored = bytes_of_weight(self.shape, dtype, self.plan.rounded)
        return size.step(rows, queries, context, dtype.itemsize, stored)

    def _batch(
        self, rows: int, context: int, new: int, prompt: int = 0, adapters: int = 0
    ) -> Batch:
        """Return a batch of rows behind `context` tokens that count as computed.

        Each row has random tokens of its own.
        """
        batch = Batch(
            vocab_size=self.runner.info.vocab_size,
            block_size=BLOCK_SIZE,
            blocks=1 << 24,
            eos_ids=(),
            state_slots=self.state_slots,
        )
        length = prompt or context + 1
        need = _blocks(length + new)
        for i in range(rows):
            ids = self.draw.integers(self.runner.info.vocab_size, size=length, dtype=np.int32)
            blocks = list(range(1 + i * need, 1 + (i + 1) * need))
            asked = SamplingParameters(adapter=1 + i % adapters if adapters else 0)
            row = PrefillRow(i, ids, length, context, blocks, new, sampling=asked)
            batch.add(replace(row, states=self._grant(i, context)))
        return batch

    def _grant(self, row: int, context: int) -> StateGrant | None:
        """Return the slots of a row's states, which go on from the last slot behind a context."""
        if not self.state_slots:
            return None
        source = self.state_slots - 1 if context else 0
        return StateGrant((1 + 2 * row, 2 + 2 * row), source)

    def _run(
        self, batch: Batch, steps: int, budget: int = 1 << 20
    ) -> tuple[list[float], list[float], list[float]]:
        """Run steps as the worker does, of up to `budget` tokens.

        Return seconds between them, of the device in each, and of the host to launch each.
        """
        took: list[float] = []
        busy: list[float] = []
        host: list[float] = []
        flying: tuple[StepPlan, Pending] | None = None
        began = time.perf_counter()
        for _ in range(steps):
            plan = batch.plan(budget)
            if plan is None:
                raise RuntimeError("the batch has nothing left to do")
            at = time.perf_counter()
            pending = self.runner.launch(plan)
            host.append(time.perf_counter() - at)
            if flying is not None:
                began = _land(batch, flying, began, took, busy)
            pending.proceed()
            if self.runner.runs_ahead(plan):
                batch.expect(plan)
                flying = (plan, pending)
            else:
                began = _land(batch, (plan, pending), began, took, busy)
        if flying is not None:
            _land(batch, flying, began, took, busy)
        return took, busy, host

    def _trace(self, batch: Batch, path: Path, steps: int = 4) -> None:
        """Write a Chrome trace of a few steps."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profile:
            self._run(batch, steps)
        profile.export_chrome_trace(str(path))


def _fill_cache(runner: TorchRunner, slots: int) -> None:
    """Fill K and V of the first `slots` slots of every layer, and states, with normal numbers."""
    cache = runner._cache
    if cache is None:
        raise RuntimeError("a model that is warmed up has a cache")
    with torch.inference_mode():  # as it was made in
        for layer in (*cache.key_slots, *cache.value_slots):
            layer[:slots].normal_()
        for states in () if runner._pool is None else runner._pool.layers.values():
            for state in states.values():
                state.normal_(std=0.1)


def _land(
    batch: Batch,
    flying: tuple[StepPlan, Pending],
    began: float,
    took: list[float],
    busy: list[float],
) -> float:
    """Read a step and move the batch by it; return when that was."""
    result = flying[1].result()
    now = time.perf_counter()
    took.append(now - began)
    busy.append(result.forward_ns / 1e9)
    faults = batch.settle(flying[0], result).faults
    if faults:
        raise RuntimeError(f"a row has failed: {faults[0].message}")
    return now


def _beside(work: Work, ceiling: Ceiling, step: float) -> dict[str, Any]:
    """Return what a step needed beside what was reached."""
    return {
        "least_ms": ceiling.seconds(work) * 1e3,
        "of_roofline": ceiling.seconds(work) / step,
        "moved_gb": work.moved / 1e9,
        "gb_per_s": work.moved / step / 1e9,
        "operations_g": work.operations / 1e9,
        "tflop_per_s": work.operations / step / 1e12,
    }


def _told(adapters: int | None) -> str:
    if adapters is None:
        return ""
    return f", {adapters} adapter{'' if adapters == 1 else 's'}"


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
