"""Triton's interpreter, for tests of kernels where there is no device."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

_KINDS = 4096  # of types and shapes that are remembered
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

        if not hasattr(interpreter, "_cut_off"):
            _know_bfloat16()
            _hurry()


def _hurry() -> None:
    """Prepare Triton's language once for each module, not at every call of a function.

    Nor are all sums checked for overflows: two thirds of the time together. Of what is left a third
    is types, which are made anew for every result.
    """
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, set[str]()

    def once(function: Any) -> Any:
        if function.__module__ not in prepared:
            prepared.add(function.__module__)
            prepare(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    _know_types()


def _know_types() -> None:
    """Have what is said of types and shapes found once for each."""
    from triton import language
    from triton.runtime import interpreter

    pointer, block, unwrap = (
        language.pointer_type,
        language.block_type,
        language.core._unwrap_if_constexpr,
    )
    of_numbers = lru_cache(_KINDS)(interpreter._get_np_dtype)

    def find_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, block) else kind
        return np.dtype(np.uint64) if isinstance(element, pointer) else of_numbers(element)

    @lru_cache(_KINDS)
    def facts_of(sizes: tuple[int, ...]) -> tuple[int, Any, str, Any, Any]:
        made = block.__new__(block)
        make(made, language.int8, list(sizes))
        constants = language.tuple([language.constexpr(each) for each in sizes])
        return made.numel, made.shape, str(made.shape), language.constexpr(made.numel), constants

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([unwrap(each) for each in unwrap(shape)])
        self.facts = numel, own, text, _, _ = facts_of(sizes)
        self.numel, self.shape, self.element_ty = numel, own, element_ty
        self.name = f"<{text}, {element_ty}>"

    one = language.constexpr(1), language.tuple([])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.facts[3:] if type.is_block() else one

    make = block.__init__
    interpreter._get_np_dtype = find_dtype
    block.__init__ = make_block
    language.tensor.__init__ = make_tensor


def _know_bfloat16() -> None:
    """Have bfloat16 rounded to nearest and multiplied as numbers.

    The interpreter keeps bfloat16 as integers, cuts off what does not fit and multiplies the bits.
    """
    from triton import language
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

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, wide(a), wide(b), *rest)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
