"""The interface between a runner and a model with a paged KV cache."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tgi_trio.shard.torch_backend.kv_cache import KVShape
from tgi_trio.shard.torch_backend.step_features import StepFeatures


class Model(Protocol):
    """A model with a paged KV cache: the generic decoder, T5."""

    @property
    def kv_shape(self) -> KVShape: ...
    @property
    def needs_lengths(self) -> bool: ...  # forward reads `lengths`
    @property
    def prefix_reuse(self) -> bool: ...  # see ShardInfo
    @property
    def predicts_prompt(self) -> bool: ...  # False: an encoder reads the prompt
    @property
    def capturable(self) -> bool: ...  # decodes launch the same kernels whatever the tokens are
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: Any,
        batch: Any,
        *,
        features: StepFeatures | None = None,
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def nbytes(self) -> int: ...
