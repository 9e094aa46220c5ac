"""Capturing work on a CUDA device as CUDA graphs, and timing their replays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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

# Runs before a capture: libraries choose kernels in the first run of a size, and the very first run
# also allocates memory that the second one finds there.
_WARM_UPS, _FIRST_WARM_UPS = 1, 2
_READINGS = 5  # replays of which the fastest counts
# Torch's functions that detach an allocator from a capture: now, and in 2.6.
_END_POOL, _OLDER_END_POOL = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"


class RecordedTime:
    """Measures the device time of work when it is replayed, without launch overhead."""

    def __init__(self, device: torch.device, capture: Capture) -> None:
        self._device = device
        self._capture = capture

    def __call__(self, work: Compute) -> float:
        """Return the least device seconds of several replays of `work`; 0.0 in a rehearsal.

        With 0.0 for everything, nothing is faster than anything else, so nothing is chosen by it.
        """
        graph, _ = self._capture(work)
        if isinstance(graph, _Rehearsed):
            return 0.0
        return ReplayTime(self._device).least(graph)


class ReplayTime:
    """Measures the device time of replays of a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, graph: Graph) -> float:
        """Return the device seconds of the second of two replays."""
        graph.replay()
        return self.again(graph)

    def least(self, graph: Graph) -> float:
        """Return the least device seconds of several replays."""
        return min(self.again(graph) for _ in range(_READINGS))

    def again(self, graph: Graph) -> float:
        """Return the device seconds of one replay."""
        began = record_event(self._device, timed=True)
        graph.replay()
        ended = record_event(self._device, timed=True)
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


class _Rehearsed:
    """Takes a graph's place in a rehearsal; replaying it does nothing."""

    def replay(self) -> None:
        return None


class CudaCapture:
    """See `recorded_steps.Capture`. Its graphs share a memory pool, so only one replays at a time.

    The pool is that of a graph that is alive. Capturing into a pool whose last graph is gone ends
    the capture with an internal error of torch.
    """

    def __init__(
        self, device: torch.device, *, alone: bool = True, nodes: GraphNodes | None = None
    ) -> None:
        """`alone`: there are no other ranks. `nodes`: needed for captures with a carve-out.

        With other ranks, torch's threads that watch collectives call the driver meanwhile, which
        must not end a capture of this thread.
        """
        self._nodes = nodes
        self._alone = alone
        self._mode = "global" if alone else "thread_local"
        self._device = device
        self._runs = _FIRST_WARM_UPS
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None  # handle of the pool of the graphs that are alive
        # Graphs whose capture failed and could not be ended. Torch's allocators keep the address of
        # each; the pinned-memory allocator reads it at every allocation and cannot be told to stop.
        self._unfinished: list[torch.cuda.CUDAGraph] = []
        # One side stream for all captures: libraries keep a workspace for every stream they see.
        self._aside = torch.cuda.Stream(device)
        self._rehearses = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, calls run the work once and capture nothing."""
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
                self._run_before(compute)
            torch.cuda.current_stream().wait_stream(aside)
            if self._pool is None or not self._alive:
                self._pool = torch.cuda.graph_pool_handle()
            if carveout is None:
                graph = torch.cuda.CUDAGraph()
            else:  # instantiated once its nodes have attributes; torch keeps the captured graph
                graph = torch.cuda.CUDAGraph(keep_graph=True)
            output = self._record(graph, compute)
            if carveout is not None:
                self._carve(graph, carveout)
            self._alive.add(graph)
        return graph, output

    def _run_before(self, compute: Compute) -> None:
        """Run work as often as is needed before its capture.

        Raises CaptureError where the device is out of memory. With several ranks torch's own error
        is raised, which ends the rank and with it the group: the others wait in the same work.
        """
        try:
            for _ in range(self._runs):
                compute()
        except torch.OutOfMemoryError as error:
            if not self._alone:
                raise
            raise CaptureError(_first_reason(error)) from error
        self._runs = _WARM_UPS

    def _record(self, graph: torch.cuda.CUDAGraph, compute: Compute) -> torch.Tensor:
        """Capture work into a graph. Raises CaptureError, or torch's error for a lost device."""
        here = torch.cuda.current_stream()
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._aside, capture_error_mode=self._mode
        )
        try:
            with recording:
                return compute()
        except RuntimeError as error:  # of torch, for a device's errors
            torch.cuda.set_stream(here)  # a capture that cannot be ended leaves torch's own current
            if self._leave_pool():
                self._unfinished.append(graph)
            synchronize(self._device)
            raise CaptureError(_first_reason(error)) from error

    def _leave_pool(self) -> bool:
        """Detach the allocator from a failed capture, as the end of a capture does.

        Until then it never collects memory, and keeps blocks that other streams have used. Returns
        False where the capture has ended: its graph leaves the pool when it is destroyed.
        """
        index, binding = self._device.index or 0, _END_POOL
        if not hasattr(torch._C, binding):
            binding = _OLDER_END_POOL
        try:
            getattr(torch._C, binding)(index, self._pool)
        except RuntimeError:
            return False
        torch._C._cuda_releasePool(index, self._pool)
        return True

    def _carve(self, graph: torch.cuda.CUDAGraph, carveout: int) -> None:
        """Give a graph's kernels a carve-out, and instantiate it. Raises DriverError."""
        if self._nodes is None:
            raise DriverError("the nodes of a graph cannot be told anything here")
        self._nodes.prefer_carveout(graph.raw_cuda_graph(), carveout)
        try:
            graph.instantiate()
        except RuntimeError as error:  # of torch, for a device's errors
            raise DriverError(f"a graph was not instantiated: {error}") from error


def _first_reason(error: BaseException) -> str:
    """Return the first line of torch's first error: ending a failed capture then fails, too."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return next(iter(str(error).splitlines()), "") or type(error).__name__
