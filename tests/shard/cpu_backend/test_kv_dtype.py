"""`--kv-cache-dtype` in the CPU kernels: the numbers that torch keeps, and its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, LLAMA, cpu_runner, meets_subnormals
from tests.shard.torch_backend.models_support import load as load_torch
from tests.shard.torch_backend.models_support import prompts, run, sequences
from tests.shard.torch_backend.test_kv_dtype import with_scales
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.instructions import find_variant
from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.vectors import load, load_stored, store, store_stored
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel
from tgi_trio.shard.cpu_backend.weight_layout import EIGHT_BITS, CacheNumbers
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS as BY_TORCH

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]
PROMPTS, NEW = prompts(6), 6
words = pytest.mark.parametrize("word", sorted(EIGHT_BITS))
SCALES = (0.125, 0.5)


@entry
def round_all(variant: Any, source: int, target: int, count: int) -> None:
    for i in range(0, count, 16):
        store_stored(variant.cache, target + i, load(source + 4 * i))


@entry
def widen_all(variant: Any, source: int, target: int, count: int) -> None:
    for i in range(0, count, 16):
        store(target + 4 * i, load_stored(variant.cache, source + i))


@words
def test_all_bytes_become_exact_numbers(word: str) -> None:
    """Also those below the least exponent, and none is a subnormal number on the way."""
    numbers = torch.arange(256, dtype=torch.uint8).view(BY_TORCH[word]).float().numpy()
    given, found = np.arange(256, dtype=np.uint8), np.zeros(256, np.float32)
    code = open_kernel(widen_all, 3, find_variant(LLAMA, "float32", kv_dtype=word))
    assert not meets_subnormals(lambda: code(address(given), address(found), 256))
    stored = np.isfinite(numbers)
    np.testing.assert_array_equal(found[stored], numbers[stored])


@words
def test_bytes_are_those_of_torch(checkpoint: Checkpoint, word: str) -> None:
    """Random numbers of all sizes, all that can be stored, and what is half-way between them."""
    spec = decoder_spec(read_config(checkpoint("llama", **FITTING["llama"])))
    assert spec is not None
    draw = np.random.default_rng(0)
    exact = torch.arange(256, dtype=torch.uint8).view(BY_TORCH[word]).float()
    exact = exact[exact.isfinite()].sort().values
    every = torch.cat([exact, (exact[1:] + exact[:-1]) / 2]).numpy()
    sizes = np.exp2(draw.uniform(-20, 20, 8192)) * draw.choice([-1.0, 1.0], 8192)
    numbers = np.concatenate([every, sizes]).astype(np.float32)
    numbers = np.ascontiguousarray(numbers[: len(numbers) // 16 * 16])
    found = np.zeros(len(numbers), np.uint8)
    variant = find_variant(spec, "float32", kv_dtype=word)
    code = open_kernel(round_all, 3, variant)
    code(address(numbers), address(found), len(numbers))
    most = torch.finfo(BY_TORCH[word]).max
    expected = torch.from_numpy(numbers).clamp(-most, most).to(BY_TORCH[word]).view(torch.uint8)
    np.testing.assert_array_equal(found, expected.numpy())


@words
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_are_those_of_torch(
    checkpoint: Checkpoint, tmp_path: Path, word: str, family: str
) -> None:
    """With scales of the checkpoint, in chunks; what is half-way may be rounded either way."""
    source = checkpoint(family, **FITTING[family])
    names = [f"model.layers.{i}.self_attn.{part}_scale" for i in range(2) for part in "kv"]
    folder = with_scales(source, tmp_path, dict(zip(names, SCALES * 2, strict=True)))
    runner, recorder = load_torch(folder, dtype="float32", kv_cache_dtype=word)
    rows = sequences(PROMPTS, 3, new=NEW)
    run(runner, rows)
    expected = [recorder.logits(row.id) for row in rows]
    with cpu_runner(folder, kv=CacheNumbers(word, [SCALES] * 2)) as (runner, recorder):
        rows = sequences(PROMPTS, 3, new=NEW)
        run(runner, rows, chunk=20, joins=2)
        found = [recorder.logits(row.id) for row in rows]
    apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    assert float(np.median(apart)) < 1e-3 and max(apart) < 0.1


def test_the_flag_is_served(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With the checkpoint's scales, and a byte a number."""
    source = checkpoint("llama", **FITTING["llama"])
    scales = {"model.layers.1.self_attn.k_scale": 0.25, "model.layers.1.self_attn.v_scale": 4.0}
    folder = with_scales(source, tmp_path, scales)
    settings = ShardSettings(model_path=folder, kv_cache_dtype="fp8_e4m3fn", cpu_threads=1)
    runner: Any = load_runner(settings)
    try:
        info = runner.info
        assert "K and V in fp8_e4m3fn" in info.backend
        operations = runner._forward.program.operations
        assert set(operations["key_scale"][operations["cosines"] >= 0].tolist()) >= {1.0, 0.25}
        assert set(operations["value_scale"].tolist()) >= {1.0, 4.0}
        spec = runner._forward.spec
        assert info.kv_bytes_per_token == 2 * len(spec.layers) * spec.kv_heads * spec.head_dim
    finally:
        runner.close()
