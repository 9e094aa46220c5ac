"""8-bit codes times activations with a scale for each row, by a matrix unit (AMX).

Where there is none, the kernels are run by Python with a unit of numpy's, and compiled for a
processor that has one.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.shard.cpu_backend.kernel_support import FITTING, LLAMA, cpu_runner
from tests.shard.cpu_backend.test_compiler import in_python
from tests.shard.cpu_backend.test_int8 import dequantised
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import prompts, run, sequences
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.instructions import (
    find_multiplier,
    find_variant,
    multiplies_codes,
)
from tgi_trio.shard.cpu_backend.kernels import matrix_unit
from tgi_trio.shard.cpu_backend.kernels.compiling import write_module
from tgi_trio.shard.cpu_backend.kernels.quantised.digits import multiply_digits
from tgi_trio.shard.cpu_backend.kinds.groups import SIGNED_8, SIGNED_BY_ROWS
from tgi_trio.shard.cpu_backend.kinds.kind import (
    BLOCK_INPUTS,
    DIGIT_ZERO,
    FACTS_BYTES,
    Codes,
    fill_panels,
)
from tgi_trio.shard.cpu_backend.kinds.table import find_packing
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel, open_panel_kernel
from tgi_trio.shard.cpu_backend.scratch_memory import PRODUCTS_BYTES
from tgi_trio.shard.cpu_backend.self_tests.kinds import (
    dequantise,
    multiply,
    random_codes,
    store_digits,
    store_rows,
)
from tgi_trio.shard.cpu_backend.tables import (
    DIRECT,
    OPERATION,
    UNPACK,
    UNPACK_FOR_MANY,
    UNPACKED,
    Buffer,
    Code,
    Form,
)
from tgi_trio.shard.cpu_backend.target import find_target
from tgi_trio.shard.cpu_backend.team import Team
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS

AMX = pytest.mark.skipif(not multiplies_codes(), reason="needs a processor with AMX for bytes")
KIND = SIGNED_BY_ROWS.kind
# A single row, a register that is not full, one, and what follows one, two and four.
ROWS = (1, 5, 16, 17, 32, 33, 64, 70)
# Inputs and the inputs of a span: all, some, and with a last span that is shorter.
SPANS = ((64, 64), (320, 320), (512, 128), (192, 64), (320, 128))
BITS = (8, 16)
FORMS = {8: Form.DIGITS_8, 16: Form.DIGITS_16}

Checkpoint = Callable[..., Path]


def draw_rows(rows: int, inputs: int) -> NDArray[np.float32]:
    """Return activations, some of which are far larger than others."""
    x = np.random.default_rng(rows * inputs).standard_normal((rows, inputs)).astype(np.float32)
    x[:, 7] *= 50
    return x


def draw_weights(inputs: int, span: int, outputs: int = PANEL) -> Codes:
    """Return weights with the least code, which has no counterpart, and the largest."""
    weights = random_codes(KIND, outputs, inputs, span, np.random.default_rng(inputs))
    weights.codes[0], weights.codes[1] = 0, 255
    return weights


class Unit:
    """A matrix unit of numpy's on an array in place of memory, whose places are addresses."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.height = memory, 0
        self.sums = np.zeros((2, 16, PANEL), np.int32)

    def configure(self, rows: int) -> None:
        assert 1 <= rows <= 16
        self.height = rows

    def clear(self, registers: int) -> None:
        self.sums[:registers] = 0

    def add(self, registers: int, inputs: int, apart: int, stride: int, weights: int) -> None:
        panel = self.memory[weights : weights + 2048].view(np.int8).reshape(16, PANEL, 4)
        for register in range(registers):
            first = inputs + register * apart
            rows = np.stack([self.memory[first + i * stride :][:64] for i in range(self.height)])
            whole = rows.reshape(self.height, 16, 4).astype(np.int32)
            self.sums[register, : self.height] += np.einsum("rsi,soi->ro", whole, panel)

    def store(self, registers: int, where: int) -> None:
        for register in range(registers):
            target = self.memory[where + 2048 * register :][: 128 * self.height]
            target[:] = self.sums[register, : self.height].reshape(-1).view(np.uint8)

    def add_four_inputs(self, way, tile, inputs: int, apart: int, weights: int) -> Any:
        panel = self.memory[weights : weights + 128].view(np.int8).reshape(2, 16, 4)
        for digit in range(way.digits):
            x = self.memory[inputs + digit * apart :][:4].astype(np.int32)
            tile[digit] += panel @ x
        return tile

    def store_tile(self, rows: int, columns: int, tile, where: int, stride: int) -> None:
        for row in range(rows):
            target = self.memory[where + row * stride :][: 64 * columns]
            target[:] = np.ascontiguousarray(tile[row], np.int32).reshape(-1).view(np.uint8)

    def read_product(self, way: Multiplier, sums: int, head: int) -> NDArray[np.float32]:
        upper = self._ints(sums) + self._ints(head + 4 * PANEL)
        if way.digits == 1:
            return upper.astype(np.float32)
        lower = self._ints(sums + 2048).astype(np.float32)
        return multiply_add(upper.astype(np.float32), 256.0, lower)

    def _ints(self, where: int) -> NDArray[np.int32]:
        return self.memory[where : where + 64].view(np.int32)

    def load(self, where: int) -> NDArray[np.float32]:
        return self.memory[where : where + 64].view(np.float32).copy()

    def load_float(self, where: int) -> np.float32:
        return np.float32(self.memory[where : where + 4].view(np.float32)[0])

    def write(self, where: int, value: NDArray[np.float32]) -> None:
        self.memory[where : where + 64] = value.astype(np.float32).view(np.uint8)


