"""The kernel of hyper-connections' weights, against the same in torch's operations."""

from __future__ import annotations

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.spec import HyperSpec
from tgi_trio.shard.torch_backend.layers.hyper import HyperConnection, HyperWeights

need_triton()


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("iterations", [0, 1, 20])
def test_weights_are_those_of_torch(count: int, iterations: int) -> None:
    spec = HyperSpec(count, iterations, eps=1e-6, added=1.5, added_eps=1e-3)
    weights, kinds = 2 * count, 2
    if iterations:
        weights, kinds = weights + count * count, 3
    draw = torch.Generator().manual_seed(count)
    base, scale = (torch.randn(size, generator=draw).to(DEVICE) for size in (weights, kinds))
    own = HyperConnection(spec, HyperWeights(torch.empty(0), base, scale, 1e-6))
    parts = 3 * torch.randn(5, weights, generator=draw).to(DEVICE)
    ours, theirs = own._launch(parts), own._weigh(parts)
    assert (ours[2] is None) == (theirs[2] is None) == (iterations == 0)
    for found, wanted in zip(ours, theirs, strict=True):
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
