"""The replacements of torch's device functions, and of Triton's launches, for a simulated device.

See `stand_in_device.py`. Each replacement uses the stand-in of the thread that calls it.
"""

# mypy: disable-error-code="override, assignment, arg-type, no-untyped-call, no-any-return"
# The types of torch's extension points do not allow for extensions.

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch
from torch.utils import _device as torch_device
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from tgi_trio.shard.torch_backend.recordings import graph_nodes
from tgi_trio.testing.stand_in_tensor import RecordingBroken

MEMORY = 8 << 30  # bytes of the device's memory, as it claims
# Set where "meta" is what a user means: torch's own code takes our tensors for that.
MEANT: Final[ContextVar[bool]] = ContextVar("meta is meant", default=False)
NAME = "a device that is not there"
PROPERTIES: Final = SimpleNamespace(
    major=9, minor=0, shared_memory_per_block_optin=227 << 10, multi_processor_count=4
)


@dataclass
class Counts:
    """How often the device was used, and how."""

    launches: Counter[str] = field(default_factory=Counter)  # by operation, without replays
    replays: int = 0
    waits: Counter[str] = field(default_factory=Counter)  # of the host, by reason
    event_waits: int = 0  # of the host for an event: the only waits of a steady loop
    sent: int = 0  # asynchronous copies to the device
    received: int = 0  # and from it
    recordings: int = 0
    stream_waits: int = 0  # of a stream of the device for another
    pinned: int = 0  # tensors whose memory was pinned
    unpinned: int = 0  # pinned tensors that are gone: with a lost device, that ends a process