def multiply_add(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """Return a * b + c, rounded once: float64 holds the products of float32 exactly."""
    return np.asarray(a.astype(np.float64) * b + c, np.float32)


def run_in_python(
    bits: int, x: NDArray[np.float32], weights: Codes, span: int
) -> NDArray[np.float32]:
    """Return rows times a panel, as Python runs the kernels with a unit of numpy's."""
    way, (rows, inputs) = Multiplier(KIND, bits, "vnni", 16, half=True, matrix=True), x.shape
    panel = np.zeros((1, KIND.panel_bytes(inputs, span)), np.uint8)
    fill_panels(panel, KIND, weights, span)
    stored, _ = store_digits(x, way.digits)
    given = np.concatenate([stored, np.full((SPARE_ROWS, stored.shape[1]), 255, np.uint8)])
    room = np.full(PRODUCTS_BYTES, 255, np.uint8)
    sums = np.full((rows + SPARE_ROWS + 16) * 4 * PANEL, 255, np.uint8)
    parts = [given.reshape(-1), panel.reshape(-1), room, sums]
    where = np.cumsum([0, *(len(part) for part in parts)])
    unit = Unit(np.concatenate(parts))
    names: dict[str, Any] = {
        "configure_registers": unit.configure, "release_registers": lambda: None,
        "clear_sums": unit.clear, "add_products_of_bytes": unit.add, "store_sums": unit.store,
        "zeros": lambda rows, columns: np.zeros((rows, columns, 16), np.int32),
        "add_four_inputs": unit.add_four_inputs, "store_tile": unit.store_tile,
        "read_product": unit.read_product, "load": unit.load, "load_float": unit.load_float,
        "store": unit.write, "fma": multiply_add, "multiply": np.multiply,
        "fill": lambda value: np.full(16, value, np.float32),
        "prefetch": int, "prefetch_near": int, "count": int, "lesser": min, "greater": max,
    }  # fmt: skip
    in_python(multiply_digits, {**vars(matrix_unit), **names})(
        way, rows, 0, stored.shape[1], where[1], inputs // BLOCK_INPUTS, span // BLOCK_INPUTS,
        panel.size, DIRECT, where[2], where[3],
    )  # fmt: skip
    return unit.memory[where[3] :].view(np.float32).reshape(-1, PANEL)[:rows]


@cache
def kernel(bits: int) -> PanelKernel:
    return open_panel_kernel(find_multiplier(KIND, bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "span"), SPANS)
def test_the_product_is_that_of_its_factors(bits: int, inputs: int, span: int) -> None:
    weights = draw_weights(inputs, span)
    exact = dequantise(KIND, weights, span)
    for rows in (1, 17, 40):
        x = draw_rows(rows, inputs)
        _, whole = store_digits(x, bits // 8)
        allowed = 1e-6 * (np.abs(whole) @ np.abs(exact).T)
        found = run_in_python(bits, x, weights, span)
        assert (np.abs(found - whole @ exact.T) <= allowed).all()


@AMX
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "span"), SPANS)
def test_a_processor_computes_the_same_bits(bits: int, inputs: int, span: int) -> None:
    weights = draw_weights(inputs, span)
    for rows in (1, 17, 40):
        x = draw_rows(rows, inputs)
        stored, _ = store_rows(kernel(bits).multiplier, x)
        np.testing.assert_array_equal(
            multiply(kernel(bits), weights, span, stored), run_in_python(bits, x, weights, span)
        )


