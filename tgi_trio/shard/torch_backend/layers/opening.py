"""Values times the sigmoid of gates, in one launch on a device."""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.torch_device import overlap, runs_kernels

BLOCK: Final = 1024  # values of a program


def open_values(
    values: torch.Tensor, gates: torch.Tensor, *, in_float32: bool = False
) -> torch.Tensor:
    """Return `values` [T, size] times sigmoid(`gates`), [T, size] or one for neighbouring values.

    `in_float32`: opened gates are not rounded to the dtype before they multiply.
    """
    if runs_kernels(values.device):
        return _launch(values, gates, in_float32=in_float32)
    opened = (gates.float() if in_float32 else gates).sigmoid()
    each = values.shape[-1] // gates.shape[-1]
    found: torch.Tensor = values.unflatten(-1, (-1, each)) * opened[..., None]
    return found.flatten(-2).to(values.dtype)


def _launch(values: torch.Tensor, gates: torch.Tensor, *, in_float32: bool) -> torch.Tensor:
    from tgi_trio.shard.torch_backend.kernels import fused  # imports Triton

    tokens, size = values.shape
    values, gates = (x if x.stride(-1) == 1 else x.contiguous() for x in (values, gates))
    out = torch.empty((tokens, size), dtype=values.dtype, device=values.device)
    fused.open_values[(tokens, -(-size // BLOCK))](
        *(out, values, gates, values.stride(0), gates.stride(0)),
        SIZE=size,
        EACH=size // gates.shape[-1],
        BLOCK=BLOCK,
        ROUNDS=not in_float32,
        **overlap(values.device),
    )
    return out
