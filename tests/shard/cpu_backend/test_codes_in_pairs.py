"""Floating-point codes by a matrix unit (AMX): as Python runs the kernels, and as a processor.

Where there is none, the kernels are run with a unit of numpy's, and compiled for a processor that
has one. `test_quantised_kinds.py` asks the same of all kinds on a processor that has.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import platform
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.shard.cpu_backend.test_compiler import in_python
from tests.shard.cpu_backend.test_matrix_unit import MatrixUnit
from tests.shard.cpu_backend.test_quantised_kinds import ALL
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend import instructions
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.instructions import find_multiplier, has_amx, multiplies_pairs
from tgi_trio.shard.cpu_backend.kernels import matrix_unit
from tgi_trio.shard.cpu_backend.kernels.compiling import write_module
from tgi_trio.shard.cpu_backend.kernels.quantised.pairs import multiply_as_pairs
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, Codes, fill_panels
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel, open_panel_kernel
from tgi_trio.shard.cpu_backend.scratch_memory import PRODUCTS_BYTES
from tgi_trio.shard.cpu_backend.self_tests.kinds import dequantise, random_codes
from tgi_trio.shard.cpu_backend.tables import DIRECT, UNPACK, UNPACK_FOR_MANY, UNPACKED
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS

AMX = pytest.mark.skipif(
    not (has_amx() and multiplies_pairs("bfloat16")), reason="needs a processor with AMX"
)
# A single row, a register that is not full, one, and what follows one, two and four.
ROWS = (1, 5, 16, 17, 32, 33, 64, 70)
# Inputs and the inputs of a span: all, whole turns of blocks, spans that end within one, and whose
# last is shorter.
SPANS = ((32, 32), (96, 96), (320, 160), (512, 128), (384, 64), (256, 32), (320, 128), (160, 96))


def way_of(name: str) -> Multiplier:
    """Return how rows are multiplied with a kind where there is a matrix unit."""
    return Multiplier(ALL[name], 16, "vnni", 8, half=True, matrix=True)


def draw_rows(rows: int, inputs: int) -> NDArray[np.uint16]:
    """Return bfloat16 activations of many magnitudes, so that the order of a sum shows."""
    rng = np.random.default_rng(rows * inputs)
    x = rng.normal(size=(rows, inputs)) * np.exp(rng.normal(0, 3, (rows, inputs)))
    return to_bfloat16(x.astype(np.float32))


class Unit(MatrixUnit):
    """A matrix unit of numpy's, with what else the kernels do to memory."""

    def __init__(self, memory: NDArray[np.uint8], way: Multiplier, span: int, weights: Codes):
        super().__init__(memory)
        self.way, self.unpacked = way, 0
        numbers = E4M3_NUMBERS[weights.codes]
        self.numbers = to_bfloat16(numbers).reshape(PANEL, -1, BLOCK_INPUTS // 2, 2)
        scales = weights.numbers["scale"].repeat(span // BLOCK_INPUTS, 1)
        self.scales = scales[:, : weights.codes.shape[1] // BLOCK_INPUTS]

    def unpack(self, way, table, span_head, block, flipped, target) -> None:
        """Write a block as `unpack_block` does; which one, its place and its head's tell."""
        size, number = way.block_bytes, self.unpacked
        self.unpacked = (number + 1) % self.scales.shape[1]
        first = self.memory[block : block + size].view(np.uint8)
        stored = first.reshape(8, PANEL, 4)[:, :, [0, 2, 1, 3]]
        codes = stored.swapaxes(0, 1).reshape(PANEL, BLOCK_INPUTS)
        np.testing.assert_array_equal(
            to_bfloat16(E4M3_NUMBERS[codes]).reshape(PANEL, -1, 2), self.numbers[:, number]
        )
        head = self.memory[span_head : span_head + 4 * PANEL].view(np.float32)
        np.testing.assert_array_equal(head, self.scales[:, number])
        self.memory[target : target + 4 * PANEL] = head.view(np.uint8)
        pairs = np.ascontiguousarray(self.numbers[:, number].swapaxes(0, 1)).view(np.uint8)
        self.memory[target + 4 * PANEL :][: pairs.size] = pairs.reshape(-1)

    def load(self, where: int) -> NDArray[np.float32]:
        return self.memory[where : where + 64].view(np.float32).copy()

    def write(self, where: int, value: NDArray[np.float32]) -> None:
        self.memory[where : where + 64] = value.astype(np.float32).view(np.uint8)


def multiply_add(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """Return a * b + c, rounded once: float64 holds the products of float32 exactly."""
    return np.asarray(a.astype(np.float64) * b + c, np.float32)


def run_in_python(
    stored: NDArray[np.uint16], weights: Codes, span: int, *modes: int
) -> NDArray[np.float32]:
    """Return rows times a panel, as Python runs the kernels with a unit of numpy's."""
    way, (rows, inputs) = way_of("e4m3"), stored.shape
    panel = np.zeros((1, way.kind.panel_bytes(inputs, span)), np.uint8)
    fill_panels(panel, way.kind, weights, span)
    blocks = inputs // BLOCK_INPUTS
    given = np.concatenate([stored, np.zeros((SPARE_ROWS, inputs), np.uint16)])
    room = np.full(blocks * way.unpacked.block_bytes + PRODUCTS_BYTES, 255, np.uint8)
    sums = np.full((rows + SPARE_ROWS + 16) * 4 * PANEL, 255, np.uint8)
    parts = [given.view(np.uint8).reshape(-1), panel.reshape(-1), room, sums]
    where = np.cumsum([0, *(len(part) for part in parts)])
    unit = Unit(np.concatenate(parts), way, span, weights)
    names: dict[str, Any] = {
        "configure_registers": unit.configure, "release_registers": lambda: None,
        "clear_sums": unit.clear, "add_products": unit.add, "store_sums": unit.store,
        "unpack_block": unit.unpack, "load": unit.load, "store": unit.write, "fma": multiply_add,
        "prefetch": int, "prefetch_near": int, "count": int, "lesser": min, "greater": max,
    }  # fmt: skip
    run = in_python(multiply_as_pairs, {**vars(matrix_unit), **names})
    for mode in modes:
        run(
            way, rows, 0, stored.strides[0], where[1], blocks, span // BLOCK_INPUTS, panel.size,
            mode, where[2], where[3],
        )  # fmt: skip
    return unit.memory[where[3] :].view(np.float32).reshape(-1, PANEL)[:rows]


@cache
def kernel(name: str) -> PanelKernel:
    return open_panel_kernel(find_multiplier(ALL[name], dot=True))


def run_compiled(
    name: str, stored: NDArray[np.uint16], weights: Codes, span: int, *modes: int
) -> NDArray[np.float32]:
    """Return rows times a panel, as the last of `modes` comes to it after the others."""
    used, (rows, inputs) = kernel(name), stored.shape
    kind = used.multiplier.kind
    panel = allocate_zeroed((1, kind.panel_bytes(inputs, span)))
    fill_panels(panel, kind, weights, span)
    active = allocate_zeroed((rows + SPARE_ROWS, inputs), np.uint16)
    active[:rows] = stored
    active[rows:] = to_bfloat16(np.full(1, np.nan, np.float32))  # which no result may have
    room = allocate_zeroed((used.room_bytes(inputs),))
    sums = allocate_zeroed((rows + SPARE_ROWS, PANEL), np.float32)
    for mode in modes:
        used.code(
            rows, address(active), active.strides[0], address(panel), inputs // BLOCK_INPUTS,
            span // BLOCK_INPUTS, panel.size, mode, address(room), address(sums),
        )  # fmt: skip
    return sums[:rows].copy()


@pytest.mark.parametrize(("inputs", "span"), SPANS)
def test_the_product_is_that_of_its_factors(inputs: int, span: int) -> None:
    """Whether blocks are unpacked for these rows, kept for more, or have been."""
    kind, draw = ALL["e4m3"], np.random.default_rng(inputs)
    weights = random_codes(kind, PANEL, inputs, span, draw)
    exact = dequantise(kind, weights, span)
    for rows in (1, 17, 40):
        stored = draw_rows(rows, inputs)
        x = to_float32(stored).astype(np.float64)
        allowed = 1e-6 * (np.abs(x) @ np.abs(exact).T)
        found = run_in_python(stored, weights, span, DIRECT)
        assert (np.abs(found - x @ exact.T) <= allowed).all()
        for modes in ([UNPACK], [UNPACK_FOR_MANY], [UNPACK, UNPACKED]):
            many = run_in_python(stored, weights, span, *modes)
            np.testing.assert_array_equal(many, found)


@AMX
@pytest.mark.parametrize(("inputs", "span"), SPANS)
def test_a_processor_adds_up_in_the_order_that_we_know(inputs: int, span: int) -> None:
    weights = random_codes(ALL["e4m3"], PANEL, inputs, span, np.random.default_rng(inputs))
    for rows in (1, 17, 40):
        stored = draw_rows(rows, inputs)
        expected = run_in_python(stored, weights, span, DIRECT)
        np.testing.assert_array_equal(run_compiled("e4m3", stored, weights, span, DIRECT), expected)


@AMX
@pytest.mark.parametrize(("inputs", "span"), SPANS)
@pytest.mark.parametrize("name", ["e4m3", "table"])
def test_a_row_has_the_same_sums_among_any_number_of_others(
    name: str, inputs: int, span: int
) -> None:
    """A single row of 4-bit codes is multiplied by vectors, those of others by the unit."""
    weights = random_codes(ALL[name], PANEL, inputs, span, np.random.default_rng(inputs))
    stored = draw_rows(max(ROWS), inputs)
    alone = np.concatenate(
        [run_compiled(name, row[None], weights, span, UNPACK_FOR_MANY) for row in stored]
    )
    for rows in ROWS:
        for modes in ([DIRECT], [UNPACK_FOR_MANY], [UNPACK, UNPACKED]):
            found = run_compiled(name, stored[:rows], weights, span, *modes)
            np.testing.assert_array_equal(found, alone[:rows])


@AMX
def test_torch_has_the_same_numbers_for_all_codes() -> None:
    """In float32 of bfloat16 weights, as which torch holds what FP8 stands for."""
    codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255])[: 7 * PANEL]
    numbers = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).to(torch.bfloat16)
    one = to_bfloat16(np.eye(BLOCK_INPUTS, dtype=np.float32)[:3])
    for first in range(0, len(codes), PANEL):
        own = codes[first : first + PANEL, None].repeat(BLOCK_INPUTS, 1)
        scales = {"scale": np.ones((PANEL, 1), np.float32)}
        found = run_compiled("e4m3", one, Codes(own, scales), BLOCK_INPUTS, DIRECT)
        expected = numbers[first : first + PANEL].float().numpy()
        np.testing.assert_array_equal(found, np.tile(expected, (3, 1)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
@pytest.mark.parametrize("name", ["e4m3", "table"])
def test_the_unit_is_used_wherever_it_is_compiled(name: str) -> None:
    """On any x86: the instructions need a processor only when they run."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu="sapphirerapids", opt=2)
    text = write_module(multiply_as_pairs, 10, way_of(name), "f")
    code = machine.emit_assembly(llvm.parse_assembly(text))
    assert "tdpbf16ps" in code and "tilerelease" in code


def test_it_is_for_bfloat16_where_the_machine_has_and_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal: str | None = None
    monkeypatch.setattr(instructions, "has", lambda feature: True)
    monkeypatch.setattr(instructions, "find_refusal", lambda: refusal)
    assert multiplies_pairs("bfloat16") and not multiplies_pairs("float32")
    assert find_multiplier(ALL["e4m3"], dot=True).pairs
    assert not find_multiplier(ALL["e4m3"]).pairs  # float32
    assert not find_multiplier(ALL["mcg of 4 bits"], dot=True).pairs
    assert find_multiplier(ALL["table"], dot=True).alone
    assert not find_multiplier(ALL["e4m3"], dot=True).alone
    refusal = "not permitted"
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "sapphirerapids")
    assert not multiplies_pairs("bfloat16")
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "znver5")
    assert multiplies_pairs("bfloat16")
    used = find_multiplier(ALL["e4m3"], dot=True)
    assert used.active_bits == 16 and not used.pairs  # the dot product of vectors
