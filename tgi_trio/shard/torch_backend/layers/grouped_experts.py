"""All experts of a layer at once on a device, without asking it who was chosen.

One launch chooses the experts of all tokens and lists the (token, expert) pairs by expert
(`kernels/routing.py`), and each of the two products is one launch over all of them
(`kernels/grouped.py`). What adds what they found to the hidden state weighs it, too. The loop over
experts, which needs to know on the host which ones were chosen, is a wait per layer and a handful
of launches per expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tgi_trio.model.spec import ExpertsSpec
from tgi_trio.shard.torch_backend.kernels.grouped import multiply_groups
from tgi_trio.shard.torch_backend.kernels.routing import route_tokens
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linear import Linear

_FEW, _MANY = 16, 64  # rows of a tile: the least that tensor cores take, and for long prefills
_MANY_FROM = 32  # pairs per expert
_OUTPUTS, _DEPTH = 64, 64
_SCORES: Final = 2048  # (token, expert) that a routing program holds: 16 a thread
_MOST_TOKENS: Final = 64  # of one


@dataclass(frozen=True, slots=True)
class Routed:
    """Who goes where, on the device."""

    weights: torch.Tensor  # [T, per token]
    pairs: torch.Tensor  # int32 [experts, T], as `route_tokens` leaves them; the shared ones last
    counts: torch.Tensor  # int32 [experts]


class GroupedExperts:
    """All of `DenseMlp`'s `up` [experts, inner, hidden] and `down` [experts, hidden, ...].

    Behind those that tokens are routed to come those that every token goes through.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        up: Linear,
        down: Linear,
        act: Activation,
        choice_bias: torch.Tensor | None,
    ) -> None:
        """Weights and biases [experts, outputs] contiguous, on the device."""
        self._spec = spec
        self._up = up
        self._down = down
        self._act = act
        self._choice_bias = choice_bias
        self._shared = len(up.weight) - spec.count  # experts of every token
        self._counters = torch.zeros(spec.count + 1, dtype=torch.int32, device=up.weight.device)

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
        inner = self._multiply(x, self._up, routed, gathers=True, gate=gate)
        if gate is None:
            inner = self._act(inner).contiguous()
        parts = self._multiply(inner, self._down, routed, gathers=False)
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
            PADDED=_pad(count),
            PER_TOKEN=spec.per_token,
            ROUTING=spec.routing,
            NORMALISE=spec.normalise,
            GROUPS=spec.groups,
            PADDED_GROUPS=_pad(spec.groups),
            GROUPS_USED=spec.groups_used,
            HAS_BIAS=self._choice_bias is not None,
            SHARED=self._shared,
            BLOCK=block,
        )
        return Routed(weights, pairs, counts)

    def _multiply(
        self,
        x: torch.Tensor,
        linear: Linear,
        routed: Routed,
        *,
        gathers: bool,
        gate: Gate | None = None,
    ) -> torch.Tensor:
        """Return [pairs, outputs] of one product, gated; see `multiply_groups`."""
        weight, bias = linear.weight, linear.bias
        groups, outputs, depth = weight.shape
        outputs //= 1 if gate is None else 2
        tokens, each = routed.weights.shape
        each += self._shared
        many = x.dtype.itemsize < 4 and tokens * each >= _MANY_FROM * groups
        rows = _MANY if many else _FEW
        tiles = min(tokens * each, groups + tokens * each // rows)
        out = torch.empty((tokens * each, outputs), dtype=x.dtype, device=x.device)
        multiply_groups[(tiles, -(-outputs // _OUTPUTS))](
            out,
            x,
            weight,
            weight if bias is None else bias,
            routed.pairs,
            routed.counts,
            tokens,
            0.0 if gate is None else gate.limit,
            N=outputs,
            K=depth,
            GROUPS=groups,
            PADDED_GROUPS=_pad(groups),
            PER_ROW=each,
            GATHERS=gathers,
            HAS_BIAS=bias is not None,
            ACT="" if gate is None else gate.kernel,
            LIMITS=gate is not None and gate.limit > 0,
            PAIRED=gate is not None and gate.paired,
            ROWS=rows,
            OUTPUTS=_OUTPUTS,
            DEPTH=_DEPTH if x.dtype.itemsize < 4 else _DEPTH // 2,
        )
        return out


def tokens_of_a_program(experts: int) -> int:
    """Return how many tokens a program of `route_tokens` has."""
    return max(1, min(_MOST_TOKENS, _SCORES // _pad(experts)))


def _pad(count: int) -> int:
    return 1 << (count - 1).bit_length()
