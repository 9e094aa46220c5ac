"""GGUF: a matrix is one tensor, except for the expansion of latents to keys and values.

llama.cpp's converter splits that one in two, by head, and transposes the keys' part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import Headers, Part, split_name

KEYS, VALUES = "keys", "values"
_KINDS: Final = tuple(BY_NAME)


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """The two halves: keys [heads, latent, key], values [heads, value, latent]."""

    name = "gguf"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        keys, values = (tensors.get(f"{module}.{half}") for half in (KEYS, VALUES))
        if keys is None or values is None:
            return ()
        shapes = keys.shape, values.shape
        if not halves_fit(*shapes, (matrix.rows, matrix.columns)):
            raise ModelLoadError(
                f"The two parts of {matrix.name!r} in {keys.file} have the shapes "
                f"{list(shapes[0])} and {list(shapes[1])}, which make no matrix of {matrix.rows} x "
                f"{matrix.columns}."
            )
        return (
            Part(KEYS, f"{module}.{KEYS}", _KINDS, (keys.shape,)),
            Part(VALUES, f"{module}.{VALUES}", _KINDS, (values.shape,)),
        )


def halves_fit(keys: tuple[int, ...], values: tuple[int, ...], whole: tuple[int, int]) -> bool:
    """Return whether tensors of two shapes are the halves of a matrix [outputs, latent]."""
    if len(keys) != 3 or len(values) != 3:
        return False
    heads, latent, key = keys
    each = key + values[1]
    return values[::2] == (heads, latent) and (heads * each, latent) == whole
