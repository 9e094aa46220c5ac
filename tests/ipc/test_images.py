"""Bundles come out as they went in, and nothing that lies in an arena can harm who reads it."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.images import (
    ALIGNMENT,
    FIELDS,
    ArenaPlace,
    ImageArena,
    SequenceImage,
    bundle_bytes,
    read_bundle,
    write_bundle,
)

SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4)


@st.composite
def bundles(draw: st.DrawFn) -> dict[str, NDArray[Any]]:
    chosen = draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=4))
    return {name: draw(arrays_of.arrays(dtype, SHAPES)) for name, dtype in chosen}


@settings(max_examples=30, deadline=None)
@given(bundles(), st.integers(0, 3))
def test_bundles_come_out_as_they_went_in(bundle: dict[str, NDArray[Any]], spare: int) -> None:
    memory = memoryview(bytearray(os.urandom(bundle_bytes(bundle) + spare * ALIGNMENT)))
    assert write_bundle(memory, bundle) == bundle_bytes(bundle)
    found = read_bundle(memory)
    assert list(found) == list(bundle)
    for name, array in bundle.items():
        assert found[name].dtype == dict(FIELDS)[name] and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()  # what is no number, too
        assert not found[name].flags.writeable


@settings(max_examples=60, deadline=None)
@given(bundles(), st.data())
def test_whatever_lies_there_is_read_or_refused(
    bundle: dict[str, NDArray[Any]], data: st.DataObject
) -> None:
    memory = bytearray(bundle_bytes(bundle))
    write_bundle(memoryview(memory), bundle)
    for _ in range(data.draw(st.integers(0, 3))):
        at = 4 * data.draw(st.integers(0, len(memory) // 4 - 1))
        memory[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
    kept = data.draw(st.integers(0, len(memory)))
    try:
        found = read_bundle(memoryview(memory)[:kept])
    except CorruptFrame:
        return
    assert sum(array.nbytes for array in found.values()) <= kept


def test_whole_numbers_of_any_dtype_are_stored_small() -> None:
    """As processors return them: int64 masks, float32 pixels."""
    bundle: dict[str, NDArray[Any]] = {
        "pixel_values": np.array([[0.0, 255.0]], np.float32),
        "pixel_attention_mask": np.ones((2, 3), np.int64),
        "image_sizes": np.array([[4096, 1]], np.int64),
    }
    memory = memoryview(bytearray(bundle_bytes(bundle)))
    write_bundle(memory, bundle)
    found = read_bundle(memory)
    assert [array.dtype.name for array in found.values()] == ["uint8", "uint8", "int32"]
    assert all(np.array_equal(found[name], array) for name, array in bundle.items())


@pytest.mark.parametrize(
    ("bundle", "why"),
    [
        ({"pixel_values": np.array([0.5])}, "pixel_values has values that are no uint8"),
        ({"pixel_values": np.array([256])}, "pixel_values has values that are no uint8"),
        ({"pixels": np.zeros(1)}, "'pixels' is no field of a bundle"),
        ({"pixel_values": np.zeros((1,) * 7)}, "an array of 7 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(bundle: dict[str, NDArray[Any]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        write_bundle(memoryview(bytearray(4096)), bundle)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 100"):
        write_bundle(memoryview(bytearray(100)), {"pixel_values": np.zeros(9)})


def test_an_arena_is_one_memory_for_all_who_map_it() -> None:
    with ImageArena.create(1000) as arena, ImageArena.open(os.dup(arena.fd)) as other:
        assert arena.nbytes == other.nbytes == 1024
        place = ArenaPlace(64, 512)
        write_bundle(arena.view(place), {"image_sizes": np.array([[3, 5]])})
        assert read_bundle(other.view(place))["image_sizes"].tolist() == [[3, 5]]


def test_an_empty_array_of_a_huge_shape_is_refused() -> None:
    memory = bytearray(1024)
    write_bundle(memoryview(memory), {"pixel_values": np.zeros((0, 1), np.uint8)})
    struct.pack_into("<Q", memory, ALIGNMENT + 16, 2**63)
    with pytest.raises(CorruptFrame, match="shape"):
        read_bundle(memoryview(memory))


@pytest.mark.parametrize("place", [(1024, 1), (960, 65), (-64, 64), (0, -1), (8, 64), (0, 2**63)])
def test_places_outside_of_an_arena_are_refused(place: tuple[int, int]) -> None:
    with ImageArena.create(1024) as arena, pytest.raises(CorruptFrame, match="none of 1024 bytes"):
        arena.view(ArenaPlace(*place))


def test_features_have_positions() -> None:
    image = SequenceImage(10, 9, ((1, 3), (6, 2)), bytes(32), ArenaPlace(0, 64))
    assert (image.end, image.features) == (19, 5)
    assert image.positions().tolist() == [11, 12, 13, 16, 17]
