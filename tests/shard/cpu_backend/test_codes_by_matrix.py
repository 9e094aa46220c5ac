"""Codes times many rows by the matrix unit (AMX): as Python runs the kernels, and as a processor.

That a processor comes to the bits of few rows is what `test_quantised_kinds.py` asks of all kinds,
with whole rounds of blocks; here are those that fill none.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.shard.cpu_backend.test_compiler import in_python
from tests.shard.cpu_backend.test_quantised_kinds import ALL, WHOLE
from tgi_trio.shard.cpu_backend import instructions, verified
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.instructions import find_multiplier, multiplies_codes
from tgi_trio.shard.cpu_backend.kernels.compiling import write_module
from tgi_trio.shard.cpu_backend.kernels.quantised.matrix import multiply_as_matrix, multiply_codes
from tgi_trio.shard.cpu_backend.kernels.quantised.panels import multiply_by_vectors
from tgi_trio.shard.cpu_backend.kinds.kind import (
    BLOCK_INPUTS,
    MOST_ZERO,
    Codes,
    Kind,
    fill_panels,
)
from tgi_trio.shard.cpu_backend.machine_code.entry import WAYS
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel, open_panel_kernel
from tgi_trio.shard.cpu_backend.scratch_memory import PRODUCTS_BYTES
from tgi_trio.shard.cpu_backend.self_tests.kinds import (
    dequantise,
    random_codes,
    store_activations,
)
from tgi_trio.shard.cpu_backend.tables import DIRECT, UNPACK, UNPACKED
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS

AMX = pytest.mark.skipif(not multiplies_codes(), reason="needs a processor with AMX for bytes")
HEIGHT = 16
# One with a zero, with a low, with two scales to a block, and with two scales and two lows.
SORTS = ("q8_0", "q4_1", "q6_k", "q2_k")
ROWS = (1, 16, 17, 40)
BLOCKS = (1, 3, 8, 9)


def way_of(kind: Kind) -> Multiplier:
    """Return how many rows are multiplied with a kind where there is a matrix unit."""
    return Multiplier(kind, 8, "vnni", 8, half=True, matrix=True)


class MatrixUnit:
    """What the operations do, on an array in place of memory, whose places are addresses."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.sums: dict[int, NDArray[np.int32]] = {}  # by register

    def begin(
        self, way: Multiplier, later: int, column: int, panel: int, inputs: int, stride: int
    ) -> None:
        parts, codes = way.kind.parts, np.int8 if way.signed else np.uint8
        at = panel + later * way.block_bytes + way.kind.head_bytes
        weights = self.memory[at : at + BLOCK_INPUTS * PANEL].view(codes)
        weights = weights.reshape(parts, -1, 2, HEIGHT, 4)[:, :, column]
        at = inputs + later * way.active_bytes
        rows = [self.memory[at + i * stride :][:BLOCK_INPUTS] for i in range(HEIGHT)]
        x = np.stack(rows).view(np.int8).reshape(HEIGHT, parts, -1, 4)
        for part in range(parts):
            products = np.einsum("rki,koi->ro", x[:, part].astype(int), weights[part].astype(int))
            self.sums[later % way.slots * parts + part] = products.astype(np.int32)

    def store(self, way: Multiplier, later: int, products: int) -> None:
        for part in range(way.kind.parts):
            at = products + (later % 2 * way.kind.parts + part) * 1024
            found = self.sums.get(later % way.slots * way.kind.parts + part)
            if found is not None:
                self.memory[at : at + 1024] = found.reshape(-1).view(np.uint8)

    def add(
        self, way: Multiplier, later: int, tile: Any, products: int, column: int, panel: int,
        inputs: int, stride: int,
    ) -> Any:  # fmt: skip
        parts, lows = way.kind.parts, way.kind.low_parts
        at = panel + later * way.block_bytes
        head = self.memory[at : at + way.kind.head_bytes].view(np.float32)
        head = head.reshape(-1, 2, HEIGHT)[:, column]
        at = products + later % 2 * parts * 1024
        whole = self.memory[at : at + parts * 1024].view(np.int32).reshape(parts, HEIGHT, HEIGHT)
        at = inputs + later * way.active_bytes + BLOCK_INPUTS
        facts = np.stack([self.memory[at + i * stride :][:20] for i in range(HEIGHT)])
        scale, of_all = facts.view(np.float32)[:, :2].T[..., None]
        less = head[parts:, None] * of_all
        if lows > 1:  # of the halves' own sums
            halves = facts.view(np.int32)[:, 3:].T[..., None] / -MOST_ZERO
            less = head[parts:, None] * halves * scale
        more = (whole * head[:parts, None]).sum(0) * scale
        return tile + more - (less.sum(0) if lows else 0.0)


