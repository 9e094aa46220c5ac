"""The matrices of all experts of a layer, multiplied in one launch on a device (grouped GEMM)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import torch

from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.kernels.experts.grouped import multiply_groups
from tgi_trio.shard.torch_backend.kernels.experts.grouped_codes import multiply_coded_groups
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.code_tiles import CodeTile, choose_tiles
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import (
    ONE,
    list_constants,
    list_steps,
    list_tensors,
)
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import Codes
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import Generation, generation


class GroupTile(NamedTuple):
    """The tile of a program of `multiply_groups`; its sizes are powers of two."""

    rows: int  # at least 16, as tensor cores multiply no fewer
    outputs: int
    depth: int  # inputs of one step of the loop
    warps: int = 4
    stages: int = 3


# (least pairs per expert, tile with gates, tile without), most rows first: the fastest on an H200.
# Devices with less shared memory keep to 99 KB.
_TILES: Final[dict[Generation, tuple[tuple[int, GroupTile, GroupTile], ...]]] = {
    "hopper": (
        (96, GroupTile(128, 128, 64, 8, 4), GroupTile(128, 256, 64, 8, 4)),
        (16, GroupTile(64, 64, 64), GroupTile(64, 128, 64)),
        (0, GroupTile(16, 32, 128, 4, 4), GroupTile(16, 64, 128)),
    ),
    "ampere": (
        (32, GroupTile(64, 64, 64), GroupTile(64, 64, 64)),
        (0, GroupTile(16, 64, 64), GroupTile(16, 64, 64)),
    ),
}
_WIDE_TILE: Final = GroupTile(16, 64, 32)  # float32 does not use the tensor cores
TOGETHER: Final = 8  # tiles of rows that programs go through together, for the level 2 cache
_MANY_FROM: Final = 32  # least pairs per expert for which codes have a tile of many rows
_FEW_OUTPUTS: Final = 32  # of a tile of codes of few rows: gates and ups fill the registers


@dataclass(frozen=True, slots=True)
class Routed:
    """Which tokens go to which experts, on the device."""

    weights: torch.Tensor  # [T, per token]
    pairs: torch.Tensor  # int32 [experts, T], as `route_tokens` writes them; shared experts last
    counts: torch.Tensor  # int32 [experts]
    each: int  # experts of a token, shared ones included
    gate_logits: torch.Tensor | None = None  # [T, 1]: logits of the shared experts' gate, if known

    def of_first(self, count: int) -> Routed:
        """Return the lists of the first experts alone."""
        return replace(self, pairs=self.pairs[:count], counts=self.counts[:count])


class GroupedMatrices(Protocol):
    """The matrices of all experts, and their biases."""

    @property
    def count(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def invariant(self) -> bool:
        """Whether results do not depend on the step's size; see `batch_invariance.py`."""

    def multiply(
        self,
        x: torch.Tensor,
        routed: Routed,
        *,
        gathers: bool,
        gate: Gate | None = None,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [pairs, outputs], gated; `x`, `gathers` and the order as for `multiply_groups`.

        With `gathers`, `x` is by token or by pair, whichever it has as many rows as. `room`: where
        to write it; pairs that are in no list keep what is there.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrices:
    """Matrices of plain numbers."""

    weight: torch.Tensor  # [experts, outputs, inputs], contiguous
    bias: torch.Tensor | None = None  # [experts, outputs]
    invariant: bool = False

    @property
    def count(self) -> int:
        return len(self.weight)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def multiply(
        self,
        x: torch.Tensor,
        routed: Routed,
        *,
        gathers: bool,
        gate: Gate | None = None,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        _, outputs, depth = weight.shape
        outputs //= 1 if gate is None else 2
        tokens = apparent_rows(len(routed.weights), invariant=self.invariant)
        pairs = tokens * routed.each // len(routed.counts)
        tile = choose_group_tile(x.dtype, generation(x.device), pairs, gated=gate is not None)
        out = make_room(x, routed, outputs) if room is None else room
        multiply_groups[(count_tiles(routed, tile.rows) * -(-outputs // tile.outputs),)](
            out,
            x,
            weight,
            weight if bias is None else bias,
            routed.pairs,
            routed.counts,
            len(routed.weights),
            0.0 if gate is None else gate.limit,
            N=outputs,
            K=depth,
            **group_constants(x, routed, gate, gathers=gathers, biased=bias is not None),
            BOUNDED=0 if gate is None else gate.bounded,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            TOGETHER=TOGETHER,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrices:
    """Matrices that stay quantised, stacked along the outputs."""

    codes: Codes  # [experts * outputs, inputs]
    count: int
    bias: torch.Tensor | None = None  # [experts, outputs]
    invariant: bool = False

    @property
    def device(self) -> torch.device:
        return self.codes.codes.device

    def multiply(
        self,
        x: torch.Tensor,
        routed: Routed,
        *,
        gathers: bool,
        gate: Gate | None = None,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        codes, form = self.codes, self.codes.form
        outputs = codes.outputs // self.count // (1 if gate is None else 2)
        few, many = choose_group_tiles(x.dtype, generation(x.device), form.kind)
        tokens = apparent_rows(len(routed.weights), invariant=self.invariant)
        tile = many if has_many(x, routed, tokens) else few
        out = make_room(x, routed, outputs) if room is None else room
        multiply_coded_groups[(count_tiles(routed, tile.rows), -(-outputs // tile.outputs))](
            out,
            x,
            *list_tensors(codes),
            codes.codes if self.bias is None else self.bias,
            routed.pairs,
            routed.counts,
            len(routed.weights),
            0.0 if gate is None else gate.limit,
            form.inputs,
            form.units,
            ONE,
            N=outputs,
            **group_constants(x, routed, gate, gathers=gathers, biased=self.bias is not None),
            **list_constants(codes),
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            **list_steps(codes, tile),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out


def choose_group_tile(
    dtype: torch.dtype, generation: Generation, pairs: int, *, gated: bool
) -> GroupTile:
    """Return the tile of plain matrices for so many pairs per expert."""
    if dtype.itemsize > 2:
        return _WIDE_TILE
    return next(
        gates if gated else plain for least, gates, plain in _TILES[generation] if pairs >= least
    )


def choose_group_tiles(
    dtype: torch.dtype, generation: Generation, kind: str
) -> tuple[CodeTile, CodeTile]:
    """Return the tiles of quantised experts, for few rows and for many."""
    few, many, *_ = choose_tiles(dtype, generation, kind)
    return few._replace(outputs=_FEW_OUTPUTS), many


def has_many(x: torch.Tensor, routed: Routed, tokens: int) -> bool:
    """Return whether tiles of many rows would be filled; float32 has no such tiles."""
    pairs = tokens * routed.each
    return x.dtype.itemsize < 4 and pairs >= _MANY_FROM * len(routed.counts)


def count_tiles(routed: Routed, rows: int) -> int:
    """Return the largest number of tiles that there can be, whichever experts are chosen."""
    pairs = len(routed.weights) * routed.each
    return min(pairs, len(routed.counts) + pairs // rows)


def make_room(x: torch.Tensor, routed: Routed, outputs: int) -> torch.Tensor:
    """Return memory for what experts say of each pair."""
    return x.new_empty(len(routed.weights) * routed.each, outputs)


def group_constants(
    x: torch.Tensor, routed: Routed, gate: Gate | None, *, gathers: bool, biased: bool
) -> dict[str, Any]:
    """Return the constants of all kernels for groups and gates."""
    groups, tokens = len(routed.counts), len(routed.weights)
    return {
        "GROUPS": groups,
        "PADDED_GROUPS": next_power_of_2(groups),
        "PER_ROW": routed.each * tokens // len(x) if gathers else routed.each,
        "GATHERS": gathers,
        "HAS_BIAS": biased,
        "ACT": "" if gate is None else gate.kernel,
        "LIMITS": gate is not None and gate.limit > 0,
        "RAISED": gate is not None and gate.limit > 0 and gate.raised,
        "PAIRED": gate is not None and gate.paired,
    }
