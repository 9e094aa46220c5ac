"""Sampling for encoder-decoder models: penalties concern only the decoder's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tgi_trio.shard.contract import Choices, ShardSequence
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.logits_processors import Scores

_STATE = "decoder"  # key in Sequence.state


class DecoderSampler:
    """Gives another sampler only the decoder's tokens: the start token and the output so far."""

    def __init__(self, sampler: RowSampler, start_token: int) -> None:
        self._sampler = sampler
        self._start = start_token

    def choose(self, logits: Scores, rows: list[ShardSequence]) -> Choices:
        return self._sampler.choose(logits, [self._decoder_side(row) for row in rows])

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self._sampler.prepare(None if sequence is None else self._decoder_side(sequence))

    def drop(self, sequence: ShardSequence) -> None:
        sequence.state.pop(_STATE, None)
        self._sampler.drop(sequence)

    def _decoder_side(self, row: ShardSequence) -> ShardSequence:
        """Return the decoder's sequence, the same object at every step: start token and output."""
        said = row.token_ids[row.prompt_length : row.length]
        token_ids = np.concatenate(([self._start], said)).astype(np.int32)
        side = row.state.get(_STATE)
        if not isinstance(side, ShardSequence):
            side = replace(row, prompt_length=1)
            row.state[_STATE] = side
        side.token_ids, side.length = token_ids, len(token_ids)
        side.remaining, side.min_remaining = row.remaining, row.min_remaining
        return side
