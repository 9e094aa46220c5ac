"""A CUDA device that is not there, for tests of what one would refuse or be made to wait for.

    with StandInDevice() as device:
        runner = TorchRunner.load(folder, device="cuda:0")

Tensors made inside say that they are on cuda:0; their numbers are computed on the CPU. As on a
device, an operation over tensors of two places raises `MixedDevices`; what is recorded by
`torch.cuda.graph` is replayed into the same memory; reading a number back, or copying from memory
that is not pinned, raises `RecordingBroken` inside a recording and is counted as a wait of the
host outside of one. What comes down without waiting is garbage until its event has been waited for.

Triton's kernels run in its interpreter (TRITON_INTERPRET=1 before it is imported). Not imitated:
time, memory's limits, several streams at once.
"""

# mypy: disable-error-code="override, assignment, arg-type, no-untyped-call, no-any-return"
# What torch lets others extend, it types as if nobody did.

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")
_MEMORY = 8 << 30
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Made of others on a CPU, and one kernel each on a device.
_WHOLE = ("aten::linear", "aten::matmul", "aten::rms_norm", "aten::layer_norm", "aten::reshape")
_WAIT_FOR_SIZE = ("aten::nonzero", "aten::_unique2", "aten::masked_select", "aten::bincount")


class MixedDevices(RuntimeError):
    """Tensors of the host and of the device meet in one operation."""


class RecordingBroken(RuntimeError):
    """Something that cannot be recorded: the host would have to wait."""


@dataclass
class Counts:
    """What was asked of the device."""

    launches: Counter[str] = field(default_factory=Counter)  # by operation; replays apart
    replays: int = 0
    waits: Counter[str] = field(default_factory=Counter)  # of the host, by reason
    event_waits: int = 0  # for an event: the one wait that a steady loop has
    sent: int = 0  # copies to the device that nobody waits for
    received: int = 0  # and from it


class DeviceTensor(torch.Tensor):
    """Says it is on the device; `held` has its numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        # "meta" to torch's own code, which would look for a driver otherwise.
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} over a tensor of a stand-in device that is no longer there")

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.held!r})"


class Graph:
    """What a recording runs again, into the memory that it was made with."""

    device: StandInDevice
    work: list[Callable[[], None]]

    def replay(self) -> None:
        self.device.counts.replays += 1
        with _disable_current_modes(), torch.inference_mode():
            for run in self.work:
                run()


def _begin(graph: Graph, device: StandInDevice) -> None:
    graph.device, graph.work = device, []


class Event:
    """Waiting for one brings down what was on its way before it."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._before = 0

    def record(self, stream: object = None) -> None:
        self._before = self._device.arrivals

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.refuse_in_recording("an event is waited for")
        self._device.counts.event_waits += 1
        self._device.deliver(self._before)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class _Stream:
    """There is one."""

    cuda_stream = 0

    def wait_stream(self, other: object) -> None: ...


