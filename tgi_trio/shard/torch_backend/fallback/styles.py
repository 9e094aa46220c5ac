"""The styles of transformers' plans: along which axis parameters are cut, how results are joined.

A module that works on parts either hands its part on (the next one takes it as its input) or joins
it with the others'. Its forward is replaced, as transformers does, since some code calls that and
not the module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.nn import functional

from tgi_trio.model.split import block_share, even_share
from tgi_trio.shard.torch_backend.models.decoder import Ranks

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Style:
    """What one word of a plan means."""

    # Which axis of a parameter is cut: matrices are [.., outputs, inputs]. None: none is.
    along: Literal["outputs", "inputs"] | None = None
    packs: int = 1  # see `AxisShare`
    ragged: bool = False
    sums: bool = False  # parts are added up, so that a bias is rank 0's alone
    join: Callable[[Forward, Any, Ranks], Forward] | None = None  # None: parts are handed on


def _add_up(forward: Forward, module: Any, ranks: Ranks) -> Forward:
    """Return a forward whose result is the sum of all ranks'."""

    def add_up(*args: Any, **options: Any) -> Any:
        return ranks.all_reduce(forward(*args, **options))

    return add_up


def _split_and_add_up(forward: Forward, module: Any, ranks: Ranks) -> Forward:
    """Return a forward that takes this rank's part of a whole input, and adds up all results."""

    def split_and_add_up(x: torch.Tensor) -> torch.Tensor:
        own = even_share(x.shape[-1], "inputs", ranks.rank, ranks.size)
        return ranks.all_reduce(forward(x[..., own]))

    return split_and_add_up


def _gather(forward: Forward, module: Any, ranks: Ranks) -> Forward:
    """Return a forward whose result has all ranks' parts [..., n] one behind the other."""
    whole = int(module.out_features if hasattr(module, "out_features") else module.embedding_dim)
    width = -(-whole // ranks.size)  # the last rank may have fewer

    def gather(x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = forward(x)
        if own.shape[-1] < width:
            own = functional.pad(own, (0, width - own.shape[-1]))
        return ranks.all_gather(own)[..., :whole]

    return gather


def _look_up(forward: Forward, module: Any, ranks: Ranks) -> Forward:
    """Return an embedding's forward, whose rank has the rows of some tokens.

    Tokens of other ranks are zero on this one, so that the sum over the ranks is exact.
    """
    part = block_share(int(module.num_embeddings), ranks.rank, ranks.size)

    def look_up(token_ids: torch.Tensor) -> torch.Tensor:
        own = token_ids - part.start
        foreign = (own < 0) | (own >= part.stop - part.start)
        x: torch.Tensor = forward(own.masked_fill(foreign, 0))
        return ranks.all_reduce(x.masked_fill(foreign[..., None], 0))

    return look_up


def _divide(forward: Forward, module: Any, ranks: Ranks) -> Forward:
    """Return a forward of a part of its input, of what a sum over all ranks will be made."""

    def divide(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return forward(x / ranks.size, *args, **options)

    return divide


_WHOLE: Final = Style()
_GATHERED: Final = Style("outputs", ragged=True, join=_gather)
_SPLIT: Final = Style("inputs", sums=True, join=_split_and_add_up)

STYLES: Final[dict[str, Style]] = {
    "all_reduce": Style(join=_add_up),
    "colwise": Style("outputs"),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,  # its older name
    "embedding_colwise": Style("inputs", ragged=True, join=_gather),
    "embedding_rowwise": Style("outputs", ragged=True, join=_look_up),
    # What the next three change are gradients, and where DTensors become plain ones.
    "local_params": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "moe_identity_expert": Style(join=_divide),
    "moe_tp_experts": Style(join=_add_up),
    "packed_colwise": Style("outputs", packs=2),
    "packed_rowwise": Style("inputs", packs=2),
    "replicate": _WHOLE,
    "rowwise": Style("inputs", sums=True, join=_add_up),
    "rowwise_rep": _SPLIT,  # its older name
    "rowwise_split_input": _SPLIT,
}
