"""Products by the matrix unit (AMX): as Python runs their kernels, and as a processor does."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import LLAMA
from tests.shard.cpu_backend.test_compiler import in_python
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend import instructions, matrix_unit, verified
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.instructions import find_variant, has_amx
from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel
from tgi_trio.shard.cpu_backend.kernels.compiling import write_module
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import (
    configure_registers,
    multiply_rows_as_matrix,
    prepare_registers,
    release_registers,
    score_two_blocks,
)
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel
from tgi_trio.shard.cpu_backend.machine_code.object_files import MachineCode
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS

AMX = pytest.mark.skipif(not has_amx(), reason="needs a processor with AMX")
VARIANT = find_variant(LLAMA, "bfloat16", pairs="amx")
# One row, less than a register, one, two, and what follows two; 48 features fill one and a half.
ROWS, INPUTS = (0, 1, 3, 16, 17, 32, 33, 50), (32, 48, 576)


@entry
def multiply_panel(variant, rows, inputs, stride, weights, steps, sums):
    prepare_registers(rows)
    row = rows - rows
    while row < rows:
        row += multiply_rows_as_matrix(
            variant, rows - row, rows <= variant.product_rows, inputs + row * stride, stride,
            weights, steps, weights, 4, sums + row * 4 * PANEL,
        )  # fmt: skip
    release_registers()


@entry
def score(variant, rows, queries, stride, keys, size, scores):
    """Score the tokens of the second of three blocks of K, then those of the last."""
    configure_registers(rows)
    score_two_blocks(queries, stride, keys + size, keys + 2 * size, size, scores, 256)
    release_registers()


class MatrixUnit:
    """What the operations do, on an array in place of memory, whose places are addresses."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory, self.height = memory, 0
        self.sums = np.full((2, 2, 16, 16), np.nan, np.float32)

    def configure(self, rows: int) -> None:
        assert 1 <= rows <= 16
        self.height = rows

    def clear(self, blocks: int) -> None:
        self.sums[:blocks] = 0.0

    def add(self, blocks: int, inputs: int, stride: int, weights: int) -> None:
        panel = self._read(weights, 128, 16, 128).reshape(16, 2, 16, 2)
        for block in range(blocks):
            rows = self._read(inputs + 16 * block * stride, stride, self.height, 64)
            for half in range(2):
                self.sums[block, half, : self.height] += of_pairs(rows, panel[:, half])

    def store(self, blocks: int, where: int) -> None:
        for block in range(blocks):
            target = self.memory[where + 2048 * block :][: 128 * self.height].view(np.float32)
            target[:] = self.sums[block, :, : self.height].swapaxes(0, 1).reshape(-1)

    def add_scores(self, queries: int, stride: int, *keys: int) -> None:
        rows = self._read(queries, stride, self.height, 64)
        for block, where in enumerate(keys):
            steps = self._read(where, 64, 16, 64).reshape(16, 16, 2)
            self.sums[0, block, : self.height] += of_pairs(rows, steps)

    def store_scores(self, where: int, stride: int) -> None:
        for row in range(self.height):
            target = self.memory[where + row * stride :][:128].view(np.float32)
            target[:] = self.sums[0, :, row].reshape(-1)

    def add_rest(self, variant, rows, inputs, stride, weights, steps, sums) -> None:
        x = self._read(inputs, stride, rows, 4 * steps)
        panel = self._read(weights, 128, steps, 128).reshape(steps, PANEL, 2)
        target = self.memory[sums : sums + 128 * rows].view(np.float32).reshape(rows, PANEL)
        target += of_pairs(x, panel)

    def _read(self, where: int, stride: int, count: int, size: int) -> Floats:
        rows = [self.memory[where + i * stride :][:size] for i in range(count)]
        return to_float32(np.stack(rows).view(np.uint16))


