"""Panels hold the weights in the order that the kernels read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tests.shard.cpu_backend.kernel_support import stack
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.int8 import to_int8
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.mapped_file import MappedFile
from tgi_trio.shard.checkpoint.numbers import to_bfloat16
from tgi_trio.shard.checkpoint.stored_matrix import Stack
from tgi_trio.shard.cpu_backend import packing
from tgi_trio.shard.cpu_backend.packing import Packer, interleave
from tgi_trio.shard.cpu_backend.weight_layout import Storage


def unpacked(panels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return [out, in], with the rows of zeros that fill the last panel."""
    rows = np.ascontiguousarray(panels.swapaxes(1, 2)).reshape(-1, panels.shape[1])
    return rows.view(np.uint16) if rows.dtype == np.uint32 else rows


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("job", [1, 1 << 20])
def test_parts_come_below_each_other(monkeypatch: pytest.MonkeyPatch, bf16: bool, job: int) -> None:
    monkeypatch.setattr(packing, "_JOB_BYTES", job)
    draw = np.random.default_rng(1)
    parts = [draw.normal(size=(n, 48)).astype(np.float32) for n in (64, 32, 41)]
    halves = parts[0][:32], parts[1]
    storage = Storage("bfloat16" if bf16 else "float32")
    with Packer(storage, threads=2) as packer:
        (stacked, _), (paired, _) = (
            packer.pack(stack(*parts)),
            packer.pack(stack(*halves), paired=True),
        )
        packer.start()
    expected: Any = np.concatenate(parts)
    between: Any = interleave(*halves)
    if bf16:
        expected, between = to_bfloat16(expected), to_bfloat16(between)
    assert np.array_equal(unpacked(stacked)[: len(expected)], expected)
    assert not unpacked(stacked)[len(expected) :].any()
    assert np.array_equal(unpacked(paired), between)


@pytest.mark.parametrize("job", [1, 1 << 20])
def test_scales_lie_as_their_outputs(monkeypatch: pytest.MonkeyPatch, job: int) -> None:
    monkeypatch.setattr(packing, "_INT8_JOB_BYTES", job)
    draw = np.random.default_rng(1)
    parts = [draw.normal(size=(n, 48)).astype(np.float32) for n in (64, 32, 41)]
    halves = parts[0][:32], parts[1]
    with Packer(Storage("int8"), threads=2) as packer:
        stacked, paired = packer.pack(stack(*parts)), packer.pack(stack(*halves), paired=True)
        packer.start()
    for (panels, scales), expected in (
        (stacked, np.concatenate(parts)),
        (paired, interleave(*halves)),
    ):
        whole, own = to_int8(expected)
        assert scales is not None
        assert np.array_equal(unpacked(panels)[: len(whole)], whole)
        assert np.array_equal(scales.reshape(-1)[: len(own)], own)
        assert not unpacked(panels)[len(whole) :].any()


matrices = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


@given(matrices)
def test_int8_is_as_near_as_it_can_be(values: np.ndarray[Any, Any]) -> None:
    whole, scales = to_int8(values)
    errors = np.abs(whole.astype(np.float64) * scales[:, None] - values)
    assert (errors <= 0.5001 * scales[:, None]).all()
    largest = np.abs(whole.astype(int)).max(axis=1)
    assert (largest <= 127).all()
    assert (largest[np.abs(values).max(axis=1) > 1e-30] == 127).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_has_no_8_bits(bad: float) -> None:
    with pytest.raises(ModelLoadError, match="no 8-bit form"):
        to_int8(np.array([[1.0, 2.0], [3.0, bad]], np.float32))


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    parts = np.ones((32, 16), np.float32), np.ones((32, 8), np.float32)
    with pytest.raises(ValueError):
        with Packer(Storage("float32"), threads=1) as packer:
            packer.pack(stack(*parts))
            packer.start()


class ReadFile(MappedFile):
    """Takes note of what is released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, gives_back=False)
        self.released: list[tuple[int, int]] = []

    def release(self, first: int, end: int) -> None:
        self.released.append((first, end))


def test_rows_are_read_in_the_order_of_the_file_and_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packing, "_JOB_BYTES", 1)  # a job for every panel
    path = tmp_path / "numbers"
    path.write_bytes(np.ones((2, 64, 16), np.float32).tobytes())
    file = ReadFile(path)
    first, second = (PlainMatrix(v, file) for v in file.data.view(np.float32).reshape(2, 64, 16))
    with Packer(Storage("float32"), threads=1) as packer:
        packer.pack(Stack([second]))
        packer.pack(Stack([first]))
        packer.start()
    panel = 32 * 16 * 4
    assert file.released == [(i * panel, (i + 1) * panel) for i in range(4)]
