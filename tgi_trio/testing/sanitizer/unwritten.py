"""Memory that nothing has written: what `torch.empty` returns, until something is written there.

It is filled with bytes of ones, which are NaN as a float of any width and -1 as an index. A launch
that reads any of it runs once more with other numbers there, see `launches.py`. Of torch's own
operations, and of collectives, only the writing is followed: one that reads such memory passes NaN
on.

When a recording is replayed, memory that was allocated inside it holds what other recordings have
left, as all share a pool. It is filled anew then. So is what was allocated inside the recordings
that were captured later: their results may lie where this one has memory that it had given back.
"""

# mypy: disable-error-code="no-untyped-call"
# The types of torch's extension points do not allow for extensions.

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tgi_trio.testing.sanitizer.memory import Flags, Region
from tgi_trio.testing.stand_in_device import StandInDevice
from tgi_trio.testing.stand_in_driver import Graph
from tgi_trio.testing.stand_in_group import StandInGroup
from tgi_trio.testing.stand_in_tensor import DeviceTensor, held

_FILL: Final = 0xFF
_EMPTY: Final = ("aten::empty", "aten::new_empty")
_MOST: Final = 1 << 28  # bytes that are followed of one allocation


class _Allocation(NamedTuple):
    """Memory that was allocated inside a graph."""

    address: int
    storage: StorageWeakRef
    size: int  # in bytes


class Unwritten:
    """Follows which memory has been written, once `patched`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Flags]] = {}  # by address
        self._recorded = WeakKeyDictionary[Graph, list[_Allocation]]()
        self._mutated: dict[Any, tuple[list[int], list[str]]] = {}  # of operations: arguments

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Follow the memory of stand-ins inside the block, in all threads."""
        dispatch, replay = StandInDevice.__torch_dispatch__, Graph.replay
        record, gather = StandInDevice._note, StandInGroup._fill

        def on_operation(
            own: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = dispatch(own, func, types, args, kwargs)
            graph = own._recording
            self.note(func, args, kwargs or {}, out, fill=not own._computes_nothing(), graph=graph)
            return out

        def on_record(own: Any, name: str, run: Any, args: Any, out: Any) -> None:
            def again() -> Any:
                found = run()
                self._write(out)
                return found

            record(own, name, again, args, out)

        def on_collective(own: Any, into: Any, begin: Any) -> None:
            gather(own, into, begin)
            self._write(into)

        def on_replay(own: Any) -> None:
            if not own._device.idles:
                self._spoil(own)
            replay(own)

        with ExitStack() as stack:
            patch = mock.patch.object
            stack.enter_context(patch(StandInDevice, "__torch_dispatch__", on_operation))
            stack.enter_context(patch(StandInDevice, "_note", on_record))
            stack.enter_context(patch(StandInGroup, "_fill", on_collective))
            stack.enter_context(patch(Graph, "replay", on_replay))
            yield

    @contextmanager
    def of_host(self) -> Iterator[None]:
        """Follow the memory of the host inside the block, for kernels that are given that."""
        with _Following(self):
            yield

    def prepare(self, region: Region) -> None:
        """Tell a launch what has not been written of a region."""
        flags = self._find(region.base)
        region.unwritten = flags if flags is not None and len(flags) == region.size else None

    def note(
        self, func: Any, args: Any, kwargs: Any, out: Any, *, fill: bool, graph: Graph | None
    ) -> None:
        """Follow one operation of torch."""
        name = func._schema.name
        if name.startswith(_EMPTY):
            if isinstance(out, torch.Tensor):
                self._add(held(out), fill, graph)
            return
        if not self._known:
            return
        if func not in self._mutated:
            written = [
                (i, each.name)
                for i, each in enumerate(func._schema.arguments)
                if each.alias_info is not None and each.alias_info.is_write
            ]
            self._mutated[func] = [i for i, _ in written], [name for _, name in written]
        places, names = self._mutated[func]
        for i in places:
            if i < len(args):
                self._write(args[i])
        for name in names:
            if name in kwargs:
                self._write(kwargs[name])

    def _add(self, tensor: torch.Tensor, fill: bool, graph: Graph | None) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if tensor.device.type != "cpu" or not 0 < size <= _MOST:
            return
        if fill:
            _fill(address, size)
        reference = StorageWeakRef(storage)
        self._known[address] = reference, np.ones(size, np.bool_)
        if graph is not None:
            self._recorded.setdefault(graph, []).append(_Allocation(address, reference, size))

    def _spoil(self, graph: Graph) -> None:
        """Fill what was allocated inside a graph of a device, and inside those captured later."""
        graphs = [each for own in self._recorded.keyrefs() if (each := own()) is not None]
        later = graphs[graphs.index(graph) :] if graph in graphs else []
        for each in later:
            for address, storage, size in self._recorded[each]:
                if each._device is graph._device and not storage.expired():
                    self._known[address] = storage, np.ones(size, np.bool_)
                    _fill(address, size)

    def _find(self, address: int) -> Flags | None:
        """Return which bytes of an allocation have not been written, None if all have."""
        if (known := self._known.get(address)) is None:
            return None
        reference, flags = known
        if reference.expired() or not flags.any():
            del self._known[address]
            return None
        return flags

    def _write(self, tensor: Any) -> None:
        if isinstance(tensor, list | tuple):
            for each in tensor:
                self._write(each)
            return
        if not isinstance(tensor, torch.Tensor):
            return
        tensor = held(tensor)
        if tensor.device.type != "cpu" or not tensor.numel():
            return
        flags = self._find(tensor.untyped_storage().data_ptr())
        if flags is None:
            return
        size = tensor.element_size()
        with _disable_current_modes():
            view = torch.from_numpy(flags).as_strided(
                (*tensor.size(), size),
                (*(step * size for step in tensor.stride()), 1),
                tensor.storage_offset() * size,
            )
            view.fill_(False)


class _Following(TorchDispatchMode):
    """Tells of every operation of this thread."""

    def __init__(self, unwritten: Unwritten) -> None:
        super().__init__()
        self._unwritten = unwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, DeviceTensor):  # the stand-in tells of these
            self._unwritten.note(func, args, kwargs or {}, out, fill=True, graph=None)
        return out


def _fill(address: int, size: int) -> None:
    ctypes.memset(address, _FILL, size)