class Driven(Protocol):
    """The attributes of a stand-in that this file uses."""

    counts: Counts
    arrivals: int
    place: torch.device

    @property
    def idles(self) -> bool: ...
    def check(self) -> None: ...
    def wait(self, why: str) -> None: ...
    def refuse_in_recording(self, what: str) -> None: ...
    def deliver(self, upto: int) -> None: ...
    def record(self, graph: Graph) -> contextlib.AbstractContextManager[None]: ...
    def launch_kernel(self, function: Any, *args: Any, **kwargs: Any) -> None: ...


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`: runs captured work again, over the same memory."""

    def __init__(self, device: Driven, *, keep_graph: bool = False) -> None:
        self._device = device
        self._kept = keep_graph
        self.work: list[Callable[[], None]] = []
        self.kernels: list[bool] = []  # for each node, whether it is a kernel
        self.attributes: dict[int, int] = {}  # carve-outs, by node
        self.carveouts: dict[int, int] | None = None  # those of the instance; None: no instance yet

    def add(self, run: Callable[[], None], *, kernel: bool) -> None:
        """Add a node, a kernel or a copy."""
        self.work.append(run)
        self.kernels.append(kernel)

    def raw_cuda_graph(self) -> int:
        """Return a handle, unique as long as the graph is there."""
        if not self._kept:
            raise RuntimeError("the graph has not been kept")
        KEPT_GRAPHS[id(self)] = self
        return id(self)

    def capture_end(self) -> None:
        if not self._kept:
            self.instantiate()

    def instantiate(self) -> None:
        self.carveouts = dict(self.attributes)

    def replay(self) -> None:
        if self.carveouts is None:
            self.instantiate()
        self._device.check()
        self._device.counts.replays += 1
        if self._device.idles:
            return
        with _disable_current_modes(), torch.inference_mode():
            for run in self.work:
                run()


KEPT_GRAPHS: Final = weakref.WeakValueDictionary[int, Graph]()  # by handle


class Event:
    """Stands in for an event: waiting for it completes the copies launched before it."""

    def __init__(self, device: Driven) -> None:
        self._device = device
        self._before = 0

    def record(self, stream: object = None) -> None:
        self._before = self._device.arrivals

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.check()
        self._device.refuse_in_recording("an event is waited for")
        self._device.counts.event_waits += 1
        self._device.deliver(self._before)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    """Stands in for all streams: there is only one, so waits are counted, but do nothing."""

    cuda_stream = 0

    def __init__(self, current: Callable[[], Driven]) -> None:
        self._current = current

    def wait_stream(self, other: object) -> None:
        self._current().counts.stream_waits += 1

    def wait_event(self, event: object) -> None:
        self._current().counts.stream_waits += 1


def replacements(current: Callable[[], Driven]) -> list[tuple[Any, str, Any]]:
    """Return (owner, name, value) of everything that is replaced.

    `current` returns the stand-in of the calling thread.
    """
    found = [*_device_functions(current), *_graph_functions(current), _placing_of_blocks()]
    if INTERPRET is not None:
        from triton.runtime.interpreter import InterpretedFunction

        def run(function: Any, *args: Any, **kwargs: Any) -> None:
            current().launch_kernel(function, *args, **kwargs)

        found.append((InterpretedFunction, "run", run))
    return found


def _placing_of_blocks() -> tuple[Any, str, Any]:
    """Return the replacement for what constructs tensors in a block of `torch.device`."""
    place: Any = DeviceContext.__torch_function__

    def construct(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = MEANT.set(self.device.type == "meta")
        try:
            return place(self, func, types, args, kwargs)
        finally:
            MEANT.reset(before)

    return DeviceContext, "__torch_function__", construct


def _device_functions(current: Callable[[], Driven]) -> list[tuple[Any, str, Any]]:
    """Return the replacements for a device's properties, memory and synchronisation."""
    cuda, every = torch.cuda, torch.accelerator

    def wait(device: object = None) -> None:
        current().wait("the device is waited for")

    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """Make it on the host: torch would reach for a driver before any mode could."""
        found = made(data, **options)
        return found if device is None else found.to(device)

    def kind(check_available: bool = False) -> torch.device:
        return torch.device(current().place.type)

    # Torch remembers what constructs tensors in a block of `torch.device`, for good: it must not
    # remember the replacement, or models built on "meta" later would hold numbers of the host.
    known = torch_device._device_constructors()

    return [
        (torch, "tensor", tensor),
        (torch_device, "_device_constructors", lambda: known | {tensor}),
        (every, "is_available", lambda: True),
        (every, "current_accelerator", kind),
        (every, "device_count", lambda: 1),
        (every, "current_device_index", lambda: current().place.index),
        (every, "synchronize", wait),
        (every, "empty_cache", _nothing),
        (every, "reset_peak_memory_stats", _nothing),
        (every, "memory_allocated", lambda device=None: 0),
        (every, "max_memory_allocated", lambda device=None: 0),
        (every, "get_memory_info", lambda device=None: (MEMORY, MEMORY)),
        (torch.xpu, "_lazy_init", _nothing),
        (torch.xpu, "get_per_process_memory_fraction", lambda device=None: 1.0),
        (torch.xpu, "get_device_name", lambda device=None: NAME),
        (cuda, "_lazy_init", _nothing),
        (cuda, "get_per_process_memory_fraction", lambda device=None: 1.0),
        (cuda, "get_device_properties", lambda device=None: PROPERTIES),
        (cuda, "get_device_capability", lambda device=None: (PROPERTIES.major, PROPERTIES.minor)),
        (cuda, "get_device_name", lambda device=None: NAME),
    ]


def _graph_functions(current: Callable[[], Driven]) -> list[tuple[Any, str, Any]]:
    """Return the replacements for streams, events and CUDA graphs."""
    cuda, stream = torch.cuda, Stream(current)
    handles, pools = itertools.count(1), dict[object, weakref.WeakSet[Graph]]()

    def record(
        graph: Graph,
        pool: object = None,
        stream: object = None,
        capture_error_mode: str = "global",
    ) -> contextlib.AbstractContextManager[None]:
        if pool in pools and not pools[pool]:
            raise RecordingBroken("into the memory of graphs that are all gone")
        pools.setdefault(pool, weakref.WeakSet()).add(graph)
        return current().record(graph)

    class AnyEvent:  # a class, because modules of torch that are imported later derive from it
        def __new__(cls, device: object = None, enable_timing: bool = False) -> Any:
            return Event(current())

    class AnyGraph(Graph):
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(current(), keep_graph=keep_graph)

    return [
        (cuda, "device", _inside),
        (cuda, "stream", _inside),
        (cuda, "Stream", lambda device=None: stream),
        (cuda, "current_stream", lambda device=None: stream),
        (cuda, "set_stream", _nothing),
        (torch.accelerator, "current_stream", lambda device=None: stream),
        (torch, "Event", AnyEvent),
        (cuda, "graph", record),
        (cuda, "CUDAGraph", AnyGraph),
        (cuda, "graph_pool_handle", lambda: (0, next(handles))),
        (graph_nodes, "load_driver", _no_driver),  # a real driver does not know these graphs
    ]


def _nothing(*args: object, **kwargs: object) -> None: ...


def _no_driver() -> Any:
    raise OSError("there is no driver; see stand_in_nodes.py")


@contextlib.contextmanager
def _inside(*args: object, **kwargs: object) -> Iterator[None]:
    yield


def _interpreter() -> Any:
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return None
    return InterpretedFunction.run


INTERPRET = _interpreter()
