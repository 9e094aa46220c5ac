"""All experts of a layer at once on a device, without asking it who was chosen.

One launch chooses the experts of all tokens and lists the (token, expert) pairs by expert
(`kernels/routing.py`), and each of the two products is one launch over all of them
(`grouped_matrices.py`). What adds what they found to the hidden state weighs it, too. The loop over
experts, which needs to know on the host which ones were chosen, is a wait per layer and a handful
of launches per expert.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.model.spec import ExpertsSpec
from tgi_trio.shard.torch_backend.kernels.routing import route_tokens
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.grouped_matrices import (
    GroupedMatrices,
    Routed,
    pad_count,
)

_SCORES: Final = 2048  # (token, expert) that a routing program holds: 16 a thread
_MOST_TOKENS: Final = 64  # of one


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

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        doors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, hidden] of `x` [T, hidden]: the weighted sum of each token's experts.

        `logits` [T, experts] of the router. What is shared counts once, times the sigmoid of
        `doors` [T, 1] where there are any.
        """
        return self.find(x, logits, doors).combine()

    def find(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        doors: torch.Tensor | None = None,
    ) -> ExpertParts:
        """Return what is to be added up; the arguments as above."""
        routed = self.route(logits, x.dtype)
        gate = self._act if isinstance(self._act, Gate) and self._act.kernel else None
        inner = self._up.multiply(x, routed, gathers=True, gate=gate)
        if gate is None:
            inner = self._act(inner).contiguous()
        parts = self._down.multiply(inner, routed, gathers=False)
        doors = None if doors is None else doors.contiguous()
        return ExpertParts(parts, routed.weights, doors, self._shared)

    def route(self, logits: torch.Tensor, dtype: torch.dtype) -> Routed:
        """Return what `route` of `layers/routing.py` chooses, weights of `dtype`."""
        spec, (tokens, count) = self._spec, logits.shape
        device = logits.device
        weights = torch.empty((tokens, spec.per_token), dtype=dtype, device=device)
        every = count + self._shared
        pairs = torch.empty((every, tokens), dtype=torch.int32, device=device)
        counts = torch.empty(every, dtype=torch.int32, device=device)
        block = tokens_of_a_program(count)
        route_tokens[(-(-tokens // block),)](
            weights,
            pairs,
            counts,
            self._counters,
            logits.contiguous(),
            counts if self._choice_bias is None else self._choice_bias,
            tokens,
            spec.scale,
            spec.jitter,
            EXPERTS=count,
            PADDED=pad_count(count),
            PER_TOKEN=spec.per_token,
            ROUTING=spec.routing,
            NORMALISE=spec.normalise,
            GROUPS=spec.groups,
            PADDED_GROUPS=pad_count(spec.groups),
            GROUPS_USED=spec.groups_used,
            HAS_BIAS=self._choice_bias is not None,
            SHARED=self._shared,
            BLOCK=block,
        )
        return Routed(weights, pairs, counts, spec.per_token + self._shared)


def tokens_of_a_program(experts: int) -> int:
    """Return how many tokens a program of `route_tokens` has."""
    return max(1, min(_MOST_TOKENS, _SCORES // pad_count(experts)))
