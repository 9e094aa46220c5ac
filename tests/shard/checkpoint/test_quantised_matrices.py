"""Matrices in every format of several tensors: what they mean, and any part of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.checkpoint.quantised_cases import (
    CASES,
    COLUMNS,
    ROWS,
    WITH_PLANES,
    Case,
    bitnet,
    open_matrix,
)
from tests.support.bitnet import BITNET_ONLINE
from tests.support.quantised import Array, Tensors, pack_gptq, random_rounded, store_exl2
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.gguf_blocks import HALVES_OF_E2M1
from tgi_trio.shard.checkpoint.unpacked import unpack_matrix


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


EVEN = [name for name in CASES if not re.search("uneven|fp8|across|exl3", name)]


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


@pytest.mark.parametrize("name", WITH_PLANES)
def test_what_is_taken_apart_means_the_same(tmp_path: Path, name: str) -> None:
    """Also where a last group has fewer inputs than the others."""
    case = CASES[name]()
    parts = unpack_matrix(open_matrix(tmp_path, case))
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


@pytest.mark.sampled(3)
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
        unpack_matrix(open_matrix(tmp_path, case))


def test_a_packed_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    case = CASES["packed, 4 bits"]()
    case.tensors["a.weight_shape"][1] -= 1
    with pytest.raises(ModelLoadError, match=r"says that its matrix has shape \[96, 127\]"):
        open_matrix(tmp_path, case)
