"""Watermarks of any gamma and delta, from both samplers, held to the paper and to torch.randperm.

Kirchenbauer et al., "A Watermark for Large Language Models", 2023: the previous token seeds a
generator, which splits the vocabulary; `delta` is added to the logits of the green list.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.sampling.sampling_support import CPU, EOS, Logits, normal, sequence, top
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler
from tgi_trio.shard.sampling.logits_processors import Watermark
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler

SIZE = 1000


def by_kernels(logits: Logits, row: ShardSequence, watermark: Watermark | None) -> dict[int, float]:
    sampler = CpuSampler(SIZE, [EOS], watermark=watermark)
    return top(sampler.choose(logits[None].copy(), [row]).rows[0])


def by_torch(logits: Logits, row: ShardSequence, watermark: Watermark | None) -> dict[int, float]:
    sampler = Sampler(SIZE, [EOS], CPU, watermark=watermark)
    return top(sampler.choose(torch.tensor(logits[None]), [row]).rows[0])


def green_list(previous: int, gamma: float, size: int = SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(15485863 * previous)
    permuted = torch.randperm(size, generator=generator)
    return permuted[: int(gamma * size)].tolist()


both = pytest.mark.parametrize("choose", [by_kernels, by_torch])


@both
@pytest.mark.parametrize("delta", [-3.0, 0.0, 0.7, 2.0, 40.0])
@pytest.mark.parametrize("gamma", [0.001, 0.25, 0.5, 0.99])
def test_delta_is_added_to_a_gamma_share(choose: Any, gamma: float, delta: float) -> None:
    logits, row = normal(1, SIZE)[0], sequence([5, 6, 321], watermark=True, top_n=SIZE)
    wanted = torch.tensor(logits, dtype=torch.float64)
    wanted[green_list(321, gamma)] += delta
    wanted = wanted.log_softmax(-1)
    found = choose(logits, row, Watermark(gamma, delta))
    assert len(found) == SIZE
    assert [found[i] for i in range(SIZE)] == pytest.approx(wanted.tolist(), abs=5e-5)


@both
def test_the_share_of_the_green_list_is_the_paper_s(choose: Any) -> None:
    """Of flat logits: gamma e^delta / (1 + (e^delta - 1) gamma)."""
    gamma, delta = 0.3, 1.7
    flat = np.zeros(SIZE, np.float32)
    row = sequence([5, 6, 42], watermark=True, top_n=SIZE)
    found = choose(flat, row, Watermark(gamma, delta))
    share = math.fsum(math.exp(found[token]) for token in green_list(42, gamma))
    expected = gamma * math.exp(delta) / (1 + (math.exp(delta) - 1) * gamma)
    assert share == pytest.approx(expected, abs=1e-4)


@both
def test_without_settings_they_are_tgi_s_and_only_rows_that_ask_have_one(choose: Any) -> None:
    logits = normal(1, SIZE)[0]
    marked = sequence([5, 6, 7], watermark=True, top_n=SIZE)
    assert choose(logits, marked, None) == choose(logits, marked, Watermark(0.5, 2.0))
    plain = sequence([5, 6, 7], top_n=SIZE)
    assert plain.sampling == SamplingParameters(top_n=SIZE)
    assert choose(logits, plain, Watermark(0.1, 9.0)) == choose(logits, plain, None)
