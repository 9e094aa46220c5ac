"""EXL3's matrices of all experts of a layer, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.kernels.grouped_trellis import (
    multiply_turned_groups,
    turn_groups,
)
from tgi_trio.shard.torch_backend.layers.coded_linear import ONE
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.grouped_matrices import (
    Routed,
    count_tiles,
    group_constants,
    has_many,
    make_room,
)
from tgi_trio.shard.torch_backend.layers.stored_trellis import Trellis
from tgi_trio.shard.torch_backend.layers.trellis_tiles import (
    TURN_WARPS,
    TURNED_ROWS,
    choose_expert_tiles,
)
from tgi_trio.shard.torch_backend.torch_device import generation

_OF_GROUPS: Final = ("GROUPS", "PADDED_GROUPS", "PER_ROW", "GATHERS")


@dataclass(frozen=True, slots=True, eq=False)
class TrellisMatrices:
    """EXL3's matrices as they are stored, one below the other."""

    trellis: Trellis  # see `stack_trellises`
    count: int
    bias: torch.Tensor | None = None  # [experts, outputs]
    invariant: bool = False

    @property
    def device(self) -> torch.device:
        return self.trellis.rings.device

    def multiply(
        self,
        x: torch.Tensor,
        routed: Routed,
        *,
        gathers: bool,
        gate: Gate | None = None,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        own, form = self.trellis, self.trellis.form
        if gate is not None and (gate.paired or own.outputs % (2 * TURNED)):
            return gate(self.multiply(x, routed, gathers=gathers)).contiguous()
        outputs = own.outputs // (1 if gate is None else 2)
        few, many = choose_expert_tiles(x.dtype, generation(x.device))
        tokens = apparent_rows(len(routed.weights), invariant=self.invariant)
        tile = many if has_many(x, routed, tokens) else few
        out = make_room(x, routed, outputs) if room is None else room
        constants = group_constants(x, routed, gate, gathers=gathers, biased=self.bias is not None)
        turned = self._turn(x, routed, {name: constants[name] for name in _OF_GROUPS})
        multiply_turned_groups[(count_tiles(routed, tile.rows), -(-outputs // TURNED))](
            out,
            turned,
            own.rings,
            own.sorts,
            own.output_scales,
            own.rings if self.bias is None else self.bias,
            routed.pairs,
            routed.counts,
            len(routed.weights),
            0.0 if gate is None else gate.limit,
            form.padded,
            turned[0].numel(),
            ONE,
            N=outputs,
            **{name: value for name, value in constants.items() if name != "PAIRED"},
            HALF_BITS=form.half_bits,
            BOOK=form.book,
            ROWS=tile.rows,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out

    def _turn(self, x: torch.Tensor, routed: Routed, groups: dict[str, Any]) -> torch.Tensor:
        """Return inputs, scaled and turned, [sorts, pairs, padded]; `groups`: for kernels."""
        form, sorts = self.trellis.form, len(self.trellis.counts)
        every = len(routed.weights) * routed.each
        turned = x.new_empty((sorts, every, form.padded))
        turn_groups[(count_tiles(routed, TURNED_ROWS), form.padded // TURNED, sorts)](
            turned,
            x,
            self.trellis.input_scales,
            routed.pairs,
            routed.counts,
            len(routed.weights),
            form.inputs,
            form.padded,
            every * form.padded,
            **groups,
            SORTS=sorts,
            ROWS=TURNED_ROWS,
            num_warps=TURN_WARPS,
        )
        return turned
