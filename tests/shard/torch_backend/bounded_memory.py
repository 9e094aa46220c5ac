"""Triton's interpreter, held to the memory that a kernel is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Have a kernel that is interpreted raise IndexError where it leaves its tensors' memory.

    A device may end the process for that, or give it what is another's, as the interpreter does.
    Memory is the whole of what a tensor is a view of.
    """
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, places = executor._init_args_hst, list[tuple[int, int]]()

    def note(self: Any, args: Any, kwargs: Any) -> Any:
        whole = [x.untyped_storage() for x in (*args, *kwargs.values()) if hasattr(x, "data_ptr")]
        places[:] = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in whole})
        return prepare(self, args, kwargs)

    def check(pointers: Any, mask: Any) -> None:
        at = pointers.data if mask.all() else pointers.data[mask]
        if not at.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first, last = int(at.min()), int(at.max()) + size
        if any(begin <= first and last <= end for begin, end in places):
            return
        inside = [(at >= begin) & (at <= end - size) for begin, end in places if end > begin]
        outside = at.size - np.count_nonzero(np.logical_or.reduce(inside))
        if outside:
            raise IndexError(f"{outside} of {at.size} places are in no tensor of the kernel's")

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask.data)
        return plain_load(self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask.data)
        return plain_store(self, pointers, value, mask, *rest)

    def change(self: Any, how: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask.data)
        return plain_change(self, how, pointers, value, mask, *rest)

    plain_load, plain_store = builder.create_masked_load, builder.create_masked_store
    plain_change = builder.create_atomic_rmw
    with (
        mock.patch.object(executor, "_init_args_hst", note),
        mock.patch.object(builder, "create_masked_load", load),
        mock.patch.object(builder, "create_masked_store", store),
        mock.patch.object(builder, "create_atomic_rmw", change),
    ):
        yield
