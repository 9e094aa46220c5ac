"""Quantised matrices made in tests: packed bit by bit, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
DATA = Path(__file__).parents[1] / "data/quantised"


@dataclass(frozen=True)
class Rounded:
    """weight[o, i] = scale[o, g] * (code[o, i] - zero[o, g]), g = groups[i]."""

    codes: Array  # int [out, in]
    zeros: Array  # int [out, groups]
    scales: Array  # float16 [out, groups]
    groups: Array  # int [in]

    @property
    def weight(self) -> Array:
        scales, zeros = self.scales.astype(np.float32), self.zeros
        return scales[:, self.groups] * (self.codes - zeros[:, self.groups]).astype(np.float32)


def random_rounded(
    rows: int, columns: int, bits: int, group: int, *, shuffled: bool = False, seed: int = 0
) -> Rounded:
    """Return any codes at all, with zero points of 1 and more."""
    draw = np.random.default_rng(seed)
    groups = np.arange(columns) // group
    count = int(groups[-1]) + 1
    return Rounded(
        draw.integers(0, 1 << bits, (rows, columns)),
        draw.integers(1, 1 << bits, (rows, count)),
        draw.uniform(0.01, 1, (rows, count)).astype(np.float16),
        draw.permutation(groups) if shuffled else groups,
    )


def round_weight(weight: Array, bits: int, group: int, *, shuffled: bool = False) -> Rounded:
    """Return the nearest codes of a matrix [out, in]."""
    rows, columns = weight.shape
    group = min(group, columns)
    groups = np.arange(columns) // group
    if shuffled:
        groups = np.random.default_rng(columns).permutation(groups)
    count, most = int(groups.max()) + 1, (1 << bits) - 1
    zeros = np.zeros((rows, count), np.int64)
    scales = np.zeros((rows, count), np.float16)
    for each in range(count):
        own = weight[:, groups == each]
        low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
        scales[:, each] = (high - low) / most
        zeros[:, each] = np.clip(np.round(-low / scales[:, each]), 1, most)
    codes = np.round(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups]
    return Rounded(np.clip(codes, 0, most).astype(np.int64), zeros, scales, groups)


def pack_bits(codes: Array, bits: int) -> torch.Tensor:
    """Return int32 [n * bits / 32, lines] of codes [n, lines], the first in the lowest bits."""
    columns = []
    for line in np.asarray(codes).T:
        stream = sum(int(code) << (bits * place) for place, code in enumerate(line))
        columns.append(np.frombuffer(stream.to_bytes(len(line) * bits // 8, "little"), np.int32))
    return torch.from_numpy(np.ascontiguousarray(np.array(columns).T))


def pack_gptq(
    module: str, rounded: Rounded, bits: int, *, v2: bool = False, order: bool = True
) -> Tensors:
    zeros = rounded.zeros if v2 else rounded.zeros - 1
    tensors = {
        f"{module}.qweight": pack_bits(rounded.codes.T, bits),
        f"{module}.qzeros": pack_bits(zeros, bits).T.contiguous(),
        f"{module}.scales": torch.from_numpy(rounded.scales.T.copy()),
    }
    if order:
        tensors[f"{module}.g_idx"] = torch.from_numpy(rounded.groups.astype(np.int32))
    return tensors


def pack_awq(module: str, rounded: Rounded) -> Tensors:
    def words(lines: Array) -> torch.Tensor:
        """int32 [lines, outputs / 8] of [lines, outputs]."""
        result = np.zeros((len(lines), lines.shape[1] // 8), np.uint32)
        for word in range(result.shape[1]):
            for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                result[:, word] |= lines[:, 8 * word + output].astype(np.uint32) << (4 * place)
        return torch.from_numpy(result.view(np.int32))

    return {
        f"{module}.qweight": words(rounded.codes.T),
        f"{module}.qzeros": words(rounded.zeros.T),
        f"{module}.scales": torch.from_numpy(rounded.scales.T.copy()),
    }


def pack_compressed(
    module: str, rounded: Rounded, bits: int, *, symmetric: bool = False
) -> Tensors:
    """Codes and zero points are as stored; a symmetric one has half of the range as its zero."""
    tensors = {
        f"{module}.weight_packed": pack_bits(rounded.codes.T, bits).T.contiguous(),
        f"{module}.weight_scale": torch.from_numpy(rounded.scales.copy()),
        f"{module}.weight_shape": torch.tensor(rounded.codes.shape),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = pack_bits(rounded.zeros, bits)
    if not (np.diff(rounded.groups) >= 0).all():
        tensors[f"{module}.weight_g_idx"] = torch.from_numpy(rounded.groups.astype(np.int32))
    return tensors


def scale_blocks(weight: Array, most: float, block: tuple[int, int]) -> tuple[Array, Array]:
    """Return scales of blocks, whose largest weight is `most` of them, and those of all weights."""
    rows, columns = (min(size, whole) for size, whole in zip(block, weight.shape, strict=True))
    counts = [-(-whole // size) for whole, size in zip(weight.shape, (rows, columns), strict=True)]
    scales = np.zeros(counts, np.float32)
    for i, j in np.ndindex(*counts):
        own = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(own).max() / most
    spread = np.repeat(np.repeat(scales, rows, 0), columns, 1)
    return scales, spread[: weight.shape[0], : weight.shape[1]]


ALL = 1 << 20
BLOCKS = {"tensor": (ALL, ALL), "channel": (1, ALL), "group": (1, 16), "block": (24, 40)}


# From a matrix's name and its numbers to its tensors, and to what they mean.
Store = Callable[[str, Array], tuple[Tensors, Array]]


def store_gptq(bits: int, group: int, *, v2: bool = False, shuffled: bool = False) -> Store:
    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        rounded = round_weight(weight, bits, group, shuffled=shuffled)
        return pack_gptq(module, rounded, bits, v2=v2, order=shuffled), rounded.weight

    return store


def store_awq(group: int) -> Store:
    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        rounded = round_weight(weight, 4, group)
        return pack_awq(module, rounded), rounded.weight

    return store


def store_packed(
    bits: int, group: int, *, symmetric: bool = False, shuffled: bool = False
) -> Store:
    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        rounded = round_weight(weight, bits, group, shuffled=shuffled)
        if symmetric:
            zeros = np.full_like(rounded.zeros, 1 << (bits - 1))
            rounded = replace(rounded, zeros=zeros)
        return pack_compressed(module, rounded, bits, symmetric=symmetric), rounded.weight

    return store


def store_int8(strategy: str) -> Store:
    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        scales, spread = scale_blocks(weight, 127, BLOCKS[strategy])
        codes = np.round(weight / spread).astype(np.int8)
        tensors = {
            f"{module}.weight": torch.from_numpy(codes),
            f"{module}.weight_scale": torch.from_numpy(scales),
        }
        return tensors, codes * spread

    return store


def store_exl2(*groups: tuple[int, int]) -> Store:
    """As exllamav2 stores a matrix: inputs in another order, in groups with bits of their own.

    `groups`: bits and inputs of each, over and over; the last may have fewer inputs.
    """

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        outputs, inputs = weight.shape
        rows = np.zeros((inputs, -(-outputs // 32) * 32), np.float64)  # outputs are padded
        places = np.random.default_rng(inputs).permutation(inputs)  # where each input is stored
        rows[places, :outputs] = weight.T
        words: list[torch.Tensor] = []
        exact, steps, largest, pairs, first = np.empty_like(rows), [], [], [], 0
        for bits, count in cycle(groups):
            half, own = 1 << (bits - 1), rows[first : first + count]
            scales = np.maximum(np.abs(own).max(0), 1e-6) / half
            largest.append(np.float16(scales.max() * 1.01))
            steps.append(np.clip(np.ceil(np.sqrt(scales / largest[-1]) * 16), 1, 16))
            scales = (steps[-1] / 16) ** 2 * np.float64(largest[-1])
            codes = np.clip(np.round(own / scales) + half, 0, 2 * half - 1).astype(np.int64)
            exact[first : first + count] = (codes - half) * scales
            pairs += [bits, sum(map(len, words))]
            words.append(pack_bits(codes, bits))
            first += len(own)
            if first == inputs:
                break
        tensors = {
            f"{module}.q_weight": torch.cat(words),
            f"{module}.q_scale": pack_bits(np.array(steps, np.int64).T - 1, 4).T.contiguous(),
            f"{module}.q_scale_max": torch.from_numpy(np.array(largest)),
            f"{module}.q_groups": torch.tensor(pairs, dtype=torch.int16),
            f"{module}.q_invperm": torch.from_numpy(places.astype(np.int32)),
        }
        return tensors, exact[places, :outputs].T.astype(np.float32)

    return store


def store_fp8(strategy: str, scale: str = "weight_scale") -> Store:
    """torch's own FP8 says which numbers there are."""

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        scales, spread = scale_blocks(weight, 448, BLOCKS[strategy])
        codes = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
        if strategy == "tensor":
            scales = scales.reshape(1)
        tensors = {
            f"{module}.weight": codes,
            f"{module}.{scale}": torch.from_numpy(scales),
            f"{module}.input_scale": torch.ones(1),
        }
        return tensors, codes.float().numpy() * spread

    return store


