"""A sampler of one's own: never a token with the letter "e" in it, as in Perec's La Disparition.

    python examples/custom_sampler.py [FOLDER] [PROMPT]

A sampler is anything with `choose`, `prepare` and `drop` (`shard.sampling.base.RowSampler`). This
one looks at the logits first and leaves the choice to the sampler of the torch backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tgi_trio import demo
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import Choices, ShardSequence
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.sampling.logits_processors import Scores
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner


class WithoutLetter:
    """Chooses as `inner` does, among the tokens without `letter`."""

    def __init__(self, inner: Sampler, tokenizer: Tokenizer, letter: str) -> None:
        texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
        self._inner = inner
        self._banned = torch.tensor([letter in text.lower() for text in texts])  # [vocab]

    def choose(self, scores: Scores, rows: list[ShardSequence]) -> Choices:
        """`scores` [rows, vocab]; may be overwritten."""
        logits = torch.as_tensor(scores)
        logits[:, : len(self._banned)][:, self._banned] = -torch.inf
        return self._inner.choose(logits, rows)

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self._inner.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self._inner.drop(sequence)


def load(folder: Path, letter: str) -> Runner:
    """Return a runner of the torch backend that never writes `letter`."""
    config = read_config(folder)
    inner = Sampler(config.vocab_size, config.eos_ids, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sampler = WithoutLetter(inner, tokenizer, letter)
    return load_torch_runner(ShardSettings(model_path=folder), config, sampler=sampler)


if __name__ == "__main__":
    from offline import LLM

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else demo.model_path()
    prompts = sys.argv[2:3] or ["Continuous batching is"]
    print(LLM(folder, runner=load(folder, "e")).generate(prompts)[0])