def of_pairs(x: Floats, weights: Floats) -> Floats:
    """Return x [rows, 2 n] times weights [n, outputs, 2], added up as the unit adds up 32 features.

    First features of pairs apart from second ones; a product of two bfloat16 is exact.
    """
    sums = np.zeros((2, len(x), weights.shape[1]), np.float32)
    for k, pair in enumerate(weights):
        for i in range(2):
            sums[i] += x[:, 2 * k + i, None] * pair[None, :, i]
    return np.asarray(sums[0] + sums[1], np.float32)


def draw(rows: int, inputs: int) -> tuple[Any, Any]:
    """Return bfloat16 activations [rows + SPARE_ROWS, inputs], and a panel with what follows it."""
    rng = np.random.default_rng(rows * inputs)
    # Of many magnitudes, so that the order of a sum shows.
    x = rng.normal(size=(rows, inputs)) * np.exp(rng.normal(0, 3, (rows, inputs)))
    active = allocate_zeroed((rows + SPARE_ROWS, inputs), np.uint16)
    active[:rows] = to_bfloat16(x.astype(np.float32))
    panel = allocate_zeroed((inputs // 2 + 32, PANEL, 2), np.uint16)
    values = rng.normal(size=(inputs // 2, PANEL, 2)).astype(np.float32)
    panel[: inputs // 2] = to_bfloat16(values)
    return active, panel


def product(rows: int, active: Any, panel: Any) -> Floats:
    """Return the exact product, float64."""
    weights = to_float32(panel)[: active.shape[1] // 2].astype(np.float64)
    x = to_float32(active)[:rows].astype(np.float64).reshape(rows, active.shape[1] // 2, 2)
    return np.asarray(np.einsum("rki,koi->ro", x, weights))


def with_unit(function: Kernel, memory: np.ndarray[Any, Any]) -> Callable[..., Any]:
    """Return a kernel as Python runs it, with a matrix unit of numpy's on this memory."""
    unit = MatrixUnit(memory)
    return in_python(function, {
        **vars(sys.modules[multiply_rows_as_matrix.function.__module__]),
        "configure_registers": unit.configure, "release_registers": lambda: None,
        "clear_sums": unit.clear, "add_products": unit.add, "store_sums": unit.store,
        "add_scores": unit.add_scores, "store_scores": unit.store_scores,
        "add_rest": unit.add_rest, "prefetch": int, "prefetch_near": int,
        "count": int, "number": int, "lesser": min, "greater": max,
    })  # fmt: skip


def run_in_python(rows: int, active: Any, panel: Any) -> Floats:
    """Return what the kernels compute with a matrix unit of numpy's."""
    sums = np.full((rows + SPARE_ROWS, PANEL), np.nan, np.float32)
    parts = [
        np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in (active, panel, sums)
    ]
    memory = np.concatenate(parts)
    where = np.cumsum([0, *(len(part) for part in parts)])
    python = with_unit(multiply_panel, memory)
    steps = active.shape[1] // 2
    python(VARIANT, rows, where[0], 2 * active.shape[1], where[1], steps, where[2])
    found = memory[where[2] :].view(np.float32).reshape(sums.shape)
    return found[:rows]


@cache
def open_product() -> MachineCode:
    return open_kernel(multiply_panel, 6, VARIANT)


def run_compiled(rows: int, active: Any, panel: Any) -> Floats:
    code = open_product()
    sums = allocate_zeroed((rows + SPARE_ROWS, PANEL), np.float32)
    steps = active.shape[1] // 2
    code(rows, address(active), 2 * active.shape[1], address(panel), steps, address(sums))
    return sums[:rows].copy()


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_product_is_that_of_its_factors(rows: int, inputs: int) -> None:
    active, panel = draw(rows, inputs)
    expected = product(rows, active, panel)
    scale = np.abs(to_float32(active[:rows])).sum(axis=1, keepdims=True)
    ways: list[Callable[..., Floats]] = [run_in_python]
    if has_amx():
        ways.append(run_compiled)
    for way in ways:
        assert (np.abs(way(rows, active, panel) - expected) < 1e-6 * scale).all(), way


@AMX
@pytest.mark.parametrize("rows", ROWS)
def test_a_processor_adds_up_in_the_order_that_we_know(rows: int) -> None:
    """If another generation of processors did not, their answers would differ."""
    active, panel = draw(rows, 576)
    assert np.array_equal(run_compiled(rows, active, panel), run_in_python(rows, active, panel))


@AMX
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_row_has_the_same_sums_among_any_number_of_others(inputs: int) -> None:
    active, panel = draw(max(ROWS), inputs)
    alone = np.concatenate([run_compiled(1, active[i:], panel) for i in range(max(ROWS))])
    for rows in ROWS:
        assert np.array_equal(run_compiled(rows, active, panel), alone[:rows])


@pytest.mark.parametrize("rows", [1, 7, 12])
def test_scores_are_products_of_queries_and_keys(rows: int) -> None:
    """And on a processor they are the same to the bit."""
    dim, room = 96, 64  # float32 numbers from one row of scores to the next
    rng = np.random.default_rng(rows)
    queries = to_bfloat16(rng.normal(size=(rows, dim)).astype(np.float32))
    keys = to_bfloat16(rng.normal(size=(3, dim // 2, 16, 2)).astype(np.float32))
    size, scores = keys[0].nbytes, np.full((rows, room), np.nan, np.float32)
    memory = np.concatenate([part.reshape(-1).view(np.uint8) for part in (queries, keys, scores)])
    ends = queries.nbytes, queries.nbytes + keys.nbytes
    with_unit(score, memory)(VARIANT, rows, 0, 2 * dim, ends[0], size, ends[1])
    found = memory[ends[1] :].view(np.float32).reshape(scores.shape)
    pairs = to_float32(keys)[1:].astype(np.float64)
    x = to_float32(queries).astype(np.float64).reshape(rows, -1, 2)
    expected = np.einsum("rki,bkti->rbt", x, pairs).reshape(rows, 32)
    np.testing.assert_allclose(found[:, :32], expected, atol=1e-5)
    assert np.isnan(found[:, 32:]).all()
    if has_amx():
        code = open_kernel(score, 6, VARIANT)
        code(rows, address(queries), 2 * dim, address(keys), size, address(scores))
        assert np.array_equal(scores, found, equal_nan=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
def test_the_unit_is_used_wherever_it_is_compiled() -> None:
    """On any x86: the instructions need a processor only when they run."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu="sapphirerapids", opt=2)
    text = machine.emit_assembly(llvm.parse_assembly(write_module(multiply_panel, 6, VARIANT, "f")))
    for name in ("ldtilecfg", "tdpbf16ps", "tilestored", "tilerelease"):
        assert name in text


def test_a_refusal_is_told_and_other_instructions_are_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refuse = SimpleNamespace(syscall=lambda *_: -1)
    monkeypatch.setattr(instructions, "has", lambda feature: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: refuse)
    monkeypatch.setattr(ctypes, "get_errno", lambda: 95)
    matrix_unit.find_refusal.cache_clear()
    verified.tell_of_refusal.cache_clear()
    try:
        assert "amx" not in instructions.list_pairs()
        assert not find_variant(LLAMA, "bfloat16").weights.amx
        verified.tell_of_refusal()
        told = capfd.readouterr().err
        assert "AMX" in told and os.strerror(95) in told
    finally:
        matrix_unit.find_refusal.cache_clear()
        verified.tell_of_refusal.cache_clear()


@AMX
def test_a_machine_may_be_told_to_do_without() -> None:
    told = "from tgi_trio.shard.cpu_backend.instructions import *; print(has_amx(), list_pairs())"
    features = ",".join(f"+{name}" for name in ("avx2", "fma", "avx512f", "avx512bf16"))
    done = subprocess.run(
        [sys.executable, "-c", told],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KERNEL_CPU_FEATURES": features},
    )
    assert done.stdout.startswith("False") and "amx" not in done.stdout
