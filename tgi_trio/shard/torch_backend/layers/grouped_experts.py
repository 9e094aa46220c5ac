"""All experts of a layer at once on a device, without asking it who was chosen.

One launch chooses the experts of all tokens and lists the (token, expert) pairs by expert
(`kernels/routing.py`), that of few tokens multiplies them with the router as well, and each of the
two products is one launch over all of them (`grouped_matrices.py`). What adds what they found to
the hidden state weighs it, too. The loop over experts, which needs to know on the host which ones
were chosen, is a wait per layer and a handful of launches per expert.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from tgi_trio.model.spec import ExpertsSpec
from tgi_trio.shard.torch_backend.kernels.routing import ask_router, route_tokens
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.grouped_matrices import (
    GroupedMatrices,
    Routed,
    pad_count,
)
from tgi_trio.shard.torch_backend.layers.linear import Linear

_SCORES: Final = 1024  # (token, expert) that a routing program holds: 8 a thread
_MOST_TOKENS: Final = 64  # of one
# Tokens up to which their product with the router is ours. It reads the router once for every
# `ROUTER_TOKENS` of them, which a library does not; what it takes, no device has shown.
FEW_TOKENS: Final = 256
ROUTER_TOKENS: Final = 16  # of a program: the least that tensor cores take
ROUTER_COLUMNS: Final = 16
ROUTER_DEPTH: Final = 64
_PART: Final = 1024  # inputs of a program


class GroupedExperts:
    """All of `DenseMlp`'s `up` and `down`.

    Behind those that tokens are routed to come those that every token goes through.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        up: GroupedMatrices,
        down: GroupedMatrices,
        act: Activation,
        choice_bias: torch.Tensor | None,
    ) -> None:
        """`up` and `down`: of all experts, those of every token last, on one device."""
        self._spec = spec
        self._up = up
        self._down = down
        self._act = act
        self._choice_bias = choice_bias
        self._shared = up.count - spec.count  # experts of every token
        self._counters = torch.zeros(spec.count + 1, dtype=torch.int32, device=up.device)
        blocks = -(-FEW_TOKENS // ROUTER_TOKENS)
        self._arrived = torch.zeros(blocks, dtype=torch.int32, device=up.device)

    def __call__(
        self, x: torch.Tensor, routed: Routed, doors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [T, hidden] of `x` [T, hidden]: the weighted sum of each token's experts.

        What is shared counts once, times the sigmoid of `doors` [T, 1] where there are any.
        """
        return self.find(x, routed, doors).combine()

    def find(
        self, x: torch.Tensor, routed: Routed, doors: torch.Tensor | None = None
    ) -> ExpertParts:
        """Return what is to be added up; the arguments as above."""
        gate = self._act if isinstance(self._act, Gate) and self._act.kernel else None
        inner = self._up.multiply(x, routed, gathers=True, gate=gate)
        if gate is None:
            inner = self._act(inner).contiguous()
        parts = self._down.multiply(inner, routed, gathers=False)
        doors = None if doors is None else doors.contiguous()
        return ExpertParts(parts, routed.weights, doors, self._shared)

    @staticmethod
    def asks(tokens: int) -> bool:
        """Return whether the router's product with so many tokens is part of their routing."""
        return tokens <= FEW_TOKENS

    def ask(self, x: torch.Tensor, router: Linear, dtype: torch.dtype) -> Routed:
        """Return where `router`, a plain matrix, sends `x` [T, hidden]; weights of `dtype`.

        It is asked in its own dtype, whatever that of `x` is.
        """
        tokens, inputs = x.shape
        if not self.asks(tokens):
            return self.route(router(x.to(router.weight.dtype)), dtype)
        tile = router_tile(self._spec.count, inputs)
        blocks = -(-tokens // ROUTER_TOKENS)
        size = (blocks, tile["PARTS"], ROUTER_TOKENS, tile["PADDED"])
        routed = self._make_room(tokens, dtype)
        weight, bias = router.weight, router.bias
        ask_router[(blocks, tile["PADDED"] // ROUTER_COLUMNS, tile["PARTS"])](
            *(routed.weights, routed.pairs, routed.counts, self._counters),
            torch.empty(size, dtype=torch.float32, device=x.device),
            self._arrived,
            x.contiguous(),
            weight.contiguous(),
            weight if bias is None else bias,
            routed.counts if self._choice_bias is None else self._choice_bias,
            tokens,
            self._spec.scale,
            self._spec.jitter,
            HAS_ROUTER_BIAS=bias is not None,
            **tile,
            **self._constants(),
            num_warps=router_warps(tile["PADDED"]),
        )
        return routed

    def route(self, logits: torch.Tensor, dtype: torch.dtype) -> Routed:
        """Return what `route` of `layers/routing.py` chooses, weights of `dtype`."""
        tokens, count = logits.shape
        routed = self._make_room(tokens, dtype)
        block = tokens_of_a_program(count)
        route_tokens[(-(-tokens // block),)](
            *(routed.weights, routed.pairs, routed.counts, self._counters),
            logits.contiguous(),
            routed.counts if self._choice_bias is None else self._choice_bias,
            tokens,
            self._spec.scale,
            self._spec.jitter,
            PADDED=pad_count(count),
            **self._constants(),
            BLOCK=block,
        )
        return routed

    def _make_room(self, tokens: int, dtype: torch.dtype) -> Routed:
        spec, device = self._spec, self._up.device
        every = spec.count + self._shared
        return Routed(
            torch.empty((tokens, spec.per_token), dtype=dtype, device=device),
            torch.empty((every, tokens), dtype=torch.int32, device=device),
            torch.empty(every, dtype=torch.int32, device=device),
            spec.per_token + self._shared,
        )

    def _constants(self) -> dict[str, Any]:
        """Return what both kernels are told of how experts are chosen."""
        spec = self._spec
        return {
            "EXPERTS": spec.count,
            "PER_TOKEN": spec.per_token,
            "ROUTING": spec.routing,
            "NORMALISE": spec.normalise,
            "GROUPS": spec.groups,
            "PADDED_GROUPS": pad_count(spec.groups),
            "GROUPS_USED": spec.groups_used,
            "HAS_BIAS": self._choice_bias is not None,
            "SHARED": self._shared,
        }


def tokens_of_a_program(experts: int) -> int:
    """Return how many tokens a program of `route_tokens` has."""
    return max(1, min(_MOST_TOKENS, _SCORES // pad_count(experts)))


def router_tile(experts: int, inputs: int) -> dict[str, int]:
    """Return the constants of `ask_router` that say who multiplies what."""
    return {
        "INPUTS": inputs,
        "PARTS": -(-inputs // _PART),
        "PART": _PART,
        "DEPTH": ROUTER_DEPTH,
        "TOKENS": ROUTER_TOKENS,
        "COLUMNS": ROUTER_COLUMNS,
        "PADDED": max(ROUTER_COLUMNS, pad_count(experts)),
    }


def router_warps(padded: int) -> int:
    """Return the warps of a program that may choose for all of its tokens: 8 scores a thread."""
    return max(4, min(16, ROUTER_TOKENS * padded // 256))
