"""Which size of a recording a step with prompts takes, and which sizes there are."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.torch_backend.models_support import plan, sequences
from tgi_trio.shard.machine.device import graph_sizes
from tgi_trio.shard.torch_backend.kv_cache import NULL_BLOCK
from tgi_trio.shard.torch_backend.recordings.mixed_plans import (
    MixedSize,
    find_size,
    idle_arrays,
    idle_step,
    mixed_sizes,
    token_arrays,
    widest_sizes,
)
from tgi_trio.shard.torch_backend.staging import Sheet, packed_size


def test_sizes_are_few_and_the_largest_comes_first() -> None:
    decodes = [size for size in graph_sizes("cuda", None) if size <= 128]
    sizes = mixed_sizes(4096, decodes)
    assert sizes[0] == (1024, 128) and sizes[-1] == (64, 8) and len(sizes) == 17
    assert sizes == sorted(sizes, reverse=True)
    assert {size.rows for size in sizes if size.tokens <= 256} == {8, 32, 128}
    assert {size.rows for size in sizes if size.tokens > 256} == {32, 128}
    assert widest_sizes(sizes) == [(n, 128) for n in (1024, 768, 512, 384, 256, 128, 64)]
    assert widest_sizes([]) == []
    assert mixed_sizes(4096, decodes, in_turns=True) == sizes[-9:]
    assert mixed_sizes(20, [1, 2, 4]) == [(20, 4), (20, 1)]
    assert mixed_sizes(70, [16]) == [(70, 16), (64, 16)]
    assert mixed_sizes(4, [4, 12]) == [(4, 12)]
    assert mixed_sizes(0, [1]) == mixed_sizes(9, []) == []


@given(
    st.integers(1, 2000),
    st.lists(st.integers(1, 300), min_size=1, max_size=9, unique=True),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_a_step_takes_the_smallest_that_holds_it(
    most: int, decodes: list[int], counts: list[int]
) -> None:
    sizes = mixed_sizes(most, sorted(decodes))
    assert len(set(sizes)) == len(sizes)
    # Every step up to the largest has one, as no step has more rows than tokens.
    tokens, rows = sum(counts), len(counts)
    largest = max(sizes)
    step = plan(sequences([[5] * n for n in counts], shuffle=1, new=1), counts)
    found = find_size(sizes, step, rows)
    fits = tokens <= largest.tokens and rows <= max(decodes)
    assert (found is not None) == fits
    if found is not None:
        assert found.tokens >= tokens and found.rows >= min(rows, found.tokens)
        assert not any(
            tokens <= other.tokens < found.tokens and other.rows >= rows for other in sizes
        )


def test_what_is_left_over_is_another_row_that_sees_nothing() -> None:
    rows = sequences([[5] * 9, [6] * 4], shuffle=1, new=1)
    rows[0].computed = 6
    step = plan(rows, [3, 2])
    size, width = MixedSize(8, 4), step.block_tables.shape[1] + 2
    idle = idle_step(size, width)
    arrays = [*idle_arrays(size), idle.context_lengths, idle.query_starts, idle.block_tables]
    target = torch.zeros(packed_size(arrays), dtype=torch.uint8)
    sheet = Sheet(arrays, target, shared=False)
    told = token_arrays(step, step.positions, np.array([2]))
    sheet.write([*told, step.context_lengths, step.query_starts, step.block_tables])
    ids, positions, _, inputs, places, contexts, starts = sheet._columns
    assert ids.tolist() == [5, 5, 5, 6, 6, 0, 0, 0]
    assert positions.tolist() == [6, 7, 8, 0, 1, 0, 0, 0]
    assert inputs.tolist() == [-1] * 8 and places.tolist() == [2, 0, 0, 0]
    assert contexts.tolist() == [9, 2, 0, 0, 0]
    assert starts.tolist() == [0, 3, 5, 8, 8, 8]
    assert not idle.kv_slots.any() and (idle.block_tables == NULL_BLOCK).all()
