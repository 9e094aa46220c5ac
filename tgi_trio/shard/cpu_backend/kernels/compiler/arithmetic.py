"""Arithmetic on numbers: as Python has it, but in types of the processor, and without errors.

Whole numbers wrap around; their division and remainder round down, and are 0 for a divisor of 0.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler.types import (
    Float,
    Integer,
    boolean,
    float64,
    int64,
)
from tgi_trio.shard.cpu_backend.kernels.compiler.values import (
    KernelError,
    Value,
    constant,
    convert,
    unify,
)

_KNOWN: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_FLOATS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_INTEGERS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.LShift: "shl",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
}
COMPARISONS: dict[type[ast.AST], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}


def compute(builder: Any, kind: type[ast.operator], a: Value, b: Value) -> Value:
    """Return a binary operation on two numbers; raises KernelError where there is none."""
    known = a.known is not None and b.known is not None and {a.type, b.type} <= {int64, float64}
    if known and (b.known or kind not in (ast.Div, ast.FloorDiv, ast.Mod)):
        return constant(_KNOWN[kind](a.known, b.known))
    common = unify(a.type, b.type)
    if kind is ast.Div and isinstance(common, Integer):
        common = float64
    if common == boolean:
        common = boolean if kind in (ast.BitAnd, ast.BitOr, ast.BitXor) else int64
    a, b = convert(builder, a, common), convert(builder, b, common)
    if isinstance(common, Float):
        if kind not in _FLOATS:
            raise KernelError(f"{kind.__name__} of {common}")
        return Value(common, getattr(builder, _FLOATS[kind])(a.llvm, b.llvm))
    assert isinstance(common, Integer)
    if kind in _INTEGERS:
        return Value(common, getattr(builder, _INTEGERS[kind])(a.llvm, b.llvm))
    if kind is ast.RShift:
        return Value(common, (builder.ashr if common.signed else builder.lshr)(a.llvm, b.llvm))
    if kind in (ast.FloorDiv, ast.Mod):
        return Value(common, _divide(builder, common, a, b, rest=kind is ast.Mod))
    raise KernelError(f"{kind.__name__} of {common}")


def _divide(builder: Any, kind: Integer, a: Value, b: Value, *, rest: bool) -> Any:
    """Return the quotient, rounded down, or the remainder, which has the divisor's sign."""
    zero, one = ir.Constant(kind.llvm, 0), ir.Constant(kind.llvm, 1)
    number = b.known
    if number is not None and number > 0 and not number & (number - 1):
        if rest:
            return builder.and_(a.llvm, ir.Constant(kind.llvm, number - 1))
        shift = builder.ashr if kind.signed else builder.lshr
        return shift(a.llvm, ir.Constant(kind.llvm, number.bit_length() - 1))
    divisor, absent = b.llvm, None
    if not number:
        absent = builder.icmp_unsigned("==", b.llvm, zero)
        divisor = builder.select(absent, one, b.llvm)
    if not kind.signed:
        found = (builder.urem if rest else builder.udiv)(a.llvm, divisor)
    else:
        quotient, left = builder.sdiv(a.llvm, divisor), builder.srem(a.llvm, divisor)
        differs = builder.icmp_signed("<", builder.xor(left, divisor), zero)
        below = builder.and_(differs, builder.icmp_signed("!=", left, zero))
        if rest:
            found = builder.select(below, builder.add(left, divisor), left)
        else:
            found = builder.select(below, builder.sub(quotient, one), quotient)
    return found if absent is None else builder.select(absent, zero, found)


def compare(builder: Any, kind: type[ast.cmpop], a: Value, b: Value) -> Value:
    """Return a truth value; comparisons with NaN are false, but for `!=`."""
    if kind not in COMPARISONS:
        raise KernelError(f"comparison {kind.__name__}")
    sign, known = COMPARISONS[kind]
    if a.known is not None and b.known is not None:
        return constant(known(a.known, b.known))
    common = unify(a.type, b.type)
    a, b = convert(builder, a, common), convert(builder, b, common)
    if isinstance(common, Float):
        make = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
    else:
        signed = isinstance(common, Integer) and common.signed
        make = builder.icmp_signed if signed else builder.icmp_unsigned
    return Value(boolean, make(sign, a.llvm, b.llvm))


def truth(builder: Any, value: Value) -> Value:
    """Return whether a number is not 0."""
    if value.type == boolean:
        return value
    return compare(builder, ast.NotEq, value, convert(builder, constant(0), value.type))


def negate(builder: Any, value: Value) -> Value:
    """Return -value."""
    if value.known is not None and value.type != boolean:
        return convert(builder, constant(-value.known), value.type)
    if isinstance(value.type, Float):
        return Value(value.type, builder.fneg(value.llvm))
    value = convert(builder, value, int64 if value.type == boolean else value.type)
    return Value(value.type, builder.neg(value.llvm))


def invert(builder: Any, value: Value) -> Value:
    """Return ~value."""
    if not isinstance(value.type, Integer) or value.type == boolean:
        raise KernelError(f"~ of {value.type}")
    return Value(value.type, builder.not_(value.llvm))
