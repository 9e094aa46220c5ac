"""What is asked of every kind of index in the CPU kernels: of tokens, of blocks, of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.adapters.peft_support import PeftGolden, adapted, check, install, write_adapter
from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.cpu_backend.test_at_any_load import DOTS
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    advance,
    load,
    prompts,
    run,
    sequence,
    sequences,
)
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers

# How a model of three layers is computed, for `check_invariance`.
NUMBERS: dict[str, Any] = {
    "keys and values of 8 bits": {"kv": CacheNumbers("fp8_e4m3fn", [(0.5, 0.5)] * 3)},
    "two threads": {"cores": (0, 0), "dtype": "bfloat16"},
    "dot products": {"dtype": "bfloat16", "pairs": "dot"},
}
WAYS = [pytest.param(NUMBERS[name], id=name, marks=[DOTS] * ("dot" in name)) for name in NUMBERS]
# The same rounding in the kernels and in torch.
_EIGHT_BITS = {"kv": CacheNumbers("fp8_e5m2", [(1.0, 1.0)] * 3)}, {"kv_cache_dtype": "fp8_e5m2"}
_Q8_0 = {"quantize": "q8_0"}, {"quantize": "q8_0"}
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keys and values of 8 bits": _EIGHT_BITS,
    "8-bit weights": _Q8_0,
}

# Of a context in which most is left out.
SQUARES = prompts(1, vocab=512, seed=3)[0] + [3 + (i * i) % 500 for i in range(1500)]


def check_long_context(folder: Path, prompt: list[int], *, cores: tuple[int, ...] = (0, 0)) -> None:
    """Compare with torch: chunks that threads share, and tokens that are not shared."""
    blocks = [*range(110, 0, -2), *range(1, 110, 2)]

    def logits(runner: Any, recorder: Any) -> torch.Tensor:
        row = sequence(0, prompt, blocks, new=4)
        for count in (700, 40, len(prompt) - 740, 1, 1, 1):
            advance(runner, [row], [count])
        found: torch.Tensor = recorder.logits(0)
        return found

    expected = logits(*load(folder, dtype="float32"))
    with cpu_runner(folder, cores=cores) as pair:
        torch.testing.assert_close(logits(*pair), expected, atol=3e-4, rtol=0.0)


def check_unwritten(folder: Path, *, indexes: int, numbers: int) -> None:
    """Fill the cache with NaN, as a block's last owner may: behind rows, and in the null block.

    `indexes`: layers that have an index of their own; `numbers`: that a token takes.
    """
    golden = Golden(folder)
    with cpu_runner(folder) as (runner, recorder):
        caches = runner._forward.program.caches
        assert len(caches.index_keys) == indexes
        assert runner.info.kv_bytes_per_token == 4 * numbers
        for kept in (*sum(caches.kept, ()), *caches.index_keys):
            kept.fill(np.nan)
        batch = sequences(prompts(8)[2:6], 5, new=24)
        run(runner, batch, chunk=20, joins=2)
        for row in batch:
            assert_greedy(golden, recorder, row, 3e-4)


def check_rounded(folder: Path, rounding: str, tolerance: float) -> None:
    """Compare rounded numbers (a key of `ROUNDED`) with torch's.

    What is half-way may be rounded either way, which few choices depend on.
    """
    numbers, same = ROUNDED[rounding]
    found = []
    with cpu_runner(folder, **numbers) as kernels:
        for runner, recorder in (kernels, load(folder, dtype="float32", **same)):
            rows = sequences(prompts(8), 3, new=8)
            run(runner, rows)
            found.append([recorder.logits(row.id) for row in rows])
    apart = [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]
    assert float(np.median(apart)) < tolerance


def check_adapters(base: Path, folder: Path, tolerance: float) -> None:
    """Compare two adapters and none, of queries, keys and outputs, with PEFT's.

    Queries and keys of attention and of its index have the same names. `folder`: for adapters.
    """
    modules = {"target_modules": ["q_proj", "k_proj", "o_proj"]}
    folders = [write_adapter(base, folder / str(r), seed=r, r=r, **modules) for r in (4, 3)]
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=4) as (runner, recorder):
        for number, own in enumerate(folders, start=1):
            install(runner, number, own)
        rows = adapted(sequences(prompts(10)[4:], new=8), [1, 0, 2, 1, 2, 0])
        run(runner, rows, chunk=20, joins=2)
        for row in rows:
            check(golden, recorder, row, tolerance)
