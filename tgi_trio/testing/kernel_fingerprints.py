"""Fingerprints of kernels: whether what was compiled once would be compiled from the same today."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Final

from tgi_trio.testing.variant import Variant

_DIGITS: Final = 12
_OURS: Final = "tgi_trio"


def fingerprint(variant: Variant) -> str:
    """Return a hash of all that a variant is compiled from.

    That is the text of its kernel and of all that this calls, without comments and docstrings,
    wherever it lies; the constants that they name; and types, constants and options of the variant.
    The versions of Triton and of the assembler are left out.
    """
    told = [variant.arguments, variant.warps, variant.stages, variant.registers]
    parts = [repr(told), *sorted(map(repr, variant.constants.items()))]
    parts += sorted(_describe_all(_python_function(variant.kernel)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]


def _python_function(kernel: Any) -> FunctionType:
    """Return what Triton was given, whether it compiles or interprets it."""
    function = kernel.fn
    assert isinstance(function, FunctionType), kernel
    return function


@cache
def _describe_all(function: FunctionType) -> frozenset[str]:
    """Return the texts of a function and of everything that it calls, and their constants."""
    found, left, seen = set[str](), [function], set[FunctionType]()
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        text, named = _describe(each)
        found.add(text)
        left += named
    return frozenset(found)


@cache
def _describe(function: FunctionType) -> tuple[str, tuple[FunctionType, ...]]:
    """Return a function's text with the constants that it names, and the functions that it names.

    A name that is local as well may be among them, which only makes a hash depend on more.
    """
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    constants, functions = set[str](), set[FunctionType]()
    for name, value in _named(node, function.__globals__):
        called = value if isinstance(value, FunctionType) else getattr(value, "fn", None)
        plain = getattr(value, "value", value)  # of Triton's constants
        if isinstance(called, FunctionType):
            if called.__module__.split(".")[0] == _OURS:
                functions.add(called)
        elif isinstance(plain, int | float | str | tuple):
            constants.add(f"{name} = {plain!r}")
    text = "\n".join([ast.unparse(node), *sorted(constants)])
    return text, tuple(sorted(functions, key=lambda each: (each.__module__, each.__name__)))


def _named(node: ast.FunctionDef, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a function names of its module, and of the modules that that has imported."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in scope:
            if not isinstance(scope[each.id], ModuleType):
                yield each.id, scope[each.id]
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            module = scope.get(each.value.id)
            if isinstance(module, ModuleType) and module.__name__.split(".")[0] == _OURS:
                yield each.attr, getattr(module, each.attr)
