"""The numbers of an adapter's tensors, out of the content of its file, as float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.model.adapters.files import Adapter, Named
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_KINDS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


def read_bytes(path: Path) -> bytes:
    """Return the content of one of an adapter's files; raises ModelLoadError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {tell_reason(error, path)}") from error


def read_rows(tensor: StoredTensor, content: bytes, rows: slice) -> Floats:
    """Return some rows of a matrix."""
    kind, width = np.dtype(_KINDS[tensor.dtype]), tensor.shape[1]
    first = tensor.first + rows.start * width * kind.itemsize
    count = (rows.stop - rows.start) * width
    return to_float32(np.frombuffer(content, kind, count, first)).reshape(-1, width)


def read_tensor(adapter: Adapter, named: Named, content: bytes) -> Floats:
    """Return a tensor; raises ModelLoadError, naming it, for infinite values and NaN."""
    name, tensor = named
    kind, count = np.dtype(_KINDS[tensor.dtype]), math.prod(tensor.shape)
    if tensor.first + count * kind.itemsize > len(content):
        raise ModelLoadError(f"{tensor.file} has changed while it was read: {name} is cut off")
    raw = np.frombuffer(content, kind, count, tensor.first)
    values = to_float32(raw).reshape(tensor.shape).copy()  # else a view of what is read alone
    if not np.isfinite(values).all():
        raise ModelLoadError(f"{name} of {adapter.folder} holds numbers that are infinite or none")
    return values
