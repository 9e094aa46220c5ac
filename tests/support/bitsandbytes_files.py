"""Matrices as bitsandbytes stores them, in 8 bits and by tables of sixteen numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from tests.support.quantised import Array, Store, Tensors


def store_bytes(module: str, weight: Array) -> tuple[Tensors, Array]:
    """Store as bitsandbytes does in 8 bits: the largest of each output is 127."""
    largest = np.abs(weight).max(1)
    codes = np.round(weight / largest[:, None] * 127).astype(np.int8)
    tensors = {
        f"{module}.weight": torch.from_numpy(codes),
        f"{module}.SCB": torch.from_numpy(largest),
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest / np.float32(127))[:, None]


# Any sixteen numbers will do: a checkpoint has its own.
TABLE = np.sort(np.random.default_rng(1).uniform(-1, 1, 16)).astype(np.float32)


def store_table(kind: str, size: int, *, nested: int = 0) -> Store:
    """Store as bitsandbytes does in 4 bits, in blocks of `size` weights; `nested` scales share one
    of their own.
    """

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        flat = weight.reshape(-1)
        blocks = -(-len(flat) // size)
        padded = np.pad(flat, (0, blocks * size - len(flat))).reshape(blocks, size)
        scales = np.maximum(np.abs(padded).max(1), 0.01).astype(np.float32)
        said: dict[str, Any] = {"quant_type": kind, "blocksize": size, "shape": list(weight.shape)}
        tensors: Tensors = {}
        stored: Array = scales
        if nested:
            offset, table = float(scales.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
            groups = np.arange(blocks) // nested
            own = np.array([np.abs(scales[groups == g] - offset).max() + 0.01 for g in set(groups)])
            own = own.astype(np.float32)
            ratio = (scales - offset) / own[groups]
            stored = np.abs(ratio[:, None] - table).argmin(1).astype(np.uint8)
            scales = table[stored] * own[groups] + np.float32(offset)
            said |= {"nested_blocksize": nested, "nested_offset": offset}
            tensors[f"{module}.weight.nested_absmax"] = torch.from_numpy(own)
            tensors[f"{module}.weight.nested_quant_map"] = torch.from_numpy(table)
        codes = np.abs((padded / scales[:, None])[..., None] - TABLE).argmin(-1)
        exact = (TABLE[codes] * scales[:, None]).reshape(-1)[: len(flat)].reshape(weight.shape)
        halves = np.resize(codes.reshape(-1)[: len(flat)], len(flat) + len(flat) % 2).reshape(-1, 2)
        content = np.frombuffer(json.dumps(said).encode(), np.uint8).copy()
        tensors |= {
            f"{module}.weight": torch.from_numpy((halves @ [16, 1]).astype(np.uint8)[:, None]),
            f"{module}.weight.absmax": torch.from_numpy(stored),
            f"{module}.weight.quant_map": torch.from_numpy(TABLE.copy()),
            f"{module}.weight.quant_state.bitsandbytes__{kind}": torch.from_numpy(content),
        }
        return tensors, exact

    return store


def describe_bitsandbytes(kind: str) -> dict[str, Any]:
    """Return what config.json says of weights that bitsandbytes stores so."""
    is_int8 = kind == "int8"
    said = {"quant_method": "bitsandbytes", "load_in_8bit": is_int8, "load_in_4bit": not is_int8}
    return said | ({} if is_int8 else {"bnb_4bit_quant_type": kind})
