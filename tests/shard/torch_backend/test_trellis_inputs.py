"""What is done to inputs of EXL3's matrices before products: activations, and turning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import (
    DEVICE,
    need_triton,
    sum_in_order,
)

need_triton()

from tests.shard.torch_backend.trellis_support import (  # noqa: E402
    FLOAT,
    HALF,
    encoded,
    linear_of,
    some_matrix,
    some_rows,
    write_for_library,
)
from tgi_trio.shard.torch_backend.layers import (  # noqa: E402
    gating,
)
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS, Activation  # noqa: E402
from tgi_trio.shard.torch_backend.layers.gating import Gate, activate  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import (  # noqa: E402
    join_trellises,
)

GATES: dict[str, tuple[Activation, int]] = {
    "silu": (Gate(functional.silu), 2),
    "silu scaled": (Gate(functional.silu, scale=0.5), 2),
    "quick_gelu limited": (Gate(ACTIVATIONS["quick_gelu"], 0.7, paired=True), 2),
    "gelu limited": (Gate(functional.gelu, 0.7, raised=False), 2),
    "relu2": (ACTIVATIONS["relu2"], 1),
    "gelu": (functional.gelu, 1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("act", "wider"), GATES.values(), ids=GATES)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("rows", [2, 20, 70])
def test_activations_where_inputs_are_turned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Activation,
    wider: int,
    dtype: torch.dtype,
    rows: int,
) -> None:
    """To the bit as by the kernel that opens gates, for few rows, in tiles and for a library."""
    write_for_library(monkeypatch)
    sum_in_order(monkeypatch)
    monkeypatch.setattr(gating, "runs_kernels", lambda device: True)
    matrix, _ = some_matrix(tmp_path, 128, 200)  # inputs are padded
    linear, inner = linear_of([encoded(matrix)], dtype), some_rows(rows, wider * 200, dtype)
    assert linear.opens(act)
    found, expected = linear.multiply_opened(inner, act), linear(activate(act, inner))
    if isinstance(act, Gate):
        assert torch.equal(found, expected)
    else:  # of which torch may have an operation
        step = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, atol=step * float(expected.abs().max()), rtol=0)


def test_activations_that_no_launch_opens(tmp_path: Path) -> None:
    """What no kernel knows, and where a plain matrix reads the same."""
    matrix, _ = some_matrix(tmp_path, 128, 256)
    part = encoded(matrix)
    bounded = Gate(functional.silu, 0.7, bounds_opened=True)
    assert not linear_of([part]).opens(bounded) and not linear_of([part]).opens(torch.tanh)
    plain = torch.zeros(128, 256, device=DEVICE)
    assert not linear_of([part, plain]).opens(Gate(functional.silu))


def test_inputs_that_are_scaled_alike_are_turned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_for_library(monkeypatch)
    one, other = (some_matrix(tmp_path / str(outputs), outputs, 256)[0] for outputs in (128, 256))
    upper, lower = encoded(one), encoded(other)
    lower.input_scales[:] = upper.input_scales
    (joined,) = join_trellises([upper, lower])
    assert joined.counts == (384,) and joined.input_scales.shape == (1, 256)
    assert joined.sorts.tolist() == [0, 0, 0]
    (apart,) = join_trellises([joined, encoded(other)])
    assert apart.counts == (384, 256) and apart.sorts.tolist() == [0, 0, 0, 1, 1]
    x = some_rows(70, 256, HALF)
    split = torch.cat([linear_of([part], HALF)(x) for part in (upper, lower)], 1)
    torch.testing.assert_close(linear_of([joined], HALF)(x), split, atol=0, rtol=0)
