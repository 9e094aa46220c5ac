"""Which attention backend a device gets."""

from __future__ import annotations

import importlib.util

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, CapturableAttention
from tgi_trio.shard.torch_backend.attention.paged.tiles import fits_flash, fits_kernels
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVShape
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_HALF = (torch.float16, torch.bfloat16)


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    shape: KVShape,
    *,
    eight_bits: bool = False,
    invariant: bool = False,
) -> AttentionBackend:
    """Return our own kernels on a GPU, with flash-attn's for some steps if it is installed.

    flash-attn needs half precision and heads with values of their own; see `flash.py` for the
    steps and layers. With 8-bit K and V (`eight_bits`) everything is read from the cache, by our
    kernels, and so it is where results must be `invariant`. The result is plain torch on a CPU, on
    a GPU without Triton, and for heads too large for the kernels.
    """
    own = capturable_attention(device, shape, invariant=invariant) or ReferenceAttention()
    fits = dtype in _HALF and fits_flash(shape) and not eight_bits
    fits = fits and not invariant  # its kernel is chosen by what rows bring
    if device.type != "cuda" or not fits or importlib.util.find_spec("flash_attn") is None:
        return own
    from flash_attn import flash_attn_varlen_func  # optional, and only there on a GPU

    from tgi_trio.shard.torch_backend.attention.flash import FlashAttention

    return FlashAttention(flash_attn_varlen_func, own, device)


def capturable_attention(
    device: torch.device, shape: KVShape, *, invariant: bool = False
) -> CapturableAttention | None:
    """Return the backend whose steps can be captured as CUDA graphs; None if there is none."""
    if not runs_kernels(device) or not fits_kernels(shape):
        return None
    from tgi_trio.shard.torch_backend.attention.paged.paged_attention import (
        PagedAttention,  # imports Triton
    )

    return PagedAttention(device, invariant=invariant)
