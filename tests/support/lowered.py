"""Matrices as MLX and HQQ store them: codes with a scale and a low for each group."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.quantised import Array, Store, Tensors, pack_bits


def store_mlx(bits: int, group: int) -> Store:
    """As MLX stores a matrix: words along the inputs, and a scale and a bias of each group."""

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        rows, columns = weight.shape
        runs = weight.reshape(rows, -1, group)
        low, high = runs.min(-1), runs.max(-1)
        scales = ((high - low) / ((1 << bits) - 1)).astype(np.float16)
        # MLX turns scales around where the other end is larger; any sign is read.
        scales[:, ::2], low[:, ::2] = -scales[:, ::2], high[:, ::2]
        biases = low.astype(np.float16)
        wide, added = scales.astype(np.float32), biases.astype(np.float32)
        codes = np.round((runs - added[..., None]) / wide[..., None])
        codes = np.clip(codes, 0, (1 << bits) - 1)
        words = pack_bits(codes.reshape(rows, columns).T.astype(np.int64), bits)
        tensors = {
            f"{module}.weight": words.T.contiguous().view(torch.uint32),
            f"{module}.scales": torch.from_numpy(scales),
            f"{module}.biases": torch.from_numpy(biases),
        }
        exact = wide[..., None] * codes.astype(np.float32) + added[..., None]
        return tensors, exact.reshape(rows, columns)

    return store


def store_hqq(bits: int, group: int, *, axis: int = 1, view: torch.dtype | None = None) -> Store:
    """As HQQ stores a matrix: rows of codes in parts above one another, and what describes it.

    `view`: the dtype as which bytes of codes are stored.
    """

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        shape = (-1, group) if axis == 1 else (group, -1)
        runs = weight.reshape(shape)
        low, high = runs.min(axis, keepdims=True), runs.max(axis, keepdims=True)
        scales = ((high - low) / ((1 << bits) - 1)).astype(np.float16).astype(np.float32)
        zeros = (-low / scales).astype(np.float16).astype(np.float32)
        codes = np.clip(np.round(runs / scales + zeros), 0, (1 << bits) - 1).astype(np.int32)
        together = 10 if bits == 3 else 8 // bits
        padded = np.pad(codes, ((0, -len(codes) % together), (0, 0)))
        parts = np.split(padded, together)
        words = sum(part << (bits * (together - 1 - i)) for i, part in enumerate(parts))
        stored = torch.from_numpy(np.asarray(words, np.int32 if bits == 3 else np.uint8))
        described = {"nbits": bits, "group_size": group, "axis": axis}
        flags = ("view_as_float", "quant_scale", "quant_zero", "encoded_state_dict", "round_zero")
        tensors = {
            f"{module}.W_q": stored if view is None else stored.view(view),
            f"{module}.scale": torch.from_numpy(scales).half(),
            f"{module}.zero": torch.from_numpy(zeros).half(),
            f"{module}.shape": torch.tensor(weight.shape),
            f"{module}.packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
            **{
                f"{module}.{name}": torch.tensor(n, dtype=torch.int32)
                for name, n in described.items()
            },
            **{f"{module}.{name}": torch.tensor(0, dtype=torch.uint8) for name in flags},
        }
        exact = scales * codes.astype(np.float32) - scales * zeros
        return tensors, exact.reshape(weight.shape)

    return store
