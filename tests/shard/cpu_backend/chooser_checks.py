"""What is asked of every kind of index in the CPU kernels: of tokens, of blocks, of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    advance,
    load,
    prompts,
    run,
    sequence,
    sequences,
)

# Of a context in which most is left out.
SQUARES = prompts(1, vocab=512, seed=3)[0] + [3 + (i * i) % 500 for i in range(1500)]


def check_long_context(folder: Path, prompt: list[int]) -> None:
    """Compare with torch: chunks that threads share, and tokens that are not shared."""
    blocks = [*range(110, 0, -2), *range(1, 110, 2)]

    def logits(runner: Any, recorder: Any) -> torch.Tensor:
        row = sequence(0, prompt, blocks, new=4)
        for count in (700, 40, len(prompt) - 740, 1, 1, 1):
            advance(runner, [row], [count])
        found: torch.Tensor = recorder.logits(0)
        return found

    expected = logits(*load(folder, dtype="float32"))
    with cpu_runner(folder, cores=(0, 0)) as pair:
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
