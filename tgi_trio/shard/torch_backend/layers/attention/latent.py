"""Attention over a compressed K and V (DeepSeek-V2, 2024, section 2.1), with absorbed matrices.

The keys and values of all heads are linear functions of one small vector per token, its *latent* c,
except for a part of the key that is rotated and that all heads share. So the matrices that expand c
need not be applied to every token of the context; they are applied to this token's query and to the
result instead:

    q . (K c) = (K^T q) . c        sum of p (V c) = V (sum of p c)

All heads then attend to a single key, of the latent and the rotated part; its latent is the value.
So the cache holds one small vector per token, rather than a key and a value per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tgi_trio.model.specs.decoder import LatentSpec
from tgi_trio.shard.torch_backend.layers.attention.expanding import (
    AttendedParts,
    compile_expanding,
    expand_values,
)
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable
from tgi_trio.shard.torch_backend.layers.linears.joined import JoinedLinears, join_linears
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_by_head
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.opening import open_values


class ChangeHeads(Protocol):
    """What adapters add around attention over latents, in place; they change what expands these."""

    @property
    def acts(self) -> bool:
        """Whether any row of the present step has an adapter."""
        ...

    def add_to_queries(self, plain: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Change `absorbed` [T, heads, rank], made of `plain` [T, heads, plain_dim]."""
        ...

    def add_to_values(self, latents: torch.Tensor, values: torch.Tensor) -> None:
        """Change `values` [T, heads, value_dim], made of `latents` [T, heads, rank]."""
        ...


