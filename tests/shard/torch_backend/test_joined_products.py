"""Linears of the same input that share one matrix, as codes."""

from __future__ import annotations

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton

need_triton()

from tests.shard.torch_backend.test_coded_products import (  # noqa: E402  (Triton's)
    coded,
    some_parts,
    some_rows,
)
from tgi_trio.shard.torch_backend.layers.coded_linear import CodedLinear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.joined import join_linears  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linear import Linear  # noqa: E402

FLOAT = torch.float32


@pytest.mark.parametrize(("kind", "heads"), [("u5", "nested lows"), ("e4m3", "scales")])
def test_linears_that_are_alike_share_one_matrix(kind: str, heads: str) -> None:
    """Which is multiplied in one launch; each of them says what it said before."""
    sizes, device = (48, 16), torch.device(DEVICE)
    first, second = (
        CodedLinear([coded(some_parts(kind, n, 128, 32, heads, seed=n))], None, FLOAT, device)
        for n in sizes
    )
    x = some_rows(5, 128)
    before, held = [first(x), second(x)], first.nbytes() + second.nbytes()
    joined = join_linears(first, second)
    assert joined is not None and joined.serves(first, second) and not joined.serves(None, second)
    assert torch.equal(joined.whole(x), torch.cat(before, dim=1))
    assert torch.equal(first(x), before[0]) and torch.equal(second(x), before[1])
    assert isinstance(joined.whole, CodedLinear)
    whole, *parts = (each.lone for each in (joined.whole, first, second))
    assert whole is not None
    memory = {name: each.untyped_storage().data_ptr() for name, each in whole.tensors().items()}
    for part in parts:
        assert part is not None
        tensors = part.tensors().items()
        assert memory == {name: each.untyped_storage().data_ptr() for name, each in tensors}
    assert joined.whole.nbytes() <= held


def test_linears_that_differ_are_apart() -> None:
    device = torch.device(DEVICE)
    one, other = (
        CodedLinear([coded(some_parts(kind, 16, 128, 32))], None, FLOAT, device)
        for kind in ("u4", "i8")
    )
    biased = CodedLinear([coded(some_parts("u4", 16, 128, 32))], torch.ones(16), FLOAT, device)
    plain = Linear(torch.ones(16, 128, device=device))
    assert not any(join_linears(one, each) for each in (other, biased, plain))
