"""Products that are cut are those of the whole, whichever dimension is long."""

from __future__ import annotations

import numpy as np
import pytest

from tgi_trio.shard.machine.small_products import multiply_small


@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(4, 32, 50), (4, 512, 1500), (4, 1500, 512), (7, 300, 300)]
)
def test_a_product_in_parts_is_the_product(rows: int, inner: int, width: int) -> None:
    draw = np.random.default_rng(1)
    x = draw.standard_normal((2, rows, inner)).astype(np.float32)
    y = draw.standard_normal((2, inner, width)).astype(np.float32)
    found = multiply_small(x, y)
    assert found.shape == (2, rows, width) and found.dtype == np.float32
    expected = x.astype(np.float64) @ y.astype(np.float64)
    assert np.abs(found - expected).max() < 1e-3
