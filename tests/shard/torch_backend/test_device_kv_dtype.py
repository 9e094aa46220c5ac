"""K and V of 8 bits in the kernels: what is kept is what the CPU keeps, and steps are recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import BLOCK, prompts
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVCache, KVShape
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    agree,
    drive,
    start,
)
from tgi_trio.shard.torch_backend.attention.paged import kv_writing, split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS = prompts(2, longest=2 * BLOCK)
# How tokens are chosen is test_device_requests.py's and test_device_sampler.py's.
ASKED: list[dict[str, Any]] = [{}, {}]


@pytest.mark.parametrize("codes", EIGHT_BITS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.03)])
def test_the_nearest_numbers_are_kept(codes: str, scales: tuple[float, float]) -> None:
    """All of them, what lies in the middle between two, what is too small and what is too large."""
    every = torch.arange(256, dtype=torch.uint8).view(EIGHT_BITS[codes]).float()
    every = every[every.isfinite()].unique()
    middles = (every[1:] + every[:-1]) / 2
    some = torch.randn(2000, generator=torch.Generator().manual_seed(3)) * torch.logspace(
        -9, 9, 2000
    )
    numbers = torch.cat((every, middles, some, torch.zeros(64)))
    tokens = len(numbers) // 64
    key = numbers[: tokens * 64].view(tokens, 1, 64) * scales[0]
    value = key / scales[0] * scales[1]
    caches = [KVCache(KVShape(1, 1, 64), 9, EIGHT_BITS[codes], torch.device(DEVICE)) for _ in "ab"]
    assert tokens < 8 * BLOCK and caches[0].codes == codes
    slots = torch.randperm(8 * BLOCK)[:tokens].to(DEVICE) + BLOCK
    caches[0].write(0, slots, key.to(DEVICE), value.to(DEVICE), scales)
    ours = caches[1]
    qkv = torch.cat((torch.zeros_like(key), key, value), 1).flatten(1).to(DEVICE)
    kv_writing.write_projected(
        qkv,
        HeadSteps(1, 1, 64),
        None,
        ours.key_slots[0],
        ours.value_slots[0],
        slots,
        scales=scales,
        codes=codes,
    )
    assert torch.equal(ours.key, caches[0].key) and torch.equal(ours.value, caches[0].value)


@pytest.mark.parametrize(
    ("family", "codes"),
    [("llama", "fp8_e4m3fn"), ("gpt_oss", "fp8_e5m2"), ("deepseek_v3", "fp8_e4m3fn")],
)
def test_steps_are_recorded_and_say_what_the_cpu_says(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, codes: str
) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    folder = checkpoint(family)  # transformers makes it without a device
    expected = drive(start(folder, "cpu", kv_cache_dtype=codes), TEXTS, ASKED, 3)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (2,), kv_cache_dtype=codes)
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
