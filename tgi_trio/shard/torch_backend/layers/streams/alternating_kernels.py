"""Launches the kernels of several hidden states of which a layer computes one.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from tgi_trio.shard.torch_backend.kernels.streams import alternating_updates as kernels
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.streams.alternating_parts import Added, Routing
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap


def predict(
    streams: torch.Tensor,
    added: Added | None,
    routing: Routing,
    prediction: torch.Tensor,
    active: int,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted `streams` [count, T, hidden], and the norm [T, hidden] of the `active` one.

    `prediction`: [count * count, count].
    """
    streams = streams.contiguous()
    count, tokens, size = streams.shape
    predicted, normed = torch.empty_like(streams), streams.new_empty((tokens, size))
    more = streams if added is None else added.output.contiguous()
    inner = norm if added is None else added.norm
    kernels.predict_streams[(tokens,)](
        *(normed, predicted, streams, more),
        *(_gain(inner), _gain(routing.norm), _gain(norm)),
        *(routing.router, prediction),
        *(inner.eps, routing.norm.eps, norm.eps, tokens),
        ACTIVE=active,
        ADDS=added is not None,
        KIND=norm.kind,
        **_describe(streams, count, size),
    )
    return predicted, normed


def join(
    active: torch.Tensor,
    mixed: torch.Tensor,
    read: torch.Tensor,
    detour: torch.Tensor,
    norms: tuple[Norm, Norm, Norm],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale * (active + norm(mixed) + read + norm(detour)), and its norm, [T, hidden] each.

    `norms`: of what attention says (`mixed`), of the `detour`, and of the sum.
    """
    tokens, size = active.shape
    active = active.contiguous()
    summed, normed = torch.empty_like(active), torch.empty_like(active)
    kernels.join_detour[(tokens,)](
        *(summed, normed, active, mixed.contiguous(), read.contiguous(), detour.contiguous()),
        *map(_gain, norms),
        *(norm.eps for norm in norms),
        scale,
        KIND=norms[2].kind,
        **_sizes(active, size),
        num_warps=count_warps(next_power_of_2(size)),
    )
    return summed, normed


def correct(
    predicted: torch.Tensor,
    x: torch.Tensor,
    found: torch.Tensor,
    norm: Norm,
    routing: Routing,
    correction: torch.Tensor,
    active: int,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `predicted` [count, T, hidden], corrected by x + norm(found), which was computed.

    And the state that was computed [T, hidden], as corrected, times `scale` [hidden] if there is
    one. `correction`: [count, count].
    """
    count, tokens, size = predicted.shape
    predicted, x = predicted.contiguous(), x.contiguous()
    corrected, shown = torch.empty_like(predicted), torch.empty_like(x)
    kernels.correct_streams[(tokens,)](
        *(corrected, shown, predicted, x, found.contiguous()),
        *(_gain(norm), _gain(routing.norm), x if scale is None else scale),
        *(routing.router, correction),
        *(norm.eps, routing.norm.eps, tokens),
        ACTIVE=active,
        SCALES=scale is not None,
        KIND=norm.kind,
        **_describe(predicted, count, size),
    )
    return corrected, shown


def add(streams: torch.Tensor, added: Added) -> torch.Tensor:
    """Return all `streams` [count, T, hidden] but the first, with what the last layer adds."""
    count, tokens, size = streams.shape
    summed = streams.new_empty((count - 1, tokens, size))
    kernels.add_to_others[(tokens,)](
        *(
            summed,
            streams.contiguous(),
            added.output.contiguous(),
            _gain(added.norm),
            added.norm.eps,
            tokens,
        ),
        KIND=added.norm.kind,
        **_describe(streams, count, size),
    )
    return summed


def match(first: torch.Tensor, others: torch.Tensor, least: float, *, joins: bool) -> torch.Tensor:
    """Return `first` [T, hidden] and `others` [count - 1, T, hidden], which get its magnitude.

    They are [count, T, hidden]; if it `joins` them, their mean [T, hidden]. `least`: the smallest
    mean square whose root divides.
    """
    (tokens, size), count = first.shape, len(others) + 1
    out = first.new_empty((tokens, size) if joins else (count, tokens, size))
    kernels.match_streams[(tokens,)](
        *(out, first.contiguous(), others, least, tokens),
        JOINS=joins,
        **_describe(first, count, size),
    )
    return out


def _describe(x: torch.Tensor, count: int, size: int) -> dict[str, Any]:
    """Return constants of kernels with all of a token's states, and the warps of a program."""
    padded = next_power_of_2(count)
    warps = count_warps(padded * next_power_of_2(size))
    return {"COUNT": count, "PADDED_COUNT": padded, **_sizes(x, size), "num_warps": warps}


def _sizes(x: torch.Tensor, size: int) -> dict[str, Any]:
    return {"SIZE": size, "PADDED": next_power_of_2(size), **overlap(x.device)}


def _gain(norm: Norm) -> torch.Tensor:
    if norm.weight is None:
        raise ValueError("a norm of hidden states has no weights")
    return norm.weight
