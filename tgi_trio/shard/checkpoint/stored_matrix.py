"""A matrix of a checkpoint, whichever way its numbers are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.config import ModelConfig
from tgi_trio.shard.checkpoint.container import Container
from tgi_trio.shard.checkpoint.numbers import to_float32

Array = NDArray[Any]


class StoredMatrix(Protocol):
    """A matrix [outputs, inputs], or a part of one. Nothing is read before it is asked for.

    `dequantised` is what it means, and what a backend reads that has no kernel for the format; one
    that has takes the `planes`, whose names and layout are the format's.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def coding(self) -> str:
        """What the planes hold: "numbers", "affine" (codes, scales, zero points), "affine in any
        order" (of groups), "int8" (no zero points), "table", "e4m3", "nvfp4", or a type of GGUF's.
        """

    @property
    def bits(self) -> int:
        """Of one number as it is stored, without its share of scales."""

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: there are no scales."""

    def rows(self, part: slice) -> StoredMatrix:
        """Return some outputs, a run of them."""

    def columns(self, part: slice) -> StoredMatrix:
        """Return some inputs, a run of them. One that splits a group has no planes."""

    def dequantised(self) -> Array:
        """Return plain numbers, see `numbers.py`; a view of the file where it holds those."""

    def planes(self) -> Mapping[str, Array]:
        """Return what is stored, by name. Raises ModelLoadError for a part that splits a group."""

    def place(self) -> tuple[Path, int]:
        """Return the file it lies in and its first byte there: reading goes on in this order."""

    def release(self) -> None:
        """Note that it has been read for the last time; called by any thread."""


class PlainNumbers(ABC):
    """What a `StoredMatrix` of plain numbers says of itself; float32, unless it has others."""

    __slots__ = ()

    @property
    def coding(self) -> str:
        return "numbers"

    @property
    def bits(self) -> int:
        return 32

    @property
    def group(self) -> int:
        return 0

    @abstractmethod
    def dequantised(self) -> Array: ...

    def planes(self) -> Mapping[str, Array]:
        return {"numbers": self.dequantised()}


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of as many inputs, one below the other.

    They stay apart, since those that one operation multiplies may be stored in different ways.
    """

    parts: Sequence[StoredMatrix]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantised(self) -> Array:
        """Return plain numbers: float32, or those of the only part."""
        if len(self.parts) == 1:
            return self.parts[0].dequantised()
        return np.concatenate([to_float32(part.dequantised()) for part in self.parts])


class WeightFormat(Protocol):
    """One way of storing matrices. Vectors are plain numbers in every format."""

    @property
    def name(self) -> str: ...

    def claims(self, config: ModelConfig, container: Container) -> bool:
        """Return whether a checkpoint is in this format."""

    def matrix(
        self, container: Container, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        """Return the matrix [outputs, inputs] that plain numbers would be called `name`.

        `transposed`: the file has [inputs, outputs]. Raises ModelLoadError where a tensor of it is
        missing, of another shape or of a type that the format does not have.
        """
