"""A vision tower's parameters, read from a projector of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.gguf.header import refusing
from tgi_trio.model.gguf.projectors.projector import count_heads
from tgi_trio.model.gguf.projectors.stored_parameters import Parameter, list_parameters
from tgi_trio.model.gguf.projectors.table import read_projector
from tgi_trio.shard.checkpoint.formats.gguf import read_numbers
from tgi_trio.shard.checkpoint.mapped_files import MappedFiles

Floats = NDArray[np.float32]
# (name in the tower's class, shape) -> the parameter; raises ModelLoadError.
ReadParameter = Callable[[str, tuple[int, ...]], Floats]


@contextmanager
def open_projector(file: Path) -> Iterator[ReadParameter]:
    """Open a projector, and yield what reads a parameter of its tower's class.

    That raises ModelLoadError for one that the file lacks, or has in another shape. Raises
    ModelLoadError as `read_projector` does.
    """
    model, projector = read_projector(file)
    with refusing(file):
        parameters, heads = list_parameters(model, projector), count_heads(model)
    stored = {
        name: StoredTensor(place, info.kind.name, info.shape, info.first, info.end)
        for name, (place, info) in model.tensors.items()
    }
    files = MappedFiles(file.parent, stored)

    def read(name: str, shape: tuple[int, ...]) -> Floats:
        if name not in parameters:
            raise ModelLoadError(f"{file} has no tensor for {name!r}, which its tower needs.")
        parts = [read_numbers(files.tensor(each)) for each in parameters[name].tensors]
        values = _undo(parameters[name], parts, heads)
        if [n for n in values.shape if n > 1] != [n for n in shape if n > 1]:
            raise ModelLoadError(
                f"Tensor {parameters[name].tensors[0]!r} in {file} makes a parameter of the shape "
                f"{list(values.shape)}, but {name!r} of its tower has {list(shape)}."
            )
        return np.ascontiguousarray(values.reshape(shape))

    try:
        yield read
    finally:
        files.close()


def _undo(parameter: Parameter, parts: list[Floats], heads: int) -> Floats:
    """Return a parameter of its tensors, without what the converter did to its numbers."""
    if parameter.change == "frames":
        return np.stack(parts, axis=2)
    values = np.concatenate(parts) if len(parts) > 1 else parts[0]
    match parameter.change:
        case "pairs":
            pairs = values.reshape(heads, -1, 2, *values.shape[1:])
            return pairs.swapaxes(1, 2).reshape(values.shape)
        case "plus_one":
            return values - np.float32(1)
        case "pixels":
            return np.moveaxis(values, 1, -1).reshape(len(values), -1)
        case "flat":
            return values.reshape(len(values), -1)
        case None:
            return values
