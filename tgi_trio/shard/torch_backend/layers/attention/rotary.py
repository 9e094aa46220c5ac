"""Rotary position embeddings and their scalings, in transformers' numerics.

Frequencies are float32. Where they depend on the length of the sequence (dynamic, longrope), each
token takes the length that its sequence had when transformers would have computed it: the whole
prompt for prompt tokens, position + 1 for generated ones. So a token's K is the same whether its
prompt was computed in one chunk or many, alone or in a batch, for the first time or in a replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tgi_trio.model.specs.decoder import QueryScale, RotarySpec
from tgi_trio.shard.positions.rotary_frequencies import (
    exponents,
    long_frequencies,
    rotary_axes,
    rotary_frequencies,
)


class RotaryTable(NamedTuple):
    """Cosines and sines that rotate the queries and keys of a step."""

    cos: torch.Tensor  # [T, 1, dim]
    sin: torch.Tensor  # likewise, with the rotation's sign
    query_scale: torch.Tensor | None = None  # [T, 1, 1], factor of rotated queries; None: 1
    logs: torch.Tensor | None = None  # [T, 1, 1], of positions, counted from 1; None: unused


class Rotary:
    """Computes or looks up cosines and sines for the tokens of a step."""

    def __init__(
        self, spec: RotarySpec, device: torch.device, factors: torch.Tensor | None = None
    ) -> None:
        """`factors`: those of the frequencies, float32 [dim / 2], if they are learned."""
        self.spec = spec
        self._kept: RotaryTable | None = None
        self.by_length = spec.kind in ("dynamic", "longrope")
        frequencies, self.scale = rotary_frequencies(spec)
        self.factors = factors if spec.learned else None
        self.frequencies = self._scaled(torch.from_numpy(frequencies).to(device))
        axes = rotary_axes(spec)
        self.axes = None if axes is None else torch.from_numpy(axes).to(device)
        # int64 [dim]: the part of a position by which each number turns; None: it has but one.
        self.axes_of_numbers = None
        if self.axes is not None:
            self.axes_of_numbers = self._spread(self.axes[None], self.axes[None])[0].contiguous()
        if spec.kind == "longrope":
            frequencies, self.long_scale = long_frequencies(spec)
            self.long_frequencies = self._scaled(torch.from_numpy(frequencies).to(device))
            self.scales = torch.tensor([self.scale, self.long_scale], device=device)
        if spec.kind == "dynamic":
            self.exponents = torch.from_numpy(exponents(spec)).to(device)

    def keep(self, positions: int, dtype: torch.dtype) -> None:
        """Make tables of the first `positions`; from then on steps gather from them.

        A position beyond them must not occur. No tables where they depend on the sequence's length.
        """
        self._kept = None
        if not self.by_length:
            every = torch.arange(positions, device=self.frequencies.device)
            self._kept = self.table(every, every, dtype)

    @property
    def kept(self) -> RotaryTable | None:
        """The tables that `keep` has made, if any."""
        return self._kept

    def every(self, positions: int, dtype: torch.dtype) -> RotaryTable:
        """Return tables of `dtype` for at least the first `positions`: those that `keep` has made.

        Where it has made none, they are made anew. Not for what depends on a sequence's length.
        """
        if self._kept is not None and self._kept.cos.dtype == dtype:
            return self._kept
        places = torch.arange(positions, device=self.frequencies.device)
        return self.table(places, places, dtype)

    def table(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> RotaryTable:
        """Return cosines, signed sines and query scales, all of `dtype`.

        `positions`: int64 [T], or [3, T] of time, row and column; `lengths`: int64 [T], as the
        module describes them, read where `by_length`. The sign of the rotation is in the sine, so
        that rotating takes two products.
        """
        if self._kept is not None and self._kept[0].dtype == dtype:
            return self._look_up(self._kept, positions)
        angles = self._of_pairs(positions).float() * self._frequencies(lengths)
        cos, sin = angles.cos(), angles.sin()
        cos, sin = self._spread(cos, cos), self._spread(-sin, sin)
        scale = self._scale(lengths)
        if scale is not None:
            cos, sin = cos * scale, sin * scale
        query_scale = logs = None
        places = positions if positions.dim() == 1 else positions[0]
        if self.spec.query_scale is not None:
            query_scale = _scale_queries(self.spec.query_scale, places).to(dtype)[:, None, None]
        if self.spec.log_positions:
            logs = (places + 1).float().log().to(dtype)[:, None, None]
        return RotaryTable(cos.to(dtype)[:, None], sin.to(dtype)[:, None], query_scale, logs)

    def _of_pairs(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the position by which each pair of dimensions rotates: [T, 1] or [T, dim / 2]."""
        if positions.dim() == 1:
            return positions[:, None]
        return positions[0, :, None] if self.axes is None else positions[self.axes].T

    def _spread(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return [T, dim] from the values of both dimensions of every pair, [T, dim / 2] each."""
        if self.spec.interleaved:
            return torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((first, second), dim=-1)

    def _look_up(self, kept: RotaryTable, positions: torch.Tensor) -> RotaryTable:
        """Return `table` of positions by gathering from the tables that were made."""
        cos, sin, *others = kept
        places = positions if positions.dim() == 1 else positions[0]
        by_place = [None if each is None else each.index_select(0, places) for each in others]
        if positions.dim() == 1 or self.axes is None:
            return RotaryTable(cos.index_select(0, places), sin.index_select(0, places), *by_place)
        pairs = self._of_pairs(positions)
        places = self._spread(pairs, pairs)
        cos, sin = cos[:, 0].gather(0, places), sin[:, 0].gather(0, places)
        return RotaryTable(cos[:, None], sin[:, None], *by_place)

    def apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the leading `dim` dimensions of `x` [T, heads, head_dim]."""
        dim = self.spec.dim
        if dim == 0:
            return x
        if dim < x.shape[-1]:
            turned = self.apply(x[..., :dim], cos, sin)
            return torch.cat((turned, x[..., dim:]), dim=-1)
        if self.spec.interleaved:
            swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            half = dim // 2
            swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        rotated: torch.Tensor = x * cos + swapped * sin
        return rotated

    def apply_last(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the trailing `dim` dimensions of `x` [T, heads, head_dim]."""
        plain, turned = x.split((x.shape[-1] - self.spec.dim, self.spec.dim), dim=-1)
        return torch.cat((plain, self.apply(turned, cos, sin)), dim=-1)

    def _scale(self, lengths: torch.Tensor) -> torch.Tensor | float | None:
        """Return the factor of cosines and sines: a number, or [T, 1]; None: 1."""
        if self.spec.kind == "longrope" and self.long_scale != self.scale:
            return self.scales[self._is_long(lengths).long()]
        return None if self.scale == 1.0 else self.scale

    def _is_long(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return bool [T, 1]: whether the sequence exceeds longrope's original length."""
        return (lengths > int(self.spec.parameters["original_max_position_embeddings"]))[:, None]

    def _frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return [dim / 2], or [T, dim / 2] where they depend on the length."""
        spec = self.spec
        if spec.kind == "longrope":
            return torch.where(self._is_long(lengths), self.long_frequencies, self.frequencies)
        if spec.kind == "dynamic":
            return self._scaled(_dynamic_at(spec, lengths, self.exponents))
        return self.frequencies

    def _scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return frequencies [..., dim / 2] times what was learned for them."""
        return frequencies if self.factors is None else frequencies * self.factors


def _scale_queries(spec: QueryScale, positions: torch.Tensor) -> torch.Tensor:
    """Return the query scales of positions, float32 [T]."""
    passed = torch.floor((positions.float() + spec.offset) / spec.step)
    return 1 + spec.beta * torch.log1p(passed)


def _dynamic_at(spec: RotarySpec, lengths: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Return frequencies [T, dim / 2] of an NTK-aware base that grows with the sequence's length.

    `powers`: [dim / 2].
    """
    factor, limit = spec.parameters["factor"], spec.max_positions
    longest = lengths.clamp(min=limit).float()
    grown = (factor * longest / limit) - (factor - 1)
    base = spec.theta * grown ** (spec.dim / (spec.dim - 2))
    frequencies: torch.Tensor = 1.0 / (base[:, None] ** powers)
    return -frequencies if spec.backwards else frequencies
