"""EXL3's matrices of all experts of a layer, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.nn import functional

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.kernels.experts.grouped_trellis import (
    multiply_turned_groups,
    turn_groups,
)
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import (
    Routed,
    count_tiles,
    group_constants,
    has_many,
    make_room,
)
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import ONE
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import Trellis
from tgi_trio.shard.torch_backend.layers.linears.trellis_tiles import (
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
    apart: bool = False  # ups begin behind all blocks of gates, whose number 128 need not divide

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
        if gate is not None and not self._opens(gate):
            return gate(self.multiply(x, routed, gathers=gathers)).contiguous()
        if gate is None and self.apart:
            wide = self._pad().multiply(x, routed, gathers=gathers)
            both = wide.view(len(wide), 2, -1)
            return both[:, :, : self.trellis.outputs // 2].flatten(1)
        constants = self._constants(x, routed, gate, gathers=gathers)
        turned = self._turn(x, routed, {name: constants[name] for name in _OF_GROUPS})
        outputs = self.trellis.outputs // (1 if gate is None else 2)
        out = make_room(x, routed, outputs) if room is None else room
        self._launch(out, turned, routed, gate, constants)
        return out

    def _pad(self) -> TrellisMatrices:
        """Return the same, of all outputs of blocks."""
        outputs, bias = len(self.trellis.output_scales) // self.count, self.bias
        if bias is not None:
            more = (outputs - self.trellis.outputs) // 2
            bias = functional.pad(bias.unflatten(1, (2, -1)), (0, more)).flatten(1)
        own = replace(self.trellis, outputs=outputs)
        return TrellisMatrices(own, self.count, bias, self.invariant)

    def feeds(self, reader: TrellisMatrices, gate: Gate) -> bool:
        """Return whether `feed` can do what two calls of `multiply` do."""
        return len(reader.trellis.counts) == 1 and self._opens(gate)

    def feed(
        self,
        reader: TrellisMatrices,
        x: torch.Tensor,
        routed: Routed,
        gate: Gate,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the products of `reader` [pairs, outputs] with what these say, gated.

        Programs that have found it turn it for `reader`. Arguments as for `multiply`.
        """
        constants = self._constants(x, routed, gate, gathers=True)
        turned = self._turn(x, routed, {name: constants[name] for name in _OF_GROUPS})
        inner = make_room(x, routed, reader.trellis.form.padded)
        self._launch(inner, turned, routed, gate, constants, reader.trellis.input_scales)
        out = make_room(x, routed, reader.trellis.outputs) if room is None else room
        constants = reader._constants(inner, routed, None, gathers=False)
        reader._launch(out, inner[None], routed, None, constants)
        return out

    def _opens(self, gate: Gate) -> bool:
        """Return whether programs have gates as well as their ups."""
        halved = self.apart or self.trellis.outputs % (2 * TURNED) == 0
        return halved and gate.kernel != "" and not gate.paired and not gate.bounded

    def _constants(
        self, x: torch.Tensor, routed: Routed, gate: Gate | None, *, gathers: bool
    ) -> dict[str, Any]:
        own = group_constants(x, routed, gate, gathers=gathers, biased=self.bias is not None)
        return {name: value for name, value in own.items() if name != "PAIRED"}

    def _launch(
        self,
        out: torch.Tensor,
        turned: torch.Tensor,
        routed: Routed,
        gate: Gate | None,
        constants: dict[str, Any],
        next_scales: torch.Tensor | None = None,
    ) -> None:
        """Write products of `turned` [sorts, pairs, padded] to `out`.

        `next_scales`: float16 [experts, padded outputs], by which results are turned.
        """
        own, form = self.trellis, self.trellis.form
        outputs = own.outputs // (1 if gate is None else 2)
        few, many = choose_expert_tiles(out.dtype, generation(out.device))
        tokens = apparent_rows(len(routed.weights), invariant=self.invariant)
        tile = many if has_many(out, routed, tokens) else few
        multiply_turned_groups[(count_tiles(routed, tile.rows), -(-outputs // TURNED))](
            out,
            turned,
            own.rings,
            own.sorts,
            own.output_scales,
            own.rings if self.bias is None else self.bias,
            own.output_scales if next_scales is None else next_scales,
            routed.pairs,
            routed.counts,
            len(routed.weights),
            0.0 if gate is None else gate.limit,
            form.padded,
            turned[0].numel(),
            ONE,
            N=outputs,
            **constants,
            TURNS=next_scales is not None,
            HALF_BITS=form.half_bits,
            BOOK=form.book,
            ROWS=tile.rows,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

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
