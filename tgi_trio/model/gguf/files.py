"""The GGUF files of a model: one file, or the parts of a split one, read as one header."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.header import Header, TensorInfo, read_header, refusing

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS: Final = 1000


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The headers of a model's files, merged."""

    metadata: Mapping[str, Any]  # of the first file
    tensors: Mapping[str, tuple[Path, TensorInfo]]
    lists: Mapping[str, range]  # of float32: offsets of their elements in the first file

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value by its key without the architecture's prefix, like `context_length`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def parse_part_name(name: str) -> tuple[str, int, int] | None:
    """Return whole name, number from 1 and count of parts, from a part's file name, or None."""
    found = _PART.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def list_parts(name: str) -> list[str]:
    """Return the names of all parts of the model that `name` belongs to; raises ModelLoadError."""
    found = parse_part_name(name)
    if found is None:
        return [name]
    whole, number, count = found
    if not 0 < number <= count <= _MOST_PARTS:
        raise ModelLoadError(f"{name} cannot be the name of a part of a GGUF model.")
    return [f"{whole}-{each:05d}-of-{count:05d}{SUFFIX}" for each in range(1, count + 1)]


def find_gguf(folder: Path) -> list[Path]:
    """Return the files of the only model in a folder, in order; [] if there is none."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def read_model(files: list[Path], *, vocabulary: bool = False) -> GgufModel:
    """Read the headers of all of a model's files, in order.

    Several callers need them at every start, so the latest results are cached while the files are
    unchanged, without the `vocabulary`. Raises ModelLoadError as `read_header` does, and for parts
    that do not belong together.
    """
    if vocabulary:
        return _join(files, [read_header(file, vocabulary=True) for file in files])
    with refusing(files[0]):
        states = [file.stat() for file in files]
    return _read(tuple(files), tuple((state.st_size, state.st_mtime_ns) for state in states))


@lru_cache(maxsize=2)
def _read(files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> GgufModel:
    return _join(files, [read_header(file) for file in files])


def _join(files: Sequence[Path], headers: Sequence[Header]) -> GgufModel:
    """Return the files' headers merged; raises ModelLoadError if they do not belong together."""
    tensors: dict[str, tuple[Path, TensorInfo]] = {}
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        split = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1)
        if split != (number, len(files)):
            raise ModelLoadError(
                f"{file} says that it is part {split[0]!r} (from 0) of {split[1]!r}, and is taken "
                f"for part {number} of {len(files)}: the parts of a split model belong into one "
                "folder, under their own names."
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise ModelLoadError(
                f"{file} holds tensor {min(twice)!r}, which another part holds, too."
            )
        tensors |= {name: (file, info) for name, info in header.tensors.items()}
    stated = headers[0].metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise ModelLoadError(
            f"{files[0]} says that there are {stated!r} tensors, and there are {len(tensors)}."
        )
    return GgufModel(headers[0].metadata, tensors, headers[0].lists)
