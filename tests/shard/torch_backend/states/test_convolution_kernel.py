"""The kernel of causal convolutions against torch's own, over rows of any lengths."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.states.rows_support import Slots, refill
from tgi_trio.shard.torch_backend.states import convolution
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution

need_triton()

CHANNELS, SLOTS = 12, 9
# One longer than a tile, shorter ones than there are taps, one of none, decodes.
LENGTHS = (23, 1, 2, 0, 5, 1)
READS, WRITES = [1, 2, 3, 4, 5, 6], [7, 2, 3, 4, 8, 6]
FRESH = [False, False, True, False, True, True]
ROWS = Slots(READS, WRITES, FRESH)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several tiles of tokens and of channels."""
    monkeypatch.setattr(convolution, "runs_kernels", lambda _: True)
    monkeypatch.setattr(convolution, "_BLOCK", 8)
    monkeypatch.setattr(convolution, "_TILE", 4)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def expected(
    layer: CausalConvolution,
    x: torch.Tensor,
    tails: torch.Tensor,
    dilation: int,
    lengths: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what torch's convolution makes of each row in float64, and the slots behind it."""
    kernel = layer.kernel.double().t()[:, None]
    bias = None if layer.bias is None else layer.bias.double()
    found, after = [], tails.clone()
    for row, part in enumerate(x.double().split(lengths)):
        tail = tails[READS[row]].double() * (not FRESH[row])
        joined = torch.cat((tail, part))
        after[WRITES[row]] = joined[len(joined) - len(tail) :].to(tails.dtype)
        if len(part):
            y = functional.conv1d(joined.t(), kernel, bias, dilation=dilation, groups=CHANNELS)
            found.append(y.t())
    return torch.cat(found), after


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,) * 6], ids=["prompts", "decodes"])
@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_it_is_torchs_convolution(
    is_recorded: bool,
    biased: bool,
    taps: int,
    dilation: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(taps)
    bias = some(CHANNELS, dtype=dtype) if biased else None
    layer = CausalConvolution(some(CHANNELS, taps, dtype=dtype), bias, dilation=dilation)
    count = sum(lengths)
    tokens = count + 7 if is_recorded else count
    wide = some(tokens, CHANNELS + 4, dtype=dtype)  # what else a linear has projected
    x = wide[:, :CHANNELS]
    tails = some(SLOTS, (taps - 1) * dilation, CHANNELS, dtype=dtype)
    wanted, after = expected(layer, x[:count], tails, dilation, lengths)
    steps = ROWS.launched(lengths)
    if is_recorded:
        steps, rows = ROWS.recorded(lengths, tokens)
        layer(x, tails.clone(), steps)
        refill(rows, lengths)
    own = tails.clone()
    found = layer(x, own, steps)
    assert found.dtype is dtype and not found[count:].any()
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(found[:count].double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(own[1:], after[1:])  # slot 0 is no sequence's
    opened = layer(x, tails.clone(), steps, silu=True, dtype=torch.float32)
    assert opened.dtype is torch.float32
    torch.testing.assert_close(opened, functional.silu(found).float(), atol=1e-6, rtol=1e-6)


def test_numbers_that_are_none_stay_in_their_row() -> None:
    layer = CausalConvolution(some(CHANNELS, 4))
    x, tails = some(sum(LENGTHS), CHANNELS), some(SLOTS, 3, CHANNELS)
    x[23:24] = torch.nan  # the second row
    tails[5] = torch.nan  # the fifth, which does not read it
    found = layer(x, tails, ROWS.launched(LENGTHS))
    assert found[23].isnan().all()
    assert found[:23].isfinite().all() and found[24:].isfinite().all()
    assert tails[[7, 3, 8, 6]].isfinite().all()
