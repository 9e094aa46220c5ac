"""How much of a matrix a program has at a time of a lone row's product, by what its step takes.

A program with more of it has more on its way when it may begin, and there are fewer programs to
begin: an H200 has gained by that behind attention, where few bytes move. What a product takes by
itself does not show it, as the next one's weights are on their way meanwhile. So whole steps are
measured, in which each product stands where it will, over matrices that no cache holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import torch

from tgi_trio.shard.torch_backend.layers.few_rows import Seconds, agree
from tgi_trio.shard.torch_backend.layers.linear import Linear

_ROWS: Final = 1
_WORTH: Final = 0.995  # of a step's time, from which on another share is taken
_MOST_SECONDS: Final = 0.2  # of the device, for all that is tried
_RUNS: Final = 8  # of a step to try one share
_LEFT: Final = "programs of a lone row's product have as much of a matrix as is usual"


def choose_shares(
    linears: Iterable[Linear], step: Callable[[], torch.Tensor], seconds: Seconds
) -> None:
    """Give programs of a lone row's products the share of their matrix by which a step takes less.

    `linears`: those of a model. `step` computes a step of one row, and returns what it finds.
    Matrices that are alike have the same share, and one other is tried for them, the smaller
    matrices first: as many as there is time for.
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
    """Have programs of a lone row's products use the `other` share of a matrix, or the usual."""
    for linear in linears:
        if type(linear) is Linear:
            linear.other_share = other
