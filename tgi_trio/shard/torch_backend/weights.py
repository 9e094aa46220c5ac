"""Weights of a checkpoint as torch's tensors, on one rank's device and in its dtype.

Only what a rank needs is read: slices of a mapped file touch no other pages. Where the dtype needs
no change a whole matrix stays a view of the mapping.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices import LinearRef, Share
from tgi_trio.shard.checkpoint.lookup import Checkpoint, read_bias, read_linear, read_table
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.checkpoint.taken_apart import TAKEN_APART, Parts, take_apart
from tgi_trio.shard.torch_backend.layers.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.quantised_linear import QuantisedLinear, QuantisedWeight
from tgi_trio.shard.torch_backend.layers.stored_codes import Codes, encode
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

T = TypeVar("T")


class WeightSource:
    """One checkpoint as one rank wants it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        rank: int = 0,
        world_size: int = 1,
        keeps_codes: bool = False,
        activations: int = 16,
    ) -> None:
        """`checkpoint`: opened as `writable`. Methods raise ModelLoadError as it does.

        `keeps_codes`: quantised linear layers stay as small as they are, also where they are slower
        for it. Where our kernels run they always do. `activations`: bits of what is multiplied with
        weights of 8 bits there.
        """
        self.keeps_codes = keeps_codes or checkpoint.encoding is not None
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.rank = rank
        self.world_size = world_size
        self._checkpoint = checkpoint
        self._multiplies_codes = runs_kernels(self.device)
        self._activations = activations
        self.rounds_activations = False  # before any product that has been read
        # What was read in a block of `giving_back`, and the tensor that is a view of it.
        self._read: list[tuple[StoredMatrix, Callable[[], torch.Tensor | None]]] | None = None

    @property
    def rounds(self) -> bool:
        """Whether linear layers are rounded while they are loaded."""
        return self._checkpoint.encoding is not None

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def weight(self, linear: LinearRef, share: Share) -> torch.Tensor:
        """Return a matrix [outputs, inputs] as plain numbers, as much as `share` says.

        Not rounded, whatever is asked for: tables are looked up, routers and the like are small.
        """
        stored = read_table(self._checkpoint, linear, share)
        parts = [self._matrix(part) for part in stored.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear(self, linear: LinearRef, share: Share, bias: torch.Tensor | None) -> Linear:
        """Return a linear layer, as much as `share` says, with its bias [outputs]."""
        stored = read_linear(self._checkpoint, linear, share)
        taken: list[Parts | None] = [None for _ in stored.parts]
        if self.keeps_codes or self._multiplies_codes:
            taken = [_taken_apart(part) for part in stored.parts]
        coded = self._coded(stored.parts, taken)
        if coded is not None:
            made = CodedLinear(coded, bias, self.dtype, self.device, activations=self._activations)
            self.rounds_activations |= made.rounds
            return made
        if self.keeps_codes and any(taken):
            return QuantisedLinear(
                [
                    self._matrix(part) if parts is None else self._as_stored(part, parts)
                    for part, parts in zip(stored.parts, taken, strict=True)
                ],
                bias,
            )
        plain = [self._matrix(part) for part in stored.parts]
        return Linear(plain[0] if len(plain) == 1 else torch.cat(plain), bias)

    def multiplies_codes(self, linear: LinearRef, share: Share) -> bool:
        """Return whether a kernel multiplies some of a linear layer as it is stored, or rounded."""
        if not self._multiplies_codes or self.rounds:
            return self._multiplies_codes
        stored = read_linear(self._checkpoint, linear, share)
        return any(part.coding in TAKEN_APART for part in stored.parts)

    @contextmanager
    def as_numbers(self) -> Iterator[None]:
        """Have linear layers that are read in the block as plain numbers, if memory allows it."""
        before, self._multiplies_codes = self._multiplies_codes, False
        try:
            yield
        finally:
            self._multiplies_codes = before

    @contextmanager
    def giving_back(self) -> Iterator[None]:
        """Release the matrices that are read in the block at its end; see `MappedFile.release`.

        But for those of which a tensor is a view that is still there. What was packed takes their
        place.
        """
        self._read = []
        try:
            yield
        finally:
            read, self._read = self._read, None
            for stored, view in read:
                if view() is None:
                    stored.release()

    def bias(self, linear: LinearRef, share: Share) -> torch.Tensor | None:
        """Return the bias [outputs] of a linear layer, None where it has none."""
        values = read_bias(self._checkpoint, linear, share)
        return None if values is None else self._place(values, self.dtype)

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return tensor `name` [size] in `dtype` (the source's own)."""
        return self._place(self._checkpoint.vector(name, size), dtype or self.dtype)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[slice, ...],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a `cut` of a small tensor [*shape] in `dtype` (the source's own)."""
        return self._place(self._checkpoint.array(name, shape)[cut], dtype or self.dtype)

    def kv_scales(self, names: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[float, float]:
        """Return the scales of 8-bit keys and values, 1 where the checkpoint has none.

        `names`: of tensors that may hold either, see `kv_scales` in `model/tensors.py`.
        """
        key, value = (self._checkpoint.number(each) for each in names)
        return (1.0 if key is None else key, 1.0 if value is None else value)

    def _coded(
        self, stored: Sequence[StoredMatrix], taken: Sequence[Parts | None]
    ) -> list[Codes | torch.Tensor] | None:
        """Return matrices for our kernel, plain ones beside them; None where it has none of them,
        or one that it does not know.
        """
        if not runs_kernels(self.device) or not any(taken):
            return None
        coded = [None if parts is None else encode(parts) for parts in taken]
        if any(c is None and parts for c, parts in zip(coded, taken, strict=True)):
            return None
        return [
            self._matrix(part) if codes is None else self._noted(part, codes)
            for part, codes in zip(stored, coded, strict=True)
        ]

    def _as_stored(self, stored: StoredMatrix, parts: Parts) -> QuantisedWeight:
        """Return a matrix as codes that become numbers in every call."""
        return self._noted(stored, QuantisedWeight(parts, self.device))

    def _noted(self, stored: StoredMatrix, made: T) -> T:
        """Return what was made of a matrix, and is no view of it."""
        if self._read is not None:
            self._read.append((stored, _nothing))
        return made

    def _matrix(self, stored: StoredMatrix) -> torch.Tensor:
        view = _as_tensor(stored.dequantised())
        if self._read is not None:
            self._read.append((stored, weakref.ref(view)))
        tensor = view.to(device=self.device, dtype=self.dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # if stored [in, out]

    def _place(self, values: Floats, dtype: torch.dtype) -> torch.Tensor:
        return _as_tensor(values).to(device=self.device, dtype=dtype)


def _taken_apart(stored: StoredMatrix) -> Parts | None:
    """Return the parts of a matrix, None where it has none.

    Nor where it is damaged: who reads it as numbers says which tensor that is.
    """
    try:
        parts = take_apart(stored)
    except ModelLoadError:  # or a part that splits a group, which has no planes
        return None
    if parts is None or not np.isfinite(parts.scales).all():
        return None
    return parts if parts.lows is None or np.isfinite(parts.lows).all() else None


def _as_tensor(values: NDArray[Any]) -> torch.Tensor:
    """Return plain numbers of a checkpoint as a tensor: a view of them."""
    if values.dtype == np.uint16:  # the bits of bfloat16
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _nothing() -> None:
    """What views a matrix that has been copied."""