# What the codes of e2m1 stand for.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def store_nvfp4(module: str, weight: Array) -> tuple[Tensors, Array]:
    """Store as ModelOpt does, with a scale of e4m3 for 16 inputs and a factor of all."""
    rows, columns = weight.shape
    runs = weight.reshape(rows, -1, 16)
    factor = np.float32(np.abs(weight).max() / (6 * 448))
    steps = torch.from_numpy(np.abs(runs).max(-1) / 6 / factor).to(torch.float8_e4m3fn)
    scales = steps.float().numpy() * factor
    sizes = np.abs(runs) / np.maximum(scales, 1e-30)[..., None]
    codes = np.abs(sizes[..., None] - E2M1).argmin(-1).astype(np.uint8)
    exact = np.sign(runs) * E2M1[codes] * scales[..., None]
    codes |= (runs < 0).astype(np.uint8) << 3
    codes = codes.reshape(rows, columns)
    tensors = {
        f"{module}.weight": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4),
        f"{module}.weight_scale": steps,
        f"{module}.weight_scale_2": torch.tensor(factor),
    }
    return tensors, exact.reshape(rows, columns)


def store_mxfp8(module: str, weight: Array) -> tuple[Tensors, Array]:
    """Store FP8 with a power of two for each 32 inputs."""
    rows, columns = weight.shape
    runs = weight.reshape(rows, -1, 32)
    exponents = np.ceil(np.log2(np.abs(runs).max(-1) / 448))
    codes = torch.from_numpy(runs / np.exp2(exponents)[..., None]).to(torch.float8_e4m3fn)
    exact = codes.float().numpy() * np.exp2(exponents)[..., None]
    tensors = {
        f"{module}.weight": codes.reshape(rows, columns),
        f"{module}.weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return tensors, exact.reshape(rows, columns)


def store_powers(module: str, weight: Array, scale: str = "weight_scale_inv") -> Any:
    """Store as DeepSeek V4 does: FP8 by blocks, with powers of two."""
    scales, _ = scale_blocks(weight, 448, BLOCKS["block"])
    exponents = np.ceil(np.log2(scales))
    rows, columns = BLOCKS["block"]
    spread = np.repeat(np.repeat(np.exp2(exponents), rows, 0), columns, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
    tensors = {f"{module}.weight": codes, f"{module}.{scale}": _as_exponents(exponents)}
    return tensors, codes.float().numpy() * spread


def store_pairs(module: str, weight: Array, scale: str = "weight_scale_inv") -> Any:
    """Store as DeepSeek V4 does its experts: e2m1 in signed bytes, a power for each 32 inputs."""
    rows, columns = weight.shape
    runs = weight.reshape(rows, -1, 32)
    exponents = np.ceil(np.log2(np.abs(runs).max(-1) / 6))
    sizes = np.abs(runs) / np.exp2(exponents)[..., None]
    codes = np.abs(sizes[..., None] - E2M1).argmin(-1).astype(np.uint8)
    exact = np.sign(runs) * E2M1[codes] * np.exp2(exponents)[..., None]
    codes |= (runs < 0).astype(np.uint8) << 3
    codes = codes.reshape(rows, columns)
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8))
    tensors = {f"{module}.weight": packed, f"{module}.{scale}": _as_exponents(exponents)}
    return tensors, exact.reshape(rows, columns)


