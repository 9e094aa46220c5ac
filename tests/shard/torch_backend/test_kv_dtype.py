"""`--kv-cache-dtype`: K and V of 8 bits are near plain ones, and the same however they are read."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    generated,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVCache, KVShape

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]
PROMPTS, NEW = prompts(6), 8
WORDS = sorted(EIGHT_BITS)
# Of the logits' own spread, what rounding K and V to 3 or 2 bits of fraction may move them by in
# the middle of several prompts: random weights hand every error on.
NEAR = {"fp8_e4m3fn": 0.15, "fp8_e5m2": 0.3}


def logits_of(folder: Path, **options: Any) -> list[torch.Tensor]:
    """Return the logits of each prompt's next token."""
    runner, recorder = load(folder, dtype="float32", **options)
    rows = sequences(PROMPTS, 3, new=1)
    run(runner, rows)
    return [recorder.logits(row.id)[0] for row in rows]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)])
def test_the_nearest_numbers_are_kept(word: str, scales: tuple[float, float]) -> None:
    cache = KVCache(KVShape(2, 2, 32), 4, EIGHT_BITS[word], torch.device("cpu"))
    key, value = torch.randn(2, 5, 2, 32, generator=torch.Generator().manual_seed(0))
    key[0, 0, 0] = 1e9
    slots = torch.arange(16, 21)
    read = cache.write(1, slots, key, value, scales)
    numbers = torch.arange(256, dtype=torch.uint8).view(EIGHT_BITS[word]).float()
    numbers = numbers[numbers.isfinite()]
    for exact, found, scale in zip((key, value), read, scales, strict=True):
        distances = (exact[..., None] / scale - numbers).abs()
        assert torch.equal((found / scale - exact / scale).abs(), distances.min(-1).values)
    kept = cache.decode(cache.key_slots[1][16:21], scales[0], torch.float32)
    assert torch.equal(kept, read[0])
    assert cache.nbytes == 2 * 2 * 4 * BLOCK * 2 * 32


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2", "gpt2", "minimax_m3_vl_text"])
def test_logits_are_near_those_of_plain_numbers(
    checkpoint: Checkpoint, word: str, family: str
) -> None:
    folder = checkpoint(family)
    plain, small = logits_of(folder), logits_of(folder, kv_cache_dtype=word)
    moved = [
        float((found - exact).norm() / exact.std() / len(exact) ** 0.5)
        for found, exact in zip(small, plain, strict=True)
    ]
    assert 0 < statistics.median(moved) < NEAR[word]


@pytest.mark.parametrize("word", WORDS)
def test_answers_do_not_depend_on_how_a_prompt_came_in(checkpoint: Checkpoint, word: str) -> None:
    """Alone, among others, in chunks and over two ranks, the same numbers are read."""
    folder = checkpoint("llama")
    runner, recorder = load(folder, dtype="float32", kv_cache_dtype=word)
    whole = sequences(PROMPTS, 3, new=NEW)
    run(runner, whole)
    expected = [recorder.logits(row.id) for row in whole]

    def check(again: list[torch.Tensor]) -> None:
        for found, other in zip(again, expected, strict=True):
            torch.testing.assert_close(found, other, atol=2e-4, rtol=0)

    for chunk, joins in ((7, 1), (20, 2)):
        runner, recorder = load(folder, dtype="float32", kv_cache_dtype=word)
        rows = sequences(PROMPTS, 5, new=NEW)
        run(runner, rows, chunk=chunk, joins=joins)
        assert [generated(row) for row in rows] == [generated(row) for row in whole]
        check([recorder.logits(row.id) for row in rows])
    recorder = GreedyRecorder()
    with ranks_of(folder, 2, recorder, dtype="float32", kv_cache_dtype=word) as ranks:
        ranks.warm_up(WarmupRequest(64, 256, 16, 511 * BLOCK))
        rows = sequences(PROMPTS, 3, new=NEW)
        run(ranks, rows)
        check([recorder.logits(row.id) for row in rows])


def test_a_prefix_that_is_cached_is_read_as_it_was_computed(checkpoint: Checkpoint) -> None:
    runner, recorder = load(checkpoint("llama"), dtype="float32", kv_cache_dtype="fp8_e4m3fn")
    (first,) = sequences([PROMPTS[0] * 8], 3, new=NEW)
    run(runner, [first])
    (again,) = sequences([PROMPTS[0] * 8], 3, new=NEW)
    again.id, again.computed = 1, len(PROMPTS[0] * 8) // BLOCK * BLOCK
    again.block_ids = list(first.block_ids)
    run(runner, [again])
    torch.testing.assert_close(recorder.logits(1), recorder.logits(0), atol=2e-4, rtol=0)


@pytest.mark.parametrize("word", WORDS)
def test_a_token_takes_a_byte_a_number(checkpoint: Checkpoint, word: str) -> None:
    folder = checkpoint("llama")
    small, _ = load(folder, dtype="bfloat16", kv_cache_dtype=word)
    plain, _ = load(folder, dtype="bfloat16")
    assert 2 * small.info.kv_bytes_per_token == plain.info.kv_bytes_per_token


def with_scales(folder: Path, target: Path, scales: dict[str, float]) -> Path:
    """Write a checkpoint of one layer's worth of scales, and whatever was there."""
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_the_checkpoint_are_used(
    checkpoint: Checkpoint, tmp_path: Path, names: tuple[str, str]
) -> None:
    """Keys a thousandth of what they could be are coarse, and are not with a scale as small."""
    source = tmp_path / "source"
    source.mkdir()
    small = checkpoint("llama")
    tensors = load_file(small / "model.safetensors")
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] *= 2.0**-10
        if "q_proj" in name or "o_proj" in name:
            tensors[name] *= 2.0**10
    for file in small.glob("*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder = tmp_path / "scaled"
    folder.mkdir()
    layers = {int(name.split(".")[2]) for name in tensors if ".layers." in name}
    scales = {
        f"model.layers.{layer}.self_attn.{name}": 2.0**-10 for layer in layers for name in names
    }
    with_scales(source, folder, scales)
    expected = logits_of(small, kv_cache_dtype="fp8_e4m3fn")
    for found, other in zip(logits_of(folder, kv_cache_dtype="fp8_e4m3fn"), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-4, rtol=0)
    coarse = logits_of(source, kv_cache_dtype="fp8_e4m3fn")
    assert max(float((a - b).abs().max()) for a, b in zip(coarse, expected, strict=True)) > 1e-2
    plain = logits_of(folder)  # without the flag they are known, and not read
    for found, other in zip(plain, logits_of(small), strict=True):
        torch.testing.assert_close(found, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, bad: float
) -> None:
    folder = with_scales(checkpoint("llama"), tmp_path, {"model.layers.0.self_attn.v_scale": bad})
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.v_scale' .* no scale above 0"):
        load(folder, dtype="float32", kv_cache_dtype="fp8_e4m3fn")
