"""A simulated CUDA device, for tests of what a device would refuse, and of waits of the host.

    with StandInDevice() as device:
        runner = load_torch_runner(settings, device="cuda:0")

Tensors that are made inside claim to be on cuda:0; their numbers are computed on the CPU. As on a
device, an operation over tensors of two devices raises `MixedDevices`, and what `torch.cuda.graph`
has captured is replayed into the same memory. Reading a number back, or copying from memory that is
not pinned, raises `RecordingBroken` inside a capture; outside, it is counted as a wait of the host.
The result of an asynchronous copy to the host is garbage until its event has been waited for.
`lose` breaks the device permanently.

Triton's kernels run in its interpreter (TRITON_INTERPRET=1 before it is imported). Time, limits of
memory and concurrent streams are not simulated. For several ranks see `stand_in_group.py`.
"""

# mypy: disable-error-code="override, assignment, arg-type, no-untyped-call, no-any-return"
# The types of torch's extension points do not allow for extensions.

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from tgi_trio.testing.stand_in_driver import INTERPRET, MEANT, Counts, Graph, replacements
from tgi_trio.testing.stand_in_tensor import (
    DeviceLost,
    DeviceTensor,
    MixedDevices,
    RecordingBroken,
    as_views_of,
    held,
)

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Composed of other operations on a CPU, but a single kernel each on a device.
_WHOLE = ("aten::linear", "aten::matmul", "aten::rms_norm", "aten::layer_norm", "aten::reshape")
_EMPTY = ("aten::empty", "aten::new_empty")
_INTERPRETING = threading.Lock()  # the interpreter's state is in globals
_WAIT_FOR_SIZE = ("aten::nonzero", "aten::_unique2", "aten::masked_select", "aten::bincount")


