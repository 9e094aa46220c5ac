"""Products with matrices that stay codes, against those of what the codes stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.checkpoint.quantised_cases import CASES, WITH_PLANES, open_matrix
from tests.shard.checkpoint.test_rounding import put_together
from tests.shard.torch_backend.interpreter import DEVICE, launch_to_compile, need_triton
from tests.support.quantised import Array
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.gguf import FUNCTIONS
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import round_matrix
from tgi_trio.shard.checkpoint.unpacked import (
    UNPACKED_CODINGS,
    NestedScales,
    UnpackedMatrix,
    unpack_matrix,
)

need_triton()

from tgi_trio.shard.torch_backend.layers.linears import code_tiles, coded_linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import (  # noqa: E402
    KINDS,
    Codes,
    encode,
    join,
)
from tgi_trio.testing.sanitizer.sanitizer import Sanitizer  # noqa: E402

HEADS = ("scales", "wide scales", "constant", "zeros", "lows", "nested", "nested lows")


def some_parts(
    kind: str, outputs: int, inputs: int, group: int, heads: str = "scales", seed: int = 0
) -> UnpackedMatrix:
    """Return any codes of a kind, in runs of `group` inputs."""
    draw = np.random.default_rng(seed)
    bits, numbers = KINDS[kind]
    codes = draw.integers(0, 1 << bits, (outputs, inputs)).astype(np.uint8)
    codes[0, 0] = (1 << bits) - 1
    table = None
    if numbers == "signed":
        codes = codes.view(np.int8)
    elif numbers == "table":
        table = np.sort(draw.uniform(-1, 1, 16)).astype(np.float32)
    elif numbers == "e4m3":
        codes[codes & 0x7F == 0x7F] = 3
        table = E4M3_NUMBERS
    runs = -(-inputs // group)
    scales = draw.uniform(0.01, 0.1, (outputs, runs)).astype(np.float16).astype(np.float32)
    lows, nested, nested_lows = None, None, None
    if heads == "wide scales":
        scales *= np.float32(1 + 2.0**-20)
    elif heads == "constant":
        lows = scales * np.float32(8)
    elif heads == "zeros":
        lows = scales * draw.integers(0, 16, scales.shape).astype(np.float32)
    elif heads == "lows":
        lows = draw.uniform(0, 1, scales.shape).astype(np.float32)
    elif heads.startswith("nested"):
        units = draw.uniform(0.001, 0.01, (2, outputs, -(-runs // 2))).astype(np.float16)
        steps = draw.integers(1, 64, (2, outputs, runs)).astype(np.uint8)
        wide = units.astype(np.float32).repeat(2, axis=2)[..., :runs]
        scales, nested = wide[0] * steps[0], NestedScales(steps[0], units[0].astype(np.float32))
        if heads == "nested lows":
            lows = wide[1] * steps[1]
            nested_lows = NestedScales(steps[1], units[1].astype(np.float32))
    order = None if inputs % group == 0 else np.arange(inputs) // group
    return UnpackedMatrix(codes, scales, lows, table, order, nested, nested_lows)


def numbers_of(parts: UnpackedMatrix) -> Array:
    return np.asarray(put_together(parts), np.float64)


def coded(parts: UnpackedMatrix) -> Codes:
    codes = encode(parts)
    assert codes is not None
    return codes


def some_rows(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inputs, generator=draw).to(DEVICE, dtype)


def check_product(
    parts: UnpackedMatrix, rows: int, dtype: torch.dtype = torch.float32, *, biased: bool = False
) -> CodedLinear:
    """Compare with the product in float64, by what weights are rounded to in a dtype."""
    weight = torch.from_numpy(numbers_of(parts))
    outputs, inputs = weight.shape
    x = some_rows(rows, inputs, dtype)
    bias = some_rows(1, outputs, dtype)[0] if biased else None
    linear = CodedLinear([coded(parts)], bias, dtype, torch.device(DEVICE))
    found = linear(x)
    exact = x.double().cpu() @ weight.T
    if bias is not None:
        exact += bias.double().cpu()
    assert found.dtype is dtype and found.shape == exact.shape
    # In half precision weights and results are rounded, by half a step each. In float32 so are all
    # sums, in any order, and weights where they are made, four times at most.
    step = (inputs + 4) * 2.0**-24 if dtype is torch.float32 else torch.finfo(dtype).eps
    sizes = x.double().cpu().abs() @ weight.abs().T + 1
    assert ((found.double().cpu() - exact).abs() / sizes).max() < step
    return linear


# Sizes of runs go round, so that each comes with every kind and every sort of scales.
SORTS = [
    (kind, heads, (16, 32, 64, 128)[(i + j) % 4])
    for i, kind in enumerate(KINDS)
    for j, heads in enumerate(HEADS)
]


# Each kind with the sorts of scales whose products differ from others in half precision.
SORTS_OF_HALF = [
    (kind, HEADS[(2 + i + j) % len(HEADS)]) for i, kind in enumerate(KINDS) for j in (0, 3)
]


@pytest.mark.parametrize(("kind", "heads", "group"), SORTS)
def test_every_kind_with_every_sort_of_scales(kind: str, heads: str, group: int) -> None:
    check_product(some_parts(kind, 40, 256, group, heads), 3)


@pytest.mark.parametrize("heads", ["scales", "zeros"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_for_all_inputs(kind: str, heads: str) -> None:
    check_product(some_parts(kind, 33, 96, 96, heads), 5, biased=True)


@pytest.mark.parametrize(("rows", "kind"), [(1, "u4"), (40, "u4"), (40, "u6"), (1, "i8")])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(7, 32, 16), (70, 112, 16), (65, 160, 32), (1, 48, 48), (129, 192, 128), (33, 576, 96)],
)
def test_ragged_sizes(kind: str, outputs: int, inputs: int, group: int, rows: int) -> None:
    """Neither outputs, inputs, runs nor rows fill their tiles."""
    check_product(some_parts(kind, outputs, inputs, group, "lows"), rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "biased"), [(1, True), (16, False)])
def test_programs_that_share_a_tile(kind: str, rows: int, biased: bool) -> None:
    parts = some_parts(kind, 40, 2048 + 32, 32, "constant")
    linear = check_product(parts, rows, biased=biased)
    (codes,) = linear._parts
    assert isinstance(codes, Codes)
    tile = code_tiles.choose_tiles(torch.float32, "ampere", "u4")[0]
    assert coded_linear.count_parts(codes, tile, rows) > 4


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [*((torch.bfloat16, rows) for rows in (2, 20, 260)), (torch.float16, 20)],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "heads"), [("u4", "zeros"), ("u6", "nested"), ("t4", "scales"), ("e4m3", "scales")]
)
def test_half_precision(kind: str, heads: str, rows: int, dtype: torch.dtype) -> None:
    check_product(some_parts(kind, 72, 640, 32, heads), rows, dtype, biased=True)


def test_no_rows() -> None:
    linear = CodedLinear(
        [coded(some_parts("u4", 8, 64, 32))], None, torch.float32, torch.device(DEVICE)
    )
    assert linear(some_rows(1, 64)[:0]).shape == (0, 8)


@pytest.mark.parametrize("counts", [(32, 32, 32), (20, 50, 26), (16, 16, 64), (1, 94, 1)])
@pytest.mark.parametrize("kind", ["u4", "u8"])
def test_inputs_in_any_order(kind: str, counts: tuple[int, ...]) -> None:
    """Runs of inputs that lie anywhere, also of any size: those of one rank."""
    draw = np.random.default_rng(1)
    parts = some_parts(kind, 24, 96, 32, "zeros")
    order = draw.permutation(np.repeat(np.arange(3), counts))
    scales = parts.scales[:, :3]
    lows = None if parts.lows is None else parts.lows[:, :3]
    check_product(UnpackedMatrix(parts.codes, scales, lows, None, order), 4)


@pytest.mark.parametrize("name", WITH_PLANES)
def test_every_format_of_checkpoints(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    parts = unpack_matrix(open_matrix(tmp_path, case))
    assert parts is not None
    codes = encode(parts)
    if case.group in (40, 100):  # as no kernel has them
        assert codes is None
        return
    assert codes is not None
    np.testing.assert_allclose(numbers_of(parts), case.weight, rtol=1e-5, atol=1e-5)
    check_product(parts, 3)


@pytest.mark.parametrize("name", [name for name in UNPACKED_CODINGS if name in BY_NAME])
def test_every_type_of_gguf(name: str) -> None:
    kind, draw = BY_NAME[name], np.random.default_rng(0)
    per_row = 512 // kind.weights
    blocks = draw.integers(0, 256, (24, per_row, kind.bytes), dtype=np.uint8)
    halves = draw.uniform(0.001, 0.1, (24, per_row, 2)).astype(np.float16).view(np.uint8)
    place = slice(0, 4)
    if name == "MXFP4":
        blocks[..., 0] = draw.integers(118, 130, (24, per_row))
        place = slice(0, 0)
    elif name in ("Q2_K", "Q3_K", "Q6_K", "TQ1_0", "TQ2_0"):
        place = slice(kind.bytes - (4 if name == "Q2_K" else 2), kind.bytes)
    elif name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"):
        place = slice(0, 2)
    blocks[..., place] = halves[..., : place.stop - place.start]
    parts = UNPACKED_CODINGS[name]({"blocks": blocks})
    exact = FUNCTIONS[name](blocks.reshape(-1, kind.bytes)).reshape(24, -1)
    np.testing.assert_allclose(numbers_of(parts), exact, rtol=1e-5, atol=1e-5)
    codes = check_product(parts, 3)._parts[0]
    assert isinstance(codes, Codes)
    # What scales and lows take is what they take in the file, or half a bit more. Codes of 3 bits
    # take 4.
    stored = 8 * codes.nbytes() / exact.size - (name == "Q3_K")
    assert stored <= 8 * kind.bytes / kind.weights + 0.5, stored
    if name in (
        "Q3_K",
        "Q6_K",
        "TQ1_0",
        "TQ2_0",
    ):  # whose zero is one number, also where a scale is zero
        assert codes.form.lows == "constant"


@pytest.mark.parametrize("word", ENCODINGS)
def test_every_word_of_quantize(word: str) -> None:
    values = np.random.default_rng(2).standard_normal((40, 512)).astype(np.float32)
    parts = unpack_matrix(round_matrix(PlainMatrix(values), ENCODINGS[word]))
    assert parts is not None
    check_product(parts, 3)


def test_neighbours_that_are_alike_are_one_launch() -> None:
    """Queries, keys and values of a kind are one matrix; those of others are not."""
    every: list[Any] = [some_parts("u4", n, 128, 32, "constant", seed=n) for n in (48, 16, 24)]
    every.append(some_parts("u6", 16, 128, 16, "nested"))
    codes = [coded(parts) for parts in every]
    assert [each.outputs for each in join(codes)] == [88, 16]
    plain, x, bias = torch.randn(8, 128), some_rows(4, 128), some_rows(1, 112)[0]
    linear = CodedLinear([*codes, plain], bias, torch.float32, torch.device(DEVICE))
    weight = torch.cat([torch.from_numpy(numbers_of(parts)).float() for parts in every] + [plain])
    torch.testing.assert_close(linear(x).cpu(), x.cpu() @ weight.T + bias.cpu(), atol=2e-4, rtol=0)
    assert linear.nbytes() == sum(each.nbytes() for each in codes) + plain.nbytes + bias.nbytes


@pytest.mark.parametrize("order", [True, False])
def test_others_are_apart(order: bool) -> None:
    """Tables and orders belong to a matrix."""
    one, other = (some_parts("u4" if order else "t4", 8, 64, 32, seed=i) for i in (0, 1))
    if order:
        draw = np.random.default_rng(5)
        runs = [draw.permutation(np.arange(64) // 32) for _ in range(2)]
        one, other = (
            UnpackedMatrix(p.codes, p.scales, order=o)
            for p, o in zip((one, other), runs, strict=True)
        )
    assert len(join([coded(one), coded(other)])) == 2
    assert len(join([coded(one), coded(one)])) == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="NVIDIA's own is for devices")
def test_what_is_launched_to_be_compiled_reads_only_what_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_to_compile(monkeypatch)
    codes, device = coded(some_parts("u4", 40, 2048, 32)), torch.device(DEVICE)
    sanitizer = Sanitizer()
    with sanitizer.on(), sanitizer.host():
        CodedLinear([codes], None, torch.bfloat16, device).pack()
    assert sanitizer.findings.launches["add_parts"] and not sanitizer.findings.take()


@pytest.mark.parametrize("kind", ["u4", "u6", "i8"])
def test_all_variants_are_compiled_when_it_is_packed(kind: str) -> None:
    """What is launched for any number of rows has been launched before."""
    linear = CodedLinear(
        [coded(some_parts(kind, 40, 2048, 32))], None, torch.bfloat16, torch.device(DEVICE)
    )
    seen: list[tuple[str, Any, Any]] = []
    from tgi_trio.shard.torch_backend.kernels.linears import codes, few_codes, written_codes

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **told: seen.append(
                (self.name, told.get("DIVIDED"), told.get("ROWS"))
            )

    rooms = {
        "multiply_codes": codes,
        "multiply_few_rows": few_codes,
        "write_numbers": written_codes,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, room in rooms.items():
            patch.setattr(room, name, Noting(name))
        launch_to_compile(patch)
        linear.pack()
        warm = set(seen)
        for rows in (1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 129, 257):
            linear(some_rows(rows, 2048, torch.bfloat16))
    assert set(seen) == warm
    assert {name for name, *_ in warm} == set(rooms)


@pytest.mark.parametrize(("kind", "heads"), SORTS_OF_HALF)
def test_few_rows_and_many_in_half_precision(kind: str, heads: str) -> None:
    """By kernels of their own: codes come before scales, and numbers are written for a library."""
    group = 16 if heads == "nested" else 32
    for rows in (1, 2, 130):
        check_product(some_parts(kind, 21, 192, group, heads), rows, torch.bfloat16, biased=True)


@pytest.mark.parametrize("rows", [1, 2, 130])
def test_a_scale_for_all_inputs_in_half_precision(rows: int) -> None:
    for kind, heads in (("u4", "zeros"), ("e4m3", "scales"), ("i8", "scales"), ("u8", "constant")):
        check_product(some_parts(kind, 19, 288, 288, heads), rows, torch.float16)


@pytest.mark.parametrize("rows", [1, 2, 3, 130])
def test_any_order_in_half_precision(rows: int) -> None:
    parts = some_parts("u4", 24, 96, 32, "zeros")
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(3), (20, 50, 26)))
    check_product(replace(parts, order=order), rows, torch.bfloat16)


def test_numbers_are_written_as_much_as_scratch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, x = some_parts("u4", 40, 64, 32, "lows"), some_rows(130, 64, torch.bfloat16)
    bias = some_rows(1, 40, torch.bfloat16)[0]
    linear = CodedLinear([coded(parts)], bias, torch.bfloat16, torch.device(DEVICE))
    whole = linear(x)
    monkeypatch.setattr(coded_linear, "_SCRATCH", 12 * 64 * 2)
    torch.testing.assert_close(linear(x), whole, atol=0, rtol=0)


def rounded_rows(x: torch.Tensor, most: float) -> torch.Tensor:
    """Return rows rounded as products of 8-bit numbers have them, by torch's own numbers."""
    scale = x.float().abs().amax(1, keepdim=True) / most
    shrunk = x.float() / scale
    rounded = shrunk.round() if most == 127 else shrunk.to(torch.float8_e4m3fn).float()
    return rounded.double() * scale


