"""Matrices as AMD's Quark stores them, packed code by code, and what they mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.quantised import Array, Store, Tensors, pack_bits, round_weight, store_pairs

ORDERS = {"order": range(8), "reorder": (0, 2, 4, 6, 1, 3, 5, 7)}


def describe_quark(dtype: str, pack_method: str = "reorder") -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": dtype}},
        "export": {"pack_method": pack_method, "weight_format": "real_quantized"},
    }


def store_quark(dtype: str, group: int, pack_method: str = "reorder") -> Store:
    """`group`: inputs that share a scale; if they are all, codes are stored [outputs, inputs]."""
    bits = int(dtype[-1])

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        rounded = round_weight(weight, bits, group)
        rounded = replace(rounded, scales=rounded.scales.astype(np.float32))
        half = 1 << (bits - 1) if dtype.startswith("int") else 0
        codes, zeros = rounded.codes - half, rounded.zeros - half
        whole = zeros.shape[1] == 1
        tensors = {
            f"{module}.weight": _pack(codes if whole else codes.T, dtype, pack_method),
            f"{module}.weight_scale": _lines(rounded.scales, whole),
            f"{module}.weight_zero_point": _pack(zeros.T, dtype, pack_method),
        }
        if whole:
            tensors[f"{module}.weight_zero_point"] = tensors[f"{module}.weight_zero_point"][0]
        return tensors, rounded.weight

    return store


def store_quark_mxfp4(module: str, weight: Array) -> tuple[Tensors, Array]:
    """Both in unsigned bytes: two codes of e2m1, and the exponents of 32 inputs."""
    tensors, exact = store_pairs(module, weight, "weight_scale")
    return {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}, exact


def _lines(values: Array, whole: bool) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values[:, 0] if whole else values.T))


def _pack(codes: Array, dtype: str, pack_method: str) -> torch.Tensor:
    """Return bytes, or int32 [lines, codes / 8] of eight codes of 4 bits each."""
    if dtype.endswith("8"):
        return torch.from_numpy(np.ascontiguousarray(codes.astype(dtype)))
    eights = (codes & 15).reshape(len(codes), -1, 8)[..., list(ORDERS[pack_method])]
    return pack_bits(eights.reshape(len(codes), -1).T, 4).T.contiguous()
