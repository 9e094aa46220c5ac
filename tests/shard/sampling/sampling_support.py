"""Logits, sequences and settings for tests of the samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import RowResult, ShardSequence
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler

EOS = 2
CPU = torch.device("cpu")
Logits = NDArray[np.float32]


def sequence(
    tokens: list[int] | None = None, *, prompt: int = 3, minimum: int = 0, **sampling: Any
) -> ShardSequence:
    tokens = [5, 6, 7, 5, 8] if tokens is None else tokens
    return ShardSequence(
        id=1,
        token_ids=np.array(tokens, np.int32),
        length=len(tokens),
        prompt_length=prompt,
        computed=len(tokens) - 1,
        block_ids=[1],
        remaining=10,
        min_remaining=minimum,
        sampling=SamplingParameters(**sampling),
    )


def choose(logits: Logits, rows: list[ShardSequence], **options: Any) -> list[RowResult]:
    """Choose on a copy of `logits` [R, V]."""
    sampler = Sampler(logits.shape[1], [EOS], CPU, **options)
    return sampler.choose(torch.tensor(logits), rows).rows


def normal(rows: int, size: int, spread: float = 2.0, seed: int = 0) -> Logits:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, size)) * spread).astype(np.float32)


def top(result: RowResult) -> dict[int, float]:
    (tops,) = result.tops
    assert [logprob for _, logprob in tops] == sorted((p for _, p in tops), reverse=True)
    return dict(tops)


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "absolute": {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "absolute_penalties": True,
    },
    "bias": {"logit_bias": ((5, 3.0), (9, -100.0), (5, 1.0))},
    "no repeats": {"no_repeat_size": 1},
    "few repeats": {"no_repeat_size": 1, "no_repeat_window": 4, "no_repeat_spared": (8,)},
    "watermark": {"watermark": True},
    "top-k": {"top_k": 5},
    "top-k 1": {"top_k": 1},
    "large top-k": {"top_k": 80},
    "top-k of everything": {"top_k": 10**6},
    "top-p": {"top_p": 0.7},
    "tiny top-p": {"top_p": 1e-6},
    "smallest top-p": {"top_p": 1.2e-38},
    "wide top-p": {"top_p": 0.97},
    "typical": {"typical_p": 0.6},
    "wide typical": {"typical_p": 0.97},
    "min-p": {"min_p": 0.2},
    "min-p after top-k": {"min_p": 0.2, "top_k": 30},
    "top-p after a large top-k": {"top_p": 0.5, "top_k": 68},
    "typical after a large top-k": {"typical_p": 0.5, "top_k": 68},
    "typical after top-p": {"typical_p": 0.5, "top_p": 0.9},
    "all": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "typical_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "watermark": True,
    },
}
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "share": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "absolute": {"frequency_penalty": 0.7, "presence_penalty": -0.4, "absolute_penalties": True},
    "bias": {"logit_bias": ((5, 3.0), (9, 1.0)), "repetition_penalty": 0.6},
}
MIXED: list[dict[str, Any]] = [
    {"sample": True, "temperature": 0.8},
    {},
    {"sample": True, "top_k": 7, "top_n": 4},
    {"sample": True, "top_p": 0.9, "temperature": 1.3},
    {"sample": True, "top_p": 0.99, "temperature": 4.0, "top_n": 3},
    {"sample": True, "typical_p": 0.7},
    {"sample": True, "min_p": 0.1, "repetition_penalty": 1.4},
    {"frequency_penalty": 0.5, "top_n": 2},
    {"sample": True, "watermark": True, "logit_bias": ((3, 2.0),)},
    {"sample": True, "no_repeat_size": 1, "no_repeat_window": 3},
]


class OnlyAfter:
    """Grammars under which token n + 1 follows token n; n is where one begins."""

    def start(self) -> None: ...

    def prepare(self, sequence: ShardSequence) -> bool:
        return sequence.sampling.grammar != "slow"

    def drop(self, sequence: ShardSequence) -> None:
        self.dropped = sequence

    def rewind(self, sequence: ShardSequence) -> None: ...

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        return [str(each).encode() for each in ids.tolist()]

    def allowed(self, sequences: list[ShardSequence]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        tokens, faults = np.zeros((len(sequences), 50), np.bool_), {}
        for place, one in enumerate(sequences):
            if one.sampling.grammar == "broken":
                faults[place] = "expected a rule at 'broken'"
            else:
                first = int(one.sampling.grammar)
                tokens[place, first + one.length - one.prompt_length] = True
        return np.packbits(tokens, axis=1, bitorder="little"), faults
