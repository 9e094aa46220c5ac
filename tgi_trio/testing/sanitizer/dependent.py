"""Launches that begin before the preceding one has ended; see `kernels/overlapping.py`.

On a stand-in, kernels are told to overlap and are launched as on a device that can. Up to its wait
a kernel must not use what a kernel writes that may still run: the one right before it, and if that
has let the next begin before it waited itself, those that it may run beside. What torch launches
waits for everything before it, and does not let the next begin. Of a kernel that has ended, only a
wait makes visible what it wrote, so that it counts as running as well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Final
from unittest import mock

import numpy as np
import torch

from tgi_trio.testing.sanitizer.interpreting import Interpreting
from tgi_trio.testing.sanitizer.launches import Launch
from tgi_trio.testing.sanitizer.memory import Flags, any_of
from tgi_trio.testing.stand_in_device import StandInDevice
from tgi_trio.testing.stand_in_driver import Graph
from tgi_trio.testing.stand_in_tensor import held

_COPIES: Final = ("aten::clone", "aten::copy_", "aten::_to_copy")
_EARLY: Final = {"OVERLAPS": True, "launch_pdl": True}


@dataclass(slots=True)
class _Running:
    """A kernel that may run while the next one begins, and the bytes that it writes."""

    name: str
    written: dict[int, Flags | None]  # by address of an allocation; None: any of it


class _Stream(threading.local):
    """What may run on the device of a thread."""

    def __init__(self) -> None:
        self.running = list[_Running]()


class Dependent:
    """Watches what kernels use before they wait, once `patched`."""

    # The last one is told: a recording may be older than it.
    _watching: ClassVar[list[Dependent]] = []

    def __init__(self, interpreting: Interpreting) -> None:
        self._interpreting = interpreting
        self._stream = _Stream()
        interpreting.begun.append(self._begin)
        interpreting.ended.append(self._end)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Have kernels of stand-ins overlap inside the block."""
        from tgi_trio.shard.torch_backend import torch_device

        plain = torch_device.overlap
        note, send, replay = StandInDevice._note, StandInDevice._send, Graph.replay

        def overlap(device: torch.device) -> dict[str, bool]:
            return plain(device) if device.type != "cuda" else _EARLY

        def on_note(own: Any, name: str, run: Any, args: Any, out: Any) -> None:
            def again() -> Any:
                for watching in self._watching[-1:]:
                    watching._pass_other(name, args, out)
                return run()

            before = own.counts.launches.total()
            note(own, name, again, args, out)
            if own.counts.launches.total() > before and not own._computes_nothing():
                self._pass_other(name, args, out)

        def on_send(own: Any, source: Any, quiet: bool) -> None:
            self._stream.running = []
            send(own, source, quiet)

        def on_replay(own: Any) -> None:
            self._stream.running = []
            replay(own)

        users = [(module, "overlap", overlap) for module in _users_of(plain)]
        patches: list[tuple[Any, str, Any]] = [
            *users,
            *self._instructions(),
            (StandInDevice, "_note", on_note),
            (StandInDevice, "_send", on_send),
            (Graph, "replay", on_replay),
        ]
        with ExitStack() as stack:
            stack.callback(_replace, overlap, plain)  # in modules that are imported inside
            for owner, name, value in patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            self._watching.append(self)
            stack.callback(self._watching.remove, self)
            yield

    def _instructions(self) -> list[tuple[Any, str, Any]]:
        """Return what a kernel calls where it lets the next begin, waits and prefetches."""
        from triton import language
        from triton.runtime import interpreter

        from tgi_trio.shard.torch_backend.kernels import overlapping

        def let(_semantic: Any = None) -> None:
            if (launch := self._interpreting.launch) is not None and not launch.let:
                launch.let = True
                launch.let_after |= launch.waited

        def wait(_semantic: Any = None) -> None:
            if (launch := self._interpreting.launch) is not None:
                launch.waited = True

        def assemble(own: Any, text: str, how: str, values: Any, *rest: Any) -> Any:
            if "prefetch" not in text:
                raise NotImplementedError(text)
            nothing = np.zeros(values[0].data.shape, np.int32)
            made = interpreter.TensorHandle(nothing, language.int32)
            return SimpleNamespace(get_result=lambda place: made)

        return [
            (overlapping, "gdc_launch_dependents", let),
            (overlapping, "gdc_wait", wait),
            (interpreter.InterpreterBuilder, "create_inline_asm", assemble),
        ]

    def _pass_other(self, name: str, args: Any, out: Any) -> None:
        """Note a launch of torch's, which begins once everything before it has ended."""
        outs = out if isinstance(out, list | tuple) else [out]
        tensors = [held(each) for each in outs if isinstance(each, torch.Tensor)]
        sources = [held(each) for each in args if isinstance(each, torch.Tensor)]
        every = tensors + sources
        alike = len({x.dtype for x in every}) == 1 and all(x.is_contiguous() for x in every)
        if alike and name in _COPIES:  # by the driver: what follows waits for it
            self._stream.running = []
            return
        written = {each.untyped_storage().data_ptr(): None for each in tensors}
        self._stream.running = [_Running(name, dict(written))]

    def _begin(self, launch: Launch, options: dict[str, Any]) -> None:
        """Note how a kernel is launched."""
        launch.dependent = bool(options.get("launch_pdl"))

    def _end(self, launch: Launch) -> None:
        """Report what a kernel used before it waited."""
        running = self._stream.running
        if launch.dependent:
            self._check(launch, running)
        written = {
            region.base: region.written
            for region in launch.memory.regions
            if region.written is not None
        }
        beside = running if launch.dependent and launch.all_let and not launch.let_after else []
        self._stream.running = [_Running(launch.kernel, dict(written)), *beside]

    def _check(self, launch: Launch, running: list[_Running]) -> None:
        if not launch.all_waited:
            launch.add("overlap", "", -1, "a program ends without having waited")
        for access in launch.early_writes:
            what = "it writes before it has waited"
            launch.add("overlap", access.argument.name, access.site, what)
        for access in launch.early_reads:
            for kernel in running:
                base = access.argument.region.base
                if base not in kernel.written:
                    continue
                flags = kernel.written[base]
                if flags is None or any_of(flags, access.at, access.size).any():
                    what = f"before it has waited it reads what {kernel.name} writes"
                    launch.add("overlap", access.argument.name, access.site, what)


def _users_of(function: object) -> list[ModuleType]:
    """Return the modules that have a function as `overlap`."""
    every = [each for each in list(sys.modules.values()) if each is not None]
    return [each for each in every if vars(each).get("overlap") is function]


def _replace(function: object, plain: object) -> None:
    for module in _users_of(function):
        vars(module)["overlap"] = plain