@pytest.mark.parametrize(("kind", "most"), [("i8", 127.0), ("e4m3", 448.0)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_activations_of_eight_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: float, rows: int
) -> None:
    """Alone and among others a row is rounded by itself."""
    launch_to_compile(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    parts = some_parts(kind, 48, 112, 112)
    weight, x = torch.from_numpy(numbers_of(parts)), some_rows(rows, 112, torch.bfloat16)
    x[0, 3] = 40.0
    bias = some_rows(1, 48, torch.bfloat16)[0]
    linear = CodedLinear([coded(parts)], bias, torch.bfloat16, torch.device(DEVICE), activations=8)
    assert linear.rounds
    linear.pack()
    found = linear(x)
    exact = rounded_rows(x.cpu(), most) @ weight.T + bias.double().cpu()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double().cpu(), exact, atol=0.05, rtol=0.02)
    torch.testing.assert_close(linear(x[:1]), found[:1], atol=0, rtol=0)
    coarse = (exact - (x.double().cpu() @ weight.T + bias.double().cpu())).abs().max()
    assert coarse > 0.1  # the test would see weights alone


@pytest.mark.parametrize(
    ("kind", "group", "heads"), [("u4", 128, "zeros"), ("e4m3", 32, "scales"), ("i8", 32, "scales")]
)
def test_other_matrices_take_no_rounded_activations(kind: str, group: int, heads: str) -> None:
    parts = coded(some_parts(kind, 48, 128, group, heads))
    device = torch.device(DEVICE)
    assert not CodedLinear([parts], None, torch.bfloat16, device, activations=8).rounds
