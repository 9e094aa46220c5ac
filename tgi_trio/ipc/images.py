"""The arena in shared memory through which the router passes what media hold to a shard.

A *bundle* is what a model's processor makes of one image, before normalisation, of a video or of a
sound: a few named arrays. The router writes bundles into the arena, one shared segment that
outlives shards. A PREFILL row says where they are, and a STEP reports that their pixels are no
longer needed.

A bundle is little-endian; it and all its parts begin at multiples of `ALIGNMENT` bytes::

    u4 mark, u4 number of arrays
    then each array:  u4 place of its name in `FIELDS`, u4 number of dimensions, u8 each dimension
                      its items, C-contiguous, of the dtype that `FIELDS` gives the name
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.segment import Segment

ALIGNMENT: Final = 64
KEY_BYTES: Final = 32  # of an image's key, a sha256

# What the extractor of a sound makes: features, and which frames of them are of the sound.
SOUND: Final = "input_features"
SOUND_MASK: Final = "input_features_mask"
# There where a sound is heard as one of a prompt with images.
BESIDE_IMAGES: Final = "beside_images"
# Names as transformers' image processors have them, and the dtype that each is stored as. An entry
# may be added at the end.
FIELDS: Final[tuple[tuple[str, str], ...]] = (
    ("pixel_values", "|u1"),
    ("pixel_attention_mask", "|u1"),
    ("image_sizes", "<i4"),
    ("image_grid_thw", "<i4"),
    ("image_position_ids", "<i4"),
    ("num_soft_tokens_per_image", "<i4"),
    ("num_crops", "<i4"),
    ("aspect_ratio_ids", "<i4"),
    ("aspect_ratio_mask", "|u1"),
    ("num_tiles", "<i4"),
    ("aspect_ratios", "<i4"),
    ("num_patches", "<i4"),
    ("spatial_shapes", "<i4"),
    ("pixel_values_local", "|u1"),
    ("num_local_patches", "<i4"),
    ("target_sizes", "<i4"),
    ("grids", "<i4"),
    ("num_patches_per_image", "<i4"),
    ("batch_num_images", "<i4"),
    ("high_res_pixel_values", "|u1"),
    ("seconds_per_grid", "<f4"),
    ("num_frames", "<i4"),
    (SOUND, "<f4"),
    (SOUND_MASK, "|u1"),
    (BESIDE_IMAGES, "|u1"),
    ("image_grid_hw", "<i4"),
)

_NUMBER_OF: Final = {name: number for number, (name, _) in enumerate(FIELDS)}
_DTYPE_OF: Final = {name: np.dtype(dtype) for name, dtype in FIELDS}
_MARK: Final = 0x31494754  # "TGI1"
_PAIR: Final = struct.Struct("<2I")
_MOST_DIMENSIONS: Final = 6
_MOST_ITEMS: Final = 2**48  # numpy refuses larger shapes, even of arrays without items


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where a bundle lies in the arena, in bytes."""

    offset: int  # a multiple of ALIGNMENT
    nbytes: int


@dataclass(frozen=True, slots=True)
class SequenceImage:
    """An image of a sequence, as a PREFILL row names it."""

    first: int  # position of its first token in the sequence
    tokens: int  # tokens that it takes of the sequence: features and those between them
    runs: tuple[tuple[int, int], ...]  # its feature tokens: (offset from `first`, count), ascending
    key: bytes  # KEY_BYTES; images of one key have the same features
    place: ArenaPlace

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.first + self.tokens

    @property
    def features(self) -> int:
        """Number of feature tokens."""
        return sum(count for _, count in self.runs)

    def positions(self) -> NDArray[np.int64]:
        """Return its features' positions in the sequence, ascending: int64 [features]."""
        runs = [np.arange(at, at + count) for at, count in self.runs]
        return self.first + np.concatenate(runs or [np.empty(0, np.int64)])


