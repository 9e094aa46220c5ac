"""Triton's interpreter, for tests of kernels where there is no device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from tgi_trio.shard.torch_backend.compiling import ahead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def need_triton() -> None:
    """Skip the module where Triton is not installed; without a device it interprets from here on.

    To be called before anything imports Triton.
    """
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="Triton is not installed")
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        from tgi_trio.testing.quick_interpreter import hurry

        if not hasattr(interpreter, "_cut_off"):
            _know_bfloat16()
            hurry()


def _know_bfloat16() -> None:
    """Have bfloat16 rounded to nearest and multiplied as numbers, and three of it for float32.

    The interpreter keeps bfloat16 as integers, cuts off what does not fit and multiplies the bits.
    """
    from triton import language
    from triton._C.libtriton.ir import INPUT_PRECISION
    from triton.runtime import interpreter

    plain_dot = interpreter.InterpreterBuilder.create_dot
    interpreter._cut_off = interpreter._convert_float

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (language.float32, language.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (language.bfloat16, language.float32):
            return numbers.astype(np.uint32) << 16
        return interpreter._cut_off(numbers, source, target, rounding)

    def wide(x: Any) -> Any:
        if x.dtype.scalar != language.bfloat16:
            return x
        bits = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(bits, language.float32)

    def split(x: Any) -> tuple[Any, Any]:
        whole = torch.from_numpy(np.ascontiguousarray(x.data))
        high = whole.bfloat16().float()
        low = (whole - high).bfloat16().float()
        one, other = (interpreter.TensorHandle(part.numpy(), x.dtype) for part in (high, low))
        return one, other

    def dot(self: Any, a: Any, b: Any, total: Any, precision: Any, *rest: Any) -> Any:
        a, b = wide(a), wide(b)
        if precision == INPUT_PRECISION.BF16x3 and a.dtype.scalar == language.float32:
            (a, a_low), (b, b_low) = split(a), split(b)
            total = plain_dot(self, a_low, b, total, precision, *rest)
            total = plain_dot(self, a, b_low, total, precision, *rest)
        return plain_dot(self, a, b, total, precision, *rest)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


def launch_to_compile(patch: pytest.MonkeyPatch) -> None:
    """Have kernels launched to be compiled, as on a device, where the interpreter launches none."""
    patch.setattr(ahead, "interprets_kernels", lambda: False)


def sum_in_order(patch: pytest.MonkeyPatch) -> None:
    """Have products add up their inputs one after another, as bits are compared.

    The interpreter's own products are a library's, whose sums depend on the place of a row in a
    tile. Those of a device do not. Nothing to do where there is one.
    """
    if DEVICE != "cpu":
        return
    from triton import language
    from triton.runtime import interpreter

    def wide(x: Any) -> Any:
        if x.dtype.scalar == language.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data.astype(np.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = wide(a), wide(b)
        parts = np.empty((left.shape[1] + 1, *d.data.shape), np.float32)
        parts[0] = d.data
        np.multiply(left.T[:, :, None], right[:, None], out=parts[1:])
        # Whole matrices are added, one after another: no sum is one of pairs.
        return interpreter.TensorHandle(np.add.reduce(parts, axis=0), d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
