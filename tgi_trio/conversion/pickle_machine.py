"""A pickle interpreter that builds descriptions of tensors, and nothing else.

A pickle is a program: GLOBAL names any function of any module and REDUCE calls it. So pickles are
never given to Python's unpickler. `pickletools.genops` splits them into opcodes, and the few that
`torch.save` writes are executed here. Names are looked up in a fixed table; nothing is imported,
and only the builders below are called. A file that requires more is rejected, with the name of what
it requires.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from tgi_trio.errors import ModelLoadError

MOST_OPCODES: Final = 20_000_000  # a tensor takes about fifty

# Storage classes, and dtypes of tensors with an untyped storage -> safetensors' names of the
# dtypes.
DTYPES: Final[Mapping[str, str]] = {
    "torch.DoubleStorage": "F64", "torch.FloatStorage": "F32", "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16", "torch.LongStorage": "I64", "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16",
    "torch.bfloat16": "BF16", "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16",
    "torch.int8": "I8", "torch.uint8": "U8", "torch.bool": "BOOL", "torch.uint16": "U16",
    "torch.uint32": "U32", "torch.uint64": "U64", "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}  # fmt: skip
UNTYPED: Final = "torch.storage.UntypedStorage"
ITEM_SIZES: Final[Mapping[str, int]] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Name:
    """Result of GLOBAL on the stack: a known name, which represents only itself."""

    text: str


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """The object of a persistent id: a byte range elsewhere in the file."""

    key: str
    dtype: str  # in `ITEM_SIZES`; "" if the tensor has it
    count: int  # elements, or bytes without a dtype


@dataclass(frozen=True, slots=True)
class Tensor:
    """The description of a tensor: a strided view of a storage. Counts are of elements."""

    storage: PickledStorage
    dtype: str  # in `ITEM_SIZES`
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Marks the beginning of an opcode's operands on the stack."""


_MARK: Final = _Mark()


@dataclass
class _Machine:
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while not isinstance(self.stack[place], _Mark):
            if place == 0:
                raise ValueError("a mark is missing")
            place -= 1
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items


def run_pickle(stream: BinaryIO) -> Any:
    """Return the object that a pickle describes; leaves `stream` after it.

    Dicts, lists, tuples, strings, numbers, `PickledStorage` and `Tensor`. Raises ModelLoadError if
    the pickle is damaged, or requires anything else, which it names.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if opcode.name == "STOP":
                return machine.pop()
            if count >= MOST_OPCODES:
                raise ModelLoadError(f"its pickle has more than {MOST_OPCODES} opcodes")
            step = _OPCODES.get(opcode.name)
            if step is None:
                raise ModelLoadError(
                    f"its pickle uses {opcode.name}, which no tensor needs: nothing of it was run"
                )
            step(machine, argument)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise ModelLoadError(f"its pickle is damaged: {error}") from error
    raise ModelLoadError("its pickle is damaged: it has no end")


# ---- builders ------------------------------------------------------------------------------


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a size, stride or offset is {value!r:.40}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or len(values) > 64:
        raise ValueError("a shape is no tuple")
    return tuple(map(_whole, values))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    """`_rebuild_tensor_v2`; `rest`: whether it requires a gradient, hooks, and metadata."""
    if len(rest) > 2 and rest[2]:
        raise ModelLoadError("it holds a tensor that is conjugated or negated as it is read")
    if not isinstance(storage, PickledStorage) or not storage.dtype:
        raise ValueError("a tensor has no typed storage")
    return Tensor(storage, storage.dtype, _whole(offset), _wholes(shape), _wholes(strides))


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any,
    metadata: Any = None,
) -> Tensor:  # fmt: skip
    """`_rebuild_tensor_v3`: the dtype is the tensor's, and the storage has bytes."""
    if metadata:
        raise ModelLoadError("it holds a tensor that is conjugated or negated as it is read")
    if not isinstance(storage, PickledStorage) or not isinstance(dtype, Name):
        raise ValueError("a tensor has no storage")
    kind = DTYPES[dtype.text]
    return Tensor(storage, kind, _whole(offset), _wholes(shape), _wholes(strides))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _ordered_dict(*items: Any) -> dict[Any, Any]:
    if items:  # since Python 3, items are set one by one afterwards
        raise ModelLoadError("it was written by Python 2: load and save it once more with torch")
    return {}