def _as_exponents(exponents: Array) -> torch.Tensor:
    return torch.from_numpy((exponents + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)


def describe_compressed(form: str, strategy: str, bits: int, **weights: Any) -> dict[str, Any]:
    """Return what config.json says of weights that compressed-tensors stores so."""
    kind = "float" if form == "float-quantized" else "int"
    said = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": said, "input_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_LINEARS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def quantise(
    source: Path,
    folder: Path,
    store: Store,
    said: Mapping[str, Any],
    *,
    endings: tuple[str, ...] = _LINEARS,
) -> Path:
    """Write a copy of a checkpoint whose layers' linears are stored so; its name is `folder`.

    Beside it, in `plain`, the same with the weights that this means, in float32. `endings`: of the
    linears' names.
    """
    plain = folder / "plain"
    plain.mkdir(parents=True)
    stored: Tensors = {}
    exact: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(endings):
            stored[name] = exact[name] = tensor
            continue
        tensors, weight = store(name.removesuffix(".weight"), tensor.float().numpy())
        stored |= tensors
        exact[name] = torch.from_numpy(np.ascontiguousarray(weight, np.float32))
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
            (plain / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(said)}))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    return folder


def real_checkpoint(name: str, folder: Path) -> Path:
    """Put a checkpoint of `tests/data/quantised` together in a folder."""
    (folder / "config.json").write_bytes((DATA / name / "config.json").read_bytes())
    for file in (DATA / name / "layers.safetensors", DATA / "outer.safetensors"):
        (folder / file.name).symlink_to(file)
    return folder