class StandInDevice(TorchDispatchMode):
    """A simulated device; see the module. `counts` may be replaced at any time."""

    def __init__(self, place: str = "cuda:0", beside: StandInDevice | None = None) -> None:
        """`beside`: another, entered earlier by another thread and left later, which has patched
        torch.
        """
        super().__init__()
        self.place = torch.device(place)
        self._beside = beside
        self.counts = Counts()
        self.arrivals = 0  # copies to the host that have been launched
        self._lost = False
        self._recording: Graph | None = None
        self._idle = False
        # Shared, since memory is pinned for all devices.
        self._pinned: dict[int, int] = {} if beside is None else beside._pinned  # by address
        # Copies to the host in flight: number, target, content.
        self._in_flight: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._patches = contextlib.ExitStack()

    # --- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        given = _tensors((args, kwargs))
        ours = [x for x in given if isinstance(x, DeviceTensor)]
        wanted = kwargs.get("device")
        here = bool(ours) if wanted is None else self._is_here(torch.device(wanted), ours)
        here = here or (not ours and any(map(self._is_named, args)))  # x.to(device)
        if here or ours:
            self.check()
        if (here or ours) and name not in _WHOLE and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self._again():
                return func.decompose(*args, **kwargs)
        if name == "aten::_to_copy" and (here or ours):
            return self._convert(args[0], kwargs, here)
        if name == "aten::copy_" and ours:
            return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
        if not ours and not here:
            return self._on_host(func, args, kwargs)
        mixed = any(not isinstance(x, DeviceTensor) and x.dim() and not x.is_meta for x in given)
        if mixed and name == "aten::index" and isinstance(args[0], DeviceTensor):
            self.wait("indices come from memory that is not pinned")
        elif mixed:
            raise MixedDevices(f"{name} over tensors of the host and of {self.place}")
        if name in ("aten::_local_scalar_dense", "aten::equal"):
            self.wait("a number is read back")
        if name in _WAIT_FOR_SIZE or _by_mask(name, args):
            self.wait(f"{name} has as many results as its numbers say")
        if wanted is not None:
            kwargs["device"] = "cpu"
        plain_args, plain = _mapped(held, (args, kwargs))
        out = func(*plain_args, **plain)
        if self._computes_nothing() and name.startswith(_EMPTY):
            out.zero_()  # kernels do not write it, and 0 is a valid index of any table
        if name == "aten::_local_scalar_dense":
            return out
        self._note(name, lambda: func(*plain_args, **plain), plain_args, out)
        known = {id(x.held): x for x in ours}
        with as_views_of(ours):
            return _mapped(lambda x: known[id(x)] if id(x) in known else self._wrapped(x), out)

    def _is_here(self, wanted: torch.device, ours: list[DeviceTensor]) -> bool:
        """Return whether an operation's result belongs to this device."""
        if wanted.type == "meta" and not ours and MEANT.get():
            return False
        return wanted.type in (self.place.type, "meta")

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Dispatch the parts of a composed operation: during an operation, the mode is off."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.pop("pin_memory", False):
            return func(*args, **kwargs)
        return self._keep_pinned(func(*args, **kwargs))

    def _keep_pinned(self, memory: torch.Tensor) -> torch.Tensor:
        """Treat `memory` as pinned as long as it is there; return it."""
        self.counts.pinned += 1
        at = memory.untyped_storage().data_ptr()
        self._pinned[at] = self._pinned.get(at, 0) + 1
        weakref.finalize(memory, self._unpin, at).atexit = False
        return memory

    def _unpin(self, at: int) -> None:
        self.counts.unpinned += 1
        self._pinned[at] -= 1

    def _note(self, name: str, run: Callable[[], Any], args: Any, out: Any) -> None:
        """Count a launch, and record it inside a capture; views and empty memory do not count."""
        outs = _tensors(out)
        tensors = _tensors(args)
        same = {id(x) for x in tensors}
        memory = {x.untyped_storage().data_ptr() for x in tensors}
        fresh = [x for x in outs if x.untyped_storage().data_ptr() not in memory]
        written = any(id(x) in same for x in outs)
        if (not fresh and not written) or name.startswith(_EMPTY):
            return
        self.counts.launches[name.removeprefix("aten::")] += 1
        if self._recording is None:
            return

        def again() -> None:
            found = _tensors(run())
            for old, new in zip(outs, found, strict=True):
                if old is not new and id(old) not in same:
                    old.copy_(new)

        self._recording.add(again, kernel=name != "aten::copy_")

    def _convert(self, x: torch.Tensor, kwargs: dict[str, Any], here: bool) -> torch.Tensor:
        """Copy a tensor to another device or dtype."""
        quiet = bool(kwargs.pop("non_blocking", False))
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        source = held(x)
        out = torch.ops.aten._to_copy.default(source, **options)
        if isinstance(x, DeviceTensor) and here:
            self._note(
                "aten::_to_copy",
                lambda: torch.ops.aten._to_copy.default(source, **options),
                (source,),
                out,
            )
            return DeviceTensor(out, self.place)
        if here:
            self._send(x, quiet)
            return DeviceTensor(out, self.place)
        return self._receive(out, quiet)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, quiet: bool) -> torch.Tensor:
        target, numbers = held(to), held(source)
        if not isinstance(to, DeviceTensor) and quiet and self._is_pinned(to):
            self._bring(to, numbers.to(to.dtype, copy=True))
            return to
        if not isinstance(to, DeviceTensor):
            self.wait("numbers are copied to the host")
        elif not isinstance(source, DeviceTensor) and source.dim():
            self._send(source, quiet)
            self._arrive_before(numbers)
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
        garbage = self._keep_pinned(torch.empty_like(numbers))
        self._bring(garbage, numbers)
        return garbage

    def _bring(self, to: torch.Tensor, numbers: torch.Tensor) -> None:
        """Begin a copy to the host, which arrives when it is waited for."""
        self.refuse_in_recording("a copy to the host")
        self.counts.received += 1
        self.arrivals += 1
        to.fill_(-77)
        self._in_flight.append((self.arrivals, to, numbers))

    @property
    def _pin(self) -> Callable[[torch.Tensor], torch.Tensor]:
        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            return self._keep_pinned(tensor.clone())

        return pin_memory

    def _is_pinned(self, x: torch.Tensor) -> bool:
        return self._pinned.get(x.untyped_storage().data_ptr(), 0) > 0

    def _is_named(self, x: Any) -> bool:
        return isinstance(x, torch.device) and x.type == self.place.type

    def _wrapped(self, x: Any) -> Any:
        return DeviceTensor(x, self.place) if isinstance(x, torch.Tensor) else x

    # --- errors --------------------------------------------------------------------------------

    def lose(self) -> None:
        """Have every operation of the device fail from now on; may be called from any thread."""
        self._lost = True

    def check(self) -> None:
        """Raise DeviceLost if the device has been lost."""
        if self._lost:
            raise DeviceLost("CUDA error: an illegal memory access was encountered")

    # --- waiting -------------------------------------------------------------------------------

    def wait(self, why: str) -> None:
        """Have the host wait for all copies in flight; `why` is counted."""
        self.check()
        self.refuse_in_recording(why)
        self.counts.waits[why] += 1
        self.deliver(self.arrivals)

    def refuse_in_recording(self, what: str) -> None:
        if self._recording is not None:
            raise RecordingBroken(f"inside a recording: {what}")

    def deliver(self, upto: int) -> None:
        """Complete the copies to the host up to number `upto`."""
        with _disable_current_modes(), torch.inference_mode():
            for number, to, numbers in self._in_flight:
                if number <= upto:
                    to.copy_(numbers)
        self._in_flight = [copy for copy in self._in_flight if copy[0] > upto]

    def _arrive_before(self, source: torch.Tensor) -> None:
        """Complete the copies in flight to memory that the device reads now: it keeps order."""
        at = source.untyped_storage().data_ptr()
        with _disable_current_modes(), torch.inference_mode():
            for _, to, numbers in self._in_flight:
                if to.untyped_storage().data_ptr() == at:
                    to.copy_(numbers)

    # --- torch.cuda and Triton -----------------------------------------------------------------

    def __enter__(self) -> StandInDevice:
        if self._beside is None:
            for owner, name, value in replacements(current_device):
                self._patches.enter_context(mock.patch.object(owner, name, value))
            pin = mock.patch.object(torch.Tensor, "pin_memory", self._pin)  # from any thread
            self._patches.enter_context(pin)
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
    def record(self, graph: Graph) -> Iterator[None]:
        """Record in `graph` what is launched inside the block."""
        self.counts.recordings += 1
        self._recording = graph
        try:
            yield
        finally:
            self._recording = None
        graph.capture_end()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Count kernels and replays inside the block, but do not compute them.

        That is for warm-ups, whose results are not used.
        """
        self._idle = True
        try:
            yield
        finally:
            self._idle = False

    @property
    def idles(self) -> bool:
        return self._idle

    def _computes_nothing(self) -> bool:
        return self._idle or self._recording is not None

    def launch_kernel(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Run a Triton kernel in its interpreter."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if any(not isinstance(x, DeviceTensor) for x in tensors):
            raise MixedDevices(f"{function.fn.__name__} is given a tensor of the host")
        plain_args, plain = _mapped(held, (args, kwargs))

        def run() -> None:
            with _INTERPRETING:
                INTERPRET(function, *plain_args, **plain)

        self.launch(function.fn.__name__, run)

    def launch(self, name: str, run: Callable[[], None]) -> None:
        """Launch `run`, counted under `name`; the memory that it uses must not move.

        As on a device, work that is captured runs only when it is replayed.
        """
        self.check()
        if not self._computes_nothing():
            with _disable_current_modes():
                run()
        self.counts.launches[name] += 1
        if self._recording is not None:
            self._recording.add(run, kernel=True)


def current_device() -> StandInDevice:
    """Return the stand-in that this thread has entered."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, StandInDevice):
            return mode
    raise RuntimeError("this thread has entered no stand-in device")


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in an operation's arguments or results, in order.

    Torch's own tree functions support more than the lists, tuples and dicts that occur here.
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of `tree` with `change` applied to all leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(change, part) for key, part in tree.items()}
    if isinstance(tree, list):
        return [_mapped(change, part) for part in tree]
    if isinstance(tree, tuple):
        return tuple(_mapped(change, part) for part in tree)
    return change(tree)


def _by_mask(name: str, args: Any) -> bool:
    """Return whether an operation indexes by a mask, whose count only the device knows."""
    if name not in ("aten::index", "aten::index_put_", "aten::index_put"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
