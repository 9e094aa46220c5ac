"""Expressions of a kernel."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, Protocol

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.cpu_backend.kernels.compiler import arithmetic
from tgi_trio.shard.cpu_backend.kernels.compiler.memory import (
    Variable,
    element_at,
    field_of,
    read,
)
from tgi_trio.shard.cpu_backend.kernels.compiler.types import (
    Float,
    Integer,
    IntegerLiteral,
    Intrinsic,
    Kernel,
    Record,
    Type,
    boolean,
    float32,
    float64,
    int64,
    none,
    uint64,
)
from tgi_trio.shard.cpu_backend.kernels.compiler.values import (
    NONE,
    KernelError,
    Value,
    constant,
    convert,
    packed,
    tuple_of,
    unify,
)

_CONVERSIONS = {np.int64: int64, np.uint64: uint64, np.float32: float32, np.float64: float64}
# Functions of a floating-point number that LLVM has for every width.
_OF_LLVM = {math.sqrt: "sqrt", math.exp: "exp", np.log: "log"}


# What a name means that has a type behind one branch and another behind the other.
UNCLEAR: Final = Variable(none)


class Callees(Protocol):
    """The other kernels of an entry."""

    def call(self, builder: Any, kernel: Kernel, values: Sequence[Value]) -> Value:
        """Call a kernel, which is compiled for the types of these values if it was not yet."""


class Expressions:
    """Compiles the expressions of one function, whose instructions `builder` appends."""

    def __init__(self, builder: Any, known: dict[str, Any], callees: Callees) -> None:
        self.builder, self.known, self.callees = builder, known, callees
        self.variables: dict[str, Variable | Value] = {}
        self.read: set[tuple[str, int]] = set()  # names, and the variables that they meant

    def evaluate(self, node: ast.expr) -> Value:
        """Return the value of an expression; raises KernelError for what kernels do not have."""
        rule: Callable[[Any], Value] | None = getattr(self, f"_{type(node).__name__}", None)
        if rule is None:
            raise KernelError(f"kernels have no {type(node).__name__}")
        return rule(node)

    def condition(self, node: ast.expr) -> Value:
        """Return the truth of an expression."""
        if isinstance(node, ast.BoolOp):
            every = isinstance(node.op, ast.And)
            return self._short_circuit(node.values, every, self.condition)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._not(node.operand)
        return arithmetic.truth(self.builder, self.evaluate(node))

    # ---- names and constants ---------------------------------------------------------------

    def _Name(self, node: ast.Name) -> Value:
        found = self.variables.get(node.id)
        if isinstance(found, Value):
            return found
        if found is UNCLEAR:
            raise KernelError(f"{node.id} has one type or another here")
        if found is not None:
            self.read.add((node.id, id(found)))
            return read(self.builder, found)
        if node.id not in self.known:
            raise KernelError(f"{node.id} has no value")
        return _of_object(self.known[node.id])

    def _Constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _Tuple(self, node: ast.Tuple) -> Value:
        return tuple_of([self.evaluate(each) for each in node.elts])

    def _Attribute(self, node: ast.Attribute) -> Value:
        module = self._object(node.value)
        if isinstance(module, ModuleType):
            return _of_object(getattr(module, node.attr))
        value = self.evaluate(node.value)
        if isinstance(value.type, Record):
            return field_of(self.builder, value, node.attr)
        found = value.type.attribute(node.attr)
        if found is None:
            raise KernelError(f"{value.type} has no {node.attr}")
        return Value(found) if isinstance(found, Type) else constant(found)

    def _Subscript(self, node: ast.Subscript) -> Value:
        whole = self.evaluate(node.value)
        return element_at(self.builder, whole, self.evaluate(node.slice))

    # ---- operators -------------------------------------------------------------------------

    def _BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        return arithmetic.compute(self.builder, type(node.op), left, right)

    def _UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return self._not(node.operand)
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.USub):
            return arithmetic.negate(self.builder, value)
        if isinstance(node.op, ast.Invert):
            return arithmetic.invert(self.builder, value)
        return value

    def _not(self, node: ast.expr) -> Value:
        value = self.condition(node)
        if value.known is not None:
            return constant(not value.known)
        return Value(boolean, self.builder.not_(value.llvm))

    def _Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1:
            raise KernelError("compare two values at a time")
        left, right = self.evaluate(node.left), self.evaluate(node.comparators[0])
        return arithmetic.compare(self.builder, type(node.ops[0]), left, right)

    def _BoolOp(self, node: ast.BoolOp) -> Value:
        return self._short_circuit(node.values, isinstance(node.op, ast.And), self._truth_itself)

    def _truth_itself(self, node: ast.expr) -> Value:
        """Return a truth value; raises KernelError for a number, which Python would return."""
        value = self.evaluate(node)
        if value.type != boolean:
            raise KernelError("`and` or `or` of numbers is a condition, and has no value")
        return value

    def _short_circuit(
        self, nodes: Sequence[ast.expr], every: bool, evaluate: Callable[[ast.expr], Value]
    ) -> Value:
        """Return whether all, or any, are true; later ones are not evaluated in vain."""
        end, incoming = self.builder.append_basic_block("end"), []
        for place, node in enumerate(nodes):
            value = evaluate(node)
            decided = value.known is not None and value.known != every
            incoming.append((value.llvm, self.builder.block))
            if place == len(nodes) - 1 or decided:
                self.builder.branch(end)
                break
            following = self.builder.append_basic_block("next")
            yes, no = (following, end) if every else (end, following)
            if value.known is None:
                self.builder.cbranch(value.llvm, yes, no)
            else:
                incoming.pop()
                self.builder.branch(following)
            self.builder.position_at_end(following)
        self.builder.position_at_end(end)
        if len(incoming) == 1:  # all before it are known
            return value
        return Value(boolean, _merge(self.builder, boolean, incoming))

    def _IfExp(self, node: ast.IfExp) -> Value:
        test = self.condition(node.test)
        if test.known is not None:
            return self.evaluate(node.body if test.known else node.orelse)
        builder = self.builder
        ways = [builder.append_basic_block(name) for name in ("then", "else", "end")]
        builder.cbranch(test.llvm, *ways[:2])
        values, ends = [], []
        for block, each in zip(ways[:2], (node.body, node.orelse), strict=True):
            builder.position_at_end(block)
            values.append(self.evaluate(each))
            ends.append(builder.block)
        common = unify(values[0].type, values[1].type)
        incoming = []
        for value, block in zip(values, ends, strict=True):
            builder.position_at_end(block)
            incoming.append((packed(builder, convert(builder, value, common)), block))
            builder.branch(ways[2])
        builder.position_at_end(ways[2])
        return Value(common, _merge(builder, common, incoming))

    # ---- calls -----------------------------------------------------------------------------

    def _Call(self, node: ast.Call) -> Value:
        if node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
            raise KernelError("arguments have no names in calls")
        function = self._object(node.func)
        values = [self.evaluate(each) for each in node.args]
        if isinstance(function, Kernel):
            return self.callees.call(self.builder, function, values)
        if isinstance(function, Intrinsic):
            return self._emit(function, values)
        if function in _CONVERSIONS:
            return convert(self.builder, values[0], _CONVERSIONS[function])
        if function in _OF_LLVM:
            return self._compute_float(_OF_LLVM[function], values[0])
        if function is abs:
            return self._absolute(values[0])
        if function in (np.isfinite, np.isnan):
            return self._classify(values[0], finite=function is np.isfinite)
        raise KernelError(f"{ast.unparse(node.func)} cannot be called in a kernel")

    def _object(self, node: ast.expr) -> Any:
        """Return what a name outside the kernel means, None for anything else."""
        if isinstance(node, ast.Name) and node.id not in self.variables:
            builtin = {"abs": abs}.get(node.id)
            return self.known.get(node.id, builtin)
        if isinstance(node, ast.Attribute):
            module = self._object(node.value)
            if isinstance(module, ModuleType):
                return getattr(module, node.attr)
        return None

    def _emit(self, operation: Intrinsic, values: Sequence[Value]) -> Value:
        kinds = [
            IntegerLiteral(value.known)
            if operation.literal and isinstance(value.type, Integer) and value.known is not None
            else value.type
            for value in values
        ]
        found = operation.define(*kinds)
        if found is None:
            raise KernelError(f"{operation.name} does not take {kinds}")
        signature, emit = found
        if len(values) != len(signature.args):
            raise KernelError(f"{operation.name} takes {len(signature.args)} arguments")
        given = [
            packed(self.builder, value)
            if isinstance(kind, IntegerLiteral)
            else packed(self.builder, convert(self.builder, value, kind))
            for value, kind in zip(values, signature.args, strict=True)
        ]
        made = emit(self.builder, signature, given)
        kind = signature.return_type
        if kind == none:
            return NONE
        known = None
        if isinstance(kind, Integer) and isinstance(made, ir.Constant):
            known = made.constant
        return Value(kind, made if kind.llvm is not None else None, known)

    def _compute_float(self, name: str, value: Value) -> Value:
        if not isinstance(value.type, Float):
            value = convert(self.builder, value, float64)
        return Value(value.type, self._of_llvm(name, value))

    def _of_llvm(self, name: str, value: Value) -> Any:
        assert isinstance(value.type, Float)
        kind = ir.FunctionType(value.type.llvm, [value.type.llvm])
        full = f"llvm.{name}.f{value.type.bits}"
        function = self.builder.module.globals.get(full)
        function = function or ir.Function(self.builder.module, kind, full)
        return self.builder.call(function, [value.llvm])

    def _absolute(self, value: Value) -> Value:
        if isinstance(value.type, Float):
            return Value(value.type, self._of_llvm("fabs", value))
        below = arithmetic.compare(self.builder, ast.Lt, value, constant(0))
        minus = arithmetic.negate(self.builder, value)
        return Value(value.type, self.builder.select(below.llvm, minus.llvm, value.llvm))

    def _classify(self, value: Value, *, finite: bool) -> Value:
        if not isinstance(value.type, Float):
            raise KernelError(f"{value.type} is always finite")
        if not finite:
            return Value(boolean, self.builder.fcmp_unordered("uno", value.llvm, value.llvm))
        size, limit = self._of_llvm("fabs", value), ir.Constant(value.type.llvm, math.inf)
        return Value(boolean, self.builder.fcmp_ordered("<", size, limit))


def _merge(builder: Any, kind: Type, incoming: Sequence[tuple[Any, Any]]) -> Any:
    made = builder.phi(kind.llvm)
    for value, block in incoming:
        made.add_incoming(value, block)
    return made


def _of_object(found: Any) -> Value:
    """Return the value of a global of the module: a number, or a tuple of some."""
    if isinstance(found, tuple):
        return tuple_of([_of_object(each) for each in found])
    return constant(found)
