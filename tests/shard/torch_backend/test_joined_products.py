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
from tgi_trio.shard.torch_backend.layers import joined, plain_product  # noqa: E402
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
    both = join_linears(first, second, always=False)
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


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize(
    ("outputs", "divided_alike"), [((40, 24), True), ((72, 600), False)], ids=["alike", "otherwise"]
)
def test_joined_linears_keep_the_bits_of_each(
    monkeypatch: pytest.MonkeyPatch, outputs: tuple[int, int], divided_alike: bool, always: bool
) -> None:
    """Where batch invariance is kept, and the first of them may be needed by itself."""
    monkeypatch.setattr(joined, "runs_kernels", lambda _: True)
    monkeypatch.setattr(plain_product, "runs_kernels", lambda _: True)
    monkeypatch.setattr(plain_product, "_LEAST_PART", 32)
    monkeypatch.setattr(plain_product, "_ENOUGH", 4)
    first, second = (Linear(some_rows(n, 256).clone(), invariant=True) for n in outputs)
    x = some_rows(5, 256)
    before = [first(x), second(x)]
    both = join_linears(first, second, always=always)
    assert (both is not None) == (divided_alike or always)
    if both is None:
        return
    found = both.multiply(x)
    assert torch.equal(both.multiply(x[3:4])[1], found[1][3:4])  # invariant
    assert torch.equal(found[0], first(x)) == divided_alike
    for part, alone in zip(found, before, strict=True):
        torch.testing.assert_close(part, alone)


def test_linears_that_differ_are_apart() -> None:
    device = torch.device(DEVICE)
    one, other = (
        CodedLinear([coded(some_parts(kind, 16, 128, 32))], None, FLOAT, device)
        for kind in ("u4", "i8")
    )
    biased = CodedLinear([coded(some_parts("u4", 16, 128, 32))], torch.ones(16), FLOAT, device)
    plain = Linear(torch.ones(16, 128, device=device))
    assert not any(join_linears(one, each, always=True) for each in (other, biased, plain))
