"""Tensors of a checkpoint as numpy arrays, mapped from its files.

safetensors' own numpy reader has no bfloat16, so the header is read here: eight bytes of its
length, then JSON of names, types, shapes and places.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint_files import find_safetensors
from tgi_trio.shard.cpu.packing import to_float32

_TYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Checkpoint:
    """Tensors by name: float32, float16, or uint16 for bfloat16; views of the mapped files."""

    def __init__(self, folder: Path, base: str = "") -> None:
        """`base`: prefix that may be left out of every name, as checkpoints of a bare model do.

        Raises ModelLoadError for a folder without safetensors, or one that cannot be read.
        """
        self.folder = folder
        self._files: dict[Path, tuple[dict[str, Any], NDArray[np.uint8]]] = {}
        self._where = find_safetensors(folder)
        self._base = "" if any(name.startswith(base) for name in self._where) else base

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a tensor; raises ModelLoadError for one that is missing or of another shape."""
        name = name.removeprefix(self._base)
        path = self._where.get(name)
        if path is None:
            raise ModelLoadError(f"Tensor {name!r} is missing from the checkpoint {self.folder}.")
        header, data = self._open(path)
        entry = header[name]
        if tuple(entry["shape"]) != shape:
            raise ModelLoadError(
                f"Tensor {name!r} in {path} has shape {entry['shape']}, but config.json "
                f"asks for {list(shape)}."
            )
        if entry["dtype"] not in _TYPES:
            raise ModelLoadError(
                f"Tensor {name!r} in {path} is of type {entry['dtype']}; served are "
                f"{', '.join(_TYPES)}."
            )
        kind = np.dtype(_TYPES[entry["dtype"]])
        first, count = entry["data_offsets"][0], math.prod(shape)
        return data[first : first + count * kind.itemsize].view(kind).reshape(shape)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a tensor [size] in float32."""
        return to_float32(self.tensor(name, (size,)))

    def _open(self, path: Path) -> tuple[dict[str, Any], NDArray[np.uint8]]:
        if path not in self._files:
            # find_safetensors has let the library check the file: header, offsets and length.
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            self._files[path] = header, np.memmap(path, np.uint8, "r", 8 + size)
        return self._files[path]
