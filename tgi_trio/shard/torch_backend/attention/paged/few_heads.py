"""The product that yields a single row's queries, keys and values, with rotation and cache write.

It saves a launch in every layer, as an epilogue of the product. An H200 gained by it with a 1B
model, lost with one of 8B, and never gained with two rows. So it is used for one row, where the
warm-up measures that a step then takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.interface import HeadPlaces
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable
from tgi_trio.shard.torch_backend.layers.linears.few_rows import (
    WARPS,
    Seconds,
    agree,
    fits_few_rows,
    norm_constants,
    project,
    try_rows,
)
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    addend_arguments,
    addend_constants,
)
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap

_ROWS: Final = 1
_WORTH: Final = 0.99  # a step must take less than this part of its time for it to be used
_LEFT: Final = "a lone row's heads are rotated in a launch of their own"

# Numbers of the matrix that a program holds in registers beside the row: four rows of it for 2048
# inputs and for 4096, as was fastest on an H200; two rows if they are longer.
_NUMBERS: Final = 1 << 13
_LEAST_PAIRS: Final = 2
_LONG: Final = 8192  # with more inputs, a program has one pair


class HeadProjection(NamedTuple):
    """A linear that projects heads, with the norm before it and what happens to the heads after."""

    linear: Linear
    norm: Norm | None
    steps: HeadSteps

    def turns(self, rows: int, addends: Addends | None) -> bool:
        """Return whether the warm-up has chosen `project` for so many rows."""
        return rows in self.linear.turned and (addends is None or addends.in_products)

    def project(
        self, x: torch.Tensor, addends: Addends | None, table: RotaryTable | None, to: HeadPlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of `x` [T, hidden] and `addends`, and queries [T, heads, head_dim].

        Keys and values are written `to` the cache. `table`: as for
        `AttentionBackend.attend_projected`.
        """
        from tgi_trio.shard.torch_backend.kernels.attention.few_heads import (
            multiply_heads,  # imports Triton
        )

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
            PADDED=next_power_of_2(inputs),
            **addend_constants(addends),
            **norm_constants(norm),
            **overlap(x.device),
            num_warps=WARPS,
        )
        return summed, query


def choose_pairs(inputs: int, head_dim: int, *, other: bool = False) -> int:
    """Return the pairs of a head's dimensions that a program has, a power of two.

    It divides the pairs of a head. `other`: twice as many as usual, or half for rows so long that
    the usual share is the larger one.
    """
    padded, half = next_power_of_2(inputs), head_dim // 2
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
    """Use `HeadProjection.project` for a single row if a step then takes less time.

    `projections`: of a model's layers, each with the form of the sum before it, whose tensors do
    not matter. `idle`: returns a step of so many rows. Whole steps are measured, since the time of
    a launch depends on those around it.
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
    """Return whether a linear projects heads of even size, and nothing else."""
    steps = own.steps
    width = (steps.heads + 2 * steps.kv_heads) * steps.head_dim
    return steps.head_dim % 2 == 0 and len(own.linear.weight) == width


def _agree(own: HeadProjection, like: Addends | None) -> bool:
    """Return whether one launch gives the results of several, for a row at position 1."""
    from tgi_trio.shard.torch_backend.attention.paged.kv_writing import (
        write_projected,  # imports Triton
    )

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
