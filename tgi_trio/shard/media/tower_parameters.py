"""A vision tower's parameters, read from a checkpoint whatever it calls and joins them."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.container import Container, find_tensor
from tgi_trio.shard.checkpoint.formats.plain import number_type
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.media.spellings import spellings

# A projection of queries, keys or values, and what files may have it as the first, second or third
# part of: Step 3.7, Kimi K2.5, whose rotary pairs are neighbours; InternVL and DeepSeek-OCR, which
# do not turn.
_PART: Final = re.compile(r"\b(?:self_)?attn\.([qkv])_proj\.(weight|bias)$")
_JOINED: Final = {
    **{"attn.in_proj_{}": True, "wqkv.{}": True, "attn.qkv.{}": False},
    "self_attn.qkv_proj.{}": False,
}
# Names of queries and keys in files of Mistral's own, where pairs that turn are neighbours.
_NEIGHBOURS: Final = re.compile(r"\battention\.w[qk]\.weight$")


def read_parameter(
    files: Container, name: str, shape: tuple[int, ...], heads: int
) -> NDArray[np.float32]:
    """Return the parameter `name` of a transformers class, float32 of `shape`.

    `heads`: of the tower's attention. Raises ModelLoadError if the files have it under no name that
    is known, or in another shape.
    """
    for stored in spellings(name):
        if stored in files.names:
            found = _read(files, stored, shape)
            return _halve_pairs(found, heads) if _NEIGHBOURS.search(stored) else found
        if (part := _PART.search(stored)) is None:
            continue
        for name_of_all, turns in _JOINED.items():
            joined = stored[: part.start()] + name_of_all.format(part[2])
            if joined in files.names:
                parts = _read(files, joined, (3 * shape[0], *shape[1:])).reshape(3, *shape)
                own = parts["qkv".index(part[1])]
                return _halve_pairs(own, heads) if turns and part[1] != "v" else own
    raise ModelLoadError(f"{files.folder} has no tensor {name!r}, which its tower needs.")


def _read(files: Container, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    last = (*shape[:1], *shape[2:], *shape[1:2])  # a convolution as MLX has it: channels at the end
    moved = len(shape) > 2 and files.tensor(name).shape == last != shape
    tensor = find_tensor(files, name, last if moved else shape)
    values = to_float32(tensor.take().view(number_type(tensor))).reshape(tensor.shape)
    return np.ascontiguousarray(np.moveaxis(values, -1, 1)) if moved else values


def _halve_pairs(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return a projection [heads * dim, ...] whose rotary pairs are halves of a head, which files
    have as neighbours.
    """
    paired = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
