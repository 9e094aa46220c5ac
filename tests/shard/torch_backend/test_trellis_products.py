"""Products with EXL3's matrices as they are stored, against those of the weights they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.checkpoint.quantised_cases import Case, open_matrix
from tests.shard.torch_backend.interpreter import (
    DEVICE,
    launch_to_compile,
    need_triton,
    sum_in_order,
)
from tests.support.exl3 import EXL3, store_exl3
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.exl3 import read_rings

need_triton()

from tests.shard.torch_backend.test_warm_kernels import compiled_for  # noqa: E402  (Triton's)
from tests.shard.torch_backend.trellis_support import (  # noqa: E402
    FLOAT,
    HALF,
    check_product,
    encoded,
    linear_of,
    some_matrix,
    some_rows,
    write_for_library,
)
from tgi_trio.shard.torch_backend.layers.linears import trellis_inputs, trellis_linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import (  # noqa: E402
    join_trellises,
)
from tgi_trio.shard.torch_backend.layers.linears.trellis_inputs import list_products  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import (  # noqa: E402
    count_parts,
)
from tgi_trio.testing.sanitizer.sanitizer import Sanitizer  # noqa: E402

# Every width has a codebook, and every codebook widths of both sizes of runs, whole and half.
WIDTHS = [
    *((bits, ("3inst", "mcg", "mul1")[bits % 3]) for bits in range(1, 9)),
    *((bits + 0.5, "mul1") for bits in range(1, 8)),
    *((4, "3inst"), (6, "mcg"), (4, "mul1")),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(("bits", "book"), WIDTHS)
def test_every_width_of_every_codebook(tmp_path: Path, bits: float, book: str, rows: int) -> None:
    """Inputs and outputs are padded; what rounds a number to float16 otherwise would be seen."""
    matrix, exact = some_matrix(tmp_path, 200, 150, bits, book)
    part = encoded(matrix)
    assert part.rings.nbytes * 8 == bits * 256 * 256  # as the file has it
    check_product(linear_of([part]), exact, rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 20, 64, 70])
def test_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """Few rows, some on matrix units, and numbers that are written for a library."""
    write_for_library(monkeypatch)
    bits, book = ((5, "3inst"), (3.5, "mul1"), (8, "mcg"))[rows % 3]
    matrix, exact = some_matrix(tmp_path, 300, 256, bits, book)
    bias = some_rows(1, 300, dtype)[0]
    check_product(linear_of([encoded(matrix)], dtype, bias), exact, rows, dtype, bias)


def test_rounding_is_that_of_what_is_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written for a library has been turned before it is rounded: an output that is much
    larger than others leaves their results alone.
    """
    write_for_library(monkeypatch)
    matrix, exact = some_matrix(tmp_path, 128, 256, 4, "mcg")
    part = encoded(matrix)
    part.output_scales[5] *= 1000
    linear, x = linear_of([part], HALF), some_rows(70, 256, HALF)
    scaled = torch.from_numpy(exact.astype(np.float64))
    found, others = linear(x).double().cpu(), [i for i in range(128) if i != 5]
    expected = x.double().cpu() @ scaled.T
    wrong = (found - expected)[:, others].abs() / (x.double().cpu().abs() @ scaled.abs().T)[
        :, others
    ]
    assert wrong.max() < torch.finfo(HALF).eps


