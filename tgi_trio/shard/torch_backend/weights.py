"""Weights of a checkpoint as torch tensors, on one rank's device and in its dtype.

Only what a rank needs is read: slices of a mapped file touch no other pages. On a CPU, a whole
matrix whose dtype needs no change remains a view of the mapping.
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
from tgi_trio.model.matrices.references import LinearRef, NormRef, Share
from tgi_trio.shard.checkpoint.formats.exl3 import read_rings
from tgi_trio.shard.checkpoint.head_norms import read_head_norms
from tgi_trio.shard.checkpoint.lookup import Checkpoint, read_bias, read_linear, read_table
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.checkpoint.unpacked import UNPACKED_CODINGS, UnpackedMatrix, unpack_matrix
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.quantised_linear import (
    QuantisedLinear,
    QuantisedWeight,
)
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import Codes, encode
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import encode_rings
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import TrellisLinear
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

T = TypeVar("T")


class WeightSource:
    """Reads one rank's part of a checkpoint."""

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
        invariant: bool = False,
        adapted: bool = False,
    ) -> None:
        """`checkpoint`: opened as `writable`. Methods raise ModelLoadError as it does.

        `keeps_codes`: quantised linear layers stay quantised even if they are slower for it; where
        our kernels run, they always do. `activations`: the bits of activations that our kernels
        multiply with 8-bit weights. `invariant`: see `batch_invariance.py`. `adapted`:
        adapters may change the model's linears.
        """
        self.keeps_codes = keeps_codes or checkpoint.encoding is not None
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.rank = rank
        self.world_size = world_size
        self.invariant = invariant
        self.adapted = adapted
        self._checkpoint = checkpoint
        self._multiplies_codes = runs_kernels(self.device)
        self._activations = activations
        self.rounds_activations = False  # whether any linear that has been read does
        # Matrices read in a block of `giving_back`, each with the tensor that is a view of it.
        self._read: list[tuple[StoredMatrix, Callable[[], torch.Tensor | None]]] | None = None

    @property
    def rounds(self) -> bool:
        """Whether linear layers are quantised while they are loaded."""
        return self._checkpoint.encoding is not None

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def weight(self, linear: LinearRef, share: Share) -> torch.Tensor:
        """Return the part `share` of a matrix [outputs, inputs] as plain numbers.

        It is never quantised here: tables are looked up, and routers and the like are small.
        """
        stored = read_table(self._checkpoint, linear, share)
        parts = [self._matrix(part) for part in stored.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear(self, linear: LinearRef, share: Share, bias: torch.Tensor | None) -> Linear:
        """Return the part `share` of a linear layer, with its bias [outputs]."""
        stored = read_linear(self._checkpoint, linear, share)
        trellis = self._trellis(stored.parts, bias)
        if trellis is not None:
            return trellis
        taken: list[UnpackedMatrix | None] = [None for _ in stored.parts]
        if self.keeps_codes or self._multiplies_codes:
            taken = [_taken_apart(part) for part in stored.parts]
        coded = self._coded(stored.parts, taken)
        if coded is not None:
            made = CodedLinear(
                coded,
                bias,
                self.dtype,
                self.device,
                activations=self._activations,
                invariant=self.invariant,
            )
            self.rounds_activations |= made.rounds
            return made
        if self.keeps_codes and any(taken):
            return QuantisedLinear(
                [
                    self._matrix(part) if parts is None else self._as_stored(part, parts)
                    for part, parts in zip(stored.parts, taken, strict=True)
                ],
                bias,
                invariant=self.invariant,
            )
        plain = [self._matrix(part) for part in stored.parts]
        whole = plain[0] if len(plain) == 1 else torch.cat(plain)
        return Linear(whole, bias, invariant=self.invariant)

    def multiplies_codes(self, linear: LinearRef, share: Share) -> bool:
        """Return whether a kernel multiplies quantised weights of a linear layer.

        They may be stored so, or quantised while loading.
        """
        if not self._multiplies_codes or self.rounds:
            return self._multiplies_codes
        stored = read_linear(self._checkpoint, linear, share)
        return any(
            part.coding in UNPACKED_CODINGS or read_rings(part) is not None for part in stored.parts
        )

    @contextmanager
    def as_numbers(self) -> Iterator[None]:
        """Dequantise linear layers that are read in the block, unless `keeps_codes`."""
        before, self._multiplies_codes = self._multiplies_codes, False
        try:
            yield
        finally:
            self._multiplies_codes = before

    @contextmanager
    def giving_back(self) -> Iterator[None]:
        """Release the matrices that are read in the block at its end; see `MappedFile.release`.

        Except for those of which a tensor is still a view. The others have been packed or copied.
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
        """Return the bias [outputs] of a linear layer, None if it has none."""
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

    def table(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of whole numbers, int64."""
        return torch.from_numpy(self._checkpoint.table(name, shape)).to(self.device)

    def head_norms(self, ref: NormRef, mine: slice) -> torch.Tensor:
        """Return the weights of norms of the heads `mine`, [heads, size]."""
        return self._place(read_head_norms(self._checkpoint, ref, mine), self.dtype)

    def kv_scales(self, names: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[float, float]:
        """Return the scales of 8-bit keys and values, 1 if the checkpoint has none.

        `names`: of tensors that may hold each, see `kv_scales` in `model/tensors.py`.
        """
        key, value = (self._checkpoint.number(each) for each in names)
        return (1.0 if key is None else key, 1.0 if value is None else value)

    def _trellis(
        self, stored: Sequence[StoredMatrix], bias: torch.Tensor | None
    ) -> TrellisLinear | None:
        """Return a linear layer of EXL3's matrices, some of which may be plain; None without any.

        Those are plain of which a rank has a part of what is turned together.
        """
        rings = [read_rings(part) if self._multiplies_codes else None for part in stored]
        if not any(rings):
            return None
        parts = [
            self._matrix(part)
            if own is None
            else self._note_copy(part, encode_rings(own, part.shape))
            for part, own in zip(stored, rings, strict=True)
        ]
        return TrellisLinear(parts, bias, self.dtype, self.device, invariant=self.invariant)

    def _coded(
        self, stored: Sequence[StoredMatrix], taken: Sequence[UnpackedMatrix | None]
    ) -> list[Codes | torch.Tensor] | None:
        """Return codes for our kernel, and plain matrices where a part has no codes.

        None if no part has codes, or the kernel does not support those of one.
        """
        if not runs_kernels(self.device) or not any(taken):
            return None
        coded = [None if parts is None else encode(parts) for parts in taken]
        if any(c is None and parts for c, parts in zip(coded, taken, strict=True)):
            return None
        return [
            self._matrix(part) if codes is None else self._note_copy(part, codes)
            for part, codes in zip(stored, coded, strict=True)
        ]

    def _as_stored(self, stored: StoredMatrix, parts: UnpackedMatrix) -> QuantisedWeight:
        """Return a matrix as codes that are dequantised in every call."""
        return self._note_copy(stored, QuantisedWeight(parts, self.device))

    def _note_copy(self, stored: StoredMatrix, made: T) -> T:
        """Return `made`, after noting that it is no view of the matrix."""
        if self._read is not None:
            self._read.append((stored, _no_view))
        return made

    def _matrix(self, stored: StoredMatrix) -> torch.Tensor:
        view = _as_tensor(stored.dequantised())
        if self._read is not None:
            self._read.append((stored, weakref.ref(view)))
        tensor = view.to(device=self.device, dtype=self.dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # if stored [in, out]

    def _place(self, values: Floats, dtype: torch.dtype) -> torch.Tensor:
        return _as_tensor(values).to(device=self.device, dtype=dtype)


def _taken_apart(stored: StoredMatrix) -> UnpackedMatrix | None:
    """Return the parts of a matrix, None if it has none.

    Also None if it is damaged: reading it as numbers reports which tensor that is.
    """
    try:
        parts = unpack_matrix(stored)
    except ModelLoadError:  # damaged, or a share that splits a group, for which there are no planes
        return None
    if parts is None or not np.isfinite(parts.scales).all():
        return None
    return parts if parts.lows is None or np.isfinite(parts.lows).all() else None


def _as_tensor(values: NDArray[Any]) -> torch.Tensor:
    """Return a view of plain numbers of a checkpoint as a tensor."""
    if values.dtype == np.uint16:  # the bits of bfloat16
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _no_view() -> None:
    """In place of a weak reference: no tensor is a view of the matrix."""
