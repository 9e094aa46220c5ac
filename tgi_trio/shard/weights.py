"""Checkpoint tensors by name: memory-mapped safetensors, checked, sliced per rank.

Only what a rank needs is read: slices of a mapped file touch no other pages. Where the dtype needs
no change a whole tensor stays a view of the mapping.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint_files import find_safetensors, open_safetensors


class WeightSource:
    """Tensors of one checkpoint as one rank wants them. A context manager: closes its files."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        rank: int = 0,
        world_size: int = 1,
        base: str = "",
    ) -> None:
        """Map `folder`; raises ModelLoadError as `find_safetensors` does.

        `base`: prefix that may be left out of every name, as checkpoints of a bare model do.
        """
        self.folder = folder
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.rank = rank
        self.world_size = world_size
        self._where = find_safetensors(folder)
        if base and not any(name.startswith(base) for name in self._where):
            self._base = base
        else:
            self._base = ""
        self._files: dict[Path, Any] = {}
        self._open_files = ExitStack()

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return name.removeprefix(self._base) in self._where

    @property
    def names(self) -> list[str]:
        return sorted(self._where)

    def block(self, count: int) -> slice:
        """Return this rank's part of `count` rows; the last rank's may be shorter than the others'.

        Raises ModelLoadError when a rank would get none.
        """
        each = -(-count // self.world_size)
        if each * (self.world_size - 1) >= count:
            raise ModelLoadError(
                f"{count} rows cannot be split over {self.world_size} shards; choose a smaller "
                "--num-shard."
            )
        return slice(self.rank * each, min(count, (self.rank + 1) * each))

    def share(self, count: int, what: str) -> slice:
        """Return this rank's part of `count` equal things; raises ModelLoadError unless even."""
        if count % self.world_size:
            raise ModelLoadError(
                f"{count} {what} cannot be split over {self.world_size} shards; choose a "
                f"--num-shard that divides {count}."
            )
        each = count // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def vector(
        self, name: str, size: int, part: slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return tensor `name` [size], or the `part` of it, in `dtype` (the source's own)."""
        return self._read(name, (size,), (part,), dtype)

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Return matrix `name` as [out, in] = `shape`, cut to `rows` and `columns`.

        `transposed`: the file holds it as [in, out], as GPT-2's Conv1D does.
        """
        if transposed:
            flipped = self._read(name, shape[::-1], (columns, rows))
            return flipped.t().contiguous()
        return self._read(name, shape, (rows, columns))

    def tensor(self, name: str, shape: tuple[int, ...], first: slice | None = None) -> torch.Tensor:
        """Return tensor `name` of any rank, cut to `first` on its first dimension."""
        return self._read(name, shape, (first,) + (None,) * (len(shape) - 1))

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: tuple[slice | None, ...],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        name = name.removeprefix(self._base)
        view = self._view(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise ModelLoadError(
                f"Tensor {name!r} in {self._where[name]} has shape {list(found)}, but config.json "
                f"asks for {list(shape)}."
            )
        try:
            if all(part in (None, slice(0, size)) for part, size in zip(parts, shape, strict=True)):
                tensor = self._file(self._where[name]).get_tensor(name)
            else:
                tensor = view[tuple(part or slice(None) for part in parts)]
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"Tensor {name!r} in {self._where[name]} cannot be read: {error}."
            ) from error
        result: torch.Tensor = tensor.to(device=self.device, dtype=dtype or self.dtype)
        return result

    def _view(self, name: str) -> Any:
        if name not in self._where:
            raise ModelLoadError(f"Tensor {name!r} is missing from the checkpoint {self.folder}.")
        try:
            return self._file(self._where[name]).get_slice(name)
        except SafetensorError as error:
            raise ModelLoadError(
                f"Tensor {name!r} is missing from {self._where[name]}: {error}."
            ) from error

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open_files.enter_context(open_safetensors(path, "pt"))
        return self._files[path]