class StandInDevice(TorchDispatchMode):
    """See the module; `counts` may be replaced at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.arrivals = 0  # copies to the host that have been launched
        self._recording: Graph | None = None
        self._pinned: list[torch.Tensor] = []
        self._coming: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (number, to, numbers)
        self._patches = contextlib.ExitStack()

    # --- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        ours = [x for x in given if isinstance(x, DeviceTensor)]
        wanted = kwargs.get("device")
        here = bool(ours) if wanted is None else torch.device(wanted).type in ("cuda", "meta")
        if not ours and any(_is_device(x) for x in args):  # `to(device)`, in inference mode
            here = True
        if (here or ours) and name not in _WHOLE and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self._again():
                return func.decompose(*args, **kwargs)
        if name == "aten::_to_copy" and (here or ours):
            return self._convert(args[0], kwargs, here)
        if name == "aten::copy_" and ours:
            return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
        if not ours and not here:
            return self._on_host(func, args, kwargs)
        if any(not isinstance(x, DeviceTensor) and x.dim() for x in given):
            raise MixedDevices(f"{name} over tensors of the host and of {DEVICE}")
        if name in ("aten::_local_scalar_dense", "aten::equal"):
            self.wait("a number is read back")
        if name in _WAIT_FOR_SIZE or _by_mask(name, args):
            self.wait(f"{name} has as many results as its numbers say")
        if wanted is not None:
            kwargs["device"] = "cpu"
        plain_args, plain = tree_map(_held, (args, kwargs))
        out = func(*plain_args, **plain)
        if name == "aten::_local_scalar_dense":
            return out
        self._note(name, lambda: func(*plain_args, **plain), plain_args, out)
        known = {id(x.held): x for x in ours}
        return tree_map(lambda x: known.get(id(x), x) if id(x) in known else _wrapped(x), out)

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """See what an operation is made of; the mode is off while it looks at one."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.pop("pin_memory", False):
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._pinned.append(out)
        return out

    def _note(self, name: str, run: Callable[[], Any], args: Any, out: Any) -> None:
        """Count a launch, and keep it where it is recorded; views and empty memory are free."""
        outs = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        tensors = [x for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)]
        same = {id(x) for x in tensors}
        memory = {x.untyped_storage().data_ptr() for x in tensors}
        fresh = [x for x in outs if x.untyped_storage().data_ptr() not in memory]
        written = any(id(x) in same for x in outs)
        if (not fresh and not written) or name.startswith(("aten::empty", "aten::new_empty")):
            return
        self.counts.launches[name.removeprefix("aten::")] += 1
        if self._recording is None:
            return

        def again() -> None:
            found = [x for x in tree_flatten(run())[0] if isinstance(x, torch.Tensor)]
            for old, new in zip(outs, found, strict=True):
                if old is not new and id(old) not in same:
                    old.copy_(new)

        self._recording.work.append(again)

    def _convert(self, x: torch.Tensor, kwargs: dict[str, Any], here: bool) -> torch.Tensor:
        """Copy a tensor to another device or dtype."""
        quiet = bool(kwargs.pop("non_blocking", False))
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        source = _held(x)
        out = torch.ops.aten._to_copy.default(source, **options)
        if isinstance(x, DeviceTensor) and here:
            self._note(
                "aten::_to_copy",
                lambda: torch.ops.aten._to_copy.default(source, **options),
                (source,),
                out,
            )
            return DeviceTensor(out)
        if here:
            self._send(x, quiet)
            return DeviceTensor(out)
        return self._receive(out, quiet)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, quiet: bool) -> torch.Tensor:
        target, numbers = _held(to), _held(source)
        if not isinstance(to, DeviceTensor):
            self.wait("numbers are copied to the host")
        elif not isinstance(source, DeviceTensor) and source.dim():
            self._send(source, quiet)
        target.copy_(numbers)
        if isinstance(to, DeviceTensor) and isinstance(source, DeviceTensor):
            self._note("aten::copy_", lambda: target.copy_(numbers), (target, numbers), target)
        return to

    def _send(self, source: torch.Tensor, quiet: bool) -> None:
        if quiet and self._is_pinned(source):
            self.refuse_in_recording("a copy to the device")
            self.counts.sent += 1
        else:
            self.wait("memory that is not pinned is copied to the device")

    def _receive(self, numbers: torch.Tensor, quiet: bool) -> torch.Tensor:
        if not quiet:
            self.wait("numbers are copied to the host")
            return numbers
        self.refuse_in_recording("a copy to the host")
        self.counts.received += 1
        self.arrivals += 1
        garbage = torch.full_like(numbers, -77)
        self._coming.append((self.arrivals, garbage, numbers))
        return garbage

    def _is_pinned(self, x: torch.Tensor) -> bool:
        memory = x.untyped_storage().data_ptr()
        return any(memory == pinned.untyped_storage().data_ptr() for pinned in self._pinned)

    # --- waiting -------------------------------------------------------------------------------

    def wait(self, why: str) -> None:
        """The host waits for everything that is on its way."""
        self.refuse_in_recording(why)
        self.counts.waits[why] += 1
        self.deliver(self.arrivals)

    def refuse_in_recording(self, what: str) -> None:
        if self._recording is not None:
            raise RecordingBroken(f"inside a recording: {what}")

    def deliver(self, upto: int) -> None:
        """Bring down the copies up to number `upto`."""
        with _disable_current_modes(), torch.inference_mode():
            for number, to, numbers in self._coming:
                if number <= upto:
                    to.copy_(numbers)
        self._coming = [coming for coming in self._coming if coming[0] > upto]

    # --- torch.cuda and Triton -----------------------------------------------------------------

    def __enter__(self) -> StandInDevice:
        for owner, name, value in self._replacements():
            self._patches.enter_context(mock.patch.object(owner, name, value))
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()

    @contextlib.contextmanager
    def _record(self, graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
        self._recording = graph
        try:
            yield
        finally:
            self._recording = None

    def _launch_kernel(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Run a Triton kernel in its interpreter."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(not isinstance(x, DeviceTensor) for x in tensors):
            raise MixedDevices(f"{function.fn.__name__} is given a tensor of the host")
        plain_args, plain = tree_map(_held, (args, kwargs))
        run = _INTERPRET

        def again() -> None:
            run(function, *plain_args, **plain)

        with _disable_current_modes():
            again()
        self.counts.launches[function.fn.__name__] += 1
        if self._recording is not None:
            self._recording.work.append(again)

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        cuda, stream = torch.cuda, _Stream()
        own_graph = type("CUDAGraph", (Graph,), {"__init__": lambda graph: _begin(graph, self)})

        def nothing(*args: object, **kwargs: object) -> None: ...

        @contextlib.contextmanager
        def inside(*args: object, **kwargs: object) -> Iterator[None]:
            yield

        found: list[tuple[Any, str, Any]] = [
            (cuda, "is_available", lambda: True),
            (cuda, "device_count", lambda: 1),
            (cuda, "current_device", lambda: 0),
            (cuda, "_lazy_init", nothing),
            (cuda, "empty_cache", nothing),
            (cuda, "reset_peak_memory_stats", nothing),
            (cuda, "device", inside),
            (cuda, "stream", inside),
            (cuda, "graph", self._record),
            (cuda, "CUDAGraph", own_graph),
            (cuda, "graph_pool_handle", lambda: (0, 0)),
            (cuda, "Stream", lambda device=None: stream),
            (cuda, "current_stream", lambda device=None: stream),
            (cuda, "Event", lambda enable_timing=False: Event(self)),
            (cuda, "synchronize", lambda device=None: self.wait("the device is waited for")),
            (cuda, "mem_get_info", lambda device=None: (_MEMORY, _MEMORY)),
            (cuda, "get_per_process_memory_fraction", lambda device=None: 1.0),
            (cuda, "memory_allocated", lambda device=None: 0),
            (cuda, "max_memory_allocated", lambda device=None: 0),
            (cuda, "get_device_name", lambda device=None: "a device that is not there"),
        ]
        if _INTERPRET is not None:
            from triton.runtime.interpreter import InterpretedFunction

            device = self

            def run(function: Any, *args: Any, **kwargs: Any) -> None:
                device._launch_kernel(function, *args, **kwargs)

            found.append((InterpretedFunction, "run", run))
        return found


def _interpreter() -> Any:
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return None
    return InterpretedFunction.run


_INTERPRET = _interpreter()


def _held(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda"


def _wrapped(x: Any) -> Any:
    return DeviceTensor(x) if isinstance(x, torch.Tensor) else x


def _by_mask(name: str, args: Any) -> bool:
    """Return whether an index is a mask, whose number of entries only the device knows."""
    if name not in ("aten::index", "aten::index_put_", "aten::index_put"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
