"""A container with parsed headers, whose files are mapped when a tensor of theirs is requested."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.mapped_file import MappedFile


class MappedFiles:
    """The files of a checkpoint, mapped one by one."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        *,
        given_back: Collection[Path] = (),
        kept: Collection[str] = (),
        writable: bool = False,
    ) -> None:
        """`tensors`: from the headers of the files in `folder`.

        `given_back`: files whose released pages leave the page cache, except those of tensors in
        `kept`. `writable`: see `MappedFile`.
        """
        self.folder = folder
        self._tensors = tensors
        self._given_back = given_back
        self._kept = kept
        self._writable = writable
        self._files: dict[Path, MappedFile] = {}

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor; raises ModelLoadError if it is missing."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelLoadError(f"Tensor {name!r} is missing from the checkpoint {self.folder}.")
        if stored.file not in self._files:
            self._files[stored.file] = self._map(stored.file)
        file = self._files[stored.file]
        return RawTensor(
            name, stored.dtype, stored.shape, file, stored.first, stored.end, stored.change
        )

    def close(self) -> None:
        """Close the files; arrays that are views of them keep their mappings."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _map(self, path: Path) -> MappedFile:
        file = MappedFile(path, gives_back=path in self._given_back, writable=self._writable)
        held = {name: stored for name, stored in self._tensors.items() if stored.file == path}
        for name in held.keys() & set(self._kept):
            file.keep(held[name].first, held[name].end)
        end = 0
        for stored in sorted(held.values(), key=lambda stored: stored.first):
            file.release(end, stored.first)  # the header, and padding between tensors
            end = stored.end
        return file
