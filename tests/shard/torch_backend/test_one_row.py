"""A lone row and a matrix: our kernel says what the library does, and is taken where it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.torch_backend.layers import one_row
from tgi_trio.shard.torch_backend.layers.linear import Linear

need_triton()

from tgi_trio.shard.torch_backend.cuda_graphs import CudaCapture, RecordedTime  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402


def linear(outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype) -> Linear:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    more = torch.randn(outputs, generator=generator).to(DEVICE, dtype) if bias else None
    return Linear(weight.to(DEVICE, dtype), more)


@pytest.mark.parametrize("tile", one_row.TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(7, 1500, True), (16, 1024, False)])
def test_it_multiplies_as_the_library_does(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype, tile: one_row.RowTile
) -> None:
    own = linear(outputs, inputs, bias=bias, dtype=dtype)
    x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    expected = x.double() @ own.weight.double().T
    if own.bias is not None:
        expected += own.bias.double()
    found = one_row.multiply_by_kernel(own, x, tile)
    bits = 8 if dtype is torch.bfloat16 else 11
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-bits, atol=1e-5)


class Measuring:
    """Times by what was launched: `faster` is, for the matrices that have so many outputs."""

    def __init__(self, faster: one_row.RowTile | None, outputs: int) -> None:
        self.faster, self.outputs = faster, outputs
        self.seen: list[tuple[int, one_row.RowTile | None]] = []
        self.tile: one_row.RowTile | None = None

    def __call__(self, work: Callable[[], torch.Tensor]) -> float:
        self.tile = None
        outputs = work().shape[1]
        self.seen.append((outputs, self.tile))
        return 0.5 if self.tile == self.faster and outputs == self.outputs else 1.0


@pytest.mark.parametrize("faster", [*one_row.TILES, None])
def test_what_takes_less_is_taken(
    monkeypatch: pytest.MonkeyPatch, faster: one_row.RowTile | None
) -> None:
    monkeypatch.setattr(one_row, "_LEAST", 1)
    measuring, calls = Measuring(faster, 16), list[one_row.RowTile]()

    def multiply(own: Linear, x: torch.Tensor, tile: one_row.RowTile) -> torch.Tensor:
        measuring.tile = tile
        calls.append(tile)
        return torch.nn.functional.linear(x, own.weight, own.bias)

    monkeypatch.setattr(one_row, "multiply_by_kernel", multiply)
    wide = [linear(16, 32, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    others = [linear(8, 32, bias=False, dtype=d) for d in (torch.bfloat16, torch.float32)]
    stranger = cast("Linear", object())  # wraps a matrix, and has no room for ours
    one_row.choose_for_one_row([*wide, stranger, *others], measuring)
    assert [tile for outputs, tile in measuring.seen if outputs == 16] == [None, *one_row.TILES]
    assert all(own.one_row is None for own in others)
    calls.clear()
    for own in wide:
        own(torch.zeros(1, 32, dtype=torch.bfloat16, device=DEVICE))
        own(torch.zeros(2, 32, dtype=torch.bfloat16, device=DEVICE))
    assert calls == ([] if faster is None else [faster] * 3)
    one_row.choose_for_one_row(wide, Measuring(None, 0))  # another warm-up
    assert all(own.one_row is None for own in wide)


def test_work_is_timed_as_it_is_recorded() -> None:
    device = torch.device("cuda:0")
    with StandInDevice() as stand_in:
        x = torch.zeros(4, device=device)
        seconds = RecordedTime(device, CudaCapture(device))
        assert seconds(lambda: x + 1) == 0.0
        assert stand_in.counts.recordings == 1 and stand_in.counts.replays > 1
        # That recording is gone, and with it the memory that others may share.
        assert seconds(lambda: x + 2) == 0.0
