"""The CPU kernels give the reference's tokens in float32, however a step is put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import COMPRESSED, FITTING, MIXTURES, cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy, check_prompt_logprobs
from tests.shard.torch_backend.models_support import (
    TOLERANCES,
    advance,
    baichuan,
    generated,
    prompts,
    run,
    sequence,
    sequences,
)
from tests.shard.torch_backend.own_names import CASES, make_case
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.cpu_backend.instructions import has_amx, has_dot
from tgi_trio.shard.cpu_backend.weight_layout import Pairs

PROMPTS = prompts(16)
pytestmark = pytest.mark.usefixtures("one_thread")

# How far logits may be from those of transformers, which rounds, too: where experts are chosen,
# where an MLP is of squares (both are 1e-4 from what float64 says of Nemotron, logits up to 18),
# and where states are alone (transformers is 2e-4 from float64 there, logits up to 11).
ROUNDING = {
    **dict.fromkeys((*MIXTURES, *COMPRESSED, "lfm2_moe", "nemotron_h"), 3e-4),
    "mamba": 5e-4,
    "nemotron": 1e-3,
    **TOLERANCES,
}

Checkpoint = Callable[..., Path]


def rows(shuffle: int | None = None) -> list[ShardSequence]:
    return sequences(PROMPTS, shuffle)


@pytest.mark.sampled(5)  # `make test-avx2` has them all
@pytest.mark.parametrize("family", FITTING)
def test_tokens_and_logits_of_every_family(checkpoint: Checkpoint, family: str) -> None:
    """Prompts of every length about a block, and texts that go on in another one."""
    folder = checkpoint(family, **FITTING[family])
    golden = Golden(folder)
    with cpu_runner(folder) as (runner, recorder):
        batch = sequences(PROMPTS[:8], 3, new=16)
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, ROUNDING.get(family, 1e-4))
    different = len({tuple(generated(row)) for row in batch})
    assert different == len(batch) or (family == "bloom" and different > len(batch) / 2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", sorted(CASES.keys() - {"kimi_k2"})
)  # whose parts are those of FITTING
def test_families_that_transformers_has_not(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    relative, own = make_case(name, checkpoint, tmp_path)
    golden = Golden(relative)
    with cpu_runner(own) as (runner, recorder):
        batch = sequences(PROMPTS[2:7], 3, new=12)
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, 3e-4)


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", **FITTING["llama"])


@pytest.fixture(scope="module")
def golden(llama: Path) -> Golden:
    return Golden(llama)


@pytest.fixture(scope="module")
def runner(llama: Path) -> Iterator[tuple[Any, ...]]:
    with cpu_runner(llama) as pair:
        yield pair


def test_a_batch_at_once_and_one_by_one(runner: tuple[Any, ...], golden: Golden) -> None:
    batch = rows()
    run(runner[0], batch)
    for row in batch:
        assert_greedy(golden, runner[1], row)
    for row in rows()[:6]:
        runner[1].by_place.clear()
        run(runner[0], [row])
        assert_greedy(golden, runner[1], row)
    runner[1].by_place.clear()


def test_a_long_context(checkpoint: Checkpoint) -> None:
    """Positions to 8192; the reference computes the whole sequence at once."""
    folder = checkpoint("llama", **FITTING["llama"], max_position_embeddings=8192)
    long = prompts(1, vocab=512, seed=3)[0] + [3 + (i * i) % 500 for i in range(8150)]
    with cpu_runner(folder) as (runner, recorder):
        blocks = list(range(1, 511))
        blocks[::2], blocks[1::2] = blocks[1::2], blocks[::2]
        row = sequence(0, long, [*blocks, 511], new=8)
        while row.length - row.computed > 1:
            advance(runner, [row], [min(700, row.length - row.computed)])
        while row.remaining:
            advance(runner, [row], [1])
        assert_greedy(Golden(folder), recorder, row, tolerance=1e-3)


@pytest.mark.parametrize("chunk", [1000, 5])
def test_prompt_logprobs(runner: tuple[Any, ...], golden: Golden, chunk: int) -> None:
    check_prompt_logprobs(runner[0], golden, PROMPTS[5:7], chunk)
    runner[1].by_place.clear()


def test_threads_share_every_operation(llama: Path, golden: Golden) -> None:
    before = os.sched_getaffinity(0)
    try:
        with cpu_runner(llama, cores=(0, 1)) as (runner, recorder):
            batch = rows(shuffle=8)
            run(runner, batch, chunk=30, joins=5, seed=2)
            for row in batch:
                assert_greedy(golden, recorder, row)
    finally:
        os.sched_setaffinity(0, before)


def bfloat16_distance(golden: Golden, recorder: object, batch: list[ShardSequence]) -> float:
    """Norm of the logits' difference to float32, relative; over what the runner chose from."""
    ours, exact = [], []
    for row in batch:
        prompt = row.token_ids[: row.prompt_length].tolist()
        exact.append(golden.logits(prompt, generated(row)))
        ours.append(recorder.logits(row.id))  # type: ignore[attr-defined]
    a, b = torch.cat(ours), torch.cat(exact)
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "pairs",
    [
        "float32",
        pytest.param("dot", marks=pytest.mark.skipif(not has_dot(), reason="AVX512_BF16")),
        pytest.param("amx", marks=pytest.mark.skipif(not has_amx(), reason="AMX")),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_is_as_near_as_torch(checkpoint: Checkpoint, family: str, pairs: Pairs) -> None:
    from tests.shard.torch_backend.models_support import load

    folder = checkpoint(family, **FITTING[family], dtype="bfloat16")
    golden = Golden(folder)
    torch_runner, torch_recorder = load(folder, dtype="bfloat16")
    reference = rows()
    run(torch_runner, reference, chunk=16, joins=4)
    with cpu_runner(folder, "bfloat16", pairs=pairs) as (runner, recorder):
        batch = rows(shuffle=4)
        run(runner, batch, chunk=16, joins=4)
        ours = bfloat16_distance(golden, recorder, batch)
    assert ours <= bfloat16_distance(golden, torch_recorder, reference)


def test_rows_of_a_head_are_divided_by_their_lengths(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Baichuan 2, which is told by its vocabulary."""
    original = checkpoint("llama", head_dim=32, num_key_value_heads=4, vocab_size=125696)
    golden = Golden(original)
    golden.model.lm_head.weight.data /= golden.model.lm_head.weight.norm(dim=1, keepdim=True)
    with cpu_runner(baichuan(original, tmp_path / "packed")) as (runner, recorder):
        batch = sequences(PROMPTS[:4], 3, new=6)
        run(runner, batch, chunk=20, joins=2)
        for row in batch:
            assert_greedy(golden, recorder, row)