def bundle_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the size of a bundle in bytes. Raises as `write_bundle`, except for values."""
    sizes = (_header_bytes(a.ndim) + _align(a.size * _dtype(n).itemsize) for n, a in arrays.items())
    return ALIGNMENT + sum(sizes)


def write_bundle(memory: memoryview, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Write arrays of any numeric dtype; returns the bytes used, a multiple of ALIGNMENT.

    Raises ValueError for names that are not in `FIELDS`, values that the stored dtype cannot
    represent, too many dimensions, and too little memory.
    """
    size = bundle_bytes(arrays)
    if size > len(memory):
        raise ValueError(f"a bundle of {size} bytes does not fit {len(memory)}")
    _PAIR.pack_into(memory, 0, _MARK, len(arrays))
    offset = ALIGNMENT
    for name, array in arrays.items():
        dtype, header = _dtype(name), _header_bytes(array.ndim)
        _PAIR.pack_into(memory, offset, _NUMBER_OF[name], array.ndim)
        struct.pack_into(f"<{array.ndim}Q", memory, offset + _PAIR.size, *array.shape)
        offset += header
        stored = np.ndarray(array.shape, dtype, memory[offset:])
        np.copyto(stored, array, casting="unsafe")
        if array.dtype != dtype and not np.array_equal(stored, array):
            raise ValueError(f"{name} has values that are no {dtype.name}")
        offset += _align(stored.nbytes)
    return size


def read_bundle(memory: memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays of the bundle at the start of `memory`, as read-only views.

    Raises CorruptFrame unless it is as `write_bundle` writes it.
    """
    memory = memory.toreadonly()
    if len(memory) < ALIGNMENT:
        raise CorruptFrame(f"a bundle of {len(memory)} bytes has no beginning")
    mark, count = _PAIR.unpack_from(memory)
    if mark != _MARK or count > len(FIELDS):
        raise CorruptFrame(f"a bundle begins with {mark:#x} and {count} arrays")
    found: dict[str, NDArray[Any]] = {}
    offset = ALIGNMENT
    for _ in range(count):
        name, shape, offset = _read_header(memory, offset)
        dtype = _DTYPE_OF[name]
        size = math.prod(shape) * dtype.itemsize  # of Python's integers, which never wrap
        if name in found or offset + size > len(memory):
            raise CorruptFrame(f"a bundle of {len(memory)} bytes has {name} {shape} at {offset}")
        found[name] = np.ndarray(shape, dtype, memory[offset : offset + size])
        offset += _align(size)
    return found


class ImageArena:
    """Shared memory for bundles, in which the router allocates. A context manager."""

    def __init__(self, segment: Segment) -> None:
        """The arena owns `segment`."""
        self._segment = segment

    @classmethod
    def create(cls, nbytes: int) -> ImageArena:
        """Create an arena with all pages reserved. Raises SegmentError if there is no memory."""
        return cls(Segment.create(_align(nbytes), label="images"))

    @classmethod
    def open(cls, fd: int) -> ImageArena:
        """Map an inherited arena; it owns the descriptor from now on."""
        return cls(Segment.open(fd))

    @property
    def fd(self) -> int:
        return self._segment.fd

    @property
    def nbytes(self) -> int:
        return self._segment.size

    def view(self, place: ArenaPlace) -> memoryview:
        """Return the memory of a place. Raises CorruptFrame if it is not in the arena."""
        end = place.offset + place.nbytes
        if place.offset < 0 or place.offset % ALIGNMENT or place.nbytes < 0 or end > self.nbytes:
            raise CorruptFrame(f"{place} is none of {self.nbytes} bytes of images")
        return self._segment.buf[place.offset : end]

    def close(self) -> None:
        """Unmap and close it; views that are alive keep the mapping."""
        self._segment.close()

    def __enter__(self) -> ImageArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(memory: memoryview, offset: int) -> tuple[str, tuple[int, ...], int]:
    """Return name and shape of the array whose header is at `offset`, and where its items are."""
    if offset + ALIGNMENT > len(memory):
        raise CorruptFrame(f"a bundle of {len(memory)} bytes ends before its last array")
    number, dimensions = _PAIR.unpack_from(memory, offset)
    if number >= len(FIELDS) or dimensions > _MOST_DIMENSIONS:
        raise CorruptFrame(f"a bundle has field {number} of {dimensions} dimensions")
    shape = struct.unpack_from(f"<{dimensions}Q", memory, offset + _PAIR.size)
    if math.prod(max(1, n) for n in shape) > _MOST_ITEMS:
        raise CorruptFrame(f"a bundle of {len(memory)} bytes has an array of shape {shape}")
    return FIELDS[number][0], shape, offset + _header_bytes(dimensions)


def _dtype(name: str) -> np.dtype[Any]:
    if name not in _DTYPE_OF:
        raise ValueError(f"{name!r} is no field of a bundle; these are: {', '.join(_DTYPE_OF)}")
    return _DTYPE_OF[name]


def _header_bytes(dimensions: int) -> int:
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"an array of {dimensions} dimensions; {_MOST_DIMENSIONS} are the most")
    return _align(_PAIR.size + 8 * dimensions)


def _align(size: int) -> int:
    return size + -size % ALIGNMENT
