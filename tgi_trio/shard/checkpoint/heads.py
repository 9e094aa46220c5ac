"""The files of a speculator's heads, which are never quantised."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.shard.checkpoint.formats.plain import PlainFormat
from tgi_trio.shard.checkpoint.lookup import Checkpoint
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles

_INTEGERS: Final = {"I64": np.int64, "I32": np.int32, "I16": np.int16}


def open_heads(spec: HeadsSpec, encoding: Encoding | None = None) -> Checkpoint:
    """Open the weights of heads; raises ModelLoadError for files that are damaged.

    `encoding`: to which their linear layers are rounded.
    """
    files = SafetensorsFiles(spec.folder, writable=True)
    return Checkpoint(files, PlainFormat(), encoding=encoding)


def read_token_map(spec: HeadsSpec, vocabulary: int) -> NDArray[np.int64] | None:
    """Return int64 [rows of a head]: the token id of each; None: the row's number.

    Raises ModelLoadError for ids that are not the model's.
    """
    if not spec.token_map:
        return None
    files = SafetensorsFiles(spec.folder)
    try:
        tensor = files.tensor(spec.token_map)
        if tensor.dtype not in _INTEGERS:
            raise ModelLoadError(
                f"Tensor {tensor.name!r} in {tensor.file.path} is of type {tensor.dtype}; token "
                f"ids are one of {', '.join(_INTEGERS)}."
            )
        ids = tensor.take().view(_INTEGERS[tensor.dtype]).astype(np.int64)
        if spec.maps_by_offset:
            ids += np.arange(len(ids))
    finally:
        files.close()
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ModelLoadError(
            f"{spec.token_map!r} in {spec.folder} names tokens {ids.min()} to {ids.max()}; the "
            f"model has 0 to {vocabulary - 1}."
        )
    return ids
