"""Has Triton's interpreter tell the sanitizer of what it launches, and of what that uses."""

from __future__ import annotations

import inspect
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes

from tgi_trio.testing.sanitizer.expected import NULL_SLOTS
from tgi_trio.testing.sanitizer.far import move_far
from tgi_trio.testing.sanitizer.findings import Findings, Place
from tgi_trio.testing.sanitizer.launches import Launch, Program, Step
from tgi_trio.testing.sanitizer.memory import Memory, Region
from tgi_trio.testing.sanitizer.races import Access

_OTHERS: Final = ("triton", "numpy", "unittest", "contextlib")  # their lines are not a kernel's
_OWN: Final = str(Path(__file__).parent)
_QUICK: Final = frozenset(map(str, Path(__file__).parents[1].glob("quick_*.py")))


class Interpreting:
    """Watches the launches of the interpreter, once `patched`."""

    def __init__(self, findings: Findings, *, again: bool = True) -> None:
        """`again`: whether programs run in several orders, and are watched for races."""
        self.findings = findings
        self.launch: Launch | None = None  # that is being interpreted
        self.far: dict[int, int] = {}  # see `Sanitizer.place_far`
        self._again = again
        self.sites: list[Place] = []
        self._site_numbers: dict[tuple[str, int], int] = {}
        self._keys: dict[object, int] = {}
        self._ours: dict[str, bool] = {}  # files, whether kernels may be in them
        self.prepare: list[Callable[[Region], None]] = []  # called for each region of a launch
        self.begun: list[Callable[[Launch, dict[str, Any]], None]] = []  # before one runs
        self.ended: list[Callable[[Launch], None]] = []

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Watch everything inside the block."""
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store
        hint = interpreter.TensorHandle.set_attr
        change, exchange = builder.create_atomic_rmw, builder.create_atomic_cas
        watch = self

        def on_load(own: Any, at: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            at, mask = watch._access(at, mask, "loads")
            return load(own, at, mask, *rest, **more)

        def on_store(own: Any, at: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            at, mask = watch._access(at, mask, "stores", value)
            return store(own, at, value, mask, *rest, **more)

        def on_change(
            own: Any, how: Any, at: Any, value: Any, mask: Any, sem: Any, scope: Any
        ) -> Any:
            at, mask = watch._access(at, mask, "changes", step=_step(sem, scope))
            return change(own, how, at, value, mask, sem, scope)

        def on_exchange(own: Any, at: Any, old: Any, value: Any, sem: Any, scope: Any) -> Any:
            every = interpreter.TensorHandle(np.ones(at.data.shape, np.bool_), None)
            at, _ = watch._access(at, every, "changes", step=_step(sem, scope))
            return exchange(own, at, old, value, sem, scope)

        def on_barrier(own: Any) -> None:
            if watch.launch is not None:
                watch.launch.pass_barrier()

        def on_hint(own: Any, name: str, values: Any) -> None:
            hint(own, name, values)
            if name == "tt.divisibility":
                watch._check_multiple(own.data, values)

        def on_launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            watch._launch(executor, args, kwargs)

        patches: tuple[tuple[Any, str, Any], ...] = (
            (builder, "create_masked_load", on_load),
            (builder, "create_masked_store", on_store),
            (builder, "create_atomic_rmw", on_change),
            (builder, "create_atomic_cas", on_exchange),
            (builder, "create_barrier", on_barrier),
            (interpreter.TensorHandle, "set_attr", on_hint),
            (interpreter.GridExecutor, "__call__", on_launch),
        )
        with ExitStack() as stack:
            for owner, name, value in patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    # --- launches ------------------------------------------------------------------------------

    def _launch(self, executor: Any, args: Any, kwargs: dict[str, Any]) -> None:
        from triton.runtime import interpreter

        names = inspect.getfullargspec(executor.fn).args
        given = {name: value for name, value in kwargs.items() if name in names}
        options = {name: value for name, value in kwargs.items() if name not in names}
        for hook in executor.pre_run_hooks:
            hook(*args, **given)
        plain = inspect.getcallargs(executor.fn, *args, **given)
        memory, told = Memory(), dict(plain)
        for name in told.keys() - set(executor.constexprs):
            told[name] = self._convert(name, plain[name], memory)
        moved = self._move(executor.fn.__name__, plain, told, memory) if self._again else None
        grid = tuple(executor.grid(told) if callable(executor.grid) else executor.grid)
        grid += (1,) * (3 - len(grid))
        launch = self._begin(executor.fn.__name__, memory, grid, options)
        if max(grid[1:]) >= 1 << 16 or math.prod(grid) >= 1 << 31:
            # Triton's launcher counts programs in 32 bits, and does nothing where there are none.
            launch.add("bounds", "", -1, f"a grid of {grid} is refused, or not launched at all")
            return
        builder, scope = interpreter.interpreter_builder, interpreter._patch_lang(executor.fn)
        builder.set_grid_dim(*grid)

        def run_program(program: Program) -> None:
            builder.set_grid_idx(*program)
            try:
                executor.fn(**(moved if moved is not None and launch.far else told))
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error

        seed = zlib.crc32(f"{launch.kernel} {self.findings.launches[launch.kernel]}".encode())
        self.launch = launch
        try:
            launch.run(run_program, seed=seed, again=self._again, moved=moved is not None)
        finally:
            self.launch = None
            scope.restore()
        for end in self.ended:
            end(launch)

    def _move(
        self, kernel: str, plain: dict[str, Any], told: dict[str, Any], memory: Memory
    ) -> dict[str, Any] | None:
        """Return converted arguments whose slots are far away, None if there are none."""
        from triton import language

        with _disable_current_modes():
            found = move_far(kernel, plain)
        if found is None:
            return None
        moved = dict(told)
        for name, indices in found.indices.items():
            moved[name] = self._convert(name, indices, memory)
        for name, shift in found.shifts.items():
            handle, kind = told[name].handle, told[name].type
            pointer = type(handle)(handle.data - np.uint64(shift), handle.dtype)
            moved[name] = language.tensor(pointer, kind)
        return moved

    def _begin(self, kernel: str, memory: Memory, grid: Program, options: dict[str, Any]) -> Launch:
        """Return a launch, and tell of it."""
        self.findings.count(kernel)
        threads = 32 * int(options.get("num_warps", 4))
        launch = Launch(kernel, memory, grid, threads, self.findings, self.sites)
        for region in memory.regions:
            for prepare in self.prepare:
                prepare(region)
        for note in self.begun:
            note(launch, options)
        return launch

    def _convert(self, name: str, value: Any, memory: Memory) -> Any:
        """Convert an argument as the interpreter does; pointers remember which they are."""
        from triton.runtime import interpreter

        if isinstance(value, tuple):
            parts = [self._convert(f"{name}[{i}]", part, memory) for i, part in enumerate(value)]
            whole = interpreter._implicit_cvt(value)
            return type(whole)(*parts) if hasattr(value, "_fields") else type(whole)(parts)
        made = interpreter._implicit_cvt(value)
        if hasattr(value, "block_shape"):  # a descriptor of a tensor
            handle, tensor = made.handle.base, value.base
        elif hasattr(value, "data_ptr"):
            handle, tensor = made.handle, getattr(value, "base", value)
        else:
            return made
        if tensor.device.type != "cpu":
            raise ValueError(f"argument {name} is on {tensor.device}, which has no interpreter")
        tag = memory.add(name, tensor, shared=name in NULL_SLOTS) - self.far.get(
            tensor.data_ptr(), 0
        )
        handle.data = handle.data + np.uint64(tag)
        return made

    # --- accesses ------------------------------------------------------------------------------

    def _access(
        self, at: Any, mask: Any, how: str, value: Any = None, step: Step | None = None
    ) -> tuple[Any, Any]:
        """Check an access; return its real pointers and a mask of what stays inside."""
        from triton.runtime import interpreter

        launch = self.launch
        if launch is None:
            return at, mask
        pointers, flags = at.data, mask.data
        if flags.shape != pointers.shape:
            flags = np.broadcast_to(flags, pointers.shape)
        size = max(1, at.get_element_ty().primitive_bitwidth // 8)
        used, strays, real, kept = launch.memory.find(pointers, flags, size)
        site = self._site()
        for stray in strays if launch.exact or launch.far else ():
            what = f"{how} outside of its tensor{' where slots are far away' * launch.far}"
            detail = f"{stray.lanes} lanes, the first at byte {stray.first} of {stray.size}"
            launch.stray(stray.argument, site, what, detail, "bounds")
        key = self._keys.setdefault((pointers.shape, size), len(self._keys))
        kind = {"alone": pointers.size == 1, "copied": pointers.size < launch.threads}
        for argument, places, lanes in used:
            access = Access(argument, places, size, lanes, key, site, **kind)
            if launch.exact:
                self._check_alignment(launch, access)
            if how == "loads":
                launch.read(access)
            elif step is not None:
                launch.change(access, step)
            else:
                data = np.broadcast_to(value.data, pointers.shape).reshape(-1)[lanes]
                launch.write(access, np.ascontiguousarray(data).view(np.uint8).reshape(-1, size))
        handle = interpreter.TensorHandle
        return handle(real, at.dtype), mask if kept is mask.data else handle(kept, mask.dtype)

    def _check_alignment(self, launch: Launch, access: Access) -> None:
        off = (access.at + access.argument.region.base) % access.size
        if off.any():
            detail = f"byte {access.at[np.flatnonzero(off)[0]]}, numbers of {access.size}"
            name, what = access.argument.name, "uses a place that is no multiple of its size"
            launch.stray(name, access.site, what, detail, "alignment")

    def _check_multiple(self, numbers: Any, values: Any) -> None:
        """Check what `tl.multiple_of` says, of the first number of a block."""
        if self.launch is None or not self.launch.exact:
            return
        first, value = int(numbers.reshape(-1)[0]), int(np.ravel(values)[-1])
        if first % value:
            what = f"a number is said to be a multiple of {value}"
            self.launch.stray("", self._site(), what, str(first), "hint")

    def _site(self) -> int:
        """Return the number of the line of the kernel that is being interpreted."""
        frame = sys._getframe(3)
        while frame.f_back is not None and not self._is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        at = frame.f_code.co_filename, frame.f_lineno
        if at not in self._site_numbers:
            self._site_numbers[at] = len(self.sites)
            self.sites.append(Place(Path(at[0]).name, at[1]))
        return self._site_numbers[at]

    def _is_ours(self, file: str) -> bool:
        if file not in self._ours:
            parts = Path(file).parts
            outside = any(name in parts for name in _OTHERS) or file.startswith("<")
            self._ours[file] = not outside and not file.startswith(_OWN) and file not in _QUICK
        return self._ours[file]


def _step(sem: Any, scope: Any) -> Step:
    """Return how an atomic orders programs."""
    names, wide = str(sem).rpartition(".")[2], "CTA" not in str(scope).upper()
    acquires = wide and names in ("ACQUIRE", "ACQUIRE_RELEASE")
    return Step(acquires, wide and names in ("RELEASE", "ACQUIRE_RELEASE"))
