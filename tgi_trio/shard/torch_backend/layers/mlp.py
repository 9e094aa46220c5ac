"""Feed-forward parts of a layer: one dense MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.machine.accelerator import runs_kernels
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.experts.routing import route, weigh
from tgi_trio.shard.torch_backend.layers.gating import Gate, activate
from tgi_trio.shard.torch_backend.layers.linears.few_rows import project
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import DividedNorm, Norm
from tgi_trio.shard.torch_backend.layers.residual import Addends
from tgi_trio.shard.torch_backend.torch_device import has_triton

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.layers.experts.grouped_experts import GroupedExperts
    from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import Routed


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, hidden] to [T, hidden]."""
        ...

    def pack(self) -> None: ...

    def nbytes(self) -> int: ...


class DenseMlp:
    """down(act(up(x))); a gated one has the gate's rows in `up`, and a `Gate` as `act`.

    With an `inner_norm` (BitNet), `down` reads it.
    """

    __slots__ = ("act", "down", "inner_norm", "up")

    def __init__(
        self, up: Linear, down: Linear, act: Activation, inner_norm: DividedNorm | None = None
    ) -> None:
        self.up = up
        self.down = down
        self.act = act
        self.inner_norm = inner_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._opens_late:
            return self.down.multiply_opened(self.up(x), self.act)
        return self._close(activate(self.act, self.up(x)))

    def add_and_feed(
        self, x: torch.Tensor, addends: Addends | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of `x` [T, hidden] and `addends`, and the output for the sum's norm."""
        if self._opens_late:
            x, inner = project(self.up, x, addends, norm)
            return x, self.down.multiply_opened(inner, self.act)
        x, opened = project(self.up, x, addends, norm, self.act)
        return x, self._close(opened)

    @property
    def _opens_late(self) -> bool:
        """Whether what `up` says is activated where `down` reads it."""
        return self.inner_norm is None and self.down.opens(self.act)

    def _close(self, opened: torch.Tensor) -> torch.Tensor:
        """Return the output for what is activated."""
        return self.down(opened if self.inner_norm is None else self.inner_norm(opened))

    def pack(self) -> None:
        self.up.pack()
        self.down.pack()

    def nbytes(self) -> int:
        norm = 0 if self.inner_norm is None else self.inner_norm.nbytes()
        return self.up.nbytes() + self.down.nbytes() + norm


class ExpertsMlp:
    """A mixture of experts: the router chooses and weights each token's experts.

    Sources: Mixtral (Jiang et al. 2024); Qwen2-MoE for a shared expert behind a sigmoid gate,
    DeepSeek-V2 for one without.
    """

    __slots__ = (
        *("choice_bias", "entry", "exit", "expert_scale", "experts", "grouped", "router"),
        *("idles", "keeps_shared", "mlp_bytes", "shared", "shared_router", "spec", "table"),
        "tell",
    )

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        router: Linear,
        experts: list[DenseMlp],
        choice_bias: torch.Tensor | None = None,
        shared: DenseMlp | None = None,
        shared_router: Linear | None = None,
        expert_scale: torch.Tensor | None = None,
        entry: Linear | None = None,
        exit: Linear | None = None,
        table: torch.Tensor | None = None,
        idles: bool = True,
        keeps_shared: bool = False,
    ) -> None:
        """`router`: scores are computed in its dtype; `choice_bias`: as for `route`.

        `expert_scale`: float32 [experts], factors of the experts' weights. `entry` and `exit`:
        projections before and after the routed experts, but not the shared one (Nemotron 3).
        `table`: int64 [vocabulary, per_token], each token's experts (`ExpertsSpec.by_token`).
        `idles`: whether this rank adds what experts say that return their input. `keeps_shared`:
        the shared expert is not grouped with others, since adapters change it.
        """
        self.spec = spec
        self.router = router
        self.experts = experts
        self.choice_bias = choice_bias
        self.shared = shared
        self.shared_router = shared_router
        self.expert_scale = expert_scale
        self.entry = entry
        self.exit = exit
        self.table = table
        self.idles = idles
        # On a device it replaces `experts` and, where possible, `shared`.
        self.grouped: GroupedExperts | None = None
        self.keeps_shared = keeps_shared
        # Called with the tokens, int64 [n], that the next expert multiplies.
        self.tell: Callable[[torch.Tensor], None] | None = None
        every = [*experts, *([] if shared is None else [shared])]
        self.mlp_bytes = sum(mlp.nbytes() for mlp in every)

    def __call__(
        self,
        x: torch.Tensor,
        routed_by: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [T, hidden] to [T, hidden].

        `routed_by`: the router's input, if it is not `x`; `ids`: the tokens, int64 [T], for a
        `table`.
        """
        asking = x if routed_by is None else routed_by
        if self._is_one_sum:
            found = self.find(x, asking, ids)
            return found if isinstance(found, torch.Tensor) else found.combine()
        gate_logits = self._compute_gate_logits(x)
        shared = None if self.shared is None else self.shared(x)
        out = self._routed(x if self.entry is None else self.entry(x), asking, gate_logits, ids)
        if self.exit is not None:
            out = self.exit(out)
        if shared is None:
            return out
        return out + (shared if gate_logits is None else torch.sigmoid(gate_logits) * shared)

    def widens(self, tokens: int) -> bool:
        """Return whether the router needs its input in float32, for so many tokens."""
        asks = self.grouped is not None and self.grouped.asks(tokens)
        return self.router.weight.dtype is torch.float32 and not asks

    def find(
        self, x: torch.Tensor, routed_by: torch.Tensor, ids: torch.Tensor | None = None
    ) -> torch.Tensor | ExpertParts:
        """Return the same, but not summed yet where the addition to the hidden state can do it."""
        if self.grouped is None or not self._is_one_sum:
            return self(x, routed_by, ids)
        beside = None if self.shared is None else self.shared(x)
        shared_gate = self._find_plain_gate(x) if routed_by is x else None
        routed = self._ask(self.grouped, routed_by, x.dtype, ids, shared_gate)
        gate_logits = self._compute_gate_logits(x) if routed.gate_logits is None else None
        return self.grouped.find(x, routed, gate_logits, beside)

    def _find_plain_gate(self, x: torch.Tensor) -> Linear | None:
        """Return the gate of the shared expert, if it may be multiplied beside the router."""
        shared_gate = self.shared_router
        if (
            shared_gate is None
            or type(shared_gate) is not Linear
            or shared_gate.bias is not None
            or shared_gate.invariant
        ):
            return None
        return shared_gate if shared_gate.weight.dtype is x.dtype and self.table is None else None

    def _ask(
        self,
        grouped: GroupedExperts,
        asking: torch.Tensor,
        dtype: torch.dtype,
        ids: torch.Tensor | None,
        shared_gate: Linear | None = None,
    ) -> Routed:
        """Return each token's experts, and their weights of `dtype`; `shared_gate` as for `ask`."""
        if self.table is None:
            return grouped.ask(asking, self.router, dtype, shared_gate)
        logits = self.router(asking.to(self.router.weight.dtype))
        chosen = self._look_up(self.table, ids)
        # The kernel takes the best, which are those that are left.
        left = torch.full_like(logits, float("-inf"))
        return grouped.route(left.scatter(1, chosen, logits.gather(1, chosen)), dtype)

    @staticmethod
    def _look_up(table: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the experts of tokens, int64 [T, per_token]; raises ValueError without `ids`."""
        if ids is None:
            raise ValueError("a table has the experts of tokens, whose ids are not given")
        return table.index_select(0, ids)

    @property
    def _is_one_sum(self) -> bool:
        """Whether a launch can add up what all experts say, the shared one included."""
        return self.grouped is not None and self.entry is None and self.exit is None

    def _compute_gate_logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of the shared expert's gate, [T, 1]; None if it has none."""
        return None if self.shared_router is None else self.shared_router(x)

    def _routed(
        self,
        x: torch.Tensor,
        asking: torch.Tensor,
        gate_logits: torch.Tensor | None,
        ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of routed experts, and of shared ones that are grouped with them."""
        if self.grouped is not None:
            return self.grouped(x, self._ask(self.grouped, asking, x.dtype, ids), gate_logits)
        logits = self.router(asking.to(self.router.weight.dtype))
        if self.table is None:
            weights, chosen = route(logits, self.spec, self.choice_bias)
        else:
            chosen = self._look_up(self.table, ids)
            weights = weigh(logits, self.spec, chosen)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        return self._one_by_one(x, weights.to(x.dtype), chosen)

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of experts, computed one after another."""
        out, count = torch.zeros_like(x), len(self.experts)
        if self.spec.idle and self.idles:
            out = x * (weights * (chosen >= count)).sum(dim=-1, keepdim=True)
        for index in chosen[chosen < count].unique().tolist():
            tokens, place = torch.where(chosen == index)
            inner, weight = x[tokens], weights[tokens, place, None]
            if self.tell is not None:
                self.tell(tokens)
            if self.spec.weighs_inputs:
                part = self.experts[index](inner * weight)
            else:
                part = self.experts[index](inner) * weight
            out.index_add_(0, tokens, part)
        return out

    def pack(self) -> None:
        self.group()
        for part in (*self.experts, self.shared, self.entry, self.exit):
            if part is not None:
                part.pack()

    def group(self) -> bool:
        """Have all experts multiplied together by kernels, if possible; return whether they are.

        Nothing is stored twice. A shared expert is cut into experts of the others' width, if all of
        them are plain numbers and it has the same input.
        """
        if self.grouped is not None:
            return True
        if self.spec.weighs_inputs and self.spec.idle:
            return False  # the kernels have no inputs for experts that return theirs
        if self.table is not None and not _differ(self.table):
            return False  # nor an expert twice
        first = self.experts[0]
        if not runs_kernels(first.up.weight.device) or not has_triton():
            return False
        if not all(expert.act == first.act for expert in self.experts):
            return False
        from tgi_trio.shard.torch_backend.layers.experts.grouped_experts import GroupedExperts
        from tgi_trio.shard.torch_backend.layers.experts.grouping import group_linears

        every, shared = self.experts, self.shared
        alone = self.entry is None and not self.spec.idle and not self.keeps_shared
        act = first.act
        if shared is not None and alone and (joint := _join_gates(first.act, shared.act, every)):
            linears = [linear for mlp in (first, shared) for linear in (mlp.up, mlp.down)]
            if all(type(linear) is Linear for linear in linears):
                every, shared = [*every, *cut_mlp(shared, first.down.weight.shape[1])], None
                act = joint
        up = group_linears([each.up for each in every])
        down = group_linears([each.down for each in every])
        if up is None or down is None:
            return False
        self.grouped = GroupedExperts(
            self.spec,
            up,
            down,
            act,
            self.choice_bias,
            expert_scale=self.expert_scale,
            idles=self.idles,
        )
        self.experts, self.shared = [], shared
        return True

    def nbytes(self) -> int:
        parts = [self.router, self.shared_router, self.entry, self.exit]
        table = 0 if self.table is None else self.table.nbytes
        return self.mlp_bytes + table + sum(part.nbytes() for part in parts if part is not None)


def _join_gates(
    routed: Activation, shared: Activation, experts: Sequence[DenseMlp]
) -> Activation | None:
    """Return what opens the gates of grouped `experts` and of shared ones behind them.

    None if no kernel can do both: they may differ in the limit that routed ones alone have.
    """
    if routed == shared:
        return routed
    if not isinstance(routed, Gate) or not routed.kernel or routed.raised:
        return None
    return replace(routed, bounded=len(experts)) if replace(routed, limit=0.0) == shared else None


def _differ(table: torch.Tensor) -> bool:
    """Return whether no row of `table` [N, per_token] has a number twice."""
    ordered = table.sort(dim=1).values
    return not bool((ordered[:, 1:] == ordered[:, :-1]).any())


def cut_mlp(mlp: DenseMlp, width: int) -> list[DenseMlp]:
    """Return MLPs of `width` that add up to a plain one; the last is padded with zeros."""
    inner = mlp.down.weight.shape[1]
    more = -inner % width
    halves, paired = 1, False
    if isinstance(mlp.act, Gate):
        halves, paired = 2, mlp.act.paired

    def cut_up(x: torch.Tensor) -> list[torch.Tensor]:
        """Cut the first dimension, in which gates and ups follow one another or alternate."""
        by_half = (
            x.unflatten(0, (-1, 2)).transpose(0, 1) if paired else x.unflatten(0, (halves, -1))
        )
        zeros = by_half.new_zeros(halves, more, *x.shape[1:])
        parts = torch.cat((by_half, zeros), 1).split(width, dim=1)
        return [(part.transpose(0, 1) if paired else part).flatten(0, 1) for part in parts]

    ups = cut_up(mlp.up.weight)
    up_biases = [None] * len(ups) if mlp.up.bias is None else cut_up(mlp.up.bias)
    downs = functional.pad(mlp.down.weight, (0, more)).split(width, dim=1)
    return [
        DenseMlp(
            Linear(up, bias, invariant=mlp.up.invariant),
            Linear(down, None if i else mlp.down.bias, invariant=mlp.down.invariant),
            mlp.act,
        )
        for i, (up, bias, down) in enumerate(zip(ups, up_biases, downs, strict=True))
    ]
