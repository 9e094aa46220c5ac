"""Panels hold the weights in the order that the kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tgi_trio.shard.cpu import packing
from tgi_trio.shard.cpu.packing import Packer, interleave, to_bfloat16


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
    with Packer(bf16, threads=2) as packer:
        stacked, paired = packer.pack(parts), packer.pack(halves, paired=True)
    expected, between = np.concatenate(parts), interleave(*halves)
    if bf16:
        expected, between = to_bfloat16(expected), to_bfloat16(between)
    assert np.array_equal(unpacked(stacked)[: len(expected)], expected)
    assert not unpacked(stacked)[len(expected) :].any()
    assert np.array_equal(unpacked(paired), between)


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    with pytest.raises(ValueError), Packer(False, threads=1) as packer:
        packer.pack([np.ones((32, 16), np.float32), np.ones((32, 8), np.float32)])
