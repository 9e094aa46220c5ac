"""Floating-point codes without AVX512: numbers that are made beside their neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tgi_trio.shard.cpu_backend.instructions import find_multiplier, has
from tgi_trio.shard.cpu_backend.kernels.quantised.neighbours import makes_neighbours
from tgi_trio.shard.cpu_backend.kinds.table import KINDS
from tgi_trio.shard.cpu_backend.multiplier import Dots, Multiplier
from tgi_trio.shard.cpu_backend.panel_kernel import open_panel_kernel
from tgi_trio.shard.cpu_backend.self_tests.kinds import multiply, random_codes, store_rows
from tgi_trio.shard.cpu_backend.tables import DIRECT, UNPACK
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

pytestmark = pytest.mark.skipif(not (has("avx2") and has("f16c")), reason="there is no AVX2")

INPUTS, SPAN = 640, 128  # two chunks of an unpacked panel and a half


def way(name: str, dots: Dots, *, half: bool = True) -> Multiplier:
    """Return float32's way to multiply a kind, in tiles of four rows."""
    return replace(find_multiplier(KINDS[name].kind), dots=dots, rows=4, looks_up=False, half=half)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("name", ["e4m3", "table", "table of e2m1", "mul1 3"])
def test_neighbours_are_added_up_as_numbers_one_by_one(name: str, half: bool) -> None:
    """To the bit, in tiles of all sizes; `half` False: what a processor without F16C has."""
    kind, draw = KINDS[name].kind, np.random.default_rng(7)
    span = INPUTS if kind.span == -1 else SPAN
    weights = random_codes(kind, PANEL, INPUTS, span, draw)
    x = draw.standard_normal((13, INPUTS)).astype(np.float32)
    used, plain = way(name, "avx2", half=half), way(name, "plain")
    assert used.keeps_neighbours and not plain.keeps_neighbours
    assert makes_neighbours(used) == (half and name != "mul1 3")
    kernel, reference = open_panel_kernel(used), open_panel_kernel(plain)
    stored, _ = store_rows(used, x)
    expected = multiply(reference, weights, span, stored)
    for rows in (1, 3, 4, 13):
        for mode in (DIRECT, UNPACK):
            found = multiply(kernel, weights, span, stored[:rows], mode)
            np.testing.assert_array_equal(found, expected[:rows])
