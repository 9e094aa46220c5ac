"""Recording work on a CUDA device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tgi_trio.shard.machine.accelerator import record_event, synchronize
from tgi_trio.shard.torch_backend.recordings.graph_nodes import DriverError, GraphNodes
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Capture,
    CaptureError,
    Compute,
    Graph,
)

# Runs before a recording: libraries choose kernels in the first of a size, and in the first of all
# take memory that the second finds there.
_WARM_UPS, _FIRST_WARM_UPS = 1, 2
_READINGS = 5  # of what is measured


class RecordedTime:
    """Measures work as a recording runs it: without what it takes to launch."""

    def __init__(self, device: torch.device, capture: Capture) -> None:
        self._device = device
        self._capture = capture

    def __call__(self, work: Compute) -> float:
        """Return the least seconds of several runs of `work` on the device; 0.0 in a rehearsal.

        Then nothing that is measured takes less than anything else, and nothing is chosen by it.
        """
        graph, _ = self._capture(work)
        if isinstance(graph, _Rehearsed):
            return 0.0
        return ReplayTime(self._device).least(graph)


class ReplayTime:
    """Measures what has been recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, graph: Graph) -> float:
        """Return the seconds of a replay on the device, which is not the first."""
        graph.replay()
        return self.again(graph)

    def least(self, graph: Graph) -> float:
        """Return the least seconds of several replays on the device."""
        return min(self.again(graph) for _ in range(_READINGS))

    def again(self, graph: Graph) -> float:
        """Return the seconds of a replay on the device."""
        began = record_event(self._device, timed=True)
        graph.replay()
        ended = record_event(self._device, timed=True)
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


class _Rehearsed:
    """A recording of nothing."""

    def replay(self) -> None:
        return None


class CudaCapture:
    """See `recorded_steps.Capture`. All graphs of one share their memory: one replays at a time.

    That memory is shared with a graph that is alive: torch ends the process's recording with an
    internal error where the last graph of a pool has gone, and another is recorded into it.
    """

    def __init__(
        self, device: torch.device, *, alone: bool = True, nodes: GraphNodes | None = None
    ) -> None:
        """`alone`: there are no other ranks, whose collectives are watched by threads of torch's.

        What those ask the driver meanwhile must not end a recording. `nodes`: of its graphs, to
        record with carve-outs.
        """
        self._nodes = nodes
        self._mode = "global" if alone else "thread_local"
        self._device = device
        self._runs = _FIRST_WARM_UPS
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None  # a handle: of those that are alive
        # Their captures could not be ended. Torch's allocators hold on to each by an address: the
        # one of pinned memory asks it at every allocation, and nothing can tell it to stop.
        self._unfinished: list[torch.cuda.CUDAGraph] = []
        # One for all: libraries keep a workspace for every stream they have seen.
        self._aside = torch.cuda.Stream(device)
        self._rehearses = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Record nothing meanwhile: what is to be is run once."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def __call__(self, compute: Compute, carveout: int | None = None) -> tuple[Graph, torch.Tensor]:
        """See `recorded_steps.Capture` and `carveouts.CarvingCapture`."""
        if self._rehearses:
            return _Rehearsed(), compute()
        with torch.cuda.device(self._device):
            aside = self._aside
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(self._runs):
                    compute()
                self._runs = _WARM_UPS
            torch.cuda.current_stream().wait_stream(aside)
            if self._pool is None or not self._alive:
                self._pool = torch.cuda.graph_pool_handle()
            if carveout is None:
                graph = torch.cuda.CUDAGraph()
            else:  # instantiated when its nodes have been told; torch keeps them beside it
                graph = torch.cuda.CUDAGraph(keep_graph=True)
            output = self._record(graph, compute)
            if carveout is not None:
                self._carve(graph, carveout)
            self._alive.add(graph)
        return graph, output

    def _record(self, graph: torch.cuda.CUDAGraph, compute: Compute) -> torch.Tensor:
        """Capture work into a graph. Raises CaptureError, or what a device that is lost raises."""
        here = torch.cuda.current_stream()
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._aside, capture_error_mode=self._mode
        )
        try:
            with recording:
                return compute()
        except RuntimeError as error:  # torch's of a device
            torch.cuda.set_stream(here)  # torch has left its own where it could not end a capture
            self._unfinished.append(graph)
            self._leave_pool()
            synchronize(self._device)
            raise CaptureError(_first_reason(error)) from error

    def _leave_pool(self) -> None:
        """Have the allocator no longer look for a capture, as one that ends does.

        While it does it keeps what other streams have used, and collects nothing.
        """
        index = self._device.index or 0
        with suppress(RuntimeError):  # the capture has ended: its graph was not instantiated
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)

    def _carve(self, graph: torch.cuda.CUDAGraph, carveout: int) -> None:
        """Instantiate a graph whose kernels prefer a carve-out. Raises DriverError."""
        if self._nodes is None:
            raise DriverError("the nodes of a graph cannot be told anything here")
        self._nodes.prefer_carveout(graph.raw_cuda_graph(), carveout)
        try:
            graph.instantiate()
        except RuntimeError as error:  # torch's of a device
            raise DriverError(f"a graph was not instantiated: {error}") from error


def _first_reason(error: BaseException) -> str:
    """Return the first line of what was raised first; ending the capture has then failed, too."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).splitlines()), "") or type(error).__name__
