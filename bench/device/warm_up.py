"""How long the parts of a warm-up take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tgi_trio.shard.torch_backend import torch_runner
from tgi_trio.shard.torch_backend.compiling import ahead
from tgi_trio.shard.torch_backend.compiling.ahead import compile_ahead
from tgi_trio.shard.torch_backend.recordings.cuda_graphs import CudaCapture
from tgi_trio.shard.torch_backend.recordings.step_recorder import StepRecorder
from tgi_trio.shard.torch_backend.torch_device import has_triton
from tgi_trio.shard.torch_backend.warm_up import LargestStep

Found = dict[str, float]


class _Recordings:
    """Adds up how many recordings are kept, and how long it takes to make them."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._makes = False  # such, not what is recorded to be measured

    def timed(self, record: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same, and is timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self._makes = time.perf_counter(), True
            try:
                return record(*args, **kwargs)
            finally:
                self._makes = False
                self._found["recordings_s"] += time.perf_counter() - began

        return timed

    def counted(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same, and is counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._found["recordings"] += self._makes
            return capture(*args, **kwargs)

        return counted


def _timed(make: Callable[..., None], times: list[float]) -> Callable[..., None]:
    """Return what does the same and adds the seconds that it takes to `times`."""

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        try:
            make(*args)
        finally:
            times.append(time.perf_counter() - began)

    return timed


def _recorders() -> list[Any]:
    """Return what makes the recordings that are kept."""
    if not has_triton():
        return [StepRecorder]
    from tgi_trio.shard.torch_backend.recordings.mixed_graphs import MixedGraphs  # imports Triton

    return [StepRecorder, MixedGraphs]


@contextmanager
def timed_warm_up() -> Iterator[Found]:
    """Yield what becomes the seconds that parts of a warm-up take, and how many there are.

    "compile_s": kernels, beside one another, of which "rehearsal_s" until all are known; "made_s",
    what each of them took to be compiled or found in the cache, added up, and "slowest_s", the most
    of any, without those that have been asked for while the model was loaded;
    "largest_s": the step that shows what activations take; "recordings_s".
    """
    found = {"compile_s": 0.0, "compiled": 0.0, "rehearsal_s": 0.0, "made_s": 0.0, "slowest_s": 0.0}
    found["largest_s"] = 0.0
    found |= {"recordings_s": 0.0, "recordings": 0.0}
    measure, recordings = LargestStep.measure, _Recordings(found)

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

    with ExitStack() as patched:
        for owner, name, timed in (
            (torch_runner, "compile_ahead", compile_timed),
            (LargestStep, "measure", measure_timed),
            *((kind, "record", recordings.timed(kind.record)) for kind in _recorders()),
            (CudaCapture, "__call__", recordings.counted(CudaCapture.__call__)),
        ):
            patched.enter_context(mock.patch.object(owner, name, timed))
        began = time.perf_counter()
        try:
            yield found
        finally:
            found["warm_up_s"] = time.perf_counter() - began
