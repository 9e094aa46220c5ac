"""Containers of a checkpoint: tensors by name, in files that are read as they are touched."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import Change, StoredTensor
from tgi_trio.shard.checkpoint.mapped_file import MappedFile


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as its file stores it: bytes, and their description in the header."""

    name: str
    dtype: str  # in the container's terms: "BF16"
    shape: tuple[int, ...]
    file: MappedFile
    first: int  # byte offset in the file
    end: int
    change: Change | None = None  # how a converter changed its numbers when it wrote the file

    @property
    def data(self) -> NDArray[np.uint8]:
        """Its bytes, read as they are touched."""
        return self.file.data[self.first : self.end]

    def take(self) -> NDArray[np.uint8]:
        """Read and return a copy of its bytes, for the last time; see `MappedFile.read`."""
        content = self.file.read(self.first, self.end)
        self.file.release(self.first, self.end)
        return content


class Container(Protocol):
    """The files of one checkpoint: safetensors or GGUF."""

    @property
    def folder(self) -> Path: ...

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor; raises ModelLoadError if it is missing or its file is damaged."""

    def close(self) -> None:
        """Close the files; arrays that were read from them stay valid."""


class Headers(Mapping[str, StoredTensor]):
    """A container's tensors, described by their headers."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._container.names:
            raise KeyError(name)
        raw = self._container.tensor(name)
        return StoredTensor(raw.file.path, raw.dtype, raw.shape, raw.first, raw.end)

    def __iter__(self) -> Iterator[str]:
        return iter(self._container.names)

    def __len__(self) -> int:
        return len(self._container.names)


def find_tensor(container: Container, name: str, shape: tuple[int, ...]) -> RawTensor:
    """Return a tensor; raises ModelLoadError if it is missing or has another shape."""
    tensor = container.tensor(name)
    if tensor.shape != shape:
        raise ModelLoadError(
            f"Tensor {name!r} in {tensor.file.path} has shape {list(tensor.shape)}, but "
            f"config.json asks for {list(shape)}."
        )
    return tensor
