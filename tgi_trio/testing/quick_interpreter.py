"""Makes Triton's interpreter fast, which runs kernels where there is no device.

Results remain the same. The interpreter prepares, looks up and constructs again and again what it
could keep, which takes most of the time of kernels as small as those of tests.
"""

from __future__ import annotations

import inspect
import itertools
from functools import lru_cache
from typing import Any

import numpy as np

from tgi_trio.testing.quick_memory import Memory
from tgi_trio.testing.quick_operations import FUNCTIONS, quicken
from tgi_trio.testing.quick_reductions import REDUCTIONS, quicken_reduction

_KINDS = 4096  # most types and shapes in each cache
_PRECISIONS = ("tf32", "tf32x3", "bf16x3", "ieee")  # all of which are those of numpy here


def hurry() -> None:
    """Patch Triton's interpreter, for the life of the process.

    It then prepares Triton's language once for each module, not at every call of a function, and
    does not check all sums for overflow: together two thirds of the time. Of the rest, a third was
    constructing types for every result, and a third bringing operands to a common type and shape.
    """
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, set[str]()

    def once(function: Any) -> Any:
        if function.__module__ not in prepared:
            prepared.add(function.__module__)
            prepare(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once
    options = interpreter.InterpreterOptions(
        sanitize_overflow=False, allowed_dot_input_precisions=_PRECISIONS
    )
    interpreter.interpreter_builder.options = options
    _find_types_once()
    _spread_at_once()
    _take_numbers_at_once()
    _call_at_once()
    _launch_at_once()
    _scan_by_slices()


def _find_types_once() -> None:
    """Cache properties of types and shapes."""
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
    def facts_of(sizes: tuple[Any, ...]) -> tuple[int, Any, tuple[int, ...], str, Any, Any]:
        made = block.__new__(block)
        make(made, language.int8, list(sizes))
        own, count = tuple(made.shape), language.constexpr(made.numel)
        constants = language.tuple([language.constexpr(each) for each in own])
        return made.numel, made.shape, own, str(made.shape), count, constants

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        given = shape if type(shape) is tuple else tuple(unwrap(shape))  # numbers or constants
        self.facts = self.numel, self.shape, self.sizes, text, _, _ = facts_of(given)
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty.name}>"

    one = language.constexpr(1), language.tuple([])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.facts[4:] if type.is_block() else one

    narrow = {  # bytes of a number; pointers, which are not here, are left to Triton's check
        name: -(-language.dtype(name).primitive_bitwidth // 8)
        for name in language.dtype.SINT_TYPES + language.dtype.UINT_TYPES + language.dtype.FP_TYPES
    }

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > narrow.get(dtype.name, 0):
            check_handle(self)

    make, check_handle = block.__init__, interpreter.TensorHandle.__post_init__
    interpreter._get_np_dtype = find_dtype
    interpreter.TensorHandle.__init__ = make_handle
    block.__init__ = make_block
    language.tensor.__init__ = make_tensor


def _spread_at_once() -> None:
    """Broadcast operands without a type and a tensor for each intermediate step.

    Uncommon cases, and all errors, are left to Triton.
    """
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    tensor, block, handle = language.tensor, language.block_type, interpreter.TensorHandle
    plain_spread = TritonSemantic.broadcast_impl_value

    @lru_cache(_KINDS)
    def joined(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
        pairs = list(zip(one, other, strict=False))
        if len(one) != len(other) or any(a != b and 1 not in (a, b) for a, b in pairs):
            return None
        return tuple([max(pair) for pair in pairs])

    def spread(x: Any, sizes: tuple[int, ...]) -> Any:
        data = np.empty(sizes, x.handle.data.dtype)
        data[...] = x.handle.data
        return tensor(handle(data, x.handle.dtype.scalar), block(x.type.scalar, sizes))

    def spread_both(self: Any, lhs: Any, rhs: Any) -> Any:
        one = lhs.type.sizes if type(lhs.type) is block else None
        other = rhs.type.sizes if type(rhs.type) is block else None
        if one == other:
            return lhs, rhs
        sizes = one or other if one is None or other is None else joined(one, other)
        if sizes is None:
            return plain_spread(self, lhs, rhs)
        if one != sizes:
            lhs = spread(lhs, sizes)
        return lhs, rhs if other == sizes else spread(rhs, sizes)

    TritonSemantic.broadcast_impl_value = spread_both


def _take_numbers_at_once() -> None:
    """Convert a number beside a tensor at once, and only broadcast tensors of the same type.

    Uncommon cases, and all errors, are left to Triton.
    """
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    tensor, handle = language.tensor, interpreter.TensorHandle
    plain_check = TritonSemantic.binary_op_type_checking_impl
    spread_both = TritonSemantic.broadcast_impl_value
    halves = (language.float16, language.bfloat16)
    ranges = {language.int32: 1 << 31, language.int64: 1 << 63}

    def number(x: Any, value: Any) -> Any:
        """Return a number in the type of `x`, None unless Triton would choose that type."""
        kind = x.type.scalar
        if type(value) is int and (kind is language.int32 or kind is language.int64):
            fits = -ranges[kind] <= value < ranges[kind]
        else:
            fits = type(value) is float and kind is language.float32 and 1e-30 < abs(value) < 1e30
        if not fits:
            return None
        sizes = x.type.sizes if x.type.is_block() else (1,)
        data = np.empty(sizes, interpreter._get_np_dtype(kind))
        data.fill(value)
        return tensor(handle(data, kind), x.type)

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check and isinstance(lhs, tensor):
            if isinstance(rhs, tensor):
                kind = lhs.type.scalar
                plain = not kind.is_ptr() and not (div_or_mod and kind in halves)
                if kind is rhs.type.scalar and plain:
                    return spread_both(self, lhs, rhs)
            elif (same := number(lhs, rhs)) is not None:
                return lhs, same
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        return plain_check(self, lhs, rhs, *options)

    TritonSemantic.binary_op_type_checking_impl = check


def _call_at_once() -> None:
    """Call functions, the language's and a kernel's, without checks; load with a cached mask."""
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    plain_unwrap, constexpr, memory = core._unwrap_if_constexpr, core.constexpr, Memory()
    plain = frozenset({core.tensor, core.dtype, int, float, bool, type(None), str})

    def unwrap(x: Any) -> Any:
        if type(x) in plain:
            return x
        return x.value if type(x) is constexpr else plain_unwrap(x)

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)  # without the check that it may be called

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        quick = owner is core.tensor or (owner in (language, core) and name in FUNCTIONS)
        scope.set_attr(owner, name, quicken(memory, name, call) if quick else call)

    @lru_cache(_KINDS)
    def ones(shape: tuple[int, ...]) -> Any:
        return interpreter.TensorHandle(np.ones(shape, np.bool_), core.int1)

    def load(self: Any, pointer: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
        every = ones(pointer.data.shape)
        return self.create_masked_load(pointer, every, None, cache, eviction, volatile)

    functions = interpreter.InterpretedFunction
    plain_call, rewritten = functions.__call__, functions.rewritten_fn

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (function := rewritten.get(self.fn)) is None:
            return plain_call(self, *args, **kwargs)  # which rewrites it, for all that follow
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    functions.__call__ = call_function
    for name in REDUCTIONS:
        setattr(language, name, quicken_reduction(memory, name, getattr(language, name)))
    core._unwrap_if_constexpr = unwrap
    interpreter._patch_attr = patch
    interpreter.InterpreterBuilder.create_load = load


@lru_cache(_KINDS)
def _signature_of(kernel: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of a kernel's parameters, and the values of those that need not be given."""
    facts = inspect.getfullargspec(kernel)
    last = facts.defaults or ()
    names = facts.args
    return tuple(names), dict(zip(names[len(names) - len(last) :], last, strict=True))


def _launch_at_once() -> None:
    """Launch without copies of what the host has, with a kernel's signature read once.

    A fifth of a small launch is to inspect the kernel, to make each tensor again and again, and to
    spell out types and read them back. What is not the host's tensors and numbers is left to
    Triton, and so are all errors in arguments.
    """
    from torch import Tensor
    from triton import language
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    plain_launch, plain_convert = executor.__call__, interpreter._implicit_cvt
    tensor, handle = language.tensor, interpreter.TensorHandle
    whole, pointers = plain_convert(1).type, dict[Any, Any]()  # the latter by torch's dtypes

    def is_here(x: Any) -> bool:
        if isinstance(x, Tensor):
            return x.device.type == "cpu"
        return not (isinstance(x, tuple) or hasattr(x, "data_ptr") or hasattr(x, "block_shape"))

    def convert(x: Any) -> Any:
        if isinstance(x, Tensor):
            if (kind := pointers.get(x.dtype)) is None:
                kind = pointers[x.dtype] = plain_convert(x).type
            return tensor(handle(np.array([x.data_ptr()], np.uint64), kind), kind)
        if type(x) is int and -(1 << 31) <= x < 1 << 31:
            return tensor(handle(np.array([x], np.int32), whole), whole)
        return plain_convert(x)

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        names, defaults = _signature_of(self.fn)
        given = {name: value for name, value in options.items() if name in names}
        told = defaults | dict(zip(names, args, strict=False)) | given
        fits = len(args) <= len(names) and told.keys() == set(names)
        if not fits or given.keys() & names[: len(args)] or not all(map(is_here, told.values())):
            return plain_launch(self, *args, **options)
        for hook in self.pre_run_hooks:
            hook(*args, **given)
        interpreter._patch_lang(self.fn)
        own = {
            name: told[name] if name in self.constexprs else convert(told[name]) for name in names
        }
        grid = tuple(self.grid(own) if callable(self.grid) else self.grid)
        if len(grid) > 3:
            return plain_launch(self, *args, **options)
        grid += (1,) * (3 - len(grid))
        builder.set_grid_dim(*grid)
        try:
            for place in itertools.product(*map(range, grid)):
                builder.set_grid_idx(*place)
                self.fn(**own)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    executor.__call__ = launch


def _scan_by_slices() -> None:
    """Scan with a function of one's own slice by slice, instead of number by number."""
    from triton.runtime import interpreter

    def scan(self: Any, parts: Any) -> Any:
        rows = [np.moveaxis(part.handle.data, self.axis, 0) for part in parts]
        kinds = [part.dtype for part in parts]
        made = [np.empty_like(part.handle.data) for part in parts]
        targets = [np.moveaxis(part, self.axis, 0) for part in made]
        before: tuple[Any, ...] = ()
        for i in range(len(rows[0])):
            now = tuple(self.to_tensor(row[i], kind) for row, kind in zip(rows, kinds, strict=True))
            before = self.combine_fn.fn(*before, *now) if before else now
            for target, part in zip(targets, before, strict=True):
                target[i] = part.handle.data
        return [self.to_tensor(part, kind) for part, kind in zip(made, kinds, strict=True)]

    interpreter.ScanOps.generic_scan = scan
