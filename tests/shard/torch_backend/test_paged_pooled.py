"""Blocks that an index chooses by one key of each: kernels write and find what torch does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.block_index_cases import (
    CONTEXTS,
    COUNTS,
    DECODES,
    INDEX,
    INDEX_DIM,
    Case,
    alike,
    alike_written,
    ragged_steps,
    some,
)
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.indexed.reference_pooled import PooledAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex

need_triton()

from tgi_trio.shard.torch_backend.attention.indexed import (  # noqa: E402
    index_writing,
    paged_pooled,
    selecting,
)

INDEX_HEADS = 3


def index_of(case: Case, size: int, most: int) -> PooledIndex:
    spec = PooledIndexSpec(INDEX_HEADS, INDEX_DIM, size, most)
    return PooledIndex(spec, query_norm=case.norm(4), key_norm=case.norm(5), number=INDEX)


def attend(
    backend: Any,
    case: Case,
    index: PooledIndex,
    table: Any,
    projected: torch.Tensor,
    asked: torch.Tensor,
    batch: Any,
) -> torch.Tensor:
    both = asked[:, : (INDEX_HEADS + 1) * INDEX_DIM]
    found: torch.Tensor = backend.attend_pooled(
        case.layer, projected, both, case.steps, index, table, batch
    )
    return found


def both(
    case: Case, index: PooledIndex, steps: list[StepPlan], blocks: int, nothing: float
) -> tuple[list[Any], list[KVCache]]:
    """Return what ours and torch's find in each step, and their caches."""
    found, caches = [], []
    for backend in (paged_pooled.PagedPooled(torch.device(DEVICE)), PooledAttention()):
        caches.append(case.cache(blocks, nothing=nothing))
        found.append(case.run(backend, partial(attend, backend, case, index), steps, caches[-1]))
    return found, caches


def agree(case: Case, size: int, most: int, contexts: list[int], counts: list[int]) -> None:
    """Compare outputs and caches of two steps; what has not been written is NaN."""
    steps, blocks = ragged_steps(contexts, counts)
    found, caches = both(case, index_of(case, size, most), steps, blocks, float("nan"))
    alike_written(case, caches, steps)
    alike(case, found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [1, 4, 7, 24])  # within a page of the cache, and over several
@pytest.mark.parametrize("most", [1, 3, 64])
def test_it_is_what_torch_finds(size: int, most: int) -> None:
    agree(Case(device=DEVICE), size, most, CONTEXTS, COUNTS)


@pytest.mark.parametrize("most", [2, 3])
def test_decodes_around_every_border(most: int) -> None:
    agree(Case(device=DEVICE, interleaved=True), 4, most, DECODES, [1] * len(DECODES))


def test_a_step_may_be_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "_SCORES", 15 * 15)  # of fifteen tokens
    agree(Case(torch.bfloat16, DEVICE, turned=16), 4, 3, CONTEXTS, COUNTS)


def test_a_block_may_be_read_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_writing, "BESIDE", 2)
    agree(Case(device=DEVICE), 7, 2, CONTEXTS, COUNTS)


def test_a_prefix_that_is_computed_again_is_written_elsewhere() -> None:
    """Its keys stay as they are, those of whole blocks in the places of tokens' keys included."""
    case = Case(device=DEVICE)
    steps, blocks = ragged_steps([16, 21], [16, 21])
    again = ragged_steps([16, 21], [16, 21])[0][0]
    again.kv_slots = again.kv_slots.copy()
    again.kv_slots[:16] = torch.arange(16).numpy()  # those of the null block
    found, caches = both(case, index_of(case, 4, 2), [*steps, again], blocks, 0.0)
    first = both(case, index_of(case, 4, 2), steps, blocks, 0.0)[1][0]
    slots = torch.from_numpy(steps[0].kv_slots[:16]).to(DEVICE)
    for layer in (0, INDEX):
        kept = caches[0].key_slots[layer][slots]
        assert torch.equal(kept, first.key_slots[layer][slots])
    torch.testing.assert_close(found[0][1][16:], found[1][1][16:], atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_of_eight_bits(stored: torch.dtype) -> None:
    case = Case(torch.float32, DEVICE, stored)
    steps, blocks = ragged_steps(CONTEXTS, COUNTS)
    found, caches = both(case, index_of(case, 4, 3), steps, blocks, 0.0)
    alike_written(case, caches, steps)
    alike(case, found)


def test_rotations_are_looked_up_where_a_table_has_been_made() -> None:
    """Of any number of positions, as a recording's steps do."""
    case = Case(device=DEVICE)
    before = case.rotary.every(40, torch.float32)
    case.rotary.keep(64, torch.float32)
    kept = case.rotary.every(40, torch.float32)
    assert kept is case.rotary.kept
    assert torch.equal(kept.cos[:40], before.cos) and torch.equal(kept.sin[:40], before.sin)
    agree(case, 4, 3, CONTEXTS, COUNTS)


def test_nothing_is_written_for_padding() -> None:
    """A recording's tokens of no row: they have no context, and no block ends with them."""
    case = Case(device=DEVICE)
    steps, blocks = ragged_steps([8], [8])
    index, cache = index_of(case, 4, 1), case.cache(blocks)
    batch: Any = paged_pooled.PagedPooled(torch.device(DEVICE)).prepare(steps[0], cache)
    batch.contexts.fill_(0)
    cache.key_slots[INDEX].copy_(some(*cache.key_slots[INDEX].shape))
    before = cache.key_slots[INDEX].clone()
    asked, norms = some(8, 3 * INDEX_DIM), (index.query_norm, index.key_norm)
    width = (case.steps.heads + 2 * case.steps.kv_heads) * case.steps.head_dim
    every = case.rotary.every(8, torch.float32)
    four = index_writing.Blocks(4, every)
    index_writing.write_heads_and_index(
        *(case.layer, some(8, width), asked, case.steps, norms, every, INDEX, batch),
        asks=False,
        blocks=four,
    )
    before[batch.slots] = asked[:, None, -INDEX_DIM:]  # as they are projected
    assert torch.equal(cache.key_slots[INDEX], before)
