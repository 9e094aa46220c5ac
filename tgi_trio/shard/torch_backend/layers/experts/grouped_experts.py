"""All experts of a layer at once on a device, without asking it which were chosen.

One launch chooses the experts of all tokens and lists the (token, expert) pairs by expert
(`kernels/experts/routing.py`); for few tokens it also computes the product with the router. Each of
the two products is one launch over all experts (`grouped_matrices.py`). Their outputs are weighted
by the launch that adds them to the hidden state. A loop over experts would need to know on the host
which ones were chosen: one wait per layer, and a handful of launches per expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.kernels.experts.routing import ask_router, route_tokens
from tgi_trio.shard.torch_backend.kernels.experts.weighing import weigh_inputs
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import GroupedMatrices, Routed
from tgi_trio.shard.torch_backend.layers.experts.grouping import multiply_both
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.padding import next_power_of_2

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import AdapterTile
    from tgi_trio.shard.torch_backend.layers.experts.slotted_experts import SlottedExperts

_SCORES: Final = 1024  # (token, expert) scores of a routing program: 8 a thread
_MOST_TOKENS: Final = 64  # of a routing program
# Up to as many tokens our kernel multiplies them with the router. It reads the router once for
# every `ROUTER_TOKENS` tokens, which a library does not; no device has shown yet what that costs.
FEW_TOKENS: Final = 256
ROUTER_TOKENS: Final = 16  # of a program: the fewest rows of a tensor core product
ROUTER_COLUMNS: Final = 16
ROUTER_DEPTH: Final = 64
_PART: Final = 1024  # inputs of a program
_BLOCK: Final = 1024  # numbers of a program that weighs inputs


class GroupedExperts:
    """`up` and `down` of all experts, in place of one `DenseMlp` for each.

    Shared experts, which every token uses, come after the routed ones.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        up: GroupedMatrices,
        down: GroupedMatrices,
        act: Activation,
        choice_bias: torch.Tensor | None,
        *,
        expert_scale: torch.Tensor | None = None,
        idles: bool = True,
    ) -> None:
        """`up` and `down`: of all experts, the shared ones last, on one device.

        `expert_scale`, `idles`: as for `ExpertsMlp`. Experts that return their input have no
        matrices; where there are such, there are no shared ones.
        """
        self._spec = spec
        self._up = up
        self._down = down
        self._act = act
        self._choice_bias = choice_bias
        self._expert_scale = expert_scale
        self._idles = idles
        self.changes: SlottedExperts | None = None  # by adapters
        self._shared = up.count - spec.count
        self._routed = spec.count + spec.idle
        self._counters = torch.zeros(self._routed + 1, dtype=torch.int32, device=up.device)
        blocks = -(-FEW_TOKENS // ROUTER_TOKENS)
        self._arrived = torch.zeros(blocks, dtype=torch.int32, device=up.device)

    def __call__(
        self, x: torch.Tensor, routed: Routed, gate_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [T, hidden] of `x` [T, hidden]: the weighted sum of each token's experts.

        Shared experts have the weight sigmoid(`gate_logits`), [T, 1], or 1 if there are none.
        """
        return self.find(x, routed, gate_logits).combine()

    def find(
        self,
        x: torch.Tensor,
        routed: Routed,
        gate_logits: torch.Tensor | None = None,
        beside: torch.Tensor | None = None,
    ) -> ExpertParts:
        """Return the experts' outputs before they are summed; arguments as for a call.

        `beside`: [T, hidden], what a shared expert says that is not among them.
        """
        room, lists, weights = None, routed, routed.weights
        if self._spec.weighs_inputs:
            x, weights = self._weigh_inputs(x, routed)
        if self._spec.idle:  # what nothing is written to below is the output of an idle expert
            room = (x if self._idles else torch.zeros_like(x)).repeat_interleave(routed.each, dim=0)
            lists = routed.of_first(self._spec.count)
        changes = self.changes if self.changes is not None and self.changes.used else None
        if changes is None:
            parts = multiply_both(self._up, self._down, x, lists, self._act, room)
        else:  # what adapters add is added before the gate
            slots = changes.find_slots(len(weights))
            wide = self._up.multiply(x, lists, gathers=True)
            changes.add(wide, x, lists, slots, inner=True)
            inner = self._act(wide).contiguous()
            parts = self._down.multiply(inner, lists, gathers=False, room=room)
            changes.add(parts, inner, lists, slots, inner=False)
        gate_logits = routed.gate_logits if gate_logits is None else gate_logits.contiguous()
        beside = None if beside is None else beside.contiguous()
        return ExpertParts(parts, weights, gate_logits, self._shared, beside)

    def compile_changes(self, tile: AdapterTile) -> None:
        """Compile what adapters launch, for a kind of tiles."""
        if self.changes is not None:
            self.changes.compile(tile, self._spec.count, self._spec.per_token)

    def _weigh_inputs(self, x: torch.Tensor, routed: Routed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs [pairs, hidden] of each token's experts, and what weighs the outputs.

        The experts' weights multiply what goes into them. Shared ones get `x`, [T, hidden].
        """
        tokens, size = x.shape
        inputs = x.new_empty(tokens * routed.each, size)
        left = torch.empty_like(routed.weights)
        weigh_inputs[(tokens, routed.each, -(-size // _BLOCK))](
            *(inputs, left, x.contiguous(), routed.weights),
            SIZE=size,
            PER_TOKEN=self._spec.per_token,
            SHARED=self._shared,
            BLOCK=_BLOCK,
        )
        return inputs, left

    def asks(self, tokens: int) -> bool:
        """Return whether routing so many tokens includes their product with the router."""
        return apparent_rows(tokens, invariant=self._up.invariant) <= FEW_TOKENS

    def ask(
        self,
        x: torch.Tensor,
        router: Linear,
        dtype: torch.dtype,
        shared_gate: Linear | None = None,
    ) -> Routed:
        """Return the routing of `x` [T, hidden] by the plain matrix `router`; weights of `dtype`.

        The product is computed in the router's dtype, whatever that of `x` is. `shared_gate`: the
        gate of shared experts, a plain matrix with one output, which is multiplied beside, in that
        of `x`.
        """
        tokens, inputs = x.shape
        if not self.asks(tokens):
            routed = self.route(router(x.to(router.weight.dtype)), dtype)
            return routed if shared_gate is None else replace(routed, gate_logits=shared_gate(x))
        tile = router_tile(self._routed, inputs)
        blocks = -(-tokens // ROUTER_TOKENS)
        arrived = self._arrived
        if blocks > len(arrived):
            arrived = torch.zeros(blocks, dtype=torch.int32, device=x.device)
        has_shared_gate = shared_gate is not None
        size = (blocks, tile["PARTS"], ROUTER_TOKENS, tile["PADDED"] + has_shared_gate)
        routed = self._make_room(tokens, dtype)
        if has_shared_gate:
            routed = replace(routed, gate_logits=x.new_empty(tokens, 1))
        weight, bias = router.weight, router.bias
        columns = tile["PADDED"] // ROUTER_COLUMNS + has_shared_gate
        ask_router[(blocks, columns, tile["PARTS"])](
            *(routed.weights, routed.pairs, routed.counts, self._counters),
            x if routed.gate_logits is None else routed.gate_logits,
            torch.empty(size, dtype=torch.float32, device=x.device),
            arrived,
            x.contiguous(),
            weight.contiguous(),
            weight if bias is None else bias,
            x if shared_gate is None else shared_gate.weight,
            routed.counts if self._choice_bias is None else self._choice_bias,
            routed.counts if self._expert_scale is None else self._expert_scale,
            tokens,
            self._spec.scale,
            self._spec.jitter,
            HAS_ROUTER_BIAS=bias is not None,
            HAS_GATE=has_shared_gate,
            **tile,
            **self._constants(),
            num_warps=router_warps(tile["PADDED"]),
        )
        return routed

    def route(self, logits: torch.Tensor, dtype: torch.dtype) -> Routed:
        """Return the choice that `route` (`routing.py`) makes, with weights of `dtype`."""
        tokens, count = logits.shape
        routed = self._make_room(tokens, dtype)
        block = tokens_of_a_program(count)
        route_tokens[(-(-tokens // block),)](
            *(routed.weights, routed.pairs, routed.counts, self._counters),
            logits.contiguous(),
            routed.counts if self._choice_bias is None else self._choice_bias,
            routed.counts if self._expert_scale is None else self._expert_scale,
            tokens,
            self._spec.scale,
            self._spec.jitter,
            PADDED=next_power_of_2(count),
            **self._constants(),
            BLOCK=block,
        )
        return routed

    def _make_room(self, tokens: int, dtype: torch.dtype) -> Routed:
        spec, device = self._spec, self._up.device
        every = self._routed + self._shared
        return Routed(
            torch.empty((tokens, spec.per_token), dtype=dtype, device=device),
            torch.empty((every, tokens), dtype=torch.int32, device=device),
            torch.empty(every, dtype=torch.int32, device=device),
            spec.per_token + self._shared,
        )

    def _constants(self) -> dict[str, Any]:
        """Return the constants of both routing kernels."""
        spec = self._spec
        return {
            "EXPERTS": self._routed,
            "PER_TOKEN": spec.per_token,
            "ROUTING": spec.routing,
            "NORMALISE": spec.normalise,
            "CAP": spec.logit_cap,
            "GROUPS": spec.groups,
            "PADDED_GROUPS": next_power_of_2(spec.groups),
            "GROUPS_USED": spec.groups_used,
            "HAS_BIAS": self._choice_bias is not None,
            "HAS_FACTORS": self._expert_scale is not None,
            "SHARED": self._shared,
        }


def tokens_of_a_program(experts: int) -> int:
    """Return the tokens of a program of `route_tokens`."""
    return max(1, min(_MOST_TOKENS, _SCORES // next_power_of_2(experts)))


def router_tile(experts: int, inputs: int) -> dict[str, int]:
    """Return the constants that divide the product of `ask_router` among programs."""
    return {
        "INPUTS": inputs,
        "PARTS": -(-inputs // _PART),
        "PART": _PART,
        "DEPTH": ROUTER_DEPTH,
        "TOKENS": ROUTER_TOKENS,
        "COLUMNS": ROUTER_COLUMNS,
        "PADDED": max(ROUTER_COLUMNS, next_power_of_2(experts)),
    }


def router_warps(padded: int) -> int:
    """Return the warps of a program of `ask_router`: 8 scores a thread where it chooses."""
    return max(4, min(16, ROUTER_TOKENS * padded // 256))
