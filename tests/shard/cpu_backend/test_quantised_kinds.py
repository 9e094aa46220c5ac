"""Quantised weights in panels: what is packed is there, and products are those of its numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.cpu_backend.kernel_support import meets_subnormals
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.cpu_backend import instructions
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.instructions import find_multiplier, multiplies_pairs
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, Codes, Kind, fill_panels
from tgi_trio.shard.cpu_backend.kinds.table import KINDS
from tgi_trio.shard.cpu_backend.multiplier import Dots, Multiplier, pairs_that_fit
from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel, open_panel_kernel
from tgi_trio.shard.cpu_backend.scratch_memory import ROWS
from tgi_trio.shard.cpu_backend.self_tests.kinds import (
    dequantise,
    find_fault,
    multiply,
    random_codes,
    store_activations,
    store_rows,
)
from tgi_trio.shard.cpu_backend.tables import UNPACK, UNPACK_FOR_MANY
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL, SPARE_ROWS

# Of EXL3's, one for each way to make states of chunks and to compute numbers; the others are read
# by the same lines, and each is tried where a model has it.
RINGS = {"3inst of 1 bits", "mul1 of 3 bits", "mcg of 4 bits", "3inst of 7 bits"}
ALL = {
    stored.kind.name: stored.kind
    for stored in KINDS.values()
    if not stored.kind.turned or stored.kind.name in RINGS
}
NAMES = sorted(ALL)
WHOLE = [name for name in NAMES if not ALL[name].floating]
LIMITS = {8: 2e-2, 16: 1e-4, 32: 1e-6}  # by the bits of activations
# Lows that are drawn beside scales make larger weights: activations of 8 bits are farther off.
WITH_LOWS_LIMIT = 2.1e-2
HAS_PAIRS = multiplies_pairs("bfloat16")


@cache
def kernel(name: str, active_bits: int, dot: bool = False) -> PanelKernel:
    return open_panel_kernel(find_multiplier(ALL[name], active_bits, dot=dot))


def spans(kind: Kind) -> list[int]:
    """Return the inputs of spans to be tried; of 512 inputs the last of 192 is shorter."""
    if kind.span:
        return [kind.span] if kind.span > 0 else [32, 64, 128]
    return [32, 64, 128, 192]


def unpack(name: str, weights: Codes, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [out, in] and the scales of a panel's inputs, read out of unpacked panels."""
    used, kind = kernel(name, 8), ALL[name]
    raised = used.multiplier.raised
    outputs, inputs = weights.codes.shape
    count, size = -(-outputs // PANEL), kind.panel_bytes(inputs, span)
    panels = allocate_zeroed((count, size))
    fill_panels(panels, kind, weights, span)
    many = used.multiplier.unpacked.kind
    blocks = inputs // BLOCK_INPUTS
    codes, scales = [], []
    for panel in panels:
        room = allocate_zeroed((blocks, many.block_bytes))
        used.code(
            0, 0, 0, address(panel), blocks, span // BLOCK_INPUTS, size, UNPACK, address(room), 0
        )
        head = room[:, : many.head_bytes].copy().view(np.float32).reshape(blocks, -1, PANEL)
        scale = np.repeat(head[:, : many.parts], BLOCK_INPUTS // many.parts, axis=1)
        scales.append(scale.reshape(inputs, PANEL).T)
        stored = room[:, many.head_bytes :].reshape(blocks, 8, PANEL, 4).transpose(2, 0, 1, 3)
        codes.append(stored.reshape(PANEL, inputs) >> raised)
    return np.concatenate(codes)[:outputs], np.concatenate(scales)[:outputs] * 2**raised


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(WHOLE), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**31))
def test_what_is_packed_is_unpacked(name: str, outputs: int, count: int, seed: int) -> None:
    draw, kind = np.random.default_rng(seed), ALL[name]
    span = spans(kind)[seed % len(spans(kind))]
    weights = random_codes(kind, outputs, count * span, span, draw)
    codes, scales = unpack(name, weights, span)
    expected = weights.codes
    if kind.table:
        expected = np.asarray(kind.table)[expected] + kernel(name, 8).multiplier.zero_code
    np.testing.assert_array_equal(codes, expected)
    ones = Codes(np.full_like(weights.codes, 1), weights.numbers)
    exact = dequantise(kind, ones, span)
    if kind.low or kind.table:
        return  # the products below have them
    np.testing.assert_allclose(scales * (1 - kind.zero), exact, rtol=1e-6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("active_bits", [8, 16])
def test_products_are_those_of_the_weights(name: str, active_bits: int) -> None:
    """Every number of rows that tiles take; some inputs are far larger than the others."""
    draw, kind = np.random.default_rng(3), ALL[name]
    used = kernel(name, active_bits)
    limit = LIMITS[used.multiplier.active_bits]
    if used.multiplier.active_bits == 8 and name.endswith("with lows"):
        limit = WITH_LOWS_LIMIT
    for span in spans(kind):
        weights = random_codes(kind, 75, 512, span, draw)
        exact = dequantise(kind, weights, span)
        for rows in (*range(1, 10), 19):
            x = draw.standard_normal((rows, 512)).astype(np.float32)
            x[:, 7] *= 50
            x[:, 300] *= 20
            stored, _ = store_rows(used.multiplier, x)
            found = multiply(used, weights, span, stored)
            many = multiply(used, weights, span, stored, UNPACK)
            np.testing.assert_array_equal(many, found)
            expected = x.astype(np.float64) @ exact.T
            assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("name", WHOLE)
def test_the_largest_products_fill_what_they_are_added_in(name: str) -> None:
    """Every code at one end of its range, and every activation as large as can be."""
    draw, kind = np.random.default_rng(7), ALL[name]
    used, span = kernel(name, 8), spans(kind)[-1]
    drawn = random_codes(kind, PANEL, span, span, draw)
    values = np.asarray(kind.table) if kind.table else np.arange(kind.largest_code + 1)
    for code in (values.argmin(), values.argmax()):
        weights = replace(drawn, codes=np.full_like(drawn.codes, code))
        x = np.ones((used.multiplier.rows + 1, span), np.float32)
        x[1:] *= -1
        stored, _ = store_rows(used.multiplier, x)
        found = multiply(used, weights, span, stored)
        np.testing.assert_array_equal(multiply(used, weights, span, stored, UNPACK), found)
        exact = x.astype(np.float64) @ dequantise(kind, weights, span).T
        np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dots", ["vnni", "avx512", "avx2"])
def test_numbers_of_e2m1_are_multiplied_with_8_bits_everywhere(
    name: str, dots: Dots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pairs of their products fit into 16 bits; those of IQ4_NL's table do not."""
    monkeypatch.setattr(instructions, "dots", lambda: dots)
    assert find_multiplier(ALL[name]).active_bits == 8
    assert pairs_that_fit(ALL[name].largest_code) == 4
    assert find_multiplier(ALL["iq4_nl"]).active_bits == (8 if dots == "vnni" else 16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dot"),
    [*((name, False) for name in NAMES), *((name, True) for name in sorted({*NAMES} - {*WHOLE}))],
)
def test_a_row_does_not_depend_on_the_others(name: str, dot: bool) -> None:
    if dot and not HAS_PAIRS:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    draw, kind = np.random.default_rng(4), ALL[name]
    used, span = kernel(name, 8, dot), spans(kind)[-1]
    weights = random_codes(kind, 40, 256, span, draw)
    x = draw.standard_normal((23, 256)).astype(np.float32)
    stored, _ = store_rows(used.multiplier, x)
    together = multiply(used, weights, span, stored)
    for row in range(len(x)):
        alone = multiply(used, weights, span, stored[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("name", WHOLE)
def test_a_panel_is_unpacked_for_many_rows_alone(name: str) -> None:
    """The room tells whether it was; products are the same either way."""
    draw, kind = np.random.default_rng(6), ALL[name]
    used, span = kernel(name, 8), spans(kind)[-1]
    weights = random_codes(kind, PANEL, span, span, draw)
    panel = allocate_zeroed((1, kind.panel_bytes(span, span)))
    fill_panels(panel, kind, weights, span)
    least = used.multiplier.least_unpacked
    assert 1 < least <= ROWS  # rows beyond those meet a panel that has been unpacked
    for rows in (1, least - 1, least):
        stored, _ = store_rows(used.multiplier, draw.standard_normal((rows, span), np.float32))
        room = allocate_zeroed((used.room_bytes(span),))
        sums = allocate_zeroed((rows + SPARE_ROWS, PANEL), np.float32)
        used.code(
            rows, address(stored), stored.strides[0], address(panel), span // BLOCK_INPUTS,
            span // BLOCK_INPUTS, panel.nbytes, UNPACK_FOR_MANY, address(room), address(sums),
        )  # fmt: skip
        np.testing.assert_array_equal(sums[:rows], multiply(used, weights, span, stored))
        assert room.any() == (rows == least)


@pytest.mark.parametrize("dot", [False, True])
def test_all_numbers_of_8_bits_are_exact(dot: bool) -> None:
    """Those below the smallest exponent, too; a lone 1 among the activations picks them."""
    if dot and not HAS_PAIRS:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    used, kind = kernel("e4m3", 8, dot), ALL["e4m3"]
    codes = np.arange(256, dtype=np.uint8)
    codes = np.delete(codes, [127, 255])[:, None].repeat(32, 1)
    weights = Codes(codes, {"scale": np.ones((len(codes), 1), np.float32)})
    stored, _ = store_rows(used.multiplier, np.eye(32, dtype=np.float32)[:3])
    found = multiply(used, weights, 32, stored)
    np.testing.assert_array_equal(multiply(used, weights, 32, stored, UNPACK), found)
    expected = torch.from_numpy(codes[:, 0].copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(found, np.tile(expected, (3, 1)))
    assert kind.floating == "e4m3"


def test_rows_that_fill_a_panel_are_zeros() -> None:
    draw, kind = np.random.default_rng(5), ALL["q4_0"]
    weights = random_codes(kind, PANEL, 64, 32, draw)
    few = Codes(weights.codes[:5], {n: v[:5] for n, v in weights.numbers.items()})
    stored, _ = store_activations(draw.standard_normal((2, 64)).astype(np.float32), 8)
    whole, part = (multiply(kernel("q4_0", 8), each, 32, stored) for each in (weights, few))
    np.testing.assert_array_equal(part, whole[:, :5])
    padded = allocate_zeroed((1, kind.panel_bytes(64, 32)))
    fill_panels(padded, kind, few, 32)
    heads = padded.reshape(2, -1)[:, : 2 * PANEL].copy().view(np.float16)
    assert not heads[:, 5:].any() and heads[:, :5].all() and LANES < PANEL


def test_the_self_test_finds_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    used = kernel("q4_0", 8)
    assert find_fault(used) is None
    assert not HAS_PAIRS or find_fault(kernel("table", 8, dot=True)) is None
    wrong = PanelKernel(used.multiplier, replace(used.code, _call=lambda *arguments: 0))
    assert "q4_0 is" in str(find_fault(wrong))


def ways_to_floats() -> list[Multiplier]:
    """Return the ways to multiply e4m3 in float32 that this processor has."""
    own = find_multiplier(ALL["e4m3"])
    return [own] if not own.looks_up else [own, replace(own, looks_up=False)]


@pytest.mark.parametrize("way", ways_to_floats(), ids=lambda way: f"looks up: {way.looks_up}")
def test_all_numbers_of_e4m3_are_exact_in_float32(way: Multiplier) -> None:
    """Those below the least exponent, too, and none becomes a subnormal number on the way."""
    used = open_panel_kernel(way)
    every = np.delete(np.arange(256, dtype=np.uint8), [127, 255])
    own = np.concatenate([every, every[:2]]).reshape(PANEL, -1)  # two codes are repeated
    codes = np.tile(own, (1, BLOCK_INPUTS))
    weights = Codes(codes, {"scale": np.ones((PANEL, 1), np.float32)})
    inputs = codes.shape[1]
    for first in range(0, inputs, BLOCK_INPUTS):
        one = np.zeros((BLOCK_INPUTS, inputs), np.float32)
        one[:, first : first + BLOCK_INPUTS] = np.eye(BLOCK_INPUTS)
        stored, _ = store_rows(way, one)
        found = multiply(used, weights, inputs, stored)
        assert not meets_subnormals(partial(multiply, used, weights, inputs, stored))
        expected = E4M3_NUMBERS[codes[:, first : first + BLOCK_INPUTS]].T
        np.testing.assert_array_equal(found, expected)
