"""Machine code lays blocks into panels as numpy does, byte for byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.shard.cpu_backend.fillers import filler
from tgi_trio.shard.cpu_backend.fillers.blocks import READERS
from tgi_trio.shard.cpu_backend.fillers.filler import Filler, compile_filler, find_filler
from tgi_trio.shard.cpu_backend.kinds.kind import fill_panels
from tgi_trio.shard.cpu_backend.kinds.table import KINDS
from tgi_trio.shard.cpu_backend.packing import interleave_codes
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

Array = np.ndarray[Any, Any]
compiled = cache(compile_filler)


def draw_blocks(coding: str, rows: int, count: int, seed: int) -> Array:
    """Return blocks [rows, count, bytes] whose scales are numbers."""
    stored = BY_NAME[coding]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, count, stored.bytes), np.uint8)
    halves = np.ones((1, 1, stored.bytes), np.uint8)
    for first in stored.scales:
        halves[..., first + 1] = 0xBB  # one bit of the exponent is never set
    return np.where(halves == 0xBB, blocks & halves, blocks)


def laid_by_numpy(coding: str, parts: list[Array], size: int) -> Array:
    kind, read = KINDS[coding].kind, KINDS[coding].read
    codes = [read({"blocks": part}) for part in parts]
    found = codes[0] if len(codes) == 1 else interleave_codes(*codes)
    panels = np.zeros((-(-len(found.codes) // PANEL), size), np.uint8)
    fill_panels(panels, kind, found, kind.span or found.codes.shape[1])
    return panels


def laid(program: Filler, parts: list[Array], size: int) -> Array:
    panels = np.zeros((-(-sum(map(len, parts)) // PANEL), size), np.uint8)
    assert program.fill(panels, parts)
    return panels


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(READERS)),
    st.integers(1, 70),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_panels_are_those_of_numpy(
    coding: str, rows: int, count: int, paired: bool, seed: int
) -> None:
    # Part of wider rows, as a rank has it.
    wide = draw_blocks(coding, rows, count + 1, seed)[:, 1:]
    parts = [wide]
    if paired:
        wide = wide[: rows - rows % (PANEL // 2)]
        parts = [wide, draw_blocks(coding, len(wide), count, seed + 1)]
    stored = BY_NAME[coding]
    kind = KINDS[coding].kind
    size = kind.panel_bytes(count * stored.weights, kind.span or BY_NAME[coding].weights)
    if len(parts[0]):
        expected = laid_by_numpy(coding, parts, size)
        np.testing.assert_array_equal(laid(compiled(coding), parts, size), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_no_number_is_found(bad: float) -> None:
    for coding, first in (("Q8_0", 0), ("Q4_1", 2), ("Q6_K", 208)):
        blocks = draw_blocks(coding, PANEL, 2, seed=1)
        blocks[7, 1, first : first + 2] = np.array([bad], "<f2").view(np.uint8)
        kind = KINDS[coding].kind
        size = kind.panel_bytes(2 * BY_NAME[coding].weights, kind.span or 32)
        assert not compiled(coding).fill(np.zeros((1, size), np.uint8), [blocks])


def test_a_program_that_errs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert find_filler("Q4_0") is not None
    assert find_filler("affine") is None  # nobody writes one
    monkeypatch.setattr(filler, "find_or_make", lambda name, make: make())
    monkeypatch.setitem(READERS, "Q4_0", READERS["Q4_1"])  # reads elsewhere
    assert find_filler("Q4_0") is None
    assert "Q4_0 are packed with numpy: their codes" in capfd.readouterr().err


def test_one_that_does_not_compile_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERNEL_CPU_FEATURES", "")  # of a processor without any
    assert find_filler("Q8_0") is not None

    def fail(coding: str) -> Filler:
        raise ModelLoadError("no instructions")

    monkeypatch.setattr(filler, "compile_filler", fail)
    assert find_filler("Q8_0") is None
    assert "packed with numpy: ModelLoadError: no instructions" in capfd.readouterr().err
