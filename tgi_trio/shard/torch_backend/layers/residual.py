"""The residual sum and the norm after it, in one launch on a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.norm_weights import NormWeights
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap, runs_kernels

_MOST = 1 << 15  # largest hidden size that a program holds


class Addends(NamedTuple):
    """What is added to a hidden state, in this order: scale * norm(first), second_scale * second.

    A `factor` multiplies the sum.
    """

    first: torch.Tensor | ExpertParts  # [T, hidden], or the parts of which it is the sum
    second: torch.Tensor | None = None
    norm: NormWeights | None = None
    scale: float = 1.0
    later: torch.Tensor | None = None  # [T, hidden], added after the next layer's MLP instead
    factor: torch.Tensor | None = None  # [1]
    second_scale: float = 1.0

    @property
    def in_products(self) -> bool:
        """Whether the launch of a product can add them."""
        return not isinstance(self.first, ExpertParts) and self.factor is None


class Addition(NamedTuple):
    """What kernels are told that add and normalise, behind where the norm is written."""

    summed: torch.Tensor  # [T, hidden], which they write; the input if nothing is added
    arguments: tuple[torch.Tensor | float, ...]
    constants: dict[str, Any]


def add_and_normalise(
    x: torch.Tensor, addends: Addends | None, norm: NormWeights | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and its norm, [T, hidden] each; without a norm, the sum twice."""
    if addends is None and norm is None:
        return x, x
    if adds_in_kernel(x):
        return _launch(x, addends, norm)
    if addends is not None:
        x = _add(x, addends)
    return x, x if norm is None else norm(x)


def normalise(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    """Return the norm of `x` [..., size], by our kernel, whatever torch has for it."""
    return _launch(x.reshape(-1, x.shape[-1]), None, norm)[1].view(x.shape)


def settle(
    x: torch.Tensor, addends: Addends | None, norm: NormWeights | None
) -> tuple[torch.Tensor, Addends | None]:
    """Return the norm of the sum, which takes the sum's place; without a norm, what was given."""
    return (x, addends) if norm is None else (add_and_normalise(x, addends, norm)[1], None)


def add_normalise_and_widen(
    x: torch.Tensor, addends: Addends | None, norm: NormWeights | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same, and the norm in float32, for a router that computes in it."""
    if norm is not None and x.dtype is not torch.float32 and adds_in_kernel(x):
        wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return *_launch(x, addends, norm, wide), wide
    summed, normed = add_and_normalise(x, addends, norm)
    return summed, normed, normed.float()


def adds_in_kernel(x: torch.Tensor) -> bool:
    """Return whether a program can have all numbers of a token."""
    return runs_kernels(x.device) and x.shape[-1] <= _MOST


def _add(x: torch.Tensor, addends: Addends) -> torch.Tensor:
    first, second, norm, scale, _, factor, second_scale = addends
    if isinstance(first, ExpertParts):
        first = first.combine()
    if norm is not None:
        first = norm(first)
    if scale != 1.0:
        first = first * scale
    x = x + first
    if second is not None:
        x = x + (second if second_scale == 1.0 else second * second_scale)
    return x if factor is None else x * factor


def _launch(
    x: torch.Tensor,
    addends: Addends | None,
    norm: NormWeights | None,
    wide: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from tgi_trio.shard.torch_backend.kernels import fused  # imports Triton

    x = x.contiguous()
    normed = x if norm is None else torch.empty_like(x)
    own = describe_addition(x, addends, norm, wide)
    fused.add_and_normalise[(len(x),)](
        normed,
        *own.arguments,
        **own.constants,
        **overlap(x.device),
        num_warps=count_warps(own.constants["PADDED"]),
    )
    return own.summed, own.summed if norm is None else normed


def describe_addition(
    x: torch.Tensor,
    addends: Addends | None,
    norm: NormWeights | None,
    wide: torch.Tensor | None = None,
) -> Addition:
    """Return what kernels are told; `x` [T, hidden] is contiguous, `wide` as for `_launch`."""
    summed = x if addends is None else torch.empty_like(x)
    first = x if addends is None else addends.first
    factor = None if addends is None else addends.factor
    parts, kind = ExpertParts.describe(first)
    _, *rest = addend_arguments(x, addends, norm)
    arguments = (
        *(x if wide is None else wide, summed, x),
        *(*parts, *rest, x if factor is None else factor),
    )
    constants = {
        **{"SIZE": x.shape[-1], "PADDED": next_power_of_2(x.shape[-1])},
        **addend_constants(addends),
        **kind,
        **{"MULTIPLIES": factor is not None, "KIND": "" if norm is None else norm.kind},
        "HAS_GAIN": norm is not None and norm.weight is not None,
        "HAS_BIAS": norm is not None and norm.bias is not None,
        "WIDENS": wide is not None,
    }
    return Addition(summed, arguments, constants)


def addend_arguments(
    x: torch.Tensor, addends: Addends | None, norm: NormWeights | None
) -> tuple[torch.Tensor | float, ...]:
    """Return the arguments of kernels that add and normalise, from `first` to `second_scale`.

    `x` stands for tensors that are missing or not summed yet; kernels do not read it there.
    """
    given = addends or Addends(x)
    first, second, inner = given.first, given.second, given.norm
    return (
        x if isinstance(first, ExpertParts) else first.contiguous(),
        x if second is None else second.contiguous(),
        *_vectors(inner, x),
        *_vectors(norm, x),
        0.0 if inner is None else inner.eps,
        0.0 if norm is None else norm.eps,
        given.scale,
        given.second_scale,
    )


def addend_constants(addends: Addends | None) -> dict[str, bool | str]:
    """Return the compile-time constants of kernels that add."""
    second, inner, scale = (None, None, 1.0) if addends is None else addends[1:4]
    return {
        "ADDS": addends is not None,
        "ADDS_SECOND": second is not None,
        "SCALES": scale != 1.0,
        "FIRST_KIND": "" if inner is None else inner.kind,
        "HAS_FIRST_GAIN": inner is not None and inner.weight is not None,
        "HAS_FIRST_BIAS": inner is not None and inner.bias is not None,
    }


def _vectors(norm: NormWeights | None, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a norm's weight and bias; `like` stands for those it lacks."""
    if norm is None:
        return like, like
    weight = like if norm.weight is None else norm.weight
    return weight, like if norm.bias is None else norm.bias


def count_warps(padded: int) -> int:
    """Return the warps of a program that holds `padded` numbers: at least 16 numbers a thread."""
    return max(1, min(16, padded // 512))
