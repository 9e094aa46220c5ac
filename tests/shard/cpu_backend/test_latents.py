"""Attention over latents in the CPU kernels: what test_exact.py does not ask of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import COMPRESSED, cpu_runner
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import generated, prompts, run, sequences
from tgi_trio.shard.cpu_backend.operations.latents import pack_heads

pytestmark = pytest.mark.usefixtures("one_thread")


def test_matrices_of_heads_lie_as_linear_layers_do() -> None:
    draw = np.random.default_rng(0)
    matrices = np.round(draw.standard_normal((2, 4, 64), np.float32) * 64)  # exact in bfloat16
    whole = pack_heads(matrices, bf16=False)
    assert whole.shape == (2, 2, 4, 32)
    np.testing.assert_array_equal(whole[1, 1, 3], matrices[1, 3, 32:])
    pairs = pack_heads(matrices, bf16=True)
    assert pairs.shape == (2, 2, 2, 32)
    first, second = (pairs[1, 0, 1] << 16).view(np.float32), (pairs[1, 0, 1] & 0xFFFF0000)
    np.testing.assert_array_equal(first, matrices[1, 2, :32])
    np.testing.assert_array_equal(second.view(np.float32), matrices[1, 3, :32])


def test_two_threads_say_the_same_and_the_cache_has_a_latent_twice(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("deepseek_v3", **COMPRESSED["deepseek_v3"])
    golden = Golden(folder)
    with cpu_runner(folder, cores=(0, 1)) as (runner, _):
        assert runner.info.kv_bytes_per_token == 2 * 2 * (64 + 32) * 4
        batch = sequences(prompts(4), 3, new=6)
        run(runner, batch, chunk=7, joins=2, seed=1)
    for row in batch:
        prompt, tokens = row.token_ids[: row.prompt_length].tolist(), generated(row)
        assert golden.logits(prompt, tokens).argmax(-1).tolist() == tokens
