"""Blocks that an index chooses for each KV head: kernels find and read what torch does."""

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
    KV_HEADS,
    Case,
    alike,
    alike_written,
    ragged_steps,
    some,
)
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.shard.torch_backend.attention.indexed.reference_blocks import BlocksAttention
from tgi_trio.shard.torch_backend.attention.indexed.reference_pooled import PooledAttention
from tgi_trio.shard.torch_backend.attention.interface import AttentionKind, AttentionNeeds
from tgi_trio.shard.torch_backend.kv_cache import KVShape, KVSize
from tgi_trio.shard.torch_backend.layers.attention.block_index import BlockIndex, score_blocks

need_triton()

from tgi_trio.shard.torch_backend.attention import kinds  # noqa: E402
from tgi_trio.shard.torch_backend.attention.indexed import paged_blocks, selecting  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402


def index_of(case: Case, spec: BlockIndexSpec) -> BlockIndex:
    return BlockIndex(
        spec, heads=KV_HEADS, query_norm=case.norm(4), key_norm=case.norm(5), number=INDEX
    )


def attend(
    backend: Any,
    case: Case,
    index: BlockIndex,
    table: Any,
    projected: torch.Tensor,
    asked: torch.Tensor,
    batch: Any,
) -> torch.Tensor:
    both = torch.cat((projected, asked[:, : (KV_HEADS + 1) * INDEX_DIM]), dim=-1)
    found: torch.Tensor = backend.attend_blocks(case.layer, both, case.steps, index, table, batch)
    return found


def agree(
    case: Case,
    spec: BlockIndexSpec,
    contexts: list[int],
    counts: list[int],
) -> None:
    """Compare outputs and caches of two steps; what has not been written is NaN."""
    steps, blocks = ragged_steps(contexts, counts)
    index, found, caches = index_of(case, spec), [], []
    for backend in (paged_blocks.PagedBlocks(torch.device(DEVICE)), BlocksAttention()):
        caches.append(case.cache(blocks, nothing=float("nan")))
        found.append(case.run(backend, partial(attend, backend, case, index), steps, caches[-1]))
    alike_written(case, caches, steps)
    alike(case, found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [4, 7, 24])  # within a page of the cache, and over several
@pytest.mark.parametrize(("most", "local"), [(1, 1), (3, 0), (3, 2), (64, 1)])
def test_it_is_what_torch_finds(size: int, most: int, local: int) -> None:
    agree(Case(device=DEVICE), BlockIndexSpec(INDEX_DIM, size, most, local), CONTEXTS, COUNTS)


@pytest.mark.parametrize("most", [2, 3])
def test_decodes_around_every_border(most: int) -> None:
    agree(
        Case(device=DEVICE, interleaved=True),
        BlockIndexSpec(INDEX_DIM, 4, most, 1),
        DECODES,
        [1] * len(DECODES),
    )


def test_a_step_may_be_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "_SCORES", 15 * 12 * KV_HEADS)  # of fifteen tokens
    agree(Case(device=DEVICE), BlockIndexSpec(INDEX_DIM, 4, 3, 1), CONTEXTS, COUNTS)


def test_many_tokens_share_a_program_with_few_keys_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_blocks, "KEYS", 16)
    agree(
        Case(torch.bfloat16, DEVICE), BlockIndexSpec(INDEX_DIM, 33, 1, 1), [70, 90, 34], [40, 1, 34]
    )


def test_heads_may_turn_whole_or_not_at_all() -> None:
    spec = BlockIndexSpec(INDEX_DIM, 4, 3, 1)
    agree(Case(device=DEVICE, turned=16), spec, CONTEXTS, COUNTS)
    agree(Case(device=DEVICE, turned=0), spec, CONTEXTS, COUNTS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_of_eight_bits(stored: torch.dtype) -> None:
    case = Case(torch.float32, DEVICE, stored)
    agree(case, BlockIndexSpec(INDEX_DIM, 4, 3, 1), CONTEXTS, COUNTS)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_block_is_as_good_as_its_best_token(decodes: bool) -> None:
    """Of those that are seen; the last blocks are better than all others."""
    case, spec = Case(device=DEVICE), BlockIndexSpec(INDEX_DIM, 5, 2, 1)
    contexts = [37, 12, 6, 10]
    steps, blocks = ragged_steps(contexts, [1] * 4 if decodes else [30, 12, 2, 1])
    cache, index = case.cache(blocks), index_of(case, spec)
    cache.key_slots[INDEX].copy_(some(*cache.key_slots[INDEX].shape))
    batch: Any = paged_blocks.PagedBlocks(torch.device(DEVICE)).prepare(steps[-1], cache)
    tokens = len(steps[-1].token_ids)
    queries = some(tokens, KV_HEADS, INDEX_DIM, seed=1).to(DEVICE)
    scores, visible = paged_blocks.score_blocks(queries, index, batch, range(1, tokens))
    for token in range(1, tokens):
        row, seen = int(batch.token_rows()[token]), int(steps[-1].positions[token]) + 1
        table = torch.from_numpy(steps[-1].block_tables[row])
        slots = (table[:, None] * 16 + torch.arange(16)).flatten()[:seen]
        keys = torch.zeros(-(-seen // 5) * 5, INDEX_DIM)
        keys[:seen] = cache.key_slots[INDEX][slots.to(DEVICE), 0].cpu()
        products = queries[token].cpu() @ keys.T
        expected = score_blocks(products[None], torch.tensor([[seen - 1]]), spec)[0]
        for head in range(KV_HEADS):
            which = (token - 1) * KV_HEADS + head
            assert visible[which] == -(-seen // 5)
            if visible[which] > spec.most:
                found = scores[which, : expected.shape[1]].cpu()
                torch.testing.assert_close(found, expected[head], atol=1e-5, rtol=1e-5)


def test_heads_that_no_kernel_holds_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of index keys has no values, and its keys may be of any width up to that."""
    monkeypatch.setattr(kinds, "runs_kernels", lambda device: True)
    device = torch.device(DEVICE)
    for heads, index, fits in ((512, 256, True), (576, 64, False), (64, 320, False)):
        shape = KVShape.of([KVSize(2, heads, heads), KVSize(1, index, 0)])
        kept: tuple[tuple[AttentionKind, type], ...]
        kept = ("blocks", BlocksAttention), ("pooled", PooledAttention)
        for kind, own in kept:
            needs = AttentionNeeds(shape, kind)
            assert (kinds.make_capturable(needs, device) is not None) == fits
            found = kinds.make_attention(needs, device, torch.float32)
            assert isinstance(found, PagedAttention if fits else own)
