"""A layer's cross-attention to a prompt's images, with the keys and values of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import CrossAttentionSpec
from tgi_trio.shard.media.cross_spans import cross_spans
from tgi_trio.shard.media.features import CrossStates
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.step_features import RowImages


class CrossLayer(NamedTuple):
    """Constants of a cross-attention layer on this rank."""

    number: int  # among the cross-attention layers
    heads: int
    head_dim: int
    scale: float


class CrossTokens(Protocol):
    """The N tokens of a step that its cross-attention layers compute."""

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Return the N rows of `x` [T, hidden]."""
        ...

    def attend(self, layer: CrossLayer, query: torch.Tensor) -> torch.Tensor:
        """Attend to the images: `query` [N, heads, head_dim] to [N, heads * head_dim]."""
        ...

    def show(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [N, hidden], zero for tokens that see no image."""
        ...

    def feed(self, found: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [N, hidden], zero for tokens to which it is not added."""
        ...

    def place(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, hidden] with the N rows replaced by `own`."""
        ...


class CrossGroup(NamedTuple):
    """Tokens that attend to the same images."""

    tokens: slice  # among the N
    images: tuple[CrossStates, ...]
    whole: bool  # including the padding of these images


@dataclass(frozen=True, slots=True, eq=False)
class GroupedCrossTokens:
    """A `CrossTokens` that computes one group of tokens after the other."""

    tokens: torch.Tensor | None  # int64 [N], indices in the step; None: all of its tokens
    groups: tuple[CrossGroup, ...]  # a token in none of them attends to nothing
    feeding: torch.Tensor | None  # [N, 1]: 1 for tokens to which MLPs add, else 0; None: all 1

    @classmethod
    def of(
        cls, cross_attention: CrossAttentionSpec, rows: Sequence[RowImages], like: torch.Tensor
    ) -> GroupedCrossTokens | None:
        """Return it for a step with hidden states like `like` [T, hidden]; None if not needed.

        `rows`: the step's rows with images.
        """
        feeds = cross_attention.blind == "feeds"
        if not rows and not feeds:
            return None
        groups: list[CrossGroup] = []
        places: list[torch.Tensor] = []
        feeding: list[torch.Tensor] = []
        count = 0
        for row in rows:
            start = row.tokens.start if feeds else count
            for span in cross_spans(
                row.places,
                row.first,
                row.end,
                together=cross_attention.together,
                untils=row.untils,
            ):
                tokens = slice(start + span.first - row.first, start + span.end - row.first)
                seen = row.states[span.images.start : span.images.stop]
                if seen or not feeds:
                    groups.append(CrossGroup(tokens, seen or row.states, whole=not seen))
                feeding.append(like.new_full((span.end - span.first, 1), 1.0 if seen else 0.0))
            places.append(torch.arange(row.tokens.start, row.tokens.stop, device=like.device))
            count += row.end - row.first
        if feeds:
            return cls(None, tuple(groups), None)
        return cls(torch.cat(places), tuple(groups), torch.cat(feeding))

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.tokens is None else x.index_select(0, self.tokens)

    def attend(self, layer: CrossLayer, query: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros_like(query)
        for group in self.groups:
            seen[group.tokens] = _attend_group(layer, query[group.tokens], group)
        return seen.flatten(1)

    def show(self, attended: torch.Tensor) -> torch.Tensor:
        return attended  # `attend` has left zeros for tokens that see no image

    def feed(self, found: torch.Tensor) -> torch.Tensor:
        return found if self.feeding is None else found * self.feeding

    def place(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own if self.tokens is None else x.index_copy(0, self.tokens, own)


@dataclass(slots=True)
class CrossAttention:
    """The weights of a cross-attention layer, and the gates of its outputs."""

    layer: CrossLayer
    query: Linear
    query_norm: Norm | None  # of each head
    output: Linear
    gate: torch.Tensor  # [1] or [hidden]
    mlp_gate: torch.Tensor  # likewise

    def attend(self, x: torch.Tensor, cross_tokens: CrossTokens) -> torch.Tensor:
        """Return the output [N, hidden] of tokens `x` [N, hidden]."""
        query = self.query(x).view(len(x), self.layer.heads, self.layer.head_dim)
        if self.query_norm is not None:
            query = self.query_norm(query)
        return self.output(cross_tokens.attend(self.layer, query))

    def pack(self) -> None:
        """Pack the linear layers for this machine; see `Linear.pack`."""
        self.query.pack()
        self.output.pack()

    def nbytes(self) -> int:
        norm = 0 if self.query_norm is None else self.query_norm.nbytes()
        gates = self.gate.nbytes + self.mlp_gate.nbytes
        return self.query.nbytes() + self.output.nbytes() + norm + gates


def _attend_group(layer: CrossLayer, query: torch.Tensor, cross_group: CrossGroup) -> torch.Tensor:
    """Return attention [Q, heads, head_dim] of `query`, of the same shape."""
    ends = [None if cross_group.whole else image.visible for image in cross_group.images]
    pairs = list(zip(cross_group.images, ends, strict=True))
    key = _join([image.keys[layer.number][:end] for image, end in pairs], query)
    value = _join([image.values[layer.number][:end] for image, end in pairs], query)
    count, kv_heads = len(query), key.shape[1]
    group = layer.heads // kv_heads  # grouped as in `attention/reference.py`, without copying K, V
    part = query.view(count, kv_heads, group, layer.head_dim).permute(1, 2, 0, 3)
    key, value = (each.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for each in (key, value))
    out = functional.scaled_dot_product_attention(part, key, value, scale=layer.scale)
    return out.permute(2, 0, 1, 3).reshape(count, layer.heads, layer.head_dim)


def _join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return parts [S, heads, dim] concatenated, with the device and dtype of `like`."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.to(like.device, like.dtype)
