"""What a single row of codes fetches ahead: all of what it will read, once, and from where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.shard.cpu_backend.test_compiler import in_python
from tests.shard.cpu_backend.test_quantised_kinds import ALL
from tgi_trio.shard.cpu_backend.instructions import find_multiplier
from tgi_trio.shard.cpu_backend.kernels.quantised.digits import sum_row as sum_digits_of_row
from tgi_trio.shard.cpu_backend.kernels.quantised.pairs import sum_row as sum_pairs_of_row
from tgi_trio.shard.cpu_backend.kernels.quantised.panels import sum_blocks
from tgi_trio.shard.cpu_backend.kinds.groups import SIGNED_BY_ROWS
from tgi_trio.shard.cpu_backend.multiplier import Multiplier

LINE = 64
BLOCKS, SPAN = 12, 4  # the latter: blocks of a span


def run(way: Multiplier) -> tuple[list[int], list[int]]:
    """Multiply a row with a panel at 0 as Python does; return what it fetches, near and far."""
    near: list[int] = []
    far: list[int] = []
    names: dict[str, Any] = {
        "prefetch_near": near.append, "prefetch": far.append, "count": int, "number": int,
        "lesser": min, "zeros": lambda rows, columns: None, "store_tile": lambda *_: None,
        "add_block": lambda *_: None, "add_unscaled": lambda *_: None,
        "add_span": lambda *_: None, "add_four_inputs": lambda *_: None, "store": lambda *_: None,
        "load_half": int, "add_sums_of_span": lambda *_: None,
    }  # fmt: skip
    if way.digits:
        in_python(sum_digits_of_row, names)(way, 0, 0, BLOCKS, SPAN, 0, 0)
    elif way.pairs:
        in_python(sum_pairs_of_row, names)(way, 0, 0, BLOCKS, SPAN, 0, 0)
    else:
        pace = way.block_bytes
        run_blocks = in_python(sum_blocks, names)
        run_blocks(way, 1, 2, 0, 0, 0, 0, BLOCKS, SPAN, way.ahead, pace, 0)
    return near, far


def ways(both: bool) -> list[Multiplier]:
    names = ["q4_0", "q8_0", "q4_k", "q6_k"]
    made = [Multiplier(ALL[name], 8, "vnni", 8, half=True, both_caches=both) for name in names]
    of_unit: dict[str, Any] = {"half": True, "matrix": True, "both_caches": both}
    made.append(Multiplier(ALL["table"], 16, "vnni", 8, **of_unit))
    made += [Multiplier(SIGNED_BY_ROWS.kind, bits, "vnni", 16, **of_unit) for bits in (8, 16)]
    return made


@pytest.mark.parametrize("both", [True, False])
def test_all_blocks_are_fetched_once_and_what_lies_further_on_before(both: bool) -> None:
    for way in ways(both):
        near, far = run(way)
        read: list[int] = []
        for block in range(BLOCKS):
            spans = block // SPAN + 1
            first = way.table_bytes + spans * way.span_bytes + block * way.block_bytes
            read += range(first, first + way.block_bytes, LINE)
        if not (way.pairs or way.digits):  # it counts from the panel's beginning
            read = [where - way.table_bytes for where in read]
        np.testing.assert_array_equal(near, np.array(read) + way.ahead)
        np.testing.assert_array_equal(far, np.array(near) + way.further if both else [])


def test_both_caches_are_for_processors_with_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (ALL["q4_0"], ALL["table"], SIGNED_BY_ROWS.kind)
    names = []
    for features, both in (("+avx512bw,+avx512vnni", False), ("+amx-tile,+avx512vnni", True)):
        monkeypatch.setenv("KERNEL_CPU_FEATURES", features)
        found = [find_multiplier(kind, bits) for kind in kinds for bits in (8, 16)]
        assert {way.both_caches for way in found} == {both}
        assert all((way.further > 0) == both for way in found)
        names += [way.name for way in found if way.kind.by_rows]
    assert len(set(names)) == len(names)  # each is compiled for itself
