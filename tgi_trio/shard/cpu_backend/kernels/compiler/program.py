"""An entry with all kernels that it calls: one module of LLVM."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler.statements import Statements, returned_type
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel, Type, int32, int64, none
from tgi_trio.shard.cpu_backend.kernels.compiler.values import (
    NONE,
    KernelError,
    Value,
    packed,
)


class Program:
    """The functions of one entry, each compiled once for every combination of argument types."""

    def __init__(self) -> None:
        self.module = ir.Module()
        # None: a function that is being compiled.
        self._made: dict[tuple[Kernel, tuple[Type, ...]], tuple[Any, Type] | None] = {}

    def add_entry(self, kernel: Kernel, chosen: Sequence[Type], integers: int, symbol: str) -> None:
        """Compile a kernel, and what it calls, as a function of so many int64 that returns 0.

        `chosen`: types of the arguments before these, which have no values at run time. Raises
        KernelError.
        """
        kind = ir.FunctionType(int32.llvm, [int64.llvm] * integers)
        function = ir.Function(self.module, kind, symbol)
        builder = ir.IRBuilder(function.append_basic_block())
        numbers = [Value(int64, each) for each in function.args]
        self.call(builder, kernel, [*map(Value, chosen), *numbers])
        builder.ret(ir.Constant(int32.llvm, 0))

    def call(self, builder: Any, kernel: Kernel, values: Sequence[Value]) -> Value:
        """Call a kernel, which is compiled if it was not yet; raises KernelError."""
        key = kernel, tuple(value.type for value in values)
        if key not in self._made:
            self._made[key] = None
            self._made[key] = self._compile(kernel, key[1])
        found = self._made[key]
        if found is None:
            raise KernelError(f"{kernel.name} calls itself")
        function, returned = found
        given = [packed(builder, value) for value in values if value.type.llvm is not None]
        made = builder.call(function, given)
        if returned == none:
            return NONE
        return Value(returned, made if returned.llvm is not None else None)

    def _compile(self, kernel: Kernel, kinds: Sequence[Type]) -> tuple[Any, Type]:
        """Return the function for arguments of these types, and the type that it returns."""
        node = _find_source(kernel)
        if len(node.args.args) != len(kinds):
            raise KernelError(f"{kernel.name} takes {len(node.args.args)} arguments")
        stored = [each.llvm for each in kinds if each.llvm is not None]
        kind = ir.FunctionType(ir.VoidType(), stored)
        function = ir.Function(self.module, kind, f"{kernel.name}.{len(self._made)}")
        # LLVM then weighs every call. An internal function that is called from one place becomes a
        # part of its caller, however large it is, and optimising a step takes three times as long.
        function.linkage = "linkonce_odr"
        arguments = iter(function.args)
        values = [Value(each, None if each.llvm is None else next(arguments)) for each in kinds]
        builder = ir.IRBuilder(function.append_basic_block())
        body = Statements(node, builder, kernel.function.__globals__, self)
        try:
            body.run(node, values)
            returned = returned_type(body.returned)
        except KernelError as error:
            if error.placed:
                raise
            place = f"{kernel.function.__module__}, line {body.line}, in {kernel.name}"
            raise KernelError(f"{error} ({place})", placed=True) from None
        _end(function, body, returned)
        return function, returned


def _end(function: Any, body: Statements, returned: Type) -> None:
    """Have a function return what its body found, which decides on its type."""
    if returned.llvm is not None:
        function.ftype = ir.FunctionType(returned.llvm, function.ftype.args)
        function.type = function.ftype.as_pointer()
        function.return_value = type(function.return_value)(function, returned.llvm)
    for value, block in body.returned:
        builder = ir.IRBuilder(block)
        if returned.llvm is None:
            builder.ret_void()
        else:
            builder.ret(packed(builder, value))


def _find_source(kernel: Kernel) -> ast.FunctionDef:
    file = sys.modules[kernel.function.__module__].__file__
    return _functions_of(str(file))[kernel.name]


@cache
def _functions_of(file: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