def run_in_python(way: Multiplier, stored: NDArray[np.uint8], panel: NDArray[np.uint8]) -> Any:
    """Return rows times an unpacked panel, as Python runs the kernels with a unit of numpy's."""
    rows, stride = stored.shape
    spare = np.zeros(SPARE_ROWS * stride, np.uint8)
    size = (rows + SPARE_ROWS) * 4 * PANEL
    room = np.zeros(PRODUCTS_BYTES, np.uint8)
    parts = [stored.reshape(-1), spare, panel, room, np.zeros(size, np.uint8)]
    where = np.cumsum([0, *(len(part) for part in parts)])
    memory = np.concatenate(parts)
    unit = MatrixUnit(memory)

    def write(rows, columns, tile, at, between):
        for row, numbers in enumerate(tile):
            memory[at + row * between :][:64] = numbers.astype(np.float32).view(np.uint8)

    run: Callable[..., Any] = in_python(multiply_as_matrix, {
        "configure_for_codes": id, "release_registers": lambda: None,
        "begin_products": unit.begin, "store_products": unit.store, "add_products": unit.add,
        "zeros": lambda rows, columns: np.zeros((rows, HEIGHT)), "store_tile": write,
        "count": int, "prefetch": int, "greater": max,
    })  # fmt: skip
    blocks = len(panel) // way.block_bytes
    run(way, rows, 0, stride, where[2], blocks, 0, 0, where[4])
    return memory[where[4] :].view(np.float32).reshape(-1, PANEL)[:rows]


def unpack(way: Multiplier, exact: Any, draw: np.random.Generator, blocks: int) -> Any:
    """Return an unpacked panel of codes that were drawn, and its weights, float64 [32, inputs]."""
    kind = way.kind
    weights = random_codes(kind, PANEL, blocks * BLOCK_INPUTS, BLOCK_INPUTS, draw)
    panel = np.zeros((1, kind.panel_bytes(blocks * BLOCK_INPUTS, 0)), np.uint8)
    fill_panels(panel, kind, weights, 0)
    found = panel.reshape(blocks, way.block_bytes)
    if way.signed:
        found[:, kind.head_bytes :] ^= 0x80
    return found.reshape(-1), exact(kind, weights, BLOCK_INPUTS)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", SORTS)
def test_the_product_is_that_of_its_factors(name: str, blocks: int) -> None:
    way, draw = way_of(ALL[name]).unpacked, np.random.default_rng(blocks)
    panel, exact = unpack(way, dequantise, draw, blocks)
    for rows in ROWS:
        x = draw.normal(size=(rows, blocks * BLOCK_INPUTS)).astype(np.float32)
        stored, whole = store_activations(x, 8)
        expected = whole @ exact.T
        found = run_in_python(way, np.ascontiguousarray(stored), panel)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def multiply(
    kernel: PanelKernel, weights: Codes, stored: NDArray[np.uint8], blocks: int, *modes: int
) -> NDArray[np.float32]:
    """Return rows times a panel, as the last of `modes` comes to it after the others."""
    kind, rows = kernel.multiplier.kind, len(stored)
    inputs = blocks * BLOCK_INPUTS
    span = inputs if kind.span <= 0 else kind.span
    size = kind.panel_bytes(inputs, span)
    panel = allocate_zeroed((1, size))
    fill_panels(panel, kind, weights, span)
    room = allocate_zeroed((kernel.room_bytes(inputs),))
    for mode in modes:
        sums = allocate_zeroed((rows + SPARE_ROWS, PANEL), np.float32)
        kernel.code(
            rows, address(stored), stored.strides[0], address(panel), blocks,
            span // BLOCK_INPUTS, size, mode, address(room), address(sums),
        )  # fmt: skip
    return sums[:rows]


