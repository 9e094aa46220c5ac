"""Linears of the same input that share one matrix, as codes."""

from __future__ import annotations

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton, sum_in_order

need_triton()

from tests.shard.torch_backend.test_coded_products import (  # noqa: E402  (Triton's)
    coded,
    some_parts,
    some_rows,
)
from tgi_trio.shard.torch_backend.layers.linears import joined, plain_product  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.joined import join_linears  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear  # noqa: E402

FLOAT = torch.float32


@pytest.mark.parametrize(("kind", "heads"), [("u5", "nested lows"), ("e4m3", "scales")])
def test_linears_that_are_alike_share_one_matrix(
    kind: str, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is multiplied in one launch; each of them says what it said before."""
    sum_in_order(monkeypatch)
    sizes, device = (48, 16), torch.device(DEVICE)
    first, second = (
        CodedLinear([coded(some_parts(kind, n, 128, 32, heads, seed=n))], None, FLOAT, device)
        for n in sizes
    )
    x = some_rows(5, 128)
    before, held = [first(x), second(x)], first.nbytes() + second.nbytes()
    both = join_linears(first, second)
    assert both is not None and both.serves(first, second) and not both.serves(None, second)
    assert all(map(torch.equal, both.multiply(x), before))
    assert torch.equal(first(x), before[0]) and torch.equal(second(x), before[1])
    assert isinstance(both.whole, CodedLinear)
    whole, *parts = (each.lone for each in (both.whole, first, second))
    assert whole is not None
    memory = {name: each.untyped_storage().data_ptr() for name, each in whole.tensors().items()}
    for part in parts:
        assert part is not None
        tensors = part.tensors().items()
        assert memory == {name: each.untyped_storage().data_ptr() for name, each in tensors}
    assert both.whole.nbytes() <= held


def test_joined_linears_are_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where batch invariance is kept; programs share the inputs of few rows."""
    sum_in_order(monkeypatch)
    for module in (joined, plain_product):
        monkeypatch.setattr(module, "runs_kernels", lambda _: True)
    monkeypatch.setattr(plain_product, "_LEAST_PART", 32)
    monkeypatch.setattr(plain_product, "_FEW_ROWS", 8)
    first, second = (Linear(some_rows(n, 256), invariant=True) for n in (72, 40))
    x = some_rows(70, 256)
    before = [first(x), second(x)]
    both = join_linears(first, second)
    assert both is not None
    every = both.multiply(x)
    for one, other in zip(every, before, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for part in (slice(0, 1), slice(3, 10), slice(5, 70)):
        found = both.multiply(x[part])
        assert all(torch.equal(one, own[part]) for one, own in zip(found, every, strict=True))


def test_linears_that_differ_are_apart() -> None:
    device = torch.device(DEVICE)
    one, other = (
        CodedLinear([coded(some_parts(kind, 16, 128, 32))], None, FLOAT, device)
        for kind in ("u4", "i8")
    )
    biased = CodedLinear([coded(some_parts("u4", 16, 128, 32))], torch.ones(16), FLOAT, device)
    plain = Linear(torch.ones(16, 128, device=device))
    assert not any(join_linears(one, each) for each in (other, biased, plain))
