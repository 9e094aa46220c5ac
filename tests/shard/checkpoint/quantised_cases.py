"""A matrix in every format of several tensors, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import write_json
from tests.support.bitnet import BITNET_OFFLINE, store_bitnet
from tests.support.bitsandbytes_files import describe_bitsandbytes, store_bytes, store_table
from tests.support.exl3 import EXL3, store_exl3
from tests.support.lowered import store_hqq, store_mlx
from tests.support.quantised import (
    DATA,
    Array,
    Store,
    Tensors,
    describe_compressed,
    pack_awq,
    pack_compressed,
    pack_gptq,
    random_rounded,
    store_exl2,
    store_fp8,
    store_int8,
    store_mxfp8,
    store_nvfp4,
    store_pairs,
    store_powers,
)
from tests.support.quark import describe_quark, store_quark, store_quark_mxfp4
from tests.support.torchao_files import TORCHAO, renamed, store_halves, store_shifted, store_tiles
from tgi_trio.model.config import read_config
from tgi_trio.shard.checkpoint.formats.choose import choose_format
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

ROWS, COLUMNS = 96, 128
GPTQ_OF_4_BITS = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MODELOPT = {"quant_method": "modelopt"}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}


@dataclass(frozen=True)
class Case:
    said: dict[str, Any]
    tensors: Tensors
    weight: Array
    bits: int
    group: int
    name: str = "a"  # what is trained is a linear if it is in a layer


def gptq(
    bits: int, group: int, *, v2: bool = False, shuffled: bool = False, order: bool = True
) -> Case:
    rounded = random_rounded(ROWS, COLUMNS, bits, group, shuffled=shuffled)
    said = {"quant_method": "gptq", "bits": bits, "group_size": group}
    if v2:
        said["checkpoint_format"] = "gptq_v2"
    tensors = pack_gptq("a", rounded, bits, v2=v2, order=order)
    return Case(said, tensors, rounded.weight, bits, group)


def awq(group: int) -> Case:
    rounded = random_rounded(ROWS, COLUMNS, 4, group)
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Case(said, pack_awq("a", rounded), rounded.weight, 4, group)


def packed(bits: int, group: int, *, symmetric: bool = False, shuffled: bool = False) -> Case:
    rounded = random_rounded(ROWS, COLUMNS, bits, group, shuffled=shuffled)
    if symmetric:
        rounded.zeros[:] = 1 << (bits - 1)
    strategy = "group" if group < COLUMNS else "channel"
    said = describe_compressed("pack-quantized", strategy, bits, group_size=group)
    tensors = pack_compressed("a", rounded, bits, symmetric=symmetric)
    return Case(said, tensors, rounded.weight, bits, group)


def marlin(name: str, group: int) -> Case:
    """A matrix that vLLM's tools put into Marlin's order."""
    said = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
    if group < COLUMNS:
        said["group_size"] = group
    made = load_file(DATA / "marlin.safetensors")
    tensors = {f"a.{part}": made[f"{name}.{part}"] for part in ("B", "s")}
    codes, scales = made[f"{name}.codes"].float() - 8, made[f"{name}.scales"].float()
    weight = codes * scales.repeat_interleave(group, 1)
    return Case(said, tensors, weight.numpy(), 4, group)


def stored(store: Store, said: dict[str, Any], group: int, bits: int = 8, name: str = "a") -> Case:
    weight = np.random.default_rng(3).standard_normal((ROWS, COLUMNS), np.float32)
    tensors, exact = store(name, weight)
    return Case(said, tensors, exact.astype(np.float32), bits, group, name)


def int8(strategy: str, group: int, **said: Any) -> Case:
    said = describe_compressed("int-quantized", strategy, 8, **said)
    return stored(store_int8(strategy), said, group)


def fp8(strategy: str, group: int, **said: Any) -> Case:
    said = describe_compressed("float-quantized", strategy, 8, **said)
    return stored(store_fp8(strategy), said, group)


def exl2(bits: int, group: int, *groups: tuple[int, int]) -> Case:
    """Groups of bits and inputs, whose codes have the widest's or 8 bits."""
    return stored(store_exl2(*groups), {"quant_method": "exl2", "bits": 4.25}, group, bits)


