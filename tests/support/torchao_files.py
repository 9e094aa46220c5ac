"""Matrices as torchao stores them, packed code by code, and what they mean."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.quantised import Array, Store, Tensors

TORCHAO = {"quant_method": "torchao"}


def renamed(store: Store) -> Store:
    """Return a store of 8 bits with torchao's names."""

    def store_renamed(module: str, weight: Array) -> tuple[Tensors, Array]:
        tensors, exact = store(module, weight)
        codes, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        if scales.ndim < 2:
            scales = scales.reshape(1, 1)
        return {f"{module}._weight_qdata": codes, f"{module}._weight_scale": scales}, exact

    return store_renamed


def store_shifted(module: str, weight: Array) -> tuple[Tensors, Array]:
    """Int8Tensor with zero points."""
    low, high = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    scales = ((high - low) / 255).astype(np.float32)
    zeros = np.clip(np.round(-128 - low / scales), -128, 127).astype(np.int8)
    codes = np.clip(np.round(weight / scales) + zeros, -128, 127).astype(np.int8)
    tensors = {
        f"{module}._weight_qdata": torch.from_numpy(codes),
        f"{module}._weight_scale": torch.from_numpy(scales),
        f"{module}._weight_zero_point": torch.from_numpy(zeros),
    }
    return tensors, scales * (codes.astype(np.float32) - zeros)


def _round(weight: Array, group: int) -> tuple[Array, Array, Array]:
    """Return codes -8 to 7 [out, in], scales and zero points [out, groups] of bfloat16's numbers:
    weight = scale * code + zero.
    """
    runs = weight.reshape(len(weight), -1, group)
    low, high = runs.min(-1), runs.max(-1)
    scales = _bfloat16((high - low) / 15)
    zeros = _bfloat16(low + 8 * scales)
    codes = np.clip(np.round((runs - zeros[..., None]) / scales[..., None]), -8, 7)
    return codes.reshape(weight.shape).astype(np.int64), scales, zeros


def _bfloat16(values: Array) -> Array:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()


def _weight(codes: Array, scales: Array, zeros: Array, group: int) -> Array:
    """Return the weights in the steps in which they are computed here."""
    unsigned = (codes + 8).astype(np.float32)
    exact = unsigned * np.repeat(scales, group, 1) - np.repeat(scales * 8 - zeros, group, 1)
    return exact.astype(np.float32)


def _transposed(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values.T)).bfloat16()


def store_halves(group: int) -> Store:
    """Int4Tensor: two codes in a byte, the first in the lower half."""

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        codes, scales, zeros = _round(weight, group)
        packed = (codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4
        tensors = {
            f"{module}._weight_qdata": torch.from_numpy(packed.astype(np.uint8).view(np.int8)),
            f"{module}._weight_scale": _transposed(scales),
            f"{module}._weight_zero_point": _transposed(zeros),
        }
        return tensors, _weight(codes, scales, zeros, group)

    return store


def store_tiles(group: int) -> Store:
    """Int4TilePackedTo4dTensor, padded to 8 outputs and 1024 inputs."""

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        (rows, columns), codes_scales = weight.shape, _round(weight, group)
        tall, wide = -(-rows // 8) * 8, -(-columns // 1024) * 1024
        codes = np.zeros((tall, wide), np.uint8)
        codes[:rows, :columns] = codes_scales[0] + 8
        both = np.zeros((wide // group, tall, 2), np.float32)
        for which, values in enumerate(codes_scales[1:]):
            both[: columns // group, :rows, which] = values.T
        tensors = {
            f"{module}._weight_qdata": convert_to_tiles(codes),
            f"{module}._weight_scale_and_zero": torch.from_numpy(both).bfloat16(),
        }
        return tensors, _weight(*codes_scales, group)

    return store


def convert_to_tiles(codes: Array) -> torch.Tensor:
    """Return what torch's `_convert_weight_to_int4pack` makes of codes on a CUDA device, thread by
    thread as its kernel goes (aten/src/ATen/native/cuda/int4mm.cu).
    """
    bytes_of_two = (codes[:, ::2].astype(np.uint32) << 4) | codes[:, 1::2]
    tall, wide = codes.shape[0] // 8, codes.shape[1] // 128
    out = np.zeros((tall, wide, 32, 4), np.uint32)
    for n_tile, outer, thread, inner in np.ndindex(*out.shape):
        base = (outer * 8 + 2 * inner) * 8
        places = [base + thread % 4 + 4 * i for i in range(4)]
        v = [int(bytes_of_two[n_tile * 8 + thread // 4, place]) for place in places]
        word = sum((v[i] & 0xF) << (16 + 4 * i) | (v[i] >> 4) << (4 * i) for i in range(4))
        out[n_tile, outer, thread, inner] = word
    return torch.from_numpy(out.view(np.int32))
