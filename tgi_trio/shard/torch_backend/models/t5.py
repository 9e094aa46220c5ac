"""T5 and its kin (mT5, UMT5, FLAN-T5, mT0): an encoder reads the prompt, a decoder answers.

The step contract has one list of tokens per sequence, prompt then output, which is read as follows:

- The encoder runs over the whole prompt in the step that reaches the prompt's end. Earlier chunks
  of the prompt compute nothing, because every encoder output depends on every prompt token.
- The decoder's start token, which is not in the list, takes the position of the last prompt token,
  so that output token i is at the position that the router gives it.
- The KV cache has two layers per decoder layer. In the first, a slot holds K and V of a decoder
  token; in the second, K and V of the encoder's output for a prompt token.

So blocks, growth, preemption and replay work as for any decoder, at the price of slots that one of
the two layers leaves empty. Blocks cannot be shared: they depend on the whole prompt.

With tensor parallelism, a rank has its part of the heads, and K and V of these alone, of the MLP
columns and of the vocabulary; every rank encodes every prompt with its part.
Source: Raffel et al. 2020; numerics as in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.specs.t5 import T5Spec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering, embed, gather_logits
from tgi_trio.shard.torch_backend.step_features import StepFeatures

_TILE = 256  # queries whose bias is computed at a time


@dataclass(slots=True)
class Block:
    """A layer of encoder or decoder. `distance_bias` [buckets, heads] is added to the scores."""

    distance_bias: torch.Tensor
    norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    mlp: DenseMlp

    def linears(self) -> list[Linear]:
        return [self.qkv, self.output, self.mlp.up, self.mlp.down]


@dataclass(slots=True)
class CrossAttention:
    """A decoder layer's attention to the encoder's output."""

    norm: Norm
    query: Linear
    key_value: Linear
    output: Linear

    def linears(self) -> list[Linear]:
        return [self.query, self.key_value, self.output]


@dataclass(slots=True)
class _T5Row:
    """A row with decoder tokens in this step."""

    tokens: slice  # its decoder tokens, in the list of all rows' decoder tokens
    first: int  # index of the first of them in the decoder's sequence
    own_slots: torch.Tensor  # int64 [first + count], of all its decoder tokens so far
    prompt_slots: torch.Tensor  # int64 [prompt length]


@dataclass(slots=True)
class T5Batch:
    """A plan as T5 reads it: prompts to encode, then decoder tokens."""

    cache: KVCache
    rows: list[_T5Row]
    places: torch.Tensor  # int64 [D], of the decoder tokens in the plan's flat list
    starts: torch.Tensor  # int64, which of those D are start tokens
    slots: torch.Tensor  # int64 [D], for their K and V
    prompts: list[torch.Tensor]  # int64 token ids, each a prompt whose end is reached
    prompt_slots: list[torch.Tensor]  # int64, for their K and V


class T5Layout:
    """Prepares a plan for T5, which computes attention itself: its scores have a relative bias.

    Remembers the token of every KV slot: the step that reaches a prompt's end encodes all of it,
    but its plan has no earlier chunks, and ranks other than 0 do not get them again.
    """

    name = "torch"

    def __init__(self) -> None:
        self._token_ids = np.empty(0, np.int64)  # [slots of the cache]

    def prepare(self, plan: StepPlan, cache: KVCache) -> T5Batch:
        device = cache.key.device
        if len(self._token_ids) != cache.blocks * BLOCK_SIZE:
            self._token_ids = np.zeros(cache.blocks * BLOCK_SIZE, np.int64)
        self._token_ids[plan.kv_slots] = plan.token_ids
        rows, places, starts, prompts, prompt_slots = [], [], [], [], []
        tables = torch.from_numpy(plan.block_tables.astype(np.int64)).to(device)
        offsets = torch.arange(BLOCK_SIZE, device=device)
        count = 0
        for index, row in enumerate(plan.rows):
            begin, end = (int(x) for x in plan.query_starts[index : index + 2])
            context = int(plan.context_lengths[index])
            last = row.prompt_length - 1  # where the decoder's sequence begins
            if context <= last:
                continue
            slots = (tables[index, :, None] * BLOCK_SIZE + offsets).flatten()
            first = int(plan.positions[begin])
            if first <= last:
                prompts.append(self._prompt(plan.block_tables[index], last + 1).to(device))
                prompt_slots.append(slots[: last + 1])
                starts.append(count)
            skipped = max(0, last - first)
            moved = end - begin - skipped
            rows.append(
                _T5Row(
                    tokens=slice(count, count + moved),
                    first=first + skipped - last,
                    own_slots=slots[last:context],
                    prompt_slots=slots[: last + 1],
                )
            )
            places.append(torch.arange(begin + skipped, end, device=device))
            count += moved
        where = torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=device)
        return T5Batch(
            cache=cache,
            rows=rows,
            places=where,
            starts=torch.tensor(starts, dtype=torch.int64, device=device),
            slots=torch.from_numpy(plan.kv_slots).to(device).index_select(0, where),
            prompts=prompts,
            prompt_slots=prompt_slots,
        )

    def _prompt(self, table: NDArray[np.int32], length: int) -> torch.Tensor:
        """Return the first token ids, int64 [length], of a block table."""
        places = np.arange(length)
        slots = table[places // BLOCK_SIZE] * np.int64(BLOCK_SIZE) + places % BLOCK_SIZE
        return torch.from_numpy(self._token_ids[slots])


class T5:
    """The model. It holds weights alone: the KV cache is the caller's."""

    needs_lengths = False
    prefix_reuse = False
    predicts_prompt = False
    capturable = False  # its batch is not made of decodes alone

    def __init__(
        self,
        spec: T5Spec,
        *,
        embedding: torch.Tensor,
        encoder: list[Block],
        encoder_norm: Norm,
        decoder: list[Block],
        cross: list[CrossAttention],
        decoder_norm: Norm,
        head: Linear,
        tied: bool,
        heads: int,
        vocabulary: slice,
        ranks: Gathering | None,
    ) -> None:
        """`cross`: of each layer of `decoder`; `tied`: the head is the embedding; `heads`: on this
        rank; `vocabulary`: tokens whose rows embedding and head have.
        """
        self.spec = spec
        self.embedding = embedding
        self.encoder = encoder
        self.encoder_norm = encoder_norm
        self.decoder = decoder
        self.cross = cross
        self.decoder_norm = decoder_norm
        self.head = head
        self.tied = tied
        self.heads = heads
        self.vocabulary = vocabulary
        self.ranks = ranks

    @property
    def kv_shape(self) -> KVShape:
        """Twice the decoder's layers: each caches its own tokens, and the prompt's."""
        return KVShape(2 * len(self.decoder), self.heads, self.spec.head_dim)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: object,
        batch: T5Batch,
        *,
        features: StepFeatures | None = None,
    ) -> torch.Tensor:
        """Return the decoder's hidden states [T, hidden], zero at tokens that are only encoded.

        `token_ids` int64 [T]; `batch` is from `T5Layout.prepare`. Raises ValueError if there are
        `features`: no model of this kind reads images.
        """
        if features is not None:
            raise ValueError("a model of T5's kind was given features of images")
        hidden = self.embedding.new_zeros((len(token_ids), self.spec.hidden_size))
        for ids, slots in zip(batch.prompts, batch.prompt_slots, strict=True):
            self._remember(self._encode(ids), slots, batch.cache)
        if batch.rows:
            ids = token_ids.index_select(0, batch.places)
            ids[batch.starts] = self.spec.start_token
            hidden.index_copy_(0, batch.places, self._decode(ids, batch))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [S, vocab] of decoder states `hidden` [S, hidden]."""
        states = self.decoder_norm(hidden)
        if self.spec.logit_scale != 1.0:
            states = states * self.spec.logit_scale
        return gather_logits(self.head(states), self.spec.vocab_size, self.ranks).float()

    def pack(self) -> None:
        """Pack every large linear for this machine; see `Linear.pack`."""
        for linear in self._linears():
            linear.pack()

    def nbytes(self) -> int:
        """Return the bytes of all weights but norms and biases, which are small."""
        shared = self.head.nbytes() if self.tied and self.head.packed is None else 0
        return self.embedding.nbytes + sum(la.nbytes() for la in self._linears()) - shared

    def _linears(self) -> list[Linear]:
        blocks: list[Block | CrossAttention] = [*self.encoder, *self.decoder, *self.cross]
        return [linear for block in blocks for linear in block.linears()] + [self.head]

    def _encode(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the encoder's output [P, hidden] for one prompt, int64 [P]."""
        x = embed(ids, self.embedding, self.vocabulary, self.ranks)
        for block in self.encoder:
            query, key, value = self._heads(block.qkv(block.norm(x)), 3)
            bias = _DistanceBias(self.spec, block.distance_bias, len(ids), causal=False)
            x = x + self._all_reduce(block.output(_attend(query, key, value, bias)))
            x = x + self._all_reduce(block.mlp(block.mlp_norm(x)))
        return self.encoder_norm(x)

    def _remember(self, encoded: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> None:
        """Write every decoder layer's K and V of `encoded` [P, hidden] to the cache."""
        for index, cross in enumerate(self.cross, start=len(self.decoder)):
            key, value = self._heads(cross.key_value(encoded), 2)
            cache.key_slots[index].index_copy_(0, slots, key)
            cache.value_slots[index].index_copy_(0, slots, value)

    def _decode(self, ids: torch.Tensor, batch: T5Batch) -> torch.Tensor:
        """Return the decoder's states [D, hidden] for its tokens, int64 [D]."""
        x = embed(ids, self.embedding, self.vocabulary, self.ranks)
        for index, (block, cross) in enumerate(zip(self.decoder, self.cross, strict=True)):
            query, key, value = self._heads(block.qkv(block.norm(x)), 3)
            batch.cache.key_slots[index].index_copy_(0, batch.slots, key)
            batch.cache.value_slots[index].index_copy_(0, batch.slots, value)
            x = x + self._all_reduce(block.output(self._attend_own(index, block, query, batch)))
            query = self._heads(cross.query(cross.norm(x)), 1)[0]
            x = x + self._all_reduce(cross.output(self._attend_prompts(index, query, batch)))
            x = x + self._all_reduce(block.mlp(block.mlp_norm(x)))
        return x

    def _attend_own(
        self, index: int, block: Block, query: torch.Tensor, batch: T5Batch
    ) -> torch.Tensor:
        """Return [D, heads * head_dim]: each row over its decoder's tokens so far."""
        parts = []
        for row in batch.rows:
            key = batch.cache.key_slots[index].index_select(0, row.own_slots)
            value = batch.cache.value_slots[index].index_select(0, row.own_slots)
            bias = _DistanceBias(self.spec, block.distance_bias, len(key), True, row.first)
            parts.append(_attend(query[row.tokens], key, value, bias))
        return torch.cat(parts)

    def _attend_prompts(self, index: int, query: torch.Tensor, batch: T5Batch) -> torch.Tensor:
        """Return [D, heads * head_dim]: each row over the encoder's output for its prompt."""
        cache, layer, parts = batch.cache, index + len(self.decoder), []
        for row in batch.rows:
            key = cache.key_slots[layer].index_select(0, row.prompt_slots)
            value = cache.value_slots[layer].index_select(0, row.prompt_slots)
            parts.append(_attend(query[row.tokens], key, value, None))
        return torch.cat(parts)

    def _heads(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Split [N, count * heads * head_dim] into `count` tensors [N, heads, head_dim]."""
        return x.view(len(x), count, self.heads, self.spec.head_dim).unbind(1)

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' partial sums `x`."""
        return x if self.ranks is None else self.ranks.all_reduce(x)


@dataclass(frozen=True, slots=True)
class _DistanceBias:
    """T5's relative position bias: added to the scores by the distance between query and key."""

    spec: T5Spec
    table: torch.Tensor  # [buckets, heads]
    keys: int
    causal: bool
    first: int = 0  # position of the first query among the keys

    def tile(self, begin: int, end: int) -> torch.Tensor:
        """Return the bias [heads, end - begin, keys] of the queries in [begin, end).

        It is a view of one row of biases by distance, of which every query sees a window.
        """
        last = self.first + end - 1
        distances = torch.arange(
            -last, self.keys - self.first - begin, device=self.table.device
        )  # key position - query position
        by_distance = self.table[self._bucket(distances)]
        if self.causal:
            by_distance = by_distance.masked_fill((distances > 0)[:, None], float("-inf"))
        return by_distance.t().unfold(1, self.keys, 1).flip(1)

    def _bucket(self, distances: torch.Tensor) -> torch.Tensor:
        """Return int64 buckets: near distances have one each, far ones share them by logarithm."""
        count, offset = self.spec.buckets, torch.zeros_like(distances)
        if self.causal:
            distances = (-distances).clamp(min=0)
        else:  # half of the buckets are for keys after the query
            count //= 2
            offset = (distances > 0).to(torch.int64) * count
            distances = distances.abs()
        exact = count // 2
        ratio = torch.log(distances.float() / exact) / math.log(self.spec.max_distance / exact)
        far = exact + (ratio * (count - exact)).to(torch.int64)
        return offset + torch.where(distances < exact, distances, far.clamp(max=count - 1))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: _DistanceBias | None
) -> torch.Tensor:
    """Return [Q, heads * head_dim] of `query` [Q, heads, dim] over `key`, `value` [K, heads, dim].

    Scores are not scaled: T5's initialisation has the scale in its weights.
    """
    key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    parts = []
    for begin in range(0, len(query), _TILE):
        end = min(begin + _TILE, len(query))
        mask = None if bias is None else bias.tile(begin, end)[None].to(query.dtype)
        part = query[begin:end].transpose(0, 1)[None]
        out = functional.scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=1.0)
        parts.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)
