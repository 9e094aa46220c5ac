"""What is beside heads, in one launch with them: what launches of their own find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.states.rows_support import Slots
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.torch_backend.layers import detour
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.detour import PendingExpansion, expansion_constants
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states import convolution
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution, PendingConvolution

need_triton()

from tgi_trio.shard.torch_backend.attention.paged import kv_writing  # noqa: E402  (imports Triton)

HEADS, KV_HEADS, DIM, CHANNELS, RANK, HIDDEN = 4, 2, 16, 20, 24, 70
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (13, 1, 2, 0)  # of rows; the first one is longer than a tile
ROWS = Slots([1, 2, 3, 4], [5, 2, 3, 4], [False, False, True, True])


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several programs of a token's heads, and tiles of tokens, channels and outputs."""
    for module in (convolution, detour):
        monkeypatch.setattr(module, "runs_kernels", lambda _: True)
    monkeypatch.setattr(kv_writing, "_ELEMENTS", 2 * DIM)
    monkeypatch.setattr(convolution, "_BLOCK", 8)
    monkeypatch.setattr(convolution, "_TILE", 4)


def some(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def write(qkv: torch.Tensor, beside: BesideHeads | None, **kind: Any) -> list[torch.Tensor]:
    """Return queries, and the keys and values of a cache."""
    tokens, dtype = len(qkv), qkv.dtype
    steps = HeadSteps(HEADS, KV_HEADS, DIM, eps=1e-6, **kind)
    table = None
    if steps.rotary is not None:
        positions = torch.arange(tokens, device=DEVICE) + 3
        table = steps.rotary.table(positions, positions + 1, dtype)
    key = torch.zeros(tokens + 4, KV_HEADS, DIM, dtype=dtype, device=DEVICE)
    value = torch.zeros_like(key)
    slots = torch.arange(tokens, device=DEVICE).flip(0) + 1
    query = kv_writing.write_projected(qkv, steps, table, key, value, slots, beside=beside)
    return [query, key, value]


def kinds(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return heads that are turned, and such that are normalised or left as they are."""
    rotary = Rotary(RotarySpec(DIM, max_positions=64), torch.device(DEVICE))
    gain = some(HEADS + KV_HEADS, DIM, seed=4, dtype=dtype)
    return [{"rotary": rotary}, {"gain": gain, "value_norm": True}, {}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,) * 4], ids=["prompts", "decodes"])
@pytest.mark.parametrize("kind", range(3))
def test_a_convolution_beside_heads(
    kind: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    wide = some(sum(lengths), WIDTH + CHANNELS, seed=1, dtype=dtype)
    qkv, x = wide.split((WIDTH, CHANNELS), dim=-1)
    bias = some(CHANNELS, seed=2, dtype=dtype)
    layer = CausalConvolution(some(CHANNELS, 4, seed=3, dtype=dtype), bias)
    tails = some(6, 3, CHANNELS, seed=5, dtype=dtype)
    apart, together = tails.clone(), tails.clone()
    wanted = layer(x, apart, ROWS.launched(lengths), silu=True)
    pending = PendingConvolution(layer, x, together, ROWS.launched(lengths), silu=True)
    ours = write(qkv, pending, **kinds(dtype)[kind])
    assert all(map(torch.equal, ours, write(qkv, None, **kinds(dtype)[kind])))
    assert torch.equal(pending.found, wanted) and torch.equal(together, apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("kind", range(3))
def test_a_product_beside_heads(
    monkeypatch: pytest.MonkeyPatch, kind: int, tokens: int, dtype: torch.dtype
) -> None:
    """In either tile; ranks are multiplied in parts."""
    monkeypatch.setattr(detour, "_FEW_TOKENS", 16)
    monkeypatch.setattr(detour, "_DEPTH", 16)
    wide = some(tokens, WIDTH + RANK, seed=1, dtype=dtype)
    qkv, low = wide.split((WIDTH, RANK), dim=-1)
    weight = some(HIDDEN, RANK, seed=2, dtype=dtype)
    pending = PendingExpansion(Linear(weight), low)
    ours = write(qkv, pending, **kinds(dtype)[kind])
    assert all(map(torch.equal, ours, write(qkv, None, **kinds(dtype)[kind])))
    wanted = functional.linear(low.double(), weight.double())
    assert pending.found.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-8
    torch.testing.assert_close(pending.found.double(), wanted, atol=tolerance, rtol=tolerance)


def test_many_tokens_have_larger_tiles_in_half_precision() -> None:
    sizes = {
        (dtype, tokens): expansion_constants(dtype, 64, tokens)["TOKENS"]
        for dtype in DTYPES
        for tokens in (256, 257)
    }
    assert list(sizes.values()) == [16, 16, 16, 64]


def test_what_cannot_join_heads_is_computed_by_itself() -> None:
    """A product with a bias; and nothing is found before."""
    qkv, low = some(3, WIDTH, seed=1, dtype=DTYPES[0]), some(3, RANK, seed=2, dtype=DTYPES[0])
    linear = Linear(some(HIDDEN, RANK, seed=3, dtype=DTYPES[0]), torch.ones(HIDDEN, device=DEVICE))
    pending = PendingExpansion(linear, low)
    assert not pending.joins
    with pytest.raises(RuntimeError, match="not been computed"):
        _ = pending.found
    write(qkv, pending)
    assert torch.equal(pending.found, linear(low))