@AMX
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in WHOLE if ALL[name].span <= BLOCK_INPUTS])
def test_a_processor_comes_to_the_bits_of_few_rows(name: str) -> None:
    """Whatever the number of blocks; and for rows after those for which a panel was unpacked."""
    kind, draw = ALL[name], np.random.default_rng(7)
    used = open_panel_kernel(find_multiplier(kind, 8))
    assert used.multiplier.matrix
    for blocks in BLOCKS:
        inputs = blocks * BLOCK_INPUTS
        span = inputs if kind.span <= 0 else kind.span
        weights = random_codes(kind, PANEL, inputs, span, draw)
        for rows in ROWS:
            x = draw.normal(size=(rows, inputs)).astype(np.float32)
            stored, _ = store_activations(x, 8)
            few = multiply(used, weights, stored, blocks, DIRECT)
            for modes in ([UNPACK], [UNPACK, UNPACKED]):
                many = multiply(used, weights, stored, blocks, *modes)
                np.testing.assert_array_equal(many, few)


@AMX
@pytest.mark.parametrize("name", SORTS)
def test_few_rows_have_the_bits_of_each_alone(name: str) -> None:
    """Whether one pass or two take them through a panel."""
    kind, draw, inputs = ALL[name], np.random.default_rng(9), 9 * BLOCK_INPUTS
    used = open_panel_kernel(find_multiplier(kind, 8))
    assert used.multiplier.most_in_one_pass == (8 if kind.parts == 1 else 4)
    span = inputs if kind.span <= 0 else kind.span
    weights = random_codes(kind, PANEL, inputs, span, draw)
    x = draw.normal(size=(10, inputs)).astype(np.float32)
    alone = [
        multiply(used, weights, store_activations(x[i : i + 1], 8)[0], 9, DIRECT) for i in range(10)
    ]
    for rows in range(2, 11):
        stored, _ = store_activations(x[:rows], 8)
        found = multiply(used, weights, stored, 9, DIRECT)
        np.testing.assert_array_equal(found, np.concatenate(alone[:rows]))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
@pytest.mark.parametrize(("name", "product"), [("q8_0", "tdpbssd"), ("q4_1", "tdpbsud")])
def test_the_unit_is_used_wherever_it_is_compiled(name: str, product: str) -> None:
    """On any x86: the instructions need a processor only when they run."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu="sapphirerapids", opt=2)
    for matrix, kernel in ((True, multiply_codes), (False, multiply_by_vectors)):
        way = replace(way_of(ALL[name]), matrix=matrix)
        assert WAYS[way.way].function == kernel.name
        text = write_module(kernel, 10, way, "f")
        code = machine.emit_assembly(llvm.parse_assembly(text))
        assert (product in code) == ("tilerelease" in code) == matrix


def test_it_is_for_bytes_where_the_machine_has_and_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal: str | None = None
    monkeypatch.setattr(instructions, "has", lambda feature: True)
    monkeypatch.setattr(instructions, "find_refusal", lambda: refusal)
    assert find_multiplier(ALL["q8_0"]).matrix
    assert not find_multiplier(ALL["q8_0"], 16).matrix
    assert not find_multiplier(ALL["e4m3"]).matrix
    refusal = "not permitted"
    assert not find_multiplier(ALL["q8_0"]).matrix
    monkeypatch.undo()
    monkeypatch.setenv("KERNEL_CPU_FEATURES", "+avx512f,+avx512bw,+avx512vnni")
    assert not find_multiplier(ALL["q8_0"]).matrix


@pytest.mark.parametrize(
    ("name", "bits", "told"), [("q8_0", 8, 1), ("q4_k", 8, 1), ("q8_0", 16, 0), ("e4m3", 8, 0)]
)
def test_a_refusal_is_told_once_of_codes_that_the_unit_would_multiply(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    bits: int,
    told: int,
) -> None:
    """As of bfloat16, though activations are float32."""
    monkeypatch.setattr(instructions, "has", lambda feature: True)
    monkeypatch.setattr(verified, "_verify", lambda *_: None)
    for module in (instructions, verified):
        monkeypatch.setattr(module, "find_refusal", lambda: "not permitted")
    verified.tell_of_refusal.cache_clear()
    try:
        for _ in range(2):
            verified.choose_panel_kernels([find_multiplier(ALL[name], bits)])
    finally:
        verified.tell_of_refusal.cache_clear()
    assert (
        capfd.readouterr().err.count("AMX, this processor's matrix unit, is not used: not") == told
    )
