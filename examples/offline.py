"""Offline generation over the shard alone: no router, no HTTP, no process but this one.

    python examples/offline.py [FOLDER] [PROMPT ...]

`LLM(folder).generate(prompts)` is all that continuous batching needs: rows are added to a batch,
the batch plans a step, a runner computes it, the batch advances.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tgi_trio import demo
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import Runner

STEP_TOKENS = 256  # prompt tokens computed in a step at most
MAX_ROWS = 16  # prompts at once


class LLM:
    """A model in this process. `folder`: as written by save_pretrained."""

    def __init__(
        self, folder: Path, *, max_tokens: int = 256, runner: Runner | None = None
    ) -> None:
        """`max_tokens`: of a prompt and its answer. `runner`: one of one's own, not yet warm."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._runner = runner or load_runner(ShardSettings(model_path=folder))
        memory = self._runner.warm_up(WarmupRequest(STEP_TOKENS, max_tokens, MAX_ROWS, 0))
        info = self._runner.info
        self._blocks_per_row = -(-max_tokens // memory.block_size)
        self._batch = Batch(
            vocab_size=info.vocab_size,
            block_size=memory.block_size,
            blocks=memory.blocks,
            eos_ids=info.eos_ids,
        )

    def generate(self, prompts: Sequence[str], max_new_tokens: int = 48) -> list[str]:
        """Return what follows each prompt, greedily. As many prompts as the batch has room for."""
        rows = [self._add(i, prompt, max_new_tokens) for i, prompt in enumerate(prompts)]
        while (plan := self._batch.plan(STEP_TOKENS)) is not None:
            self._batch.settle(plan, self._runner.step(plan))
        answers = [row.token_ids[row.prompt_length : row.length].tolist() for row in rows]
        return self._tokenizer.decode_batch(answers)

    def _add(self, number: int, prompt: str, max_new_tokens: int) -> ShardSequence:
        ids = np.array(self._tokenizer.encode(prompt).ids, np.int32)
        first = 1 + number * self._blocks_per_row  # block 0 is nobody's
        blocks = list(range(first, first + self._blocks_per_row))
        sampling = SamplingParameters()
        row = PrefillRow(number + 1, ids, len(ids), 0, blocks, max_new_tokens, 0, sampling)
        return self._batch.add(row)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else demo.model_path()
    prompts = sys.argv[2:] or ["Continuous batching is", "A nursery"]
    for prompt, answer in zip(prompts, LLM(folder).generate(prompts), strict=True):
        print(f"{prompt}|{answer}")
