"""What happens to a layer's queries, keys and values before attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import NormKind
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable


@dataclass(frozen=True, slots=True, eq=False)
class HeadSteps:
    """Constants of one layer. Heads are clipped, normalised and rotated, in this order."""

    heads: int
    kv_heads: int
    head_dim: int
    clip: float = 0.0  # of all projected numbers; 0: none
    norm: NormKind = "rms"
    eps: float = 0.0
    gain: torch.Tensor | None = None  # [heads + kv_heads, head_dim]; None: heads are not normalised
    bias: torch.Tensor | None = None
    rotary: Rotary | None = None
    norm_last: bool = False  # heads are rotated first, then normalised
    norm_whole: bool = False  # RMS of all heads of queries at once, and of all of keys (OLMo 2)
    value_dim: int = 0  # 0: values are as wide as keys
    keys_as_values: bool = False  # values are the keys before norm and rotation
    value_norm: bool = False  # each value is normalised, without weights
    value_scale: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether heads are at most rotated, and a layer has keys and equally wide values."""
        scaled = self.rotary is not None and self.rotary.spec.query_scale is not None
        values = self.keys_as_values or self.value_norm or self.value_scale != 1.0
        narrower = self.value_dim not in (0, self.head_dim)
        changed = self.gain is not None or bool(self.clip) or scaled or values
        return bool(self.kv_heads) and not changed and not narrower

    def split(
        self, qkv: torch.Tensor, table: RotaryTable | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [T, ..., head_dim] of projections `qkv` [T, width]."""
        if self.clip:
            qkv = qkv.clamp(-self.clip, self.clip)
        heads, kv_heads = self.heads, self.kv_heads
        width = (heads + kv_heads) * self.head_dim
        query_key = qkv[:, :width].unflatten(-1, (heads + kv_heads, self.head_dim))
        value = self._values(query_key[:, heads:], qkv[:, width:])
        if self.gain is not None and not self.norm_last:
            query_key = self._normalise(query_key, self.gain)
        if self.rotary is not None and table is not None:
            query_key = self.rotary.apply(query_key, table.cos, table.sin)
        if self.gain is not None and self.norm_last:
            query_key = self._normalise(query_key, self.gain)
        query, key = query_key.split((heads, kv_heads), dim=1)
        if table is not None and table.query_scale is not None:
            query = query * table.query_scale
        return query, key, value

    def _values(self, key: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Return values [T, kv_heads, value_dim] from their projection, or from `key`."""
        value, width = key, self.value_dim or self.head_dim
        if not self.keys_as_values:
            value = projected.unflatten(-1, (self.kv_heads, width))
        if self.value_norm:
            value = functional.rms_norm(value, (width,), None, self.eps)
        return value if self.value_scale == 1.0 else value * self.value_scale

    def _normalise(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Normalise query and key heads, each with its own weights."""
        size = (self.head_dim,)
        if self.norm_whole:
            parts = (each.split((self.heads, self.kv_heads), -2) for each in (x, gain))
            return torch.cat([self._normalise_whole(*part) for part in zip(*parts, strict=True)], 1)
        if self.norm in ("layer", "layer_plus_one"):
            normed = functional.layer_norm(x, size, None, None, self.eps) * gain
            return normed if self.bias is None else normed + self.bias
        if self.norm == "rms_plus_one":
            return (functional.rms_norm(x.float(), size, None, self.eps) * gain).to(x.dtype)
        return functional.rms_norm(x, size, None, self.eps) * gain

    def _normalise_whole(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Normalise all heads `x` [T, n, head_dim] of a token together; `gain` [n, head_dim]."""
        normed = functional.rms_norm(x.flatten(1), (gain.numel(),), gain.flatten(), self.eps)
        return normed.view(x.shape)
