"""Matrices in every format of several tensors: what they mean, and any part of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lowered_support import store_hqq, store_mlx
from tests.model.support import write_json
from tests.quantised_support import (
    BITNET_OFFLINE,
    BITNET_ONLINE,
    DATA,
    Array,
    Store,
    Tensors,
    describe_bitsandbytes,
    describe_compressed,
    pack_awq,
    pack_compressed,
    pack_gptq,
    random_rounded,
    store_bitnet,
    store_bytes,
    store_exl2,
    store_fp8,
    store_int8,
    store_mxfp8,
    store_nvfp4,
    store_pairs,
    store_powers,
    store_table,
)
from tests.quark_support import describe_quark, store_quark, store_quark_mxfp4
from tests.torchao_support import TORCHAO, renamed, store_halves, store_shifted, store_tiles
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.shard.checkpoint.formats.choose import choose_format
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.gguf_blocks import HALVES_OF_E2M1
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.checkpoint.taken_apart import take_apart

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


def open_matrix(folder: Path, case: Case) -> StoredMatrix:
    write_json(folder, {"model_type": "llama", "quantization_config": case.said})
    save_file(case.tensors, folder / "model.safetensors")
    files = SafetensorsFiles(folder)
    return choose_format(read_config(folder), files).matrix(
        files, f"{case.name}.weight", case.weight.shape
    )


@pytest.mark.parametrize("name", CASES)
def test_every_part_means_what_was_stored(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    matrix = open_matrix(tmp_path, case)
    assert (matrix.shape, matrix.bits, matrix.group) == (case.weight.shape, case.bits, case.group)
    assert matrix.dequantised().dtype == np.float32
    np.testing.assert_array_equal(matrix.dequantised(), case.weight)
    for rows in (slice(0, 7), slice(8, 40), slice(31, 33), slice(90, 200)):
        for columns in (slice(0, 32), slice(5, 77), slice(96, 128), slice(127, 128)):
            part = matrix.rows(rows).columns(columns)
            expected = case.weight[rows, columns]
            assert part.shape == expected.shape
            np.testing.assert_array_equal(part.dequantised(), expected)
            np.testing.assert_array_equal(
                matrix.columns(columns).rows(rows).dequantised(), expected
            )
    inner = matrix.rows(slice(3, 60)).columns(slice(10, 90)).rows(slice(1, 9)).columns(slice(2, 5))
    np.testing.assert_array_equal(inner.dequantised(), case.weight[4:12, 12:15])


def test_trained_weights_are_rounded_as_transformers_rounds_them(tmp_path: Path) -> None:
    """Up to the last bit of their mean; and only those of linears."""
    case = bitnet("trained", BITNET_ONLINE)
    matrix = open_matrix(tmp_path, case)
    assert matrix.coding == "affine" and matrix.bits == 2
    np.testing.assert_allclose(matrix.dequantised(), case.weight, rtol=1e-6)
    part = matrix.rows(slice(5, 30)).columns(slice(7, 77))
    np.testing.assert_allclose(from_planes(part.planes()), case.weight[5:30, 7:77], rtol=1e-6)
    trained = case.tensors["layers.0.a.weight"].numpy()
    left = replace(case, said=BITNET_ONLINE | {"modules_to_not_convert": ["layers.0"]})
    np.testing.assert_array_equal(open_matrix(tmp_path, left).dequantised(), trained)
    case.tensors["layers.0.a.weight"][3, 4] = np.nan
    with pytest.raises(ModelLoadError, match=r"'layers.0.a.weight' .* infinite or not a number"):
        open_matrix(tmp_path, case).dequantised()


def test_unpacked_weights_beside_a_scale_are_ternary(tmp_path: Path) -> None:
    case = CASES["bitnet, unpacked"]()
    case.tensors["layers.0.a.weight"][3, 4] = 0.5
    with pytest.raises(ModelLoadError, match=r"'layers.0.a.weight' .* none of -1, 0 and 1"):
        open_matrix(tmp_path, case).dequantised()


def from_planes(planes: Any) -> Array:
    """Return what the planes of whole numbers mean."""
    if "steps" in planes:
        scales = planes["steps"] * planes["unit"]
        planes = {"codes": planes["codes"], "scales": scales, "table": HALVES_OF_E2M1}
    codes = planes["codes"].astype(np.float32)
    if "table" in planes:
        codes = planes["table"][planes["codes"]]
    groups = planes.get("groups")
    if groups is None:
        groups = np.arange(codes.shape[1]) // -(-codes.shape[1] // planes["scales"].shape[1])
    if "zeros" in planes:
        codes -= planes["zeros"].astype(np.float32)[:, groups]
    lows = planes["lows"][:, groups] if "lows" in planes else 0
    return planes["scales"][:, groups] * codes - lows


EVEN = [name for name in CASES if not re.search("uneven|fp8|across", name)]


@pytest.mark.parametrize("name", EVEN)
def test_planes_at_borders_of_groups(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    matrix = open_matrix(tmp_path, case).rows(slice(3, 50))
    step = max(32, case.group)  # a multiple of what shares a word
    for first in range(0, COLUMNS, step):
        part = slice(first, first + step)
        planes = matrix.columns(part).planes()
        np.testing.assert_array_equal(from_planes(planes), case.weight[3:50, part])
    if step < COLUMNS and "groups" not in matrix.planes():
        with pytest.raises(ModelLoadError, match=r"split a group of"):
            matrix.columns(slice(1, step)).planes()


@pytest.mark.parametrize(
    "name", ["int8 by channel", "fp8 by channel", "packed, 8 bits", "quark, int4 by channel"]
)
def test_what_has_one_group_is_cut_at_any_word(tmp_path: Path, name: str) -> None:
    """As ranks do; its scale is that of every part."""
    matrix = open_matrix(tmp_path, CASES[name]())
    whole, part = matrix.planes(), matrix.columns(slice(24, 72)).planes()
    np.testing.assert_array_equal(part["codes"], whole["codes"][:, 24:72])
    np.testing.assert_array_equal(part["scales"], whole["scales"])


WITH_PLANES = [
    name for name in CASES if not name.startswith("fp4, uneven") and "across" not in name
]


@pytest.mark.parametrize("name", WITH_PLANES)
def test_what_is_taken_apart_means_the_same(tmp_path: Path, name: str) -> None:
    """Also where a last group has fewer inputs than the others."""
    case = CASES[name]()
    parts = take_apart(open_matrix(tmp_path, case))
    assert parts is not None
    order = parts.order
    if order is None:
        order = np.arange(COLUMNS) // (COLUMNS // parts.scales.shape[1])
    numbers = parts.codes if parts.table is None else parts.table[parts.codes]
    lows = 0 if parts.lows is None else parts.lows[:, order]
    found = numbers * parts.scales[:, order] - lows
    np.testing.assert_allclose(found, case.weight, rtol=1e-5, atol=1e-5)


def test_all_is_released_with_the_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[tuple[int, int]] = []
    matrix = open_matrix(tmp_path, CASES["gptq, 4 bits"]())
    monkeypatch.setattr(
        "tgi_trio.shard.checkpoint.mapped_file.MappedFile.release",
        lambda self, first, end: released.append((first, end)),
    )
    matrix.rows(slice(0, 40)).release()
    matrix.rows(slice(40, 96)).columns(slice(0, 64)).release()
    assert not released
    matrix.rows(slice(40, 96)).columns(slice(64, 128)).release()
    assert len(released) == 4
    parts = [matrix.rows(slice(first, first + 8)).place() for first in range(0, ROWS, 8)]
    assert parts == sorted(parts)
    assert parts[0][0] == tmp_path / "model.safetensors"


def test_zero_points_that_wrap_around(tmp_path: Path) -> None:
    """The first version stores 0 - 1."""
    rounded = random_rounded(32, 32, 4, 32)
    tensors = pack_gptq("a", rounded, 4)
    tensors["a.qzeros"][:] = -1  # fifteen everywhere
    case = Case({"quant_method": "gptq", "bits": 4, "group_size": 32}, tensors, rounded.codes, 4, 4)
    exact = rounded.scales.astype(np.float32) * rounded.codes
    np.testing.assert_array_equal(open_matrix(tmp_path, case).dequantised(), exact)


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "nan": (lambda t: t["a.scales"].view(-1)[3].fill_(np.nan), "'a.scales' in .* holds a scale"),
    "inf": (lambda t: t["a.scales"].view(-1)[3].fill_(np.inf), "'a.scales' in .* holds a scale"),
    "group": (lambda t: t["a.g_idx"][5].fill_(4), "'a.g_idx' in .* into group 4 of 4"),
    "huge group": (lambda t: t["a.g_idx"][5].fill_(2**31 - 1), "group 2147483647 of 4"),
    "negative group": (lambda t: t["a.g_idx"][5].fill_(-1), "'a.g_idx' in .* into group -1 of 4"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_numbers_that_cannot_be_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    case = CASES["gptq, 4 bits"]()
    change, message = DAMAGES[damage]
    change(case.tensors)
    with pytest.raises(ModelLoadError, match=message):
        open_matrix(tmp_path, case).dequantised()


@pytest.mark.parametrize(
    ("tensor", "place", "value", "message"),
    [
        ("q_groups", 0, 7, "'a.q_groups' in .* a group of 7 bits in words 0 to 6; EXL2 has 2, 3"),
        ("q_groups", 1, 1, "a group of 6 bits in words 1 to 6"),
        ("q_groups", 3, 4, "a group of 6 bits in words 0 to 4"),
        ("q_groups", 6, 4, "a group of 4 bits in words 14 to 16"),
        ("q_invperm", 3, 128, "'a.q_invperm' in .* puts two inputs at one place, or one nowhere"),
        ("q_scale_max", 1, np.nan, "'a.q_scale_max' in .* holds a scale that is infinite"),
    ],
)
def test_what_describes_exl2_is_checked(
    tmp_path: Path, tensor: str, place: int, value: float, message: str
) -> None:
    case = CASES["exl2, 2 to 6 bits"]()
    case.tensors[f"a.{tensor}"][place] = value
    with pytest.raises(ModelLoadError, match=message):
        open_matrix(tmp_path, case).dequantised()


def test_exl2_describes_all_inputs_of_a_matrix(tmp_path: Path) -> None:
    case = CASES["exl2, 2 to 6 bits"]()
    case.tensors["a.q_weight"] = case.tensors["a.q_weight"][:-2]
    case.tensors["a.q_groups"] = case.tensors["a.q_groups"][:-2]
    for role in ("q_scale", "q_scale_max"):
        case.tensors[f"a.{role}"] = case.tensors[f"a.{role}"][:-1]
    with pytest.raises(ModelLoadError, match="groups of 96 inputs in all, of a matrix that"):
        open_matrix(tmp_path, case)


def test_outputs_that_exl2_has_padded(tmp_path: Path) -> None:
    weight = np.random.default_rng(3).standard_normal((37, COLUMNS), np.float32)
    tensors, exact = store_exl2((5, 64), (3, 32))("a", weight)
    assert tensors["a.q_weight"].shape[1] == 64
    matrix = open_matrix(tmp_path, Case({"quant_method": "exl2"}, tensors, exact, 8, 32))
    np.testing.assert_array_equal(matrix.dequantised(), exact)
    np.testing.assert_array_equal(matrix.rows(slice(30, 37)).dequantised(), exact[30:])


@pytest.mark.parametrize("name", CASES)
def test_any_bytes_are_numbers_or_refused(tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(11)
    for turn in range(8):
        case = CASES[name]()
        for role, tensor in case.tensors.items():
            if "state" not in role and draw.random() < 0.5:
                content = tensor.view(-1).view(torch.uint8)
                content[:] = torch.from_numpy(draw.integers(0, 256, len(content), np.uint8))
        (tmp_path / str(turn)).mkdir()
        try:
            values = open_matrix(tmp_path / str(turn), case).dequantised()
        except ModelLoadError as error:
            assert f"'{case.name}." in str(error)
            continue
        assert values.shape == case.weight.shape and np.isfinite(values).all()


@pytest.mark.parametrize(
    ("name", "role", "change", "message"),
    [
        ("nf4", "absmax", lambda t: t[3].fill_(np.nan), "'a.weight.absmax' in .* holds a scale"),
        ("nf4", "quant_map", lambda t: t[3].fill_(np.inf), "'a.weight.quant_map' in .* holds a"),
        ("nf4, double", "nested_absmax", lambda t: t[0].fill_(np.nan), "nested_absmax' in .* a sc"),
        ("nf4, double", "nested_quant_map", lambda t: t.fill_(np.nan), "nested_quant_map' in .* a"),
    ],
)
def test_tables_and_scales_of_blocks_are_numbers(
    tmp_path: Path, name: str, role: str, change: Callable[[Any], Any], message: str
) -> None:
    case = CASES[name]()
    change(case.tensors[f"a.weight.{role}"])
    with pytest.raises(ModelLoadError, match=message):
        open_matrix(tmp_path, case).dequantised()


def test_blocks_over_the_ends_of_rows_have_no_planes(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"of 'a\.weight' go over the ends of rows"):
        open_matrix(tmp_path, CASES["fp4, uneven"]()).planes()


def test_bytes_in_the_order_of_another_kernel_are_refused(tmp_path: Path) -> None:
    case = CASES["bitsandbytes"]()
    case.tensors["a.weight_format"].fill_(2)
    with pytest.raises(ModelLoadError, match=r"'a\.weight_format' in .* one kind of GPU"):
        open_matrix(tmp_path, case)


STATE = "a.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocksize": 0}, "blocks of 0 weights"),
        ({"blocksize": 33}, "blocks of 33 weights"),
        ({"blocksize": 2**63}, "says blocksize 9223372036854775808"),
        ({"blocksize": None}, "says blocksize None"),
        ({"shape": [96, 64]}, r"has shape \[96, 64\], but config.json asks for \[96, 128\]"),
        ({"shape": None}, "has shape None"),
        ({"nested_blocksize": -1}, "and of -1 scales"),
        ({"nested_offset": "1"}, "nested_offset '1'"),
        ({"nested_offset": float("nan")}, "nested_offset nan"),
        (None, "holds no JSON object"),
        (..., "cannot be read as JSON"),
    ],
)
def test_what_describes_blocks_is_checked(tmp_path: Path, change: Any, message: str) -> None:
    case = CASES["nf4"]()
    said = json.loads(bytes(case.tensors[STATE].tolist()))
    text = "{" if change is ... else json.dumps(None if change is None else said | change)
    case.tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(ModelLoadError, match=message):
        open_matrix(tmp_path, case)


def test_fp8_has_the_numbers_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3_NUMBERS, codes.view(torch.float8_e4m3fn).float().numpy())


def test_a_weight_of_fp8_that_is_no_number_is_refused(tmp_path: Path) -> None:
    case = CASES["fp8 by channel"]()
    case.tensors["a.weight"].view(torch.uint8)[7, 9] = 0xFF
    with pytest.raises(ModelLoadError, match=r"'a\.weight' in .* stands for a weight that is"):
        open_matrix(tmp_path, case).dequantised()
    with pytest.raises(ModelLoadError, match="no number"):
        take_apart(open_matrix(tmp_path, case))


def test_a_packed_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    case = CASES["packed, 4 bits"]()
    case.tensors["a.weight_shape"][1] -= 1
    with pytest.raises(ModelLoadError, match=r"says that its matrix has shape \[96, 127\]"):
        open_matrix(tmp_path, case)
