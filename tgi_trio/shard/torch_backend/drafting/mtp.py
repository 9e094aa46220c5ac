"""Layers of a model's own checkpoint that draft further tokens, in torch: `MtpSpec`.

Each has a paged KV cache of its own; the embedding and the head are the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.kinds import make_attention
from tgi_trio.shard.torch_backend.drafting.own_kv import OwnKv
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.models.attending import make_tables
from tgi_trio.shard.torch_backend.models.decoder import Decoder


@dataclass(frozen=True, slots=True, eq=False)
class MtpWeights:
    """The weights of one such layer."""

    decoder: Decoder  # its final norm is the one behind the layer
    embedding_norm: Norm
    state_norm: Norm
    fuse: Linear
    states_first: bool  # the state is joined before the embedding
    fuse_embedding: Linear | None = None  # see `MtpSpec.fuse_embedding`

    def join(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return what the decoder layer reads, [T, features], of embeddings [T, hidden]."""
        if self.fuse_embedding is not None:
            hidden = embedded.shape[1]
            normed = self.state_norm(states.reshape(-1, *self.state_norm.shape))
            read = self.fuse(normed.reshape(-1, hidden)).view(len(states), -1, hidden)
            return (read + self.fuse_embedding(self.embedding_norm(embedded))[:, None]).flatten(1)
        both = self.embedding_norm(embedded), self.state_norm(states)
        return self.fuse(torch.cat(both[::-1] if self.states_first else both, dim=-1))

    def nbytes(self) -> int:
        """Return the bytes of all weights; embedding and head are the model's."""
        parts = (self.embedding_norm, self.state_norm, self.fuse, self.fuse_embedding)
        beside = sum(part.nbytes() for part in parts if part is not None)
        return beside + sum(layer.nbytes() for layer in self.decoder.layers)


class TorchMtp(OwnKv):
    """Implements `EagleLayer` of `speculation/eagle.py`. States have the model's dtype.

    They are those behind a final norm: the model's, then the layer's own.
    """

    max_positions = 0  # it was trained with the model
    token_map: NDArray[np.int64] | None = None

    def __init__(
        self,
        weights: MtpWeights,
        *,
        model_norm: Norm | None,
        embedding: torch.Tensor,
        head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`model_norm`: the model's final one; `embedding` and `head`: the model's, whole."""
        self._weights = weights
        self._model_norm = model_norm
        self._embedding = embedding
        self._head = head
        decoder = weights.decoder
        super().__init__(decoder.kv_shape, dtype, device)
        self.features = decoder.spec.hidden_size  # read from the model
        self._attention = make_attention(decoder.attention_needs, device, dtype)

    def nbytes(self) -> int:
        """Return the bytes of all weights, excluding the model's embedding and head."""
        return self._weights.nbytes()

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._model_norm is None else self._model_norm(states)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, states: torch.Tensor, wanted: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        x = self._compute(plan, states)
        if not len(wanted):
            return states[:0], np.empty(0, np.int64)
        x = self._normalise(self.pick(x, wanted))
        return x, self.draft(x)

    @torch.inference_mode()
    def read(self, plan: StepPlan, states: torch.Tensor) -> torch.Tensor:
        """Compute a plan's tokens, and store their K and V; return their states [T, hidden]."""
        return self._normalise(self._compute(plan, states))

    @torch.inference_mode()
    def draft(self, states: torch.Tensor) -> NDArray[np.int64]:
        """Return the best tokens [n] by states [n, hidden]."""
        best: NDArray[np.int64] = self._head(states).argmax(dim=-1).cpu().numpy()
        return best

    def _compute(self, plan: StepPlan, states: torch.Tensor) -> torch.Tensor:
        """Return what leaves the decoder layer, [T, hidden]."""
        if self._cache is None:
            raise RuntimeError("the drafter has no KV cache before the warm-up")
        ids, positions = (
            torch.from_numpy(each).to(self._device) for each in (plan.token_ids, plan.positions)
        )
        x = self._weights.join(functional.embedding(ids, self._embedding), states)
        decoder = self._weights.decoder
        # the length at each position is the position + 1
        tables = make_tables(decoder.rotaries, positions, positions + 1, x.dtype)
        batch = self._attention.prepare(plan, self._cache)
        batch.cache.keep_turns(batch.slots, positions)
        return decoder.run_layers(x, tables, self._attention, batch)

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        norm = self._weights.decoder.final_norm
        return x if norm is None else norm(x)