@AMX
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "span"), SPANS)
def test_a_row_has_the_same_sums_among_any_number_of_others(
    bits: int, inputs: int, span: int
) -> None:
    weights, x = draw_weights(inputs, span, 75), draw_rows(max(ROWS), inputs)

    def products(part: NDArray[np.float32], mode: int) -> NDArray[np.float32]:
        stored, _ = store_rows(kernel(bits).multiplier, part)
        return multiply(kernel(bits), weights, span, stored, mode)

    alone = np.concatenate([products(row[None], UNPACK_FOR_MANY) for row in x])
    for rows in ROWS:
        for mode in (DIRECT, UNPACK, UNPACKED, UNPACK_FOR_MANY):
            np.testing.assert_array_equal(products(x[:rows], mode), alone[:rows])


@pytest.mark.parametrize(("bits", "limit"), [(8, 8e-2), (16, 3e-4)])
def test_two_digits_are_much_closer_than_one(bits: int, limit: float) -> None:
    """Than bfloat16, too, whose rounding is 2e-3: some activations are far larger than others."""
    weights, x = draw_weights(512, 512), draw_rows(9, 512)
    exact = x.astype(np.float64) @ dequantise(KIND, weights, 512).T
    found = run_in_python(bits, x, weights, 512)
    assert limit / 8 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < limit


@AMX
def test_codes_are_unpacked_for_look_ups() -> None:
    """As unsigned bytes, from which an embedding takes rows."""
    used, weights = kernel(16), draw_weights(128, 64)
    many, size = used.multiplier.unpacked.kind, KIND.panel_bytes(128, 64)
    panel, room = allocate_zeroed((1, size)), allocate_zeroed((4, many.block_bytes))
    fill_panels(panel, KIND, weights, 64)
    used.code(0, 0, 0, address(panel), 4, 2, size, UNPACK, address(room), 0)
    stored = room[:, many.head_bytes :].reshape(4, 8, PANEL, 4).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(stored.reshape(PANEL, 128), weights.codes)
    assert many.zero == 128
    scales = room[:, : many.head_bytes].view(np.float32).reshape(4, PANEL).T
    np.testing.assert_array_equal(scales, weights.numbers["scale"].repeat(2, 1))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("cores", [[0], [0, 0]])
def test_rows_become_digits_with_a_scale(bits: int, cores: list[int]) -> None:
    """On any processor; threads share rows. Zeros have no scale, and what is no number stays so."""
    digits, (rows, inputs) = bits // 8, (7, 96)
    x = allocate_zeroed((rows, inputs), np.float32)
    x[:] = draw_rows(rows, inputs)
    x[2], x[4, 50] = 0.0, np.nan
    size = digits * inputs + FACTS_BYTES
    found = allocate_zeroed((rows, size))
    operation = np.zeros(1, OPERATION)
    fields = {"code": Code.QUANTISE, "source": Buffer.UNSORTED, "inputs": inputs, "width": inputs}
    for name, value in (fields | {"forms": FORMS[bits]}).items():
        operation[name] = value
    with Team(find_variant(LLAMA, "float32"), operation, cores) as team:
        team.step["end"], team.step["tokens"] = 1, rows
        team.step["buffers"][0, Buffer.UNSORTED] = address(x)
        team.step["buffers"][0, Buffer.DIGITS] = address(found)
        team.run()
    scales = found[:, digits * inputs :][:, :4].copy().view(np.float32)[:, 0]
    assert np.isnan(scales[4]) and scales[2] == 0.0
    numbers = np.zeros((rows, inputs), np.int64)
    for digit in range(digits):
        numbers = numbers * 256 + found[:, digit * inputs : (digit + 1) * inputs]
    numbers -= DIGIT_ZERO << 8 * (digits - 1)
    assert not numbers[2].any()
    own = [0, 1, 3, 5, 6]
    assert (np.abs(numbers[own]).max(1) == (1 << bits - 1) - 1).all()
    off = np.abs(numbers[own] * scales[own, None].astype(np.float64) - x[own])
    assert (off <= 0.5001 * scales[own, None]).all()


