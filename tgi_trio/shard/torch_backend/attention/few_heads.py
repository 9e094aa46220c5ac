"""A lone row's queries, keys and values: rotated and written in the launch of their product.

That is a launch less in every layer, and a product whose programs end with what they began with.
An H200 has gained by it with a 1B model and lost with one of 8B, and never gained with two rows:
so one row has it, where the warm-up measures that its step takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.interface import HeadPlaces
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.few_rows import (
    WARPS,
    Seconds,
    agree,
    fits_few_rows,
    norm_constants,
    project,
    try_rows,
)
from tgi_trio.shard.torch_backend.layers.heads import HeadSteps, RotaryTable
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    addend_arguments,
    addend_constants,
)
from tgi_trio.shard.torch_backend.torch_device import overlap

_ROWS: Final = 1
_WORTH: Final = 0.99  # of a step's time, from which on heads are turned in the product's launch
_LEFT: Final = "a lone row's heads are rotated in a launch of their own"

# Numbers of a matrix that a program has, as many as lie in registers beside the row: four rows of
# it for 2048 inputs and for 4096, as an H200 has shown; two where rows are longer still.
_NUMBERS: Final = 1 << 13
_LEAST_PAIRS: Final = 2
_LONG: Final = 8192  # inputs beyond which a program has one pair


class HeadProjection(NamedTuple):
    """A linear that projects heads, what is normalised before it, and what becomes of the heads."""

    linear: Linear
    norm: Norm | None
    steps: HeadSteps

    def turns(self, rows: int, addends: Addends | None) -> bool:
        """Return whether the warm-up has found that so many rows are to be given to `project`."""
        parts = addends is not None and isinstance(addends.first, ExpertParts)
        return rows in self.linear.turned and not parts

    def project(
        self, x: torch.Tensor, addends: Addends | None, table: RotaryTable | None, to: HeadPlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of `x` [T, hidden] and `addends`, and queries [T, heads, head_dim].

        Keys and values go to their places. `table`: as for `AttentionBackend.attend_projected`.
        """
        from tgi_trio.shard.torch_backend.kernels.few_heads import multiply_heads  # imports Triton

        linear, norm, steps = self
        x = x.contiguous()
        (rows, inputs), dim = x.shape, steps.head_dim
        rotary = None if table is None else steps.rotary
        pairs = choose_pairs(inputs, dim, other=linear.other_share)
        query = torch.empty((rows, steps.heads, dim), dtype=x.dtype, device=x.device)
        summed = x if addends is None else torch.empty_like(x)
        multiply_heads[(len(linear.weight) // (2 * pairs),)](
            query,
            *to,
            *((x, x) if rotary is None or table is None else (table.cos, table.sin)),
            x,
            linear.weight,
            linear.weight if linear.bias is None else linear.bias,
            summed,
            *addend_arguments(x, addends, norm),
            HEADS=steps.heads,
            KV_HEADS=steps.kv_heads,
            DIM=dim,
            ROTARY=0 if rotary is None else rotary.spec.dim,
            INTERLEAVED=rotary is not None and rotary.spec.interleaved,
            PAIRS=pairs,
            HAS_BIAS=linear.bias is not None,
            ROWS=rows,
            INPUTS=inputs,
            PADDED=1 << (inputs - 1).bit_length(),
            **addend_constants(addends),
            **norm_constants(norm),
            **overlap(x.device),
            num_warps=WARPS,
        )
        return summed, query


def choose_pairs(inputs: int, head_dim: int, *, other: bool = False) -> int:
    """Return the pairs of a head that a program has: a power of two that divides all of them.

    `other`: twice as many as is usual, or half where rows are so long that it has the larger share.
    """
    padded, half = 1 << (inputs - 1).bit_length(), head_dim // 2
    usual = _NUMBERS // padded // 2
    most = 1 if inputs > _LONG else max(_LEAST_PAIRS, usual)
    if other:
        most = 2 * most if most == usual else max(1, most // 2)
    return min(most, half & -half)


def choose_for_heads(
    projections: Iterable[tuple[HeadProjection, Addends | None]],
    idle: Callable[[int], Callable[[], torch.Tensor]],
    seconds: Seconds,
) -> None:
    """Have a lone row's heads turned in the launch of their product where its step takes less.

    `projections`: those of a model's layers, each with what is added before, whose tensors are of
    no interest. `idle`: returns what computes a step of so many rows. A whole step is measured, as
    the time that a launch takes depends on those around it.
    """
    fitting = []
    for own, like in projections:
        if type(own.linear) is Linear and fits_few_rows(own.linear):
            own.linear.turned = frozenset()
            if own.steps.plain and _holds_heads(own):
                fitting.append((own, like))
    if not fitting:
        return
    step = idle(_ROWS)
    apart = seconds(step)
    for own, _ in fitting:
        own.linear.turned = frozenset({_ROWS})
    if seconds(step) >= _WORTH * apart or not all(_agree(*each) for each in fitting):
        for own, _ in fitting:
            own.linear.turned = frozenset()


def _holds_heads(own: HeadProjection) -> bool:
    """Return whether a linear projects whole pairs of heads, and nothing else."""
    steps = own.steps
    width = (steps.heads + 2 * steps.kv_heads) * steps.head_dim
    return steps.head_dim % 2 == 0 and len(own.linear.weight) == width


def _agree(own: HeadProjection, like: Addends | None) -> bool:
    """Return whether one launch finds what several do, of a row behind another."""
    from tgi_trio.shard.torch_backend.attention.projecting import write_projected  # imports Triton

    linear, norm, steps = own
    x = try_rows(linear.weight, _ROWS)
    addends = None if like is None else like._replace(first=x)
    position = torch.ones(_ROWS, dtype=torch.int64, device=x.device)
    rotary = steps.rotary
    table = None if rotary is None else rotary.table(position, position + 1, x.dtype)

    def places() -> HeadPlaces:
        memory = x.new_zeros((2, 1 + _ROWS, steps.kv_heads, steps.head_dim))
        return HeadPlaces(memory[0], memory[1], position)

    ours, theirs = places(), places()
    query = own.project(x, addends, table, ours)[1]
    qkv = project(linear, x, addends, norm)[1]
    wanted = write_projected(qkv, steps, table, *theirs)
    pairs = ((query, wanted), (ours.key, theirs.key), (ours.value, theirs.value))
    return all(agree(found, right, _LEFT) for found, right in pairs)
