"""Weights of a checkpoint as torch's tensors, on one rank's device and in its dtype.

Only what a rank needs is read: slices of a mapped file touch no other pages. Where the dtype needs
no change a whole matrix stays a view of the mapping.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.model.matrices import LinearRef, Share
from tgi_trio.shard.checkpoint.lookup import Checkpoint, read_bias, read_linear
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix


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
    ) -> None:
        """`checkpoint`: opened as `writable`. Methods raise ModelLoadError as it does."""
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.rank = rank
        self.world_size = world_size
        self._checkpoint = checkpoint
        # What was read in a block of `giving_back`, and the tensor that is a view of it.
        self._read: list[tuple[StoredMatrix, weakref.ref[torch.Tensor]]] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def weight(self, linear: LinearRef, share: Share) -> torch.Tensor:
        """Return the matrix [outputs, inputs] of a linear layer, as much as `share` says."""
        stored = read_linear(self._checkpoint, linear, share)
        parts = [self._matrix(part) for part in stored.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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

    def _matrix(self, stored: StoredMatrix) -> torch.Tensor:
        view = _as_tensor(stored.dequantised())
        if self._read is not None:
            self._read.append((stored, weakref.ref(view)))
        tensor = view.to(device=self.device, dtype=self.dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # if stored [in, out]

    def _place(self, values: Floats, dtype: torch.dtype) -> torch.Tensor:
        return _as_tensor(values).to(device=self.device, dtype=dtype)


def _as_tensor(values: NDArray[Any]) -> torch.Tensor:
    """Return plain numbers of a checkpoint as a tensor: a view of them."""
    if values.dtype == np.uint16:  # the bits of bfloat16
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
