"""Several hidden states of a token, their sums and mixtures."""

from __future__ import annotations

import torch

from tgi_trio.model.specs.decoder import HyperSpec
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import (
    HyperConnection,
    HyperEnds,
    HyperStates,
    balance,
)
from tgi_trio.shard.torch_backend.layers.streams.hyper_weights import HyperWeights

SPEC = HyperSpec(count=2, iterations=20, eps=1e-6)


def test_a_mixture_takes_all_of_each_stream_and_gives_each_as_much() -> None:
    mixture = balance(torch.rand(3, 4, 4) + 0.1, HyperSpec(4, 50, 1e-6))
    for dim in (-1, -2):
        torch.testing.assert_close(mixture.sum(dim=dim), torch.ones(3, 4), atol=1e-4, rtol=0.0)


def test_streams_take_from_each_other_and_from_the_result() -> None:
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    mixture = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]])  # from each (row) to each (column)
    found = torch.tensor([[100.0, 200.0]])
    left = HyperConnection.leave(
        HyperStates(streams), found, torch.tensor([[1.0, 2.0]]), mixture, None
    )
    assert left.streams.tolist() == [[[105.75, 211.5], [205.25, 410.5]]]


def test_streams_that_are_not_mixed_keep_what_they_have() -> None:
    spec = HyperSpec(count=2, iterations=0, eps=0.0, added=3.0, added_eps=0.5)
    weights = HyperWeights(
        torch.zeros(4, 4), torch.tensor([0.0, 30.0, 0.0, 30.0]), torch.ones(2), 1e-6
    )
    own = HyperConnection(spec, weights)
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    read, post, mixture = own.enter(HyperStates(streams), None)
    assert mixture is None
    torch.testing.assert_close(read, torch.tensor([[10.5, 21.0]]))
    torch.testing.assert_close(post, torch.tensor([[2.0, 3.5]]))
    found = torch.tensor([[100.0, 200.0]])
    left = own.leave(HyperStates(streams), found, post, mixture, None)
    torch.testing.assert_close(left.streams, torch.tensor([[[201.0, 402.0], [360.0, 720.0]]]))


def test_weights_do_not_depend_on_the_size_of_the_streams() -> None:
    count, hidden = SPEC.count, 3
    weights = HyperWeights(
        torch.randn(8, count * hidden), torch.randn(8), torch.tensor([1.0, 0.5, 2.0]), 0.0
    )
    own = HyperConnection(SPEC, weights)
    streams = torch.randn(5, count, hidden)
    read, post, mixture = own.enter(HyperStates(streams), None)
    larger = own.enter(HyperStates(7 * streams), None)
    torch.testing.assert_close(larger[0], 7 * read)
    torch.testing.assert_close(larger[1], post)
    assert mixture is not None and larger[2] is not None
    torch.testing.assert_close(larger[2], mixture)
    assert float(post.min()) >= 0.0 and float(post.max()) <= 2.0


def test_streams_begin_alike_and_end_as_a_sum() -> None:
    weights = HyperWeights(torch.zeros(2, 6), torch.tensor([0.0, 30.0]), torch.ones(1), 1e-6)
    ends = HyperEnds(SPEC, weights)
    x = torch.randn(4, 3)
    states = ends.split(x)
    assert states.streams.shape == (4, 2, 3) and torch.equal(states.streams[:, 0], x)
    torch.testing.assert_close(ends.join(states), 1.5 * x, atol=1e-4, rtol=1e-4)
