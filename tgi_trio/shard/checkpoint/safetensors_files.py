"""The container that checkpoints come in: safetensors, one file or several.

The library's own reader of numpy arrays has no bfloat16, so the files are mapped here.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import read_headers
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.mapped_file import MappedFile


class SafetensorsFiles:
    """A folder of safetensors, mapped file by file as tensors are asked for."""

    def __init__(
        self,
        folder: Path,
        *,
        given_back: Collection[Path] = (),
        kept: Collection[str] = (),
        writable: bool = False,
    ) -> None:
        """Raises ModelLoadError as `read_headers` does.

        `given_back`: files that leave memory as they are released, but for the tensors `kept`.
        `writable`: see `MappedFile`.
        """
        self.folder = folder
        self._tensors = read_headers(folder)
        self._given_back = given_back
        self._kept = kept
        self._writable = writable
        self._files: dict[Path, MappedFile] = {}

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor; raises ModelLoadError where it is missing."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelLoadError(f"Tensor {name!r} is missing from the checkpoint {self.folder}.")
        if stored.file not in self._files:
            self._files[stored.file] = self._map(stored.file)
        file = self._files[stored.file]
        return RawTensor(name, stored.dtype, stored.shape, file, stored.first, stored.end)

    def close(self) -> None:
        """Close the files; arrays that were made of them keep their mappings."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _map(self, path: Path) -> MappedFile:
        file = MappedFile(path, gives_back=path in self._given_back, writable=self._writable)
        held = {name: stored for name, stored in self._tensors.items() if stored.file == path}
        for name in held.keys() & set(self._kept):
            file.keep(held[name].first, held[name].end)
        file.release(0, min(stored.first for stored in held.values()))  # the header
        return file
