"""An assistant of Gemma 4 in torch: a decoder without keys and values, between two projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.choice import choose_attention
from tgi_trio.shard.torch_backend.drafting.assistant_kv import AssistantKv
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.models.attending import make_tables
from tgi_trio.shard.torch_backend.models.decoder import Decoder


@dataclass(frozen=True, slots=True, eq=False)
class AssistantWeights:
    """What an assistant computes with; on rank 0 alone."""

    spec: AssistantSpec
    decoder: Decoder
    entry: Linear
    exit: Linear
    clusters: Linear | None
    head: torch.Tensor  # [vocabulary, features]
    order: torch.Tensor | None  # int64 [clusters, tokens of each]
    embedding: torch.Tensor  # the model's, whole
    embedding_scale: float
    norm: Norm | None  # the model's final one

    def nbytes(self, *, own_embedding: bool) -> int:
        """Return the bytes of all weights; `own_embedding`: the model's is here once more."""
        linears = [each for each in (self.entry, self.exit, self.clusters) if each is not None]
        order = 0 if self.order is None else self.order.nbytes
        more = self.embedding.nbytes if own_embedding else 0
        return self.decoder.nbytes() + sum(each.nbytes() for each in linears) + order + more

    def best(self, features: torch.Tensor) -> torch.Tensor:
        """Return the best token int64 [n] for features [n, features] behind the final norm."""
        if self.clusters is None or self.order is None:
            return self.decoder.head(features).argmax(dim=-1)
        used = self.clusters(features).topk(self.spec.clusters_used, dim=-1).indices
        tokens = self.order[used].flatten(1)
        scores = torch.bmm(self.head[tokens], features.unsqueeze(-1)).squeeze(-1)
        return tokens.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)


class TorchAssistant:
    """Implements `Assistant` of `speculation/assistant.py`, beside a model on one rank."""

    def __init__(
        self,
        weights: AssistantWeights | None,
        kv: AssistantKv,
        *,
        dtype: torch.dtype,
        device: torch.device,
        alone: bool,
    ) -> None:
        """`weights`: None on ranks that choose no tokens; `dtype`: of the model's hidden states;
        `alone`: the model has no other ranks.
        """
        self._weights = weights
        self._kv = kv
        self._device = device
        self._alone = alone
        self._attention = choose_attention(device, dtype, kv.shape, eight_bits=kv.has_eight_bits)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._kv.kv_bytes_per_token

    def nbytes(self) -> int:
        """Return the bytes of all weights, excluding what the model has as well."""
        return self._weights.nbytes(own_embedding=not self._alone) if self._weights else 0

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """What it keeps of tokens beside the model's cache."""
        return self._kv.caches

    def make_room(self, cache: KVCache) -> int:
        """Take the model's cache; return the bytes of what is allocated beside it."""
        return self._kv.make_room(cache)

    def keep(self, plan: StepPlan) -> None:
        """Take a step's K and V, once the model has written them; on every rank."""
        self._kv.keep(plan)

    @torch.inference_mode()
    def draft(self, plan: StepPlan, states: torch.Tensor, count: int) -> NDArray[np.int64]:
        weights, cache = self._weights, self._kv.cache
        if weights is None or cache is None:
            raise RuntimeError("the assistant has no KV cache before the warm-up")
        decoder = weights.decoder
        ids, before = (
            torch.from_numpy(each).to(self._device) for each in (plan.token_ids, plan.positions)
        )
        tables = make_tables(decoder.rotaries, before + 1, before + 2, states.dtype)
        batch = self._attention.prepare(plan, cache)
        state = states if weights.norm is None else weights.norm(states)
        scale = torch.tensor(weights.embedding_scale, dtype=states.dtype)
        drafts = []
        for _ in range(count):
            embedded = functional.embedding(ids, weights.embedding) * scale
            x = weights.entry(torch.cat((embedded, state), dim=-1))
            x = decoder.run_layers(x, tables, self._attention, batch)
            if decoder.final_norm is not None:
                x = decoder.final_norm(x)
            state, ids = weights.exit(x), weights.best(x)
            drafts.append(ids)
        found: NDArray[np.int64] = torch.stack(drafts, dim=1).cpu().numpy()
        return found