def exl3(bits: float, book: str = "3inst", **how: Any) -> Case:
    return stored(store_exl3(bits, book, **how), dict(EXL3), 128, int(np.ceil(bits)))


def mlx(bits: int, group: int) -> Case:
    return stored(store_mlx(bits, group), {"bits": bits, "group_size": group}, group, bits)


def hqq(bits: int, group: int, **how: Any) -> Case:
    return stored(store_hqq(bits, group, **how), {"quant_method": "hqq"}, group, bits)


def table(kind: str, size: int, nested: int = 0) -> Case:
    store = store_table(kind, size, nested=nested)
    return stored(store, describe_bitsandbytes(kind), size, bits=4)


def quark(dtype: str, group: int, pack_method: str = "reorder") -> Case:
    store = store_quark(dtype, group, pack_method)
    return stored(store, describe_quark(dtype, pack_method), group, bits=int(dtype[-1]))


def bitnet(form: str, said: dict[str, Any], *, divides: bool = False) -> Case:
    return stored(store_bitnet(form, divides=divides), said, COLUMNS, 2, name="layers.0.a")


CASES: dict[str, Callable[[], Case]] = {
    "gptq, 2 bits": lambda: gptq(2, 32),
    "gptq, 3 bits": lambda: gptq(3, 32),
    "gptq, 3 bits, acts": lambda: gptq(3, 32, shuffled=True),
    "gptq, 4 bits": lambda: gptq(4, 32),
    "gptq, 4 bits, uneven": lambda: gptq(4, 48),
    "gptq, 4 bits, v2": lambda: gptq(4, 64, v2=True),
    "gptq, 4 bits, acts": lambda: gptq(4, 16, shuffled=True),
    "gptq, 4 bits, no order": lambda: gptq(4, 32, order=False),
    "gptq, 8 bits": lambda: gptq(8, 128),
    "gptq, modules that differ": lambda: replace(
        gptq(3, 32), said=GPTQ_OF_4_BITS | {"dynamic": {r"+:a": {"bits": 3, "group_size": 32}}}
    ),
    "awq": lambda: awq(32),
    "marlin": lambda: marlin("grouped", 32),
    "marlin, one group": lambda: marlin("whole", COLUMNS),
    "exl2, 4 bits": lambda: exl2(4, 32, (4, 32)),
    "exl2, 8 bits": lambda: exl2(8, 64, (8, 64)),
    "exl2, 3 bits, one group": lambda: exl2(3, 128, (3, 128)),
    "exl2, 2 to 6 bits": lambda: exl2(8, 32, (6, 32), (5, 32), (3, 32), (2, 32)),
    "exl2, 2 and 4 bits": lambda: exl2(4, 64, (4, 64), (2, 64)),
    "exl2, groups of two sizes": lambda: exl2(8, 32, (5, 64), (4, 32), (4, 32)),
    "exl2, a short last group": lambda: exl2(4, 96, (4, 96), (3, 32)),
    "exl3, 1 bit": lambda: exl3(1),
    "exl3, 3 bits, signs": lambda: exl3(3, signs=True),
    "exl3, 8 bits": lambda: exl3(8),
    "exl3, 4 bits, mcg": lambda: exl3(4, "mcg"),
    **{f"exl3, {bits} bits, mul1": partial(exl3, bits, "mul1") for bits in (1.5, 2.5, 7)},
    **{f"mlx, {bits} bits": partial(mlx, bits, 32) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx, 4 bits, wide groups": lambda: mlx(4, 64),
    "mlx, 6 bits, wider groups": lambda: mlx(6, 128),
    **{f"hqq, {bits} bits": partial(hqq, bits, 32) for bits in (1, 2, 3, 4, 8)},
    "hqq, 4 bits, as numbers": lambda: hqq(4, 64, view=torch.float16),
    "hqq, 3 bits, wide groups, as numbers": lambda: hqq(3, 128, view=torch.bfloat16),
    **{f"hqq, {bits} bits, across": partial(hqq, bits, 32, axis=0) for bits in (1, 2, 3, 4, 8)},
    "hqq, 4 bits, across rows and columns": lambda: hqq(4, 256, axis=0),
    "packed, 4 bits": lambda: packed(4, 32),
    "packed, 4 bits, symmetric": lambda: packed(4, 64, symmetric=True),
    "packed, 4 bits, acts": lambda: packed(4, 32, shuffled=True),
    "packed, 8 bits": lambda: packed(8, 128, symmetric=True),
    "int8 by tensor": lambda: int8("tensor", 128),
    "int8 by channel": lambda: int8("channel", 128),
    "int8 by group": lambda: int8("group", 16, group_size=16),
    "bitsandbytes": lambda: stored(store_bytes, describe_bitsandbytes("int8"), 128),
    "nf4": lambda: table("nf4", 64),
    "nf4, double": lambda: table("nf4", 32, nested=7),
    "fp4, uneven": lambda: table("fp4", 36),
    "fp4, uneven, double": lambda: table("fp4", 100, nested=3),
    "nvfp4": lambda: stored(store_nvfp4, MODELOPT | {"quant_algo": "NVFP4"}, 16, bits=4),
    "mxfp8": lambda: stored(store_mxfp8, MODELOPT | {"quant_algo": "MXFP8"}, 32),
    "fp8 by block, powers of two, uneven": lambda: stored(store_powers, DEEPSEEK, 40),
    "fp8, experts of 4 bits": lambda: stored(store_pairs, DEEPSEEK, 32, bits=4),
    "torchao, halves of bytes": lambda: stored(store_halves(32), TORCHAO, 32, bits=4),
    "torchao, tiles": lambda: stored(store_tiles(64), TORCHAO, 64, bits=4),
    "torchao, int8": lambda: stored(renamed(store_int8("channel")), TORCHAO, 128),
    "torchao, int8 by group": lambda: stored(renamed(store_int8("group")), TORCHAO, 16),
    "torchao, int8 with zeros": lambda: stored(store_shifted, TORCHAO, 128),
    "torchao, fp8 by channel": lambda: stored(renamed(store_fp8("channel")), TORCHAO, 128),
    "torchao, fp8 by tensor": lambda: stored(renamed(store_fp8("tensor")), TORCHAO, 128),
    "quark, int4": lambda: quark("int4", 32),
    "quark, int4 in order": lambda: quark("int4", 32, "order"),
    "quark, uint4": lambda: quark("uint4", 32),
    "quark, int4 by channel": lambda: quark("int4", 128),
    "quark, uint4 by channel in order": lambda: quark("uint4", 128, "order"),
    "quark, int8": lambda: quark("int8", 32),
    "quark, uint8": lambda: quark("uint8", 32),
    "quark, uint8 by channel": lambda: quark("uint8", 128),
    "quark, fp8": lambda: stored(store_fp8("channel"), describe_quark("fp8_e4m3"), 128),
    "quark, mxfp4": lambda: stored(store_quark_mxfp4, describe_quark("fp4"), 32, bits=4),
    "bitnet": lambda: bitnet("packed", BITNET_OFFLINE),
    "bitnet, divided": lambda: bitnet("packed", {"quant_method": "bitnet"}, divides=True),
    "bitnet, unpacked": lambda: bitnet("unpacked", BITNET_OFFLINE),
    "fp8 by tensor": lambda: fp8("tensor", 128),
    "fp8 by channel": lambda: fp8("channel", 128),
    "fp8 by block, uneven": lambda: fp8("block", 40, block_structure=[24, 40]),
}


# What is taken apart; of the others matrices are dequantised.
WITH_PLANES = [
    name for name in CASES if not name.startswith(("fp4, uneven", "exl3")) and "across" not in name
]


def open_matrix(folder: Path, case: Case) -> StoredMatrix:
    write_json(folder, {"model_type": "llama", "quantization_config": case.said})
    save_file(case.tensors, folder / "model.safetensors")
    files = SafetensorsFiles(folder)
    return choose_format(read_config(folder), files).matrix(
        files, f"{case.name}.weight", case.weight.shape
    )
