"""The share of a matrix that a program has at a time, in products of a single row; measured.

With a larger share, a program has more loads in flight when it begins, and fewer programs have to
begin: an H200 gained by that after attention, where few bytes move. Timing a product by itself does
not show it, since loads for the next product overlap with it. So whole steps are measured, in which
each product is in its place, over matrices that no cache holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import torch

from tgi_trio.shard.torch_backend.layers.linears.few_rows import Seconds, agree
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear

_ROWS: Final = 1
_WORTH: Final = 0.995  # a step must take less than this part of its time for a share to be kept
_MOST_SECONDS: Final = 0.2  # of the device, for all measurements
_RUNS: Final = 8  # runs of a step that trying one share takes
_LEFT: Final = "programs of a lone row's product have as much of a matrix as is usual"


def choose_shares(
    linears: Iterable[Linear], step: Callable[[], torch.Tensor], seconds: Seconds
) -> None:
    """Choose the programs' share of each matrix by which a step of one row takes less.

    `linears`: of a model. `step`: computes a step of one row, and returns its result. Matrices of
    the same kind have the same share. One other share is tried for each kind, the smallest matrices
    first, while there is time.
    """
    alike: dict[tuple[object, ...], list[Linear]] = defaultdict(list)
    for linear in linears:
        linear.other_share = False
        if _ROWS in linear.fused | linear.turned or _ROWS in linear.few_rows:
            launched = (_ROWS in linear.fused, _ROWS in linear.turned)
            alike[(*linear.weight.shape, linear.weight.dtype, *launched)].append(linear)
    if not alike:
        return
    least, wanted = seconds(step), step()
    most = len(alike) if least == 0 else int(_MOST_SECONDS / (_RUNS * least))
    for group in sorted(alike.values(), key=lambda group: group[0].weight.numel())[:most]:
        give_shares(group, other=True)
        took = seconds(step)
        if took < _WORTH * least and agree(step(), wanted, _LEFT):
            least = took
        else:
            give_shares(group, other=False)


def give_shares(linears: Iterable[Linear], *, other: bool) -> None:
    """Make programs use the `other` share of these matrices for one row, or the usual one."""
    for linear in linears:
        if type(linear) is Linear:
            linear.other_share = other
