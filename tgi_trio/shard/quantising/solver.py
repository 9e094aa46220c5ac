"""GPTQ (Frantar and others 2022, arXiv 2210.17323): quantises one matrix, given its inputs.

Columns are rounded one after the other; each column's error is compensated in the following
columns, as far as the inputs' correlations allow. It is symmetric: the zero code is 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tgi_trio.errors import ModelLoadError

BITS: Final = 4
ZERO: Final = 8
_TRIES: Final = 8
_BLOCK: Final = 128  # columns whose corrections are applied to later ones at once


@dataclass(frozen=True, slots=True)
class Solved:
    """A quantised matrix; weight[o, i] = scales[o, groups[i]] * (codes[o, i] - ZERO)."""

    codes: torch.Tensor  # uint8 [outputs, inputs]
    scales: torch.Tensor  # float16 [outputs, groups]
    groups: torch.Tensor  # int32 [inputs]

    def weight(self) -> torch.Tensor:
        """Return float32 [outputs, inputs]."""
        scales = self.scales.float()[:, self.groups.long()]
        return scales * (self.codes.float() - ZERO)


class Gram:
    """Sums of products of a linear's inputs (X^T X), over all tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sums: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Add inputs [tokens, inputs]."""
        exact = x.reshape(-1, x.shape[-1]).float()
        self.tokens += len(exact)
        products = exact.T @ exact
        self._sums = products if self._sums is None else self._sums.add_(products)

    def mean(self, inputs: int) -> torch.Tensor:
        """Return the mean, float32 [inputs, inputs]; the identity if there were no inputs."""
        if self._sums is None:
            return torch.eye(inputs)
        return self._sums / self.tokens


def solve(
    weight: torch.Tensor, gram: torch.Tensor, *, group: int, damping: float, by_activation: bool
) -> Solved:
    """Return codes of `weight` [outputs, inputs], whose inputs have the mean products `gram`.

    `group`: inputs that share a scale, -1: all. `damping`: added to the diagonal, relative to its
    mean. `by_activation`: columns with the largest inputs come first ("act-order").
    """
    weight, gram = weight.float().clone(), gram.clone()
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    idle = gram.diagonal() == 0  # inputs that are always 0
    gram.diagonal()[idle] = 1
    weight[:, idle] = 0
    order = torch.arange(inputs)
    if by_activation:
        order = gram.diagonal().argsort(descending=True, stable=True)
        weight, gram = weight[:, order], gram[order][:, order]
    inverse = _inverse_root(gram, damping)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, -(-inputs // group), dtype=torch.float16)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = torch.empty(outputs, end - begin)
        for column in range(begin, end):
            if column % group == 0:
                scales[:, column // group] = _scales(weight[:, column : column + group])
            scale = scales[:, column // group].float()
            code = (weight[:, column] / scale).round_().add_(ZERO).clamp_(0, 2 * ZERO - 1)
            codes[:, column] = code.to(torch.uint8)
            error = (weight[:, column] - scale * (code - ZERO)) / inverse[column, column]
            # Within the block at once, since the scales of a group that begins in it depend on it.
            weight[:, column:end] -= error[:, None] * inverse[column, column:end]
            errors[:, column - begin] = error
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    back = order.argsort()
    groups = (torch.arange(inputs) // group)[back].to(torch.int32)
    return Solved(codes[:, back].contiguous(), scales, groups)


def _inverse_root(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse, with as much damping as it needs.

    Few tokens leave `gram` singular: then ten times the damping is tried, several times. Raises
    ModelLoadError if inputs are NaN or infinite.
    """
    mean = gram.diagonal().mean()
    for _ in range(_TRIES):
        damped = gram + torch.eye(len(gram)) * (damping * mean)
        root, failed = torch.linalg.cholesky_ex(damped.double())
        if not failed:
            inverse = torch.cholesky_inverse(root)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                factor: torch.Tensor = upper.float()
                return factor
        damping = max(10 * damping, 1e-4)
    raise ModelLoadError("The model computes what is no number from the calibration text.")


def _scales(weights: torch.Tensor) -> torch.Tensor:
    """Return float16 [outputs]: scales that map the largest weight to 7.5; never 0."""
    scales = weights.abs().amax(dim=1) * (2 / (2 * ZERO - 1))
    half = torch.finfo(torch.float16)
    return scales.clamp(half.tiny, half.max).half()
