"""Attention of a layer to a prompt's images, whose keys and values a tower has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from tgi_trio.model.spec import Crossing
from tgi_trio.shard.images.cross_spans import cross_spans
from tgi_trio.shard.images.features import CrossStates
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.step_features import RowImages


class Look(NamedTuple):
    """Tokens that attend to the same images."""

    tokens: slice  # of those that are computed
    images: tuple[CrossStates, ...]
    whole: bool  # to what pads these images as well


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """What the layers of a step that attend to images compute: N of its tokens."""

    tokens: torch.Tensor | None  # int64 [N] which they are; None: all of the step's
    looks: tuple[Look, ...]  # those in none attend to nothing
    feeding: torch.Tensor | None  # [N, 1] 1 for tokens that MLPs add to, else 0; None: all

    @classmethod
    def of(cls, crossing: Crossing, rows: Sequence[RowImages], like: torch.Tensor) -> Looks | None:
        """Return those of a step whose hidden states are `like` [T, hidden]; None: there are none.

        `rows`: the step's rows with images.
        """
        feeds = crossing.blind == "feeds"
        if not rows and not feeds:
            return None
        looks: list[Look] = []
        places: list[torch.Tensor] = []
        feeding: list[torch.Tensor] = []
        count = 0
        for row in rows:
            start = row.tokens.start if feeds else count
            for span in cross_spans(
                row.places,
                row.first,
                row.end,
                together=crossing.together,
                untils=row.untils,
            ):
                tokens = slice(start + span.first - row.first, start + span.end - row.first)
                seen = row.states[span.images.start : span.images.stop]
                if seen or not feeds:
                    looks.append(Look(tokens, seen or row.states, whole=not seen))
                feeding.append(like.new_full((span.end - span.first, 1), 1.0 if seen else 0.0))
            places.append(torch.arange(row.tokens.start, row.tokens.stop, device=like.device))
            count += row.end - row.first
        if feeds:
            return cls(None, tuple(looks), None)
        return cls(torch.cat(places), tuple(looks), torch.cat(feeding))


@dataclass(slots=True)
class CrossAttention:
    """The weights of a layer's attention to images, and the gates of what the layer adds."""

    number: int  # among the layers that attend to images
    heads: int
    head_dim: int
    scale: float
    query: Linear
    query_norm: Norm | None  # of a head
    output: Linear
    gate: torch.Tensor  # [1] or [hidden]
    mlp_gate: torch.Tensor  # the same

    def attend(self, x: torch.Tensor, looks: Looks) -> torch.Tensor:
        """Return what the tokens `x` [N, hidden] see in their images, [N, hidden]."""
        query = self.query(x).view(len(x), self.heads, self.head_dim)
        if self.query_norm is not None:
            query = self.query_norm(query)
        seen = torch.zeros_like(query)
        for look in looks.looks:
            seen[look.tokens] = self._see(query[look.tokens], look)
        return self.output(seen.flatten(1))

    def pack(self) -> None:
        """Pack every large linear for this machine; see `Linear.pack`."""
        self.query.pack()
        self.output.pack()

    def nbytes(self) -> int:
        norm = 0 if self.query_norm is None else self.query_norm.nbytes()
        gates = self.gate.nbytes + self.mlp_gate.nbytes
        return self.query.nbytes() + self.output.nbytes() + norm + gates

    def _see(self, query: torch.Tensor, look: Look) -> torch.Tensor:
        """Return [Q, heads, head_dim] for `query` of the same shape."""
        ends = [None if look.whole else image.visible for image in look.images]
        pairs = list(zip(look.images, ends, strict=True))
        key = _join([image.keys[self.number][:end] for image, end in pairs], query)
        value = _join([image.values[self.number][:end] for image, end in pairs], query)
        count, kv_heads = len(query), key.shape[1]
        group = self.heads // kv_heads  # as in `attention/reference.py`: no copy of K and V
        part = query.view(count, kv_heads, group, self.head_dim).permute(1, 2, 0, 3)
        key, value = (
            each.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for each in (key, value)
        )
        out = functional.scaled_dot_product_attention(part, key, value, scale=self.scale)
        return out.permute(2, 0, 1, 3).reshape(count, self.heads, self.head_dim)


def _join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return parts [S, heads, dim] one behind the other, where `like` is."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.to(like.device, like.dtype)
