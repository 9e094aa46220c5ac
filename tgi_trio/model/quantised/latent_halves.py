"""The expansion of latents to keys and values in two tensors, as mlx-lm stores it.

It splits the matrix by head, as llama.cpp does (`gguf_layout.py`), and may quantise the halves.
"""

from __future__ import annotations

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.mlx_names import KEYS, VALUES
from tgi_trio.model.quantised.layout import Headers, split_name


def find_halves(matrix: MatrixRef, tensors: Headers) -> tuple[MatrixRef, MatrixRef] | None:
    """Return keys and values of an expansion [heads * (key + value), latent]; None: it is whole.

    Raises ModelLoadError for tensors whose rows make no halves.
    """
    module, latent = split_name(matrix.name), matrix.columns
    keys, values = (tensors.get(f"{module}.{half}") for half in (KEYS, VALUES))
    if module is None or keys is None or values is None:
        return None
    heads = keys.shape[0] // latent if keys.shape and keys.shape[0] % latent == 0 else 0
    fits = heads and values.shape and not matrix.rows % heads and not values.shape[0] % heads
    key = (matrix.rows - values.shape[0]) // heads if fits else 0
    if key < 1:
        raise ModelLoadError(
            f"The two parts of {matrix.name!r} in {keys.file} have the shapes {list(keys.shape)} "
            f"and {list(values.shape)}, which make no matrix of {matrix.rows} x {latent}."
        )
    return (
        MatrixRef(f"{module}.{KEYS}", heads * latent, key),
        MatrixRef(f"{module}.{VALUES}", values.shape[0], latent),
    )
