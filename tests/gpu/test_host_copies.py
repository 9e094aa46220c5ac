"""Copies between a device and the host's memory: the same bytes, in order, beside steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.shard.conftest import checkpoint  # noqa: F401  (a fixture)
from tests.shard.torch_backend.test_host_copies import check_there_and_back
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.host_copies import Planes, TorchHostCopies
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS, PLACES = 200, 150


def numbers_of(cache: KVCache) -> torch.Tensor:
    """Return the first and the last number of every block, int16 [layers, blocks, 2]."""
    whole = torch.cat([plane.view(torch.int16) for plane in cache.planes])
    return whole[:, :, [0, -1]].cpu()


@torch.inference_mode()
def test_launches_keep_their_order_without_a_wait_between_them() -> None:
    """Blocks of a megabyte, so that launches are in flight when the next ones come."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache = KVCache(KVShape(16, 8, 128), BLOCKS, torch.bfloat16, device)
    cache.key.view(torch.int16).random_(0, 1 << 15)
    cache.value.view(torch.int16).random_(0, 1 << 15)
    block = sum(plane.nbytes for plane in cache.planes) // BLOCKS
    copies = TorchHostCopies(Planes(cache.planes, ()), 2 * PLACES * block, device)
    expected = numbers_of(cache)
    kept: dict[int, torch.Tensor] = {}
    rng = random.Random(0)
    for launches in range(1, 60):
        ordered = []
        for _ in range(rng.randint(1, 100)):
            item, place = rng.randrange(BLOCKS), rng.randint(1, PLACES)
            if place in kept and rng.random() < 0.5:
                expected[:, item] = kept[place]
                ordered.append(Transfer(item, place, back=True))
            else:
                kept[place] = expected[:, item].clone()
                ordered.append(Transfer(item, place, back=False))
        copies.launch(ordered)
        assert copies.done <= launches
    copies.finish()
    assert copies.done == 59
    assert torch.equal(numbers_of(cache), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v2"])
def test_a_model_says_the_same_behind_what_comes_back(
    checkpoint: Callable[..., Path],  # noqa: F811
    family: str,
) -> None:
    told = ShardSettings(
        model_path=checkpoint(family), dtype="float32", prefix_cache_host_bytes=1 << 20
    )
    runner = load_torch_runner(
        told, read_config(told.model_path), device="cuda", graph_sizes=(1, 2)
    )
    runner.warm_up(WarmupRequest(24, 64, 4, 63 * 16))
    check_there_and_back(runner)
