"""How long the parts of a warm-up take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from tgi_trio.shard.torch_backend import torch_runner
from tgi_trio.shard.torch_backend.compiling_ahead import compile_ahead
from tgi_trio.shard.torch_backend.decode_graphs import Capture, Compute, Graph
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


@contextmanager
def timed_warm_up(runner: TorchRunner) -> Iterator[Found]:
    """Yield what becomes the seconds that parts of a warm-up take, and how many there are.

    "compile_s": kernels, beside one another; "largest_s": the step that shows what activations
    take; "recordings_s". What is rehearsed counts among the first.
    """
    found = {"compile_s": 0.0, "compiled": 0.0, "largest_s": 0.0}
    found |= {"recordings_s": 0.0, "recordings": 0.0}
    measure, graphs = LargestStep.measure, runner._graphs

    def compile_timed(device: torch.device, work: Callable[[], None]) -> int:
        began = time.perf_counter()
        found["compiled"] = compile_ahead(device, work)
        found["compile_s"] = time.perf_counter() - began
        found["recordings_s"] = found["recordings"] = 0.0
        return int(found["compiled"])

    def measure_timed(step: LargestStep, *args: Any) -> int:
        began = time.perf_counter()
        taken = measure(step, *args)
        found["largest_s"] = time.perf_counter() - began
        return taken

    capture = None if graphs is None else graphs._capture
    if graphs is not None and capture is not None:
        graphs._capture = _TimedCapture(capture, found)
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
