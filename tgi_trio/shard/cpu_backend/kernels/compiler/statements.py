"""Statements of a kernel, and its variables."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler import arithmetic
from tgi_trio.shard.cpu_backend.kernels.compiler.expressions import UNCLEAR, Callees, Expressions
from tgi_trio.shard.cpu_backend.kernels.compiler.memory import (
    Variable,
    declare,
    element_at,
    set_element,
    set_field,
    size_of,
    write,
)
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Array, Type, int64
from tgi_trio.shard.cpu_backend.kernels.compiler.values import (
    NONE,
    KernelError,
    Value,
    constant,
    convert,
    spread,
)


@dataclass(slots=True)
class _Loop:
    more: Any  # the block that goes on with it
    end: Any  # the block behind it
    before: dict[str, Any]  # what names meant before it
    broken: bool = False  # whether anything has left it


class Statements(Expressions):
    """Compiles the statements of one function.

    `returned` has what it returns: the values, and the blocks that end with them.
    """

    def __init__(
        self, node: ast.FunctionDef, builder: Any, known: dict[str, Any], callees: Callees
    ) -> None:
        super().__init__(builder, known, callees)
        self.returned: list[tuple[Value, Any]] = []
        self._assigned = _count_assignments(node)
        self.line = node.lineno  # of the statement at hand
        self._loops: list[_Loop] = []
        # By the nesting of statements: names that have come to mean variables of another type.
        self._changed: list[set[str]] = [set()]
        # Places of variables are made in a block of their own, before all others.
        self._first = ir.IRBuilder(builder.block)
        builder.position_at_end(builder.append_basic_block("body"))
        self._body = builder.block

    def run(self, node: ast.FunctionDef, values: Sequence[Value]) -> None:
        """Compile a function for the values of its arguments; raises KernelError."""
        for argument, value in zip(node.args.args, values, strict=True):
            if argument.arg in self._assigned:
                self._assign_name(argument.arg, value)
            else:
                self.variables[argument.arg] = value
        self._run(node.body)
        if not self._ended():
            self.returned.append((NONE, self.builder.block))
        self._first.position_at_end(self._first.block)  # operations have made places of theirs
        self._first.branch(self._body)

    def _run(self, nodes: Sequence[ast.stmt]) -> None:
        for node in nodes:
            rule: Callable[[Any], None] | None = getattr(self, f"_do_{type(node).__name__}", None)
            self.line = node.lineno
            if rule is None:
                raise KernelError(f"kernels have no {type(node).__name__}")
            rule(node)
            if self._ended():
                return

    def _ended(self) -> bool:
        """Return whether nothing can follow here."""
        block = self.builder.block
        return block.is_terminated or any(block is end for _, end in self.returned)

    def _do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.evaluate(node.value)

    def _do_Pass(self, node: ast.Pass) -> None:
        pass

    def _do_Return(self, node: ast.Return) -> None:
        value = NONE if node.value is None else self.evaluate(node.value)
        self.returned.append((value, self.builder.block))

    # ---- assignments -----------------------------------------------------------------------

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self._assign(target, value)

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        kind, builder = type(node.op), self.builder
        if isinstance(node.target, ast.Subscript):  # its index is computed once
            whole = self.evaluate(node.target.value)
            index = self.evaluate(node.target.slice)
            old, more = element_at(builder, whole, index), self.evaluate(node.value)
            set_element(builder, whole, index, arithmetic.compute(builder, kind, old, more))
            return
        old, more = self.evaluate(node.target), self.evaluate(node.value)
        self._assign(node.target, arithmetic.compute(builder, kind, old, more))

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._assign_name(target.id, value)
        elif isinstance(target, ast.Tuple):
            parts = spread(self.builder, value)
            if len(parts) != len(target.elts):
                raise KernelError(f"{len(parts)} values for {len(target.elts)} names")
            for each, part in zip(target.elts, parts, strict=True):
                self._assign(each, part)
        elif isinstance(target, ast.Attribute):
            set_field(self.builder, self.evaluate(target.value), target.attr, value)
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice):
            self._fill(target, value)
        elif isinstance(target, ast.Subscript):
            whole, index = self.evaluate(target.value), self.evaluate(target.slice)
            set_element(self.builder, whole, index, value)
        else:
            raise KernelError(f"nothing can be assigned to {ast.unparse(target)}")

    def _assign_name(self, name: str, value: Value) -> None:
        """Give a variable a value of its type; for one of another type the name gets a new one."""
        if value.type == NONE.type:
            raise KernelError(f"{name} would have no value")
        once = self._assigned.get(name) == 1
        if once and (value.known is not None or value.type.llvm is None):
            self.variables[name] = value  # the same wherever it is read
            return
        found = self.variables.get(name)
        if not isinstance(found, Variable) or found.type != value.type:
            if found is not None:
                self._changed[-1].add(name)
            found = self.variables[name] = declare(self._first, value.type, name)
        write(self.builder, found, value)

    def _fill(self, target: ast.Subscript, value: Value) -> None:
        """Assign one number to a whole array."""
        assert isinstance(target.slice, ast.Slice)
        if target.slice.lower or target.slice.upper or target.slice.step:
            raise KernelError("a slice is a whole array")
        whole = self.evaluate(target.value)
        if not isinstance(whole.type, Array):
            raise KernelError(f"{whole.type} cannot be filled")
        value = convert(self.builder, value, whole.type.item)
        bounds = constant(0), size_of(self.builder, whole), constant(1)
        for index in self._repeat(*bounds):
            set_element(self.builder, whole, index, value)

    # ---- control ---------------------------------------------------------------------------

    def _do_If(self, node: ast.If) -> None:
        test, builder = self.condition(node.test), self.builder
        if test.known is not None:
            self._run(node.body if test.known else node.orelse)
            return
        then, other, end = (builder.append_basic_block(name) for name in ("then", "else", "end"))
        builder.cbranch(test.llvm, then, other)
        reached, unclear = False, set[str]()
        for block, nodes in ((then, node.body), (other, node.orelse)):
            builder.position_at_end(block)
            changed = self._run_nested(nodes)
            if not self._ended():
                builder.branch(end)
                reached, unclear = True, unclear | changed
        self._forget(unclear)
        builder.position_at_end(end)
        if not reached:
            builder.unreachable()

    def _do_While(self, node: ast.While) -> None:
        builder = self.builder
        test, body, end = (builder.append_basic_block(name) for name in ("test", "body", "end"))
        builder.branch(test)
        builder.position_at_end(test)
        outside, self.read = self.read, set()
        found = self.condition(node.test)
        if found.known is None:
            builder.cbranch(found.llvm, body, end)
        else:
            builder.branch(body if found.known else end)
        builder.position_at_end(body)
        if not self._run_loop(node, test, end) and found.known:
            builder.unreachable()
        self.read |= outside

    def _do_For(self, node: ast.For) -> None:
        call = node.iter
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "range":
            given = [convert(self.builder, self.evaluate(each), int64) for each in call.args]
            if not 1 <= len(given) <= 3:
                raise KernelError("range takes 1 to 3 numbers")
            if len(given) == 1:
                given = [constant(0), *given]
            start, stop, step = [*given, constant(1)][:3]
            for index in self._repeat(start, stop, step, node):
                self._assign(node.target, index)
            return
        whole = self.evaluate(call)
        for index in self._repeat(constant(0), size_of(self.builder, whole), constant(1), node):
            self._assign(node.target, element_at(self.builder, whole, index))

    def _repeat(
        self, start: Value, stop: Value, step: Value, node: ast.For | None = None
    ) -> Iterator[Value]:
        """Yield the index of a loop, once; what the caller then does is repeated at run time.

        The body of `node` follows that.
        """
        builder = self.builder
        counter = self._first.alloca(int64.llvm)
        builder.store(start.llvm, counter)
        test, body, more, end = (
            builder.append_basic_block(name) for name in ("test", "body", "more", "end")
        )
        builder.branch(test)
        builder.position_at_end(test)
        index = builder.load(counter, typ=int64.llvm)
        builder.cbranch(self._goes_on(index, stop, step), body, end)
        builder.position_at_end(body)
        yield Value(int64, index)
        if node is not None:
            outside, self.read = self.read, set()
            self._run_loop(node, more, end)
            self.read |= outside
        else:
            builder.branch(more)
        builder.position_at_end(more)
        builder.store(builder.add(index, step.llvm, flags=("nsw",)), counter)
        builder.branch(test)
        builder.position_at_end(end)

    def _goes_on(self, index: Any, stop: Value, step: Value) -> Any:
        """Return whether an index is before the end, in the direction of the step."""
        builder = self.builder
        if step.known is not None:
            return builder.icmp_signed("<" if step.known > 0 else ">", index, stop.llvm)
        up = builder.icmp_signed(">", step.llvm, constant(0).llvm)
        below = builder.icmp_signed("<", index, stop.llvm)
        return builder.select(up, below, builder.icmp_signed(">", index, stop.llvm))

    def _run_loop(self, node: ast.For | ast.While, more: Any, end: Any) -> bool:
        """Compile the body of a loop, and go on behind it; return whether the loop has a break.

        `read` has what the loop has read so far.
        """
        if node.orelse:
            raise KernelError("loops have no else")
        loop = _Loop(more, end, dict(self.variables))
        self._loops.append(loop)
        changed = self._run_nested(node.body)
        self._loops.pop()
        if not self._ended():
            self.builder.branch(more)
        for name in changed:
            if (name, id(loop.before.get(name))) in self.read:
                raise KernelError(f"{name} has another type when the loop begins again")
        self._forget(changed)
        self.builder.position_at_end(end)
        return loop.broken

    def _run_nested(self, nodes: Sequence[ast.stmt]) -> set[str]:
        """Compile statements that may not run; return names that change their type in them.

        Afterwards names mean what they did before.
        """
        before = dict(self.variables)
        self._changed.append(set())
        self._run(nodes)
        changed = self._changed.pop()
        for name in changed & before.keys():
            self.variables[name] = before[name]
        return changed

    def _forget(self, names: set[str]) -> None:
        """Let names have no value until they are assigned to: it depends on what has run."""
        self._changed[-1] |= names
        for name in names:
            self.variables[name] = UNCLEAR

    def _do_Break(self, node: ast.Break) -> None:
        self._loops[-1].broken = True
        self.builder.branch(self._loops[-1].end)

    def _do_Continue(self, node: ast.Continue) -> None:
        self.builder.branch(self._loops[-1].more)


@cache
def _count_assignments(node: ast.FunctionDef) -> Mapping[str, int]:
    """Return how often each name is assigned to; an argument, one time more.

    What is read of a file is kept as well: most functions are compiled for several kernels.
    """
    counts: dict[str, int] = {}
    arguments = [each.arg for each in node.args.args]
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            counts[each.id] = counts.get(each.id, 0) + 1
    return {name: count + (name in arguments) for name, count in counts.items()}


def returned_type(returned: Sequence[tuple[Value, Any]]) -> Type:
    """Return the one type of all that a function returns; raises KernelError."""
    kinds = {value.type for value, _ in returned}
    if len(kinds) > 1:
        raise KernelError(f"it returns {', '.join(sorted(map(repr, kinds)))}")
    return kinds.pop() if kinds else NONE.type
