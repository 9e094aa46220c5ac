"""Per-layer embeddings: every layer has embeddings of its own for each token (Gemma 3n, 2025).

Source: transformers' Gemma 3n and 4, "per-layer inputs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tgi_trio.model.specs.decoder import PerLayerInputsSpec
from tgi_trio.shard.torch_backend.compiling.ahead import compile_beside
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import name_activation, open_own
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.opening import (
    STEPS,
    NarrowTile,
    choose_narrow_tile,
    opens_narrow,
)
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering, embed
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.step_features import StepFeatures

# Of a program of `multiply_opened`, for many tokens: it holds gates and what they open.
_MANY: Final = NarrowTile(128, 64, warps=8, stages=3)
_DEPTH: Final = 64  # numbers that gates open and a product multiplies at a time
_BOTH = 2.0**-0.5  # factor of a sum of two


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerInputs:
    """The part that all layers share."""

    spec: PerLayerInputsSpec
    table: torch.Tensor  # [rows of `part`, layers * width]
    part: slice  # the rows that this rank has
    projection: Linear  # [layers * width, hidden]
    norm: Norm  # over one layer's width

    def hide(self, token_ids: torch.Tensor, features: StepFeatures) -> torch.Tensor:
        """Return token ids [T] with a neutral token in the places of image features."""
        return token_ids.index_fill(0, features.places, self.spec.image_token)

    def of(self, token_ids: torch.Tensor, x: torch.Tensor, ranks: Gathering | None) -> torch.Tensor:
        """Return [layers, T, width] for token ids [T], whose embeddings are `x` [T, hidden]."""
        width, beyond = self.spec.width, token_ids >= self.spec.rows
        rows = embed(token_ids.masked_fill(beyond, 0), self.table, self.part, ranks)
        rows = rows * torch.tensor(width**0.5, dtype=rows.dtype)  # the factor is rounded first
        projected = self.projection(x) * x.shape[-1] ** -0.5
        projected = self.norm(projected.unflatten(-1, (-1, width)))
        both: torch.Tensor = (projected + rows.unflatten(-1, (-1, width))) * _BOTH
        return both.transpose(0, 1)

    def nbytes(self) -> int:
        return self.table.nbytes + self.projection.nbytes() + self.norm.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerInput:
    """One layer's part. `post_norm`, of the result, is applied by the caller."""

    gate: Linear
    act: Activation
    up: Linear
    post_norm: Norm

    def __call__(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] for `x` [T, hidden] and the layer's embeddings `own` [T, width]."""
        gates, act = self.gate(x), name_activation(self.act)
        if act and own.stride(1) == 1 and opens_narrow(self.up, x.device):
            return multiply_opened(gates, own, self.up.weight, act)
        return self.up(open_own(gates, own, self.act))

    def pack(self) -> None:
        self.gate.pack()
        self.up.pack()
        if act := name_activation(self.act):
            compile_opened(self.up, act)

    def nbytes(self) -> int:
        return self.gate.nbytes() + self.up.nbytes() + self.post_norm.nbytes()


def multiply_opened(
    gates: torch.Tensor, own: torch.Tensor, weight: torch.Tensor, act: str
) -> torch.Tensor:
    """Return [T, outputs]: act(`gates`) * `own` [T, width] times `weight` [outputs, width].

    In one launch; `act` as in `kernels/activations.py`.
    """
    from tgi_trio.shard.torch_backend.kernels import per_layer_inputs  # imports Triton

    (tokens, width), outputs = gates.shape, len(weight)
    tile = choose_opened_tile(gates.dtype, tokens)
    out = torch.empty((tokens, outputs), dtype=gates.dtype, device=gates.device)
    per_layer_inputs.multiply_opened[(-(-outputs // tile.gates), -(-tokens // tile.tokens))](
        *(out, gates.contiguous(), own, weight, tokens, own.stride(0)),
        **opened_constants(outputs, width),
        ACT=act,
        TOKENS=tile.tokens,
        BLOCK=tile.gates,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def choose_opened_tile(dtype: torch.dtype, tokens: int) -> NarrowTile:
    """Return the tile of `multiply_opened` for numbers of a dtype and a step's tokens."""
    tile = choose_narrow_tile(dtype, tokens)
    return _MANY if tile.tokens > _MANY.tokens // 2 else tile


def opened_constants(outputs: int, width: int) -> dict[str, int]:
    """Return constants of `multiply_opened` that follow from the shape of its matrix."""
    depth = max(16, min(next_power_of_2(width), _DEPTH))
    return {"OUTPUTS": outputs, "SIZE": width, "DEPTH": depth}


def compile_opened(up: Linear, act: str) -> None:
    """Start compiling what `multiply_opened` launches for any number of tokens."""
    if not opens_narrow(up, up.weight.device):
        return
    weight = up.weight

    def launch_each() -> None:
        for tokens in STEPS:
            some = weight.new_zeros(tokens, weight.shape[1])
            multiply_opened(some, some, weight, act)

    compile_beside(weight.device, launch_each, ("multiply_opened", weight.dtype, weight.shape, act))