_BUILDERS: Final[Mapping[str, Callable[..., Any]]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _wholes,
}


# What makes tensors of subclasses.
_SUBCLASSES: Final = (
    *("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"),
)


def _name(machine: _Machine, module: str, name: str) -> None:
    text = f"{module}.{name}"
    if text in _SUBCLASSES or text.startswith("torchao."):
        raise ModelLoadError(
            f"its pickle asks for {text:.200}, as tensors of torchao's kinds do: nothing of it was "
            "run. Open the model with transformers and torchao, and save it again with "
            "save_pretrained, which writes safetensors now"
        )
    if text not in _BUILDERS and text not in DTYPES and text != UNTYPED:
        raise ModelLoadError(
            f"its pickle asks for {text:.200}, which is no part of a tensor: nothing of it was run"
        )
    machine.stack.append(Name(text))


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, function = machine.pop(), machine.pop()
    if not isinstance(function, Name) or function.text not in _BUILDERS:
        raise ValueError(f"it calls {function!r:.60}")
    if not isinstance(arguments, tuple):
        raise ValueError("a call has no arguments")
    machine.stack.append(_BUILDERS[function.text](*arguments))


def _build(machine: _Machine, _: Any) -> None:
    """Ignore attributes of a state dict (versions of its modules), which do not concern tensors."""
    machine.pop()
    if not isinstance(machine.stack[-1], dict):
        raise ValueError("something that is no dict is given attributes")


def _persistent(machine: _Machine, _: Any) -> None:
    """("storage", class, key, device, count); older files add the storage of which it is a view."""
    found = machine.pop()
    if not isinstance(found, tuple) or len(found) not in (5, 6) or found[0] != "storage":
        raise ValueError("a persistent id is no storage")
    kind, key, count = found[1], found[2], found[4]
    if not isinstance(kind, Name) or not isinstance(key, str):
        raise ValueError("a storage has no class or no name")
    if len(found) == 6 and found[5] is not None:
        raise ModelLoadError("it holds a storage that is a view of another, as torch 0.3 wrote it")
    dtype = "" if kind.text == UNTYPED else DTYPES[kind.text]
    machine.stack.append(PickledStorage(key, dtype, _whole(count)))


# ---- opcodes -------------------------------------------------------------------------------


def _key(value: Any) -> Any:
    # Only strings and numbers: the hash of nested tuples recurses as deep as the file demands.
    if not isinstance(value, str | int):
        raise ValueError("a key is neither text nor number")
    return value


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError("an item is set of something that is no dict")
    for i in range(0, len(items), 2):
        target[_key(items[i])] = items[i + 1]


def _extend(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise ValueError("something is appended to what is no list")
    target.extend(items)


def _global(machine: _Machine, argument: Any) -> None:
    module, _, name = str(argument).partition(" ")
    _name(machine, module, name)


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a name is no text")
    _name(machine, module, name)


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        if len(machine.stack) < count:
            raise ValueError("the stack is empty")
        items = tuple(machine.stack[len(machine.stack) - count :])
        del machine.stack[len(machine.stack) - count :]
        machine.stack.append(items)

    return step


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(value)


def _remember(machine: _Machine, argument: Any) -> None:
    place = len(machine.memo) if argument is None else int(argument)
    machine.memo[place] = machine.stack[-1]


def _recall(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.memo[int(argument)])


def _nothing(machine: _Machine, _: Any) -> None:
    """Do nothing: PROTO and FRAME only help a reader."""


_OPCODES: Final[Mapping[str, Callable[[_Machine, Any], None]]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _nothing),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT"),
            *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
            *("SHORT_BINSTRING", "BINSTRING", "STRING"),
        ),
        _push,
    ),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _recall),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "LIST": lambda machine, _: machine.stack.append(machine.pop_to_mark()),
    "DICT": lambda machine, _: _new_dict(machine),
    "SETITEM": lambda machine, _: _set_items(machine, _last_two(machine)),
    "SETITEMS": lambda machine, _: _set_items(machine, machine.pop_to_mark()),
    "APPEND": lambda machine, _: _extend(machine, [machine.pop()]),
    "APPENDS": lambda machine, _: _extend(machine, machine.pop_to_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _persistent,
}


def _last_two(machine: _Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


def _new_dict(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({})
    _set_items(machine, items)