class LatentProjections:
    """The projections around a layer's attention over latents."""

    __slots__ = (
        *("changes", "gate_up", "gated", "invariant", "joined", "key_up", "latent_norm"),
        *("query_norm", "query_scale", "query_up", "same_scale", "spec", "value_up"),
    )

    def __init__(
        self,
        spec: LatentSpec,
        *,
        query_norm: Norm | None,
        query_up: Linear | None,
        latent_norm: Norm | None,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        gate_up: Linear | None = None,
        query_scale: LogScale | None = None,
        by_position: bool = False,
        gated: int = 0,
        invariant: bool = False,
    ) -> None:
        """Hold this rank's heads. `query_norm`, `query_up`: None if queries are not compressed.

        `latent_norm`: None in a layer that reads the latents of another.
        `key_up`: [heads, plain_dim, rank]; `value_up`: [heads, rank, value_dim].
        `query_scale`: of queries that are not compressed. `by_position`: all heads of a query are
        multiplied by a factor of its position, which is in its rotation's table. `gated`:
        neighbouring values that a gate opens, 0 if none does. `invariant`: see
        `batch_invariance.py`.
        """
        self.gated = gated
        self.query_scale = query_scale
        # That factor, as kernels are told of factors by head.
        one, heads = key_up.new_ones, len(key_up)
        self.same_scale = LogScale(one(heads), one(heads) - 1) if by_position else None
        self.spec = spec
        self.query_norm = query_norm
        self.query_up = query_up
        self.latent_norm = latent_norm
        self.key_up = key_up
        self.value_up = value_up
        self.gate_up = gate_up
        self.joined: JoinedLinears | None = None  # of `query_up` and `gate_up`
        if query_up is not None and gate_up is not None:
            self.joined = join_linears(query_up, gate_up)
        self.invariant = invariant
        self.changes: ChangeHeads | None = None  # of adapters

    @property
    def reads_only(self) -> bool:
        """Whether the latents are another layer's."""
        return self.latent_norm is None

    def query_and_key(
        self,
        projected: torch.Tensor,
        rotate: Callable[[torch.Tensor], torch.Tensor],
        expanded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, rank + rotary_dim] and keys [T, 1, rank + rotary_dim].

        `projected`: queries (or compressed ones), the latent, and the key to be rotated. If the
        latents are another layer's, there are only queries, and keys are [T, 0, ...]. `expanded`:
        queries [T, heads * size], if they are known.
        """
        spec, heads = self.spec, len(self.key_up)
        query, latent, key = self.split(projected, expanded)
        plain, turned = query.split((spec.plain_dim, spec.rotary_dim), dim=-1)
        if self.latent_norm is None:
            query = torch.cat((self.absorb(plain), rotate(turned)), dim=-1)
            return query, query[:, :0]
        turned = rotate(torch.cat((turned, key[:, None]), dim=1))
        absorbed = self.absorb(plain)
        latent = self.latent_norm(latent)[:, None]
        return (
            torch.cat((absorbed, turned[:, :heads]), dim=-1),
            torch.cat((latent, turned[:, heads:]), dim=-1),
        )

    def split(
        self, projected: torch.Tensor, expanded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, plain_dim + rotary_dim], latents and keys, [T, ...] each.

        All as projected: queries and keys are not rotated, and latents are not normalised. Latents
        and keys of another layer are [T, 0].
        """
        spec = self.spec
        behind = (0, 0) if self.reads_only else (spec.rank, spec.rotary_dim)
        width = projected.shape[-1] - sum(behind)
        query, latent, key = projected.split((width, *behind), dim=-1)
        if expanded is None:
            normed = query if self.query_norm is None else self.query_norm(query)
            expanded = self.expand(normed, query)
        query = expanded.view(len(projected), -1, spec.plain_dim + spec.rotary_dim)
        return query, latent, key

    def compress(self, projected: torch.Tensor) -> torch.Tensor:
        """Return the compressed queries, normalised, [T, query_rank]."""
        query = projected[:, : self.spec.query_rank]
        return query if self.query_norm is None else self.query_norm(query)

    def expand(self, compressed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Return queries [T, heads * size] of `compressed` ones, normalised.

        `projected` [T, at least query_rank] begins with these before their norm. Queries that are
        not compressed are returned as they are.
        """
        if self.query_up is None:
            return compressed
        return self.query_up(self._join(compressed, projected))

    def open(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return queries [T, heads * size] and gates of values [T, heads * value_dim] of `double`.

        The latter are not activated. None: values have no gates that are made as queries are.
        """
        if self.gate_up is None or self.query_up is None:
            return None
        if self.joined is not None and self.joined.serves(self.query_up, self.gate_up):
            return self.joined.multiply(both)
        return self.query_up(both), self.gate_up(both)

    def double(self, projected: torch.Tensor) -> torch.Tensor:
        """Return compressed queries, normalised; if `doubled`, behind that as they are."""
        return self._join(self.compress(projected), projected)

    def scale(self, projected: torch.Tensor, table: RotaryTable) -> None:
        """Multiply the queries in `projected` by factors of their positions, if there are such."""
        if self.query_scale is not None:
            size = self.spec.plain_dim + self.spec.rotary_dim
            queries = projected[:, : len(self.key_up) * size].unflatten(-1, (-1, size))
            self.query_scale.multiply(queries, table.logs)

    def _join(self, compressed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        if not self.spec.doubled or compressed.shape[-1] > self.spec.query_rank:
            return compressed  # which may have been doubled already
        return torch.cat((compressed, projected[:, : self.spec.query_rank]), dim=-1)

    @property
    def changed(self) -> bool:
        """Whether adapters of this step's rows change what expands latents.

        Then `values` are made of what has been merged.
        """
        return self.changes is not None and self.changes.acts

    def absorb(self, plain: torch.Tensor) -> torch.Tensor:
        """Return queries over latents [T, heads, rank] of those [T, heads, plain_dim] over keys."""
        absorbed = multiply_by_head(plain, self.key_up, invariant=self.invariant)
        self.change_queries(plain, absorbed)
        return absorbed

    def change_queries(self, plain: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Add to queries over latents what adapters say of those over keys."""
        if self.changes is not None:
            self.changes.add_to_queries(plain, absorbed)

    def values(
        self, attended: torch.Tensor | AttendedParts, gates: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values [T, heads * value_dim] of `attended` [T, heads * (rank + rotary_dim)].

        They are multiplied by the sigmoids of `gates`, as for `expand_values`.
        """
        if isinstance(attended, torch.Tensor):
            attended = attended.view(len(attended), len(self.value_up), -1)[..., : self.spec.rank]
        if self.changes is None or not self.changes.acts:
            return expand_values(attended, self.value_up, gates, invariant=self.invariant)
        if isinstance(attended, AttendedParts):
            raise TypeError("adapters change values of what is merged, not of its parts")
        values = multiply_by_head(attended, self.value_up, invariant=self.invariant)
        self.changes.add_to_values(attended, values)
        return values.flatten(1) if gates is None else open_values(values.flatten(1), gates)

    def pack(self) -> None:
        for linear in (self.query_up, self.gate_up):
            if linear is not None:
                linear.pack()
        if self.joined is not None:
            self.joined.pack()
        if not self.invariant:
            compile_expanding(self.value_up, self.gated)

    def nbytes(self) -> int:
        parts = [self.query_norm, self.query_up, self.gate_up, self.latent_norm, self.query_scale]
        return (
            sum(part.nbytes() for part in parts if part is not None)
            + self.key_up.nbytes
            + self.value_up.nbytes
        )