def test_signs_in_place_of_scales(tmp_path: Path) -> None:
    matrix, exact = some_matrix(tmp_path, 128, 256, 4, "3inst", signs=True)
    check_product(linear_of([encoded(matrix)]), exact, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_matrices_of_several_sorts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """Queries, keys and values scale their inputs by themselves, some alike, and one is plain."""
    write_for_library(monkeypatch)
    made = [
        some_matrix(tmp_path / str(i), outputs, 256, *how)
        for i, (outputs, how) in enumerate(
            [(256, (3, "mcg")), (128, (3, "mcg")), (384, (4, "mcg")), (130, (4, "mcg"))]
        )
    ]
    parts: list[Any] = [encoded(matrix) for matrix, _ in made]
    exact = np.concatenate([weight for _, weight in made])
    assert [each.counts for each in join_trellises(parts)] == [(256, 128), (384, 130)]
    plain = some_rows(40, 256, dtype)
    exact = np.concatenate([exact[:384], plain.float().cpu().numpy(), exact[384:]])
    bias = some_rows(1, len(exact), dtype)[0]
    linear = linear_of([*parts[:2], plain, *parts[2:]], dtype, bias)
    assert linear.outputs == len(exact) and linear.nbytes() == sum(
        each.nbytes if isinstance(each, torch.Tensor) else each.nbytes()
        for each in (*parts, plain, bias)
    )
    check_product(linear, exact, rows, dtype, bias)


def test_equally_many_outputs_of_several_sorts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are one product of a library, unless they have a bias or are written one by one."""
    write_for_library(monkeypatch)
    matrix, exact = some_matrix(tmp_path, 128, 256)
    parts, weights = [], []
    for i in range(3):
        own = encoded(matrix)
        factors = 2.0 ** ((np.arange(256) % (i + 2)) - 1)
        own.input_scales[:] = own.input_scales * torch.from_numpy(factors).half()
        parts.append(own)
        weights.append(exact * factors)
    weight = np.concatenate(weights)
    bias = some_rows(1, 384, HALF)[0]
    for given in (None, bias):
        check_product(linear_of(list(parts), HALF, given), weight, 70, HALF, given)
    monkeypatch.setattr(trellis_inputs, "_SCRATCH", 2 * 128 * 256 * 2)
    check_product(linear_of(list(parts), HALF), weight, 70, HALF)


def test_products_of_a_library() -> None:
    """As many at once as are equally large; sorts that are cut are apart."""

    def products(counts: tuple[int, ...], first: int, last: int, together: bool = True) -> Any:
        found = list_products(counts, first, last, together=together)
        return [(p.sorts.stop - p.sorts.start, p.outputs.start, p.outputs.stop) for p in found]

    assert products((512, 128, 128), 0, 768) == [(1, 0, 512), (2, 512, 768)]
    assert products((128, 128, 128), 0, 384) == [(3, 0, 384)]
    assert products((128, 128, 256), 0, 512) == [(2, 0, 256), (1, 256, 512)]
    assert products((256, 128, 128, 128), 0, 640) == [(1, 0, 256), (3, 256, 640)]
    assert products((256, 256), 128, 384) == [(2, 128, 384)]
    assert products((256, 256), 0, 384) == [(1, 0, 256), (1, 256, 384)]
    assert products((256, 256), 0, 512, together=False) == [(1, 0, 256), (1, 256, 512)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("rows", [65, 130])
def test_tiles_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """Programs of several tiles share a block each, and leave their counters as they found them."""
    matrix, exact = some_matrix(tmp_path, 256, 640)
    linear = linear_of([encoded(matrix)], dtype)
    for _ in range(2):
        check_product(linear, exact, rows, dtype)
    assert linear.arrived is not None and not linear.arrived.any()
    if dtype is FLOAT:  # some rows at a time
        monkeypatch.setattr(trellis_linear, "MOST_ROWS", 64)
        check_product(linear, exact, rows, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_programs_that_share_a_block(tmp_path: Path, rows: int, dtype: torch.dtype) -> None:
    """And leave their counters as they found them."""
    matrix, exact = some_matrix(tmp_path, 256, 1152)
    assert count_parts(2, 9) == 9 and count_parts(200, 9) == 2 and count_parts(600, 9) == 1
    linear = linear_of([encoded(matrix)], dtype)
    for _ in range(2):
        check_product(linear, exact, rows, dtype)
    assert linear.arrived is not None and not linear.arrived.any()


@pytest.mark.parametrize(("blocks", "runs"), [(1, 1), (32, 32), (48, 32), (32, 112), (7, 37)])
def test_every_part_has_inputs(blocks: int, runs: int) -> None:
    parts = count_parts(blocks, runs)
    assert 1 <= parts <= runs and (parts - 1) * -(-runs // parts) < runs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_blocks_that_nobody_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(trellis_linear, "_PROGRAMS", 1)
    matrix, exact = some_matrix(tmp_path, 256, 384)
    check_product(linear_of([encoded(matrix)], HALF), exact, rows, HALF)


def test_no_rows(tmp_path: Path) -> None:
    matrix, _ = some_matrix(tmp_path, 128, 256)
    assert linear_of([encoded(matrix)])(some_rows(1, 256)[:0]).shape == (0, 128)


def test_numbers_are_written_as_much_as_scratch_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_for_library(monkeypatch)
    matrix, _ = some_matrix(tmp_path, 380, 256)
    linear, x = linear_of([encoded(matrix)], HALF), some_rows(70, 256, HALF)
    whole = linear(x)
    monkeypatch.setattr(trellis_inputs, "_SCRATCH", 2 * 128 * 256 * 2)
    torch.testing.assert_close(linear(x), whole, atol=0, rtol=0)


def test_parts_that_are_turned_whole(tmp_path: Path) -> None:
    """Ranks have outputs and inputs by 128; a matrix's own end may be anywhere."""
    matrix, exact = some_matrix(tmp_path, 300, 456, 2, "mul1")
    part = matrix.rows(slice(128, 300)).columns(slice(256, 456))
    check_product(linear_of([encoded(part)]), exact[128:300, 256:456], 3)
    for cut in (
        matrix.rows(slice(64, 300)),
        matrix.rows(slice(0, 64)),
        matrix.columns(slice(0, 200)),
        matrix.columns(slice(16, 456)),
    ):
        assert read_rings(cut) is None


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    weight = np.ones((128, 128), np.float32)
    tensors, exact = store_exl3(4)("a", weight)
    tensors["a.suh"][7] = np.nan
    matrix = open_matrix(tmp_path, Case(EXL3, tensors, exact, 4, 128))
    with pytest.raises(ModelLoadError, match=r"'a.suh' in .* holds a scale that is infinite"):
        read_rings(matrix)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_a_row_alone_and_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """To the bit where batch invariance is kept."""
    sum_in_order(monkeypatch)
    matrix, exact = some_matrix(tmp_path, 256, 384)
    linear = linear_of([encoded(matrix)], dtype, invariant=True)
    x = some_rows(70, 384, dtype)
    check_product(linear, exact, 70, dtype)
    every = linear(x)
    for part in (slice(0, 1), slice(3, 10), slice(60, 70)):
        assert torch.equal(linear(x[part]), every[part])


@pytest.mark.skipif(DEVICE != "cpu", reason="NVIDIA's own is for devices")
def test_what_is_launched_to_be_compiled_reads_only_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_to_compile(monkeypatch)
    matrix, _ = some_matrix(tmp_path, 256, 1152)
    sanitizer = Sanitizer()
    with sanitizer.on(), sanitizer.host():
        linear_of([encoded(matrix)], HALF).pack()
    assert sanitizer.findings.launches["multiply_turned"] and not sanitizer.findings.take()


def test_all_variants_are_compiled_when_it_is_packed(tmp_path: Path) -> None:
    """What is launched for any number of rows has been launched before."""
    from tgi_trio.shard.torch_backend.kernels.linears import trellis_inputs, trellis_products

    own, other = (some_matrix(tmp_path / str(n), n, 1152, n / 64)[0] for n in (256, 128))
    linear = linear_of([encoded(own), encoded(other)], HALF, some_rows(1, 384, HALF)[0])
    seen: list[tuple[Any, ...]] = []

    class Noting:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **told: seen.append(compiled_for(self.kernel, args, told))

    rooms = {
        "turn_inputs": trellis_inputs,
        "multiply_turned_few": trellis_products,
        "multiply_turned": trellis_products,
        "turn_and_write": trellis_inputs,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, room in rooms.items():
            patch.setattr(room, name, Noting(getattr(room, name)))
        launch_to_compile(patch)
        linear.pack()
        warm = set(seen)
        for rows in (1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 129, 257):
            linear(some_rows(rows, 1152, HALF))
    assert set(seen) == warm
    assert {name for name, *_ in warm} == set(rooms)
