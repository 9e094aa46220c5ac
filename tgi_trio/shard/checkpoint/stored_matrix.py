"""A matrix of a checkpoint, independent of its format."""

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
    """A matrix [outputs, inputs], or a part of one. Nothing is read before it is requested.

    `dequantised` returns its values, for backends without a kernel for the format. Backends with a
    kernel read `planes`, whose names and layout are the format's.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def coding(self) -> str:
        """The kind of planes: "numbers", "affine" (codes, scales, zero points), "affine in any
        order" (with groups that are not contiguous), "int8" (no zero points), "lowered" (scales
        and lows), "lowered across outputs", "table", "e4m3", "nvfp4", a codebook of EXL3
        ("3inst", "mcg", "mul1", "mul1 of half bits"; "turned in part": for numbers alone), or a
        GGUF type.
        """

    @property
    def bits(self) -> int:
        """Bits of a stored number, without its share of scales."""

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: there are no scales."""

    def rows(self, part: slice) -> StoredMatrix:
        """Return a range of outputs."""

    def columns(self, part: slice) -> StoredMatrix:
        """Return a range of inputs. One that splits a group has no planes."""

    def dequantised(self) -> Array:
        """Return numbers, see `numbers.py`; a view of the file if it is not quantised."""

    def planes(self) -> Mapping[str, Array]:
        """Return the stored arrays by name; raises ModelLoadError if a part splits a group."""

    def place(self) -> tuple[Path, int]:
        """Return its file and its first byte there: matrices are best read in this order."""

    def release(self) -> None:
        """Note that it has been read for the last time; called from any thread."""


class PlainNumbers(ABC):
    """The common part of `StoredMatrix` classes that are not quantised; float32 by default."""

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
    """Stacked matrices with the same inputs.

    They stay separate, since the matrices of one operation may be stored in different ways.
    """

    parts: Sequence[StoredMatrix]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantised(self) -> Array:
        """Return floating-point numbers: float32, or those of the only part."""
        if len(self.parts) == 1:
            return self.parts[0].dequantised()
        return np.concatenate([to_float32(part.dequantised()) for part in self.parts])


class WeightFormat(Protocol):
    """A way to store matrices. Vectors are never quantised."""

    @property
    def name(self) -> str: ...

    def claims(self, config: ModelConfig, container: Container) -> bool:
        """Return whether a checkpoint is in this format."""

    def matrix(
        self, container: Container, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        """Return the matrix [outputs, inputs] whose unquantised name is `name`.

        `transposed`: the file has [inputs, outputs]. Raises ModelLoadError if one of its tensors is
        missing, or has another shape or a type that the format does not have.
        """
