"""How matrices whose groups are of any size, in any order, become panels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.shard.checkpoint.quantised_cases import CASES, open_matrix
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.cpu_backend.kinds.floating import E2M1, E4M3, TABLE
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, Codes
from tgi_trio.shard.cpu_backend.kinds.table import find_packing
from tgi_trio.shard.cpu_backend.packing import check_codes
from tgi_trio.shard.cpu_backend.self_tests.kinds import dequantise

Array = np.ndarray[Any, Any]
PLANES = {"codes", "scales", "zeros"}


@dataclass
class Made:
    """As much of a `StoredMatrix` as packing looks at."""

    coding: str
    bits: int
    group: int
    held: dict[str, Array]

    @property
    def shape(self) -> tuple[int, int]:
        return self.held["codes"].shape

    def rows(self, part: slice) -> Made:
        own = {name: plane[part] if name in PLANES else plane for name, plane in self.held.items()}
        return replace(self, held=own)

    def planes(self) -> dict[str, Array]:
        return self.held


def make(coding: str, inputs: int, groups: Array, group: int, seed: int) -> tuple[Made, Array]:
    """Return a matrix of 5 outputs, and what it means."""
    draw, count = np.random.default_rng(seed), int(groups.max()) + 1
    scales = draw.uniform(0.1, 1, (5, count)).astype(np.float32)
    held = {"codes": draw.integers(0, 16, (5, inputs), np.uint8), "scales": scales}
    if coding == "table":
        held["table"] = draw.standard_normal(16, np.float32)
        return Made(coding, 4, group, held), held["table"][held["codes"]] * scales[:, groups]
    held["zeros"] = draw.integers(0, 16, (5, count), np.uint8)
    if coding == "affine in any order":
        held["groups"] = groups
    numbers = held["codes"].astype(np.float64) - held["zeros"][:, groups]
    return Made(coding, 4, group, held), numbers * scales[:, groups]


def numbers_of_panels(matrix: Made) -> Array | None:
    """Return what the panels of a matrix mean, its inputs in the order of the matrix."""
    packing = find_packing(matrix)  # type: ignore[arg-type]
    if packing is None:
        return None
    codes = packing.arrange(packing.stored.read(matrix.planes()))
    width = packing.count_inputs(matrix.shape[1])
    assert codes.codes.shape[1] == width
    assert packing.span % BLOCK_INPUTS == width % BLOCK_INPUTS == 0
    found = dequantise(packing.kind, codes, packing.span)
    if not packing.order:
        return found
    sources = packing.sources
    assert sorted(sources[sources >= 0].tolist()) == list(range(matrix.shape[1]))
    result = np.zeros(matrix.shape)
    result[:, sources[sources >= 0]] = found[:, sources >= 0]
    return result


@given(
    st.sampled_from(["affine", "affine in any order", "table"]),
    st.integers(1, 9),
    st.integers(1, 200),
    st.integers(0, 2**31),
)
def test_panels_mean_what_the_matrix_does(coding: str, blocks: int, group: int, seed: int) -> None:
    inputs = BLOCK_INPUTS * blocks
    assume(coding != "table" or inputs % group == 0)
    groups = np.arange(inputs) // group
    if coding == "affine in any order":
        groups = np.random.default_rng(seed).permutation(groups)
    matrix, exact = make(coding, inputs, groups, group, seed)
    found = numbers_of_panels(matrix)
    if found is None:  # padding would take more memory than it saves
        assert BLOCK_INPUTS * -(-min(group, inputs) // BLOCK_INPUTS) * (groups.max() + 1) > inputs
        return
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_groups_in_order_are_not_padded() -> None:
    """Of 576 inputs in groups of 128 the last group has half."""
    matrix, _ = make("affine", 576, np.arange(576) // 128, 128, 0)
    packing = find_packing(matrix)  # type: ignore[arg-type]
    assert packing is not None and not packing.order and packing.span == 128


def test_a_table_whose_blocks_go_over_rows_becomes_numbers() -> None:
    matrix, _ = make("table", 96, np.arange(96) // 64, 64, 0)
    assert find_packing(matrix) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [127, 255])
def test_a_code_that_is_no_number_is_refused(code: int) -> None:
    codes = np.zeros((4, 32), np.uint8)
    codes[3, 7] = code
    weights = Codes(codes, {"scale": np.ones((4, 1), np.float32)})
    with pytest.raises(ModelLoadError, match="holds a weight that is not a number"):
        check_codes(PlainMatrix(np.zeros((4, 32), np.float32)), E4M3.kind, weights)


@pytest.mark.parametrize(("name", "kind"), [("quark, mxfp4", E2M1), ("nf4", TABLE)])
def test_a_table_of_e2m1_is_known_by_its_numbers(tmp_path: Path, name: str, kind: Any) -> None:
    found = find_packing(open_matrix(tmp_path, CASES[name]()))
    assert found is not None and found.stored is kind
