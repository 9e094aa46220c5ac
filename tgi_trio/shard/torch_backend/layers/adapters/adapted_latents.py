"""Adapters of the matrix that expands latents, in torch: around products that it is absorbed in.

Of each head, it has a part K for keys and a part V for values (`layers/attention/latent.py`). With
an adapter these are K + B_k A and V + B_v A, with one A for all heads, so that

    (K + B_k A)^T q = K^T q + A^T (B_k^T q)        (V + B_v A) c = V c + B_v (A c)

As in `layers/adapters/adapted_linear.py`, a row's tokens are multiplied separately from those of
other rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tgi_trio.model.adapters.sites import Site
from tgi_trio.model.specs.decoder import LatentSpec
from tgi_trio.shard.torch_backend.layers.adapters.adapted_linear import AdapterTable, TorchPart


class AdaptedHeads:
    """Implements `ChangeHeads` for a layer."""

    def __init__(self, spec: LatentSpec, site: Site, table: AdapterTable) -> None:
        self._spec = spec
        self._site = site
        self._table = table

    @property
    def acts(self) -> bool:
        return bool(self._table.runs)

    def add_to_queries(self, plain: torch.Tensor, absorbed: torch.Tensor) -> None:
        size = self._spec.plain_dim
        for rows, part in self._parts():
            keys = self._by_head(part)[:, :, :size].permute(1, 2, 0)  # [heads, plain_dim, r]
            low = torch.bmm(plain[rows].transpose(0, 1), keys)  # [heads, n, r]
            absorbed[rows] += (low @ part.a.T).transpose(0, 1)

    def add_to_values(self, latents: torch.Tensor, values: torch.Tensor) -> None:
        size = self._spec.plain_dim
        for rows, part in self._parts():
            own = self._by_head(part)[:, :, size:].transpose(0, 1)  # [heads, r, value_dim]
            low = latents[rows].transpose(0, 1) @ part.a  # [heads, n, r]
            values[rows] += torch.bmm(low, own).transpose(0, 1)

    def _parts(self) -> Iterator[tuple[slice, TorchPart]]:
        """Yield the tokens of each row with an adapter that changes the layer, with its part."""
        table = self._table
        for run in table.runs:
            for part in table.packed[run.adapter].get(self._site, ()):
                for rows in run.rows:
                    yield rows, part

    def _by_head(self, part: TorchPart) -> torch.Tensor:
        """Return B as [r, heads, plain_dim + value_dim]."""
        each = self._spec.plain_dim + self._spec.value_dim
        return part.b.view(len(part.b), -1, each)
