"""Runs encoder-decoder models other than T5's kind through transformers: BART, Pegasus, Marian, ...

The encoder's output and transformers' cache are kept in each sequence's state. Prompt and output
share a sequence as `t5.py` describes: the encoder runs when the prompt's end is reached, and the
decoder's start token is at the position of the last prompt token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.fallback.modes import Offsets, RecomputeWay, find_cache_name

_STATE = "transformers"  # our key in Sequence.state


class EncoderDecoderWay(RecomputeWay):
    """Runs a forward per row, over transformers' own cache."""

    name = "encoder-decoder"
    prefix_reuse = False  # an encoder's output depends on the whole prompt
    predicts_prompt = False

    def __init__(self, model: Any) -> None:
        """Raise ModelLoadError for a model that takes no cache."""
        super().__init__(model)
        config = model.config
        start = model.generation_config.decoder_start_token_id
        self.start_token = int(config.decoder_start_token_id if start is None else start)
        name = find_cache_name(model)
        if name is None:
            raise ModelLoadError(f"{type(model).__name__} keeps no keys and values between calls")
        self._cache_name = name
        # The router counts prompt and output tokens alike; for each, a decoder layer keeps at most
        # two pairs of K and V. All such models have as many KV heads as query heads.
        self.kv_bytes_per_token = 4 * config.decoder_layers * config.d_model * model.dtype.itemsize

    def _logits(self, plan: StepPlan, index: int, offsets: Offsets) -> torch.Tensor:
        row = plan.rows[index]
        start, stop = plan.query_starts[index : index + 2].tolist()
        begin = row.prompt_length - 1  # position of the decoder's start token
        first, end = int(plan.positions[start]), int(plan.positions[start]) + stop - start
        # Removed first: a cache that a failed call has half filled must not be used again.
        held = row.state.pop(_STATE, None)
        if end <= begin:
            return torch.empty((0, self.model.config.vocab_size), device=self.model.device)
        known, options = held if isinstance(held, tuple) else (0, {})
        if known != max(first - begin, 0) or not options:  # new, or this step is repeated
            ids = torch.from_numpy(row.token_ids[: begin + 1].astype(np.int64))[None]
            encoder = self.model.get_encoder()
            known, options = 0, {"encoder_outputs": encoder(ids.to(self.model.device))}
        decoded = np.concatenate(([self.start_token], row.token_ids[begin + 1 : end]))
        tokens = torch.from_numpy(decoded[known:].astype(np.int64))[None].to(self.model.device)
        out = self.model(decoder_input_ids=tokens, use_cache=True, return_dict=True, **options)
        row.state[_STATE] = (
            end - begin,
            {**options, self._cache_name: out[self._cache_name]},
        )
        keep = torch.from_numpy(first + offsets - begin - known).to(self.model.device)
        logits: torch.Tensor = out.logits[0].index_select(0, keep)
        return logits
