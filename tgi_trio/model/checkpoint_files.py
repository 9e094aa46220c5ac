"""The files of a checkpoint folder, and the headers that describe every tensor.

A safetensors file begins with the length of its header in eight bytes, then JSON with names,
dtypes, shapes and offsets. It is parsed and checked here, so that neither torch nor the safetensors
library is needed to know what a checkpoint contains.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import open_file, parse_json, read_file

_INDEX = "model.safetensors.index.json"
_HQQ_FILE = "qmodel.pt"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
_LONGEST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
# Bits of a number. Newer dtypes are not in this table: they are not read, but named in messages.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True)
class Change:
    """How a converter changed a tensor in ways that formats do not record."""

    # Number of heads whose rows were reordered: rows that are rotated together were half a head
    # apart, and are now neighbours. 0: not reordered.
    rotary_heads: int = 0
    plus_one: bool = False  # 1 was added to every number
    exponential: bool = False  # every number x was replaced by -exp(x)
    # [outputs, inputs] in the file, [inputs, outputs] in a checkpoint, as in `shape`.
    transposed: bool = False
    # Rows were grouped by key head: its queries, `queries_each`, its key, its value. Now they are
    # grouped by kind: all queries, all keys, all values. 0: not regrouped.
    key_heads: int = 0
    queries_each: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header's entry of one tensor."""

    file: Path
    dtype: str  # as named by safetensors or GGUF: "BF16", "Q4_K"
    shape: tuple[int, ...]
    first: int  # byte offset in the file
    end: int
    change: Change | None = None


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint folder by name.

    Raises ModelLoadError for a folder without safetensors (naming the command that converts it),
    a file that is missing, truncated or unreadable, and an index that does not fit its files.
    """
    named = _read_index(folder)
    files = sorted({folder / file for file in named.values()})
    if not named:
        files = sorted(folder.glob("*.safetensors"))
        if (folder / "model.safetensors") in files:  # adapters and draft heads may be beside it
            files = [folder / "model.safetensors"]
    if not files:
        raise ModelLoadError(_no_safetensors(folder))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(read_file_header(file))
    for name, file_name in named.items():
        if name not in tensors:
            raise ModelLoadError(
                f"Tensor {name!r} is missing from {folder / file_name}, where {_INDEX} has it."
            )
    return tensors


def find_safetensors(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file of a checkpoint folder; raises as `read_headers` does."""
    return {name: tensor.file for name, tensor in read_headers(folder).items()}


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors; raises as `read_headers` does."""
    return frozenset(_read_index(folder) or read_headers(folder))


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name; empty if there is no index."""
    path = folder / _INDEX
    try:
        table = parse_json(read_file(path))["weight_map"]
        named = {str(name): str(file) for name, file in table.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = tell_reason(error, path)
        raise ModelLoadError(f"{path} cannot be read as an index of weights: {why}") from error
    missing = sorted({file for file in named.values() if not (folder / file).exists()})
    if missing:
        raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names.")
    return named


def read_file_header(file: Path, longest: int = _LONGEST_HEADER) -> dict[str, StoredTensor]:
    """Return every tensor of one safetensors file by name.

    `longest`: limit of the header in bytes. Raises ModelLoadError for a file that is missing,
    truncated or unreadable.
    """
    try:
        size = file.stat().st_size
        with open_file(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(longest, size - 8):
                raise ValueError(f"its header cannot be {length} bytes long")
            header = parse_json(opened.read(length), _refuse_twice)
        return _check_header(file, header, 8 + length, size)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{file} cannot be read as safetensors ({error}); it may be truncated: "
            f"it has {size} bytes. Download it again."
        ) from error


def _check_header(
    file: Path, header: dict[str, Any], begin: int, file_size: int
) -> dict[str, StoredTensor]:
    """Return the tensors of a parsed header; raises ValueError unless they fill the data exactly.

    Their bytes reach from `begin` to the end of the file.
    """
    header.pop("__metadata__", None)
    tensors, total, data_size = {}, 0, file_size - begin
    for name, entry in header.items():
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        first, end = entry["data_offsets"]
        if any(type(count) is not int for count in (*shape, first, end)):
            raise ValueError(f"shape and offsets of tensor {name!r} are no whole numbers")
        if not 0 <= first <= end <= data_size or any(count < 0 for count in shape):
            raise ValueError(f"tensor {name!r} lies outside of it")
        if dtype in _BITS and (end - first) * 8 != math.prod(shape) * _BITS[dtype]:
            raise ValueError(f"tensor {name!r} is not as large as its shape says")
        total += end - first
        tensors[name] = StoredTensor(file, dtype, shape, begin + first, begin + end)
    if total != data_size:
        raise ValueError(f"its tensors are {total} bytes and its data {data_size}")
    place = begin
    for name in sorted(tensors, key=lambda name: (tensors[name].first, tensors[name].end)):
        if tensors[name].first != place:
            raise ValueError(f"tensor {name!r} lies over another one")
        place = tensors[name].end
    return tensors


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises ValueError for a repeated key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise ValueError(f"{twice!r} is there twice")
    return found


def _no_safetensors(folder: Path) -> str:
    others = sorted(file.name for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    if not others:
        return f"{folder} holds no weights: there is no .safetensors file in it."
    if _HQQ_FILE in others:
        return (
            f"{folder} holds {_HQQ_FILE}, in which HQQ's own library stores quantised weights: a "
            "pickle, which is code and is not opened. HQQ is read from .safetensors, as "
            "transformers saves it; the original model will do as well."
        )
    return (
        f"{folder} holds {others[0]} but no .safetensors, the only format served. .bin and .pt are "
        f"converted by: python -m tgi_trio download-weights {shlex.quote(str(folder))}"
    )
