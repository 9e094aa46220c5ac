"""How long the parts of a warm-up take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from tgi_trio.shard.torch_backend import torch_runner
from tgi_trio.shard.torch_backend.compiling import ahead
from tgi_trio.shard.torch_backend.compiling.ahead import compile_ahead
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Capture,
    Compute,
    Graph,
)
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner
from tgi_trio.shard.torch_backend.warm_up import LargestStep

Found = dict[str, float]


class _TimedCapture:
    """Records as another does; adds up how often, and how long it takes."""

    def __init__(self, capture: Capture, found: Found) -> None:
        self._capture, self._found = capture, found

    def rehearsing(self) -> AbstractContextManager[None]:
        return self._capture.rehearsing()

    def __call__(self, compute: Compute) -> tuple[Graph, torch.Tensor]:
        began = time.perf_counter()
        made = self._capture(compute)
        self._found["recordings_s"] += time.perf_counter() - began
        self._found["recordings"] += 1
        return made


def _timed(make: Callable[..., None], times: list[float]) -> Callable[..., None]:
    """Return what does the same and adds the seconds that it takes to `times`."""

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        try:
            make(*args)
        finally:
            times.append(time.perf_counter() - began)

    return timed


@contextmanager
def timed_warm_up(runner: TorchRunner) -> Iterator[Found]:
    """Yield what becomes the seconds that parts of a warm-up take, and how many there are.

    "compile_s": kernels, beside one another, of which "rehearsal_s" until all are known; "made_s",
    what each of them took to be compiled or found in the cache, added up, and "slowest_s", the most
    of any, without those that have been asked for while the model was loaded;
    "largest_s": the step that shows what activations take; "recordings_s".
    """
    found = {"compile_s": 0.0, "compiled": 0.0, "rehearsal_s": 0.0, "made_s": 0.0, "slowest_s": 0.0}
    found["largest_s"] = 0.0
    found |= {"recordings_s": 0.0, "recordings": 0.0}
    measure, graphs = LargestStep.measure, runner._graphs

    def compile_timed(device: torch.device, work: Callable[[], None]) -> int:
        began, times = time.perf_counter(), list[float]()

        def rehearse() -> None:
            work()
            found["rehearsal_s"] = time.perf_counter() - began

        with mock.patch.object(ahead, "_make", _timed(ahead._make, times)):
            found["compiled"] = compile_ahead(device, rehearse)
        found["compile_s"] = time.perf_counter() - began
        found["made_s"], found["slowest_s"] = sum(times), max(times, default=0.0)
        found["recordings_s"] = found["recordings"] = 0.0
        return int(found["compiled"])

    def measure_timed(step: LargestStep, *args: Any) -> int:
        began = time.perf_counter()
        taken = measure(step, *args)
        found["largest_s"] = time.perf_counter() - began
        return taken

    capture = None if graphs is None else graphs._capture
    mixed = None if graphs is None else graphs._mixed
    if graphs is not None and capture is not None:
        graphs._capture = timed = _TimedCapture(capture, found)
        if mixed is not None:
            mixed.capture = timed
    with (
        mock.patch.object(torch_runner, "compile_ahead", compile_timed),
        mock.patch.object(LargestStep, "measure", measure_timed),
    ):
        began = time.perf_counter()
        try:
            yield found
        finally:
            found["warm_up_s"] = time.perf_counter() - began
            if graphs is not None and capture is not None:
                graphs._capture = capture
                if mixed is not None:
                    mixed.capture = capture
