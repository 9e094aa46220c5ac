"""Checkpoints of every quantised format as their headers describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.model.support import LLAMA, Stored, make_folder, write_json
from tests.support.quantised import describe_compressed
from tests.support.quark import describe_quark
from tests.support.torchao_files import TORCHAO
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.tensors import decoder_matrices

CONFIG = LLAMA | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
Q = "model.layers.0.self_attn.q_proj"
Changes = dict[str, Stored | None]


def gptq(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.qweight": ("I32", (columns // 8, rows)),
        f"{module}.qzeros": ("I32", (columns // 32, rows // 8)),
        f"{module}.scales": ("F16", (columns // 32, rows)),
        f"{module}.g_idx": ("I32", (columns,)),
    }


def awq(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.qweight": ("I32", (columns, rows // 8)),
        f"{module}.qzeros": ("I32", (columns // 32, rows // 8)),
        f"{module}.scales": ("F16", (columns // 32, rows)),
    }


def marlin(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.B": ("I32", (columns // 16, rows * 2)),
        f"{module}.s": ("F16", (columns // 32, rows)),
    }


def exl2(module: str, rows: int, columns: int) -> Changes:
    groups = columns // 32
    return {
        f"{module}.q_weight": ("I32", (columns // 8, rows)),
        f"{module}.q_scale": ("I32", (groups, rows // 8)),
        f"{module}.q_scale_max": ("F16", (groups,)),
        f"{module}.q_groups": ("I16", (2 * groups,)),
        f"{module}.q_invperm": ("I32", (columns,)),
    }


def exl3(module: str, rows: int, columns: int) -> Changes:
    inputs, outputs = (-(-size // 128) * 128 for size in (columns, rows))
    return {
        f"{module}.trellis": ("I16", (inputs // 16, outputs // 16, 64)),
        f"{module}.suh": ("F16", (inputs,)),
        f"{module}.sv": ("I16", (outputs // 16,)),
        f"{module}.mcg": ("I32", ()),
    }


def packed(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight_packed": ("I32", (rows, columns // 8)),
        f"{module}.weight_scale": ("BF16", (rows, columns // 32)),
        f"{module}.weight_zero_point": ("I32", (rows // 8, columns // 32)),
        f"{module}.weight_shape": ("I64", (2,)),
    }


def int8(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("I8", (rows, columns)),
        f"{module}.weight_scale": ("BF16", (rows, 1)),
    }


def fp8(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("F8_E4M3", (rows, columns)),
        f"{module}.weight_scale": ("BF16", ()),
        f"{module}.input_scale": ("BF16", (1,)),
    }


def fbgemm(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("F8_E4M3", (rows, columns)),
        f"{module}.weight_scale": ("F32", (rows, 1)),
        f"{module}.input_scale_ub": ("F32", (1,)),
    }


def blocks(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("F8_E4M3", (rows, columns)),
        f"{module}.weight_scale_inv": ("F32", (-(-rows // 48), -(-columns // 128))),
    }


def int8_rows(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("I8", (rows, columns)),
        f"{module}.SCB": ("F32", (rows,)),
        f"{module}.weight_format": ("U8", ()),
    }


def nvfp4(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight_packed": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_global_scale": ("F32", (1,)),
        f"{module}.input_global_scale": ("F32", (1,)),
    }


def modelopt(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def torchao_int8(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}._weight_qdata": ("I8", (rows, columns)),
        f"{module}._weight_scale": ("F32", (rows, columns // 32)),
        f"{module}._weight_zero_point": ("I8", (rows, columns // 32)),
        f"{module}._weight_act_quant_scale": ("F32", (1, 1)),
    }


def torchao_halves(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}._weight_qdata": ("I8", (rows, columns // 2)),
        f"{module}._weight_scale": ("BF16", (columns // 32, rows)),
        f"{module}._weight_zero_point": ("BF16", (columns // 32, rows)),
    }


def torchao_tiles(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}._weight_qdata": ("I32", (rows // 8, 8, 32, 4)),
        f"{module}._weight_scale_and_zero": ("BF16", (16, rows, 2)),
    }


def quark_groups(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("I32", (columns, rows // 8)),
        f"{module}.weight_scale": ("F16", (columns // 32, rows)),
        f"{module}.weight_zero_point": ("I32", (columns // 32, rows // 8)),
        f"{module}.input_scale": ("F16", ()),
        f"{module}.output_scale": ("F16", ()),
    }


def quark_mxfp4(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("U8", (rows, columns // 32)),
    }


def bitnet(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("U8", (rows // 4, columns)),
        f"{module}.weight_scale": ("BF16", (1,)),
    }


def mlx(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("U32", (rows, columns // 8)),
        f"{module}.scales": ("BF16", (rows, columns // 32)),
        f"{module}.biases": ("BF16", (rows, columns // 32)),
    }


def mlx_nvfp4(module: str, rows: int, columns: int) -> Changes:
    return {
        f"{module}.weight": ("U32", (rows, columns // 8)),
        f"{module}.scales": ("U8", (rows, columns // 16)),
    }


# Not of every matrix.
OPTIONAL = (
    *("input_global_scale", "g_idx", "weight_zero_point", "weight_format"),
    *("input_scale", "input_scale_ub", "output_scale", "act_quant_scale", "mcg"),
)
SIXTEEN = {"type": "float", "group_size": 16}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "auto-round": (
        gptq,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}
        | {"group_size": 32, "sym": True, "data_type": "int"},
    ),
    "fbgemm": (fbgemm, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "marlin": (
        marlin,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": True},
    ),
    "exl2": (exl2, {"quant_method": "exl2", "version": "0.1.8", "bits": 4.25, "head_bits": 6}),
    "exl3": (exl3, {"quant_method": "exl3", "version": "0.0.6", "bits": 4.0, "codebook": "mcg"}),
    "packed": (packed, describe_compressed("pack-quantized", "group", 4, group_size=32)),
    "int8": (int8, describe_compressed("int-quantized", "channel", 8)),
    "fp8": (fp8, describe_compressed("float-quantized", "tensor", 8)),
    "fp8 blocks": (blocks, {"quant_method": "fp8", "weight_block_size": [48, 128]}),
    "bitsandbytes": (int8_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "mlx": (mlx, {"bits": 4, "group_size": 32}),
    "mlx, nvfp4": (mlx_nvfp4, {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
    "nvfp4": (nvfp4, describe_compressed("nvfp4-pack-quantized", "tensor_group", 4, **SIXTEEN)),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "torchao int8": (torchao_int8, TORCHAO),
    "torchao halves": (torchao_halves, TORCHAO),
    "torchao tiles": (torchao_tiles, TORCHAO),
    "quark": (quark_groups, describe_quark("uint4")),
    "quark mxfp4": (quark_mxfp4, describe_quark("fp4")),
    "bitnet": (bitnet, {"quant_method": "bitnet"}),
    "fp8 alone": (fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
}


def changes_of(folder: Path, name: str) -> Changes:
    """Return what makes every linear of CONFIG's layers one of a format."""
    write_json(folder, CONFIG)
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    changes: Changes = {}
    for matrix in decoder_matrices(spec):
        if "_proj" in matrix.name:
            changes[matrix.name] = None
            module = matrix.name.removesuffix(".weight")
            changes |= FORMATS[name][0](module, matrix.rows, matrix.columns)
    return changes


def make(
    folder: Path,
    name: str,
    changes: Mapping[str, Stored | None] | None = None,
    said: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint in a format, with other tensors and another description where given."""
    every = changes_of(folder, name) | dict(changes or {})
    described = FORMATS[name][1] | dict(said or {})
    return make_folder(folder, CONFIG | {"quantization_config": described}, every)
