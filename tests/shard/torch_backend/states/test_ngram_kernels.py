"""Kernels of n-gram embeddings, against torch's operations."""

from __future__ import annotations

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.ngrams import NgramsSpec, draw_factors, find_primes
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import StreamNorm
from tgi_trio.shard.torch_backend.states import ngrams_layer
from tgi_trio.shard.torch_backend.states.ngrams_layer import NgramsLayer
from tgi_trio.shard.torch_backend.states.steps import StateSteps

need_triton()

COUNT, HIDDEN, WIDTH, END, VOCABULARY = 3, 40, 24, 1, 200000
CHANNELS = COUNT * HIDDEN
READS, WRITES = [1, 4, 5, 3], [2, 4, 6, 7]  # one to where it is read
FRESH = [False, False, False, True]


def some(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer_of(order: int, taps: int, dtype: torch.dtype) -> NgramsLayer:
    heads = 3 * (order - 1)
    rows = find_primes(50, 0, heads)
    factors = draw_factors(VOCABULARY, order, 1, 1234)
    spec = NgramsSpec(order, factors, rows, sum(rows), 0, WIDTH * heads, taps, END, CHANNELS)
    norms = [
        StreamNorm("rms_plus_one", some(CHANNELS, seed=i, dtype=dtype), 1e-5, COUNT)
        for i in range(3)
    ]
    return NgramsLayer(
        spec,
        table=some(sum(rows), WIDTH, seed=3, dtype=dtype),
        inner=Linear(some(CHANNELS + HIDDEN, WIDTH * heads, seed=4, dtype=dtype)),
        query_norm=norms[0],
        key_norm=norms[1],
        kernel_norm=norms[2],
        kernel=some(CHANNELS, taps, seed=5, dtype=dtype),
        ranks=None,
    )


def states_of(order: int, taps: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCABULARY, (8, order - 1), generator=draw)
    tokens[1, -1] = tokens[5, 0] = END  # nothing reaches over it
    before = (taps - 1) * order
    return {
        "tokens": tokens.to(DEVICE),
        "ngrams": some(8, before, CHANNELS, seed=7, dtype=dtype),
    }


def list_steps(starts: list[int]) -> StateSteps:
    reads, writes = (torch.tensor(of, device=DEVICE) for of in (READS, WRITES))
    return StateSteps(starts, reads, writes, torch.tensor(FRESH, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("order", "taps"), [(2, 2), (3, 4), (4, 3)])
@pytest.mark.parametrize("starts", [[0, 1, 2, 3, 4], [0, 3, 4, 9, 10]], ids=["decodes", "prompts"])
def test_it_adds_what_torch_adds(
    monkeypatch: pytest.MonkeyPatch, order: int, taps: int, dtype: torch.dtype, starts: list[int]
) -> None:
    layer, steps = layer_of(order, taps, dtype), list_steps(starts)
    ids = torch.arange(7, 7 + starts[-1], device=DEVICE) * 19997
    ids[1] = END
    streams = some(starts[-1], CHANNELS, seed=8, dtype=dtype)
    found = []
    for launches in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(ngrams_layer, "runs_kernels", lambda _, launches=launches: launches)
            patch.setattr(ngrams_layer, "_BLOCK", 64)  # several programs a token
            states = states_of(order, taps, dtype)
            found.append((layer.add(streams, ids, states, steps), states))
    (wanted, theirs), (mine, ours) = found
    assert torch.equal(ours["tokens"], theirs["tokens"])
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-4
    torch.testing.assert_close(ours["ngrams"], theirs["ngrams"], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_rows_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    """Of tokens so large that a product has nearly 63 bits."""
    layer, steps = layer_of(order, 2, torch.float32), list_steps([0, 1, 2, 3, 4])
    ids = torch.tensor([VOCABULARY - 1, END, 5, VOCABULARY // 2], device=DEVICE)
    expected = layer.find_rows(ids, states_of(order, 2, torch.float32)["tokens"], steps)
    monkeypatch.setattr(ngrams_layer, "runs_kernels", lambda _: True)
    found = layer.find_rows(ids, states_of(order, 2, torch.float32)["tokens"], steps)
    assert torch.equal(found, expected)
