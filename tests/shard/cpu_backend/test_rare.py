"""Operations of few families: orders of a head's dimensions, and kernels that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import VARIANT
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.cpu_backend import kernel_groups, verified
from tgi_trio.shard.cpu_backend.head_order import head_order, needs_order, widen
from tgi_trio.shard.cpu_backend.self_tests import rare as rare_self_test
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError


def turned(x: np.ndarray, rotary: RotarySpec, angles: np.ndarray) -> np.ndarray:
    """Return a head turned by the angles of its pairs, each where it is."""
    pairs = np.arange(rotary.dim // 2)
    first = 2 * pairs if rotary.interleaved else pairs
    second = first + (1 if rotary.interleaved else rotary.dim // 2)
    result = x.copy()
    result[first] = x[first] * np.cos(angles) - x[second] * np.sin(angles)
    result[second] = x[first] * np.sin(angles) + x[second] * np.cos(angles)
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 10, 32, 62, 64])
def test_an_order_turns_the_same_pairs(interleaved: bool, dim: int) -> None:
    draw, size = np.random.default_rng(1), 64
    rotary = RotarySpec(dim=dim, interleaved=interleaved)
    order, angles = head_order(rotary, size), draw.standard_normal(dim // 2).astype(np.float32)
    assert sorted(order) == list(range(size))
    x = draw.standard_normal(size).astype(np.float32)
    cosines = widen(np.cos(angles)[None], size, 1.0)[0]
    sines = widen(np.sin(angles)[None], size, 0.0)[0]
    a, b = np.split(x[order], 2)
    found = np.concatenate((a * cosines - b * sines, a * sines + b * cosines))
    np.testing.assert_allclose(found, turned(x, rotary, angles)[order], atol=1e-6)


def test_what_needs_an_order() -> None:
    assert not needs_order(None)
    assert not needs_order(RotarySpec(dim=32))
    assert needs_order(RotarySpec(dim=32, interleaved=True))
    assert needs_order(RotarySpec(dim=48))


def test_kernels_that_are_wrong_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified.open_kernel_group(kernel_groups.OF_FEW, VARIANT)
    monkeypatch.setattr(rare_self_test, "_turned", lambda x: x)
    with pytest.raises(UnsupportedError, match=r"REORDER is .* away from the reference"):
        verified.open_kernel_group(kernel_groups.OF_FEW, VARIANT)