@pytest.mark.parametrize(
    ("inputs", "group", "fits"),
    [(128, 128, True), (256, 64, True), (96, 96, False), (96, 32, False)],
)
def test_spans_are_whole_registers(inputs: int, group: int, fits: bool) -> None:
    matrix: Any = SimpleNamespace(coding="int8", bits=8, shape=(32, inputs), group=group)
    found = find_packing(matrix, int8_by_rows=True)
    plain = find_packing(matrix)
    assert found is not None and found.stored is (SIGNED_BY_ROWS if fits else SIGNED_8)
    assert plain is not None and plain.stored is SIGNED_8


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
@pytest.mark.parametrize("bits", BITS)
def test_the_unit_is_used_wherever_it_is_compiled(bits: int) -> None:
    """On any x86: the instructions need a processor only when they run."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu="sapphirerapids", opt=2)
    way = Multiplier(KIND, bits, "vnni", 16, half=True, matrix=True)
    code = machine.emit_assembly(llvm.parse_assembly(write_module(multiply_digits, 10, way, "f")))
    assert "tdpbusd" in code and "tilerelease" in code


@AMX
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_tokens_are_those_of_the_dequantised_weights(checkpoint: Checkpoint, family: str) -> None:
    """However steps are put together, and to the bit as alone."""
    folder = checkpoint(family, **FITTING[family])
    golden = dequantised(Golden(folder)) if family != "mixtral" else None
    options: dict[str, Any] = {"quantize": "eetq", "int8_by_rows": True}
    with cpu_runner(folder, **options, cores=(0, 0)) as (runner, recorder):
        kinds = {kind.name for kind in runner._forward.program.kinds}
        assert KIND.name in kinds and SIGNED_8.kind.name not in kinds
        batch = sequences(prompts(8), 3)
        run(runner, batch, chunk=20, joins=3, seed=1)
        together = [recorder.logits(row.id) for row in batch]
        for row in batch:
            if golden is not None:
                assert_greedy(golden, recorder, row, tolerance=5e-3)
    with cpu_runner(folder, **options) as (runner, recorder):
        for row, expected in list(zip(sequences(prompts(8), 3), together, strict=True))[::3]:
            run(runner, [row])
            assert torch.equal(recorder.logits(row.id), expected)


@AMX
@pytest.mark.parametrize(
    ("dtype", "activations", "words"),
    [
        ("bfloat16", None, f"{KIND.name} x int16"),
        ("bfloat16", 8, f"{KIND.name} x int8"),
        ("float32", 16, f"{KIND.name} x int16"),
        ("float32", None, "int8 weights, float32"),
    ],
)
def test_weights_that_become_int8_are_multiplied_as_asked_for(
    checkpoint: Checkpoint, dtype: str, activations: int | None, words: str
) -> None:
    """In float32 unless the model is in bfloat16, whose products the unit computes as well."""
    folder = checkpoint("llama", **FITTING["llama"])
    settings = ShardSettings(
        model_path=folder, dtype=dtype, quantize="eetq", activations=activations, cpu_threads=1
    )
    runner = load_cpu_runner(settings, read_config(folder))
    try:
        assert words in runner.info.backend
    finally:
        runner.close()


@pytest.mark.parametrize("activations", [None, 8, 16])
def test_what_became_int8_and_fills_no_registers_is_not_rounded_further(
    checkpoint: Checkpoint, activations: int | None
) -> None:
    folder = checkpoint("llama", **FITTING["llama"])
    settings = ShardSettings(model_path=folder, quantize="eetq", activations=activations)
    target = find_target(settings, read_config(folder), None, None)
    assert target.find_bits(SIGNED_8.kind) == (activations or 16)
    plain = find_target(ShardSettings(model_path=folder), read_config(folder), None, None)
    assert plain.find_bits(SIGNED_8.kind) == 8 and plain.find_bits(KIND) == 16
