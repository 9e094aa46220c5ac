"""Tensors of a checkpoint as numpy arrays, mapped from its files.

safetensors' own numpy reader has no bfloat16, so the header is read here: eight bytes of its
length, then JSON of names, types, shapes and places.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint_files import find_safetensors
from tgi_trio.shard.cpu.mapped_file import MappedFile
from tgi_trio.shard.cpu.memory import address
from tgi_trio.shard.cpu.packing import to_float32

_TYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Checkpoint:
    """Tensors by name: float32, float16, or uint16 for bfloat16; views of the mapped files."""

    def __init__(
        self,
        folder: Path,
        base: str = "",
        *,
        given_back: Collection[Path] = (),
        kept: Collection[str] = (),
    ) -> None:
        """`base`: prefix that may be left out of every name, as checkpoints of a bare model do.

        `given_back`: files whose tensors leave memory when they are released, except those named
        in `kept`. Raises ModelLoadError for a folder without safetensors, or one that cannot be
        read.
        """
        self.folder = folder
        self._files: dict[Path, tuple[dict[str, Any], MappedFile]] = {}
        self._where = find_safetensors(folder)
        self._base = "" if any(name.startswith(base) for name in self._where) else base
        self._given_back = given_back
        self._kept = {name.removeprefix(self._base) for name in kept}

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a tensor; raises ModelLoadError for one that is missing or of another shape."""
        name = name.removeprefix(self._base)
        path = self._where.get(name)
        if path is None:
            raise ModelLoadError(f"Tensor {name!r} is missing from the checkpoint {self.folder}.")
        header, file = self._open(path)
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
        values: NDArray[Any] = file.data[first : first + count * kind.itemsize].view(kind)
        return values.reshape(shape)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a copy of a tensor [size] in float32."""
        values = self.tensor(name, (size,))
        path, first = self.place(values)
        content = self._files[path][1].read(first, first + values.nbytes)
        self.release(values)
        return to_float32(content.view(values.dtype))

    def place(self, values: NDArray[Any]) -> tuple[Path, int]:
        """Return the file that rows of a tensor lie in, and their first byte there."""
        where = address(values)
        for path, (_, file) in self._files.items():
            first = where - address(file.data)
            if 0 <= first < len(file.data):
                return path, first
        raise ValueError("These values are not of this checkpoint.")

    def release(self, values: NDArray[Any]) -> None:
        """Say that rows of a tensor have been read for the last time."""
        path, first = self.place(values)
        self._files[path][1].release(first, first + values.nbytes)

    def _open(self, path: Path) -> tuple[dict[str, Any], MappedFile]:
        if path not in self._files:
            file = MappedFile(path, gives_back=path in self._given_back)
            # find_safetensors has let the library check the file: header, offsets and length.
            begin = 8 + int.from_bytes(file.data[:8], "little")
            header = json.loads(file.data[8:begin].tobytes())
            header.pop("__metadata__", None)
            for name, entry in header.items():
                entry["data_offsets"] = [begin + place for place in entry["data_offsets"]]
                if name in self._kept:
                    file.keep(*entry["data_offsets"])
            file.release(0, begin)
            self._files[path] = header, file
        return self._files[path]
