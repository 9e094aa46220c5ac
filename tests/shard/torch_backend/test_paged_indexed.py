"""Attention over what an index chooses: kernels find what plain torch finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.indexed_cases import Case, list_steps
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.indexed.reference_tokens import IndexedAttention
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer, AttentionNeeds
from tgi_trio.shard.torch_backend.attention.kinds import make_attention, make_capturable
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan
from tgi_trio.shard.torch_backend.recordings.mixed_plans import MixedSize, idle_step
from tgi_trio.shard.torch_backend.staging import Sheet, Staging, packed_size

need_triton()

from tgi_trio.shard.torch_backend.attention.indexed import paged_tokens  # noqa: E402  (Triton's)
from tgi_trio.shard.torch_backend.attention.indexed.paged_tokens import (  # noqa: E402
    PagedIndexedAttention,
)
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402  (Triton's)
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "tokens, heads to fill a tile": {"heads": 16, "most": 5},
    "sinks, last dimensions": {"sinks": True, "last": True},
    "runs": {"pool": 4, "rotary": 0},
    "runs across blocks": {"pool": 3, "most": 6},
    "runs of one": {"pool": 1, "rotary": 0},
    "8 bits": {"codes": "fp8_e4m3fn"},
}
# Rows end up to, at and beyond what is chosen; prompts in chunks beside decodes and drafts.
CONTEXTS = [1, 7, 9, 10, 33, 41]
COUNTS = [[0, 6, 8, 5, 16, 30], [1, 0, 0, 4, 14, 7], [0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 2, 3]]
Prepare = Callable[[PagedIndexedAttention, StepPlan, KVCache], PagedBatch]


def launched(attention: PagedIndexedAttention, step: StepPlan, cache: KVCache) -> PagedBatch:
    return attention.prepare(step, cache)


def recorded(attention: PagedIndexedAttention, step: StepPlan, cache: KVCache) -> PagedBatch:
    """Return a batch that does not know on the host what is in the step."""
    if len(step.rows) == len(step.token_ids):
        idle = idle_plan(len(step.rows), step.block_tables.shape[1])
    else:
        idle = idle_step(MixedSize(len(step.token_ids), len(step.rows) + 2), 1)
    wide = np.zeros((len(idle.context_lengths), step.block_tables.shape[1] + 1), np.int32)
    arrays = [*attention.arrays(idle)[:-1], wide]
    memory = torch.full((packed_size(arrays),), 255, dtype=torch.uint8, device=DEVICE)
    sheet = Sheet(arrays, memory, shared=False)
    Staging(torch.device(DEVICE)).fill_from(sheet, attention.arrays(step))
    decodes = len(step.rows) == len(step.token_ids)
    return attention.reserve(idle, cache, memory, decodes=decodes)


class Layers:
    """A layer with an index and, over its choice, one without."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layers = [case.layer(0), case.layer(1)]
        self.latents = [case.latent(), case.latent()]
        self.indices = [case.index(), None]

    def attend(
        self, attention: Any, batch: Any, step: StepPlan, projected: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        turns = self.case.turns(torch.from_numpy(step.positions))
        parts: zip[tuple[AttentionLayer, torch.Tensor, LatentProjections, TokenIndex | None]]
        parts = zip(self.layers, projected, self.latents, self.indices, strict=True)
        return [
            attention.attend_indexed(layer, own, latent, index, 0, turns, batch)
            for layer, own, latent, index in parts
        ]


def compare(
    layers: Layers, steps: list[StepPlan], blocks: int, prepare: Prepare = launched
) -> None:
    """Raise AssertionError unless kernels and plain torch find the same, step by step."""
    case = layers.case
    ours, theirs = case.cache(blocks, 2), case.cache(blocks, 2)
    for cache in () if case.codes else (ours, theirs):
        cache.key.fill_(torch.nan)  # what nobody has written is not read
    attention, reference = PagedIndexedAttention(torch.device(DEVICE)), IndexedAttention()
    for step in steps:
        tokens = len(step.token_ids)
        projected = [case.projected(tokens), case.projected(tokens, indexed=False)]
        batch = prepare(attention, step, ours)
        found = layers.attend(attention, batch, step, projected)
        assert batch.chosen is None
        plain = layers.attend(reference, reference.prepare(step, theirs), step, projected)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("prepare", "programs"), [(launched, 1), (recorded, 8)])
def test_it_attends_to_what_torch_chooses(
    monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], prepare: Prepare, programs: int
) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", programs)
    layers, (steps, blocks) = Layers(Case(device=DEVICE, **kind)), list_steps(CONTEXTS, COUNTS)
    compare(layers, steps, blocks, prepare)
    assert sum(int((step.positions >= layers.case.most).sum()) for step in steps) > 40


def test_nothing_is_scored_where_all_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(paged_tokens, "score_units")
    compare(Layers(Case(device=DEVICE, most=41)), *list_steps(CONTEXTS, COUNTS))


def test_scores_of_many_tokens_are_computed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    from tgi_trio.shard.torch_backend.attention.indexed import selecting

    case = Case(device=DEVICE)
    layers, (steps, blocks) = Layers(case), list_steps(CONTEXTS, COUNTS)
    found = []
    for most in (1 << 24, 512):
        monkeypatch.setattr(selecting, "_SCORES", most)
        case.seeds[0] = 100
        cache, attention = case.cache(blocks, 2), PagedIndexedAttention(torch.device(DEVICE))
        for step in steps:
            tokens = len(step.token_ids)
            projected = [case.projected(tokens), case.projected(tokens, indexed=False)]
            found += layers.attend(attention, attention.prepare(step, cache), step, projected)
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


@pytest.mark.parametrize("pool", [0, 3])
def test_rows_may_share_the_blocks_of_a_prefix(pool: int) -> None:
    """A run that a prefix has only begun is another one in each row."""
    case = Case(device=DEVICE, pool=pool, most=6)
    layers, (steps, blocks) = Layers(case), list_steps([33, 30], [[33, 16], [0, 9], [0, 5]])
    shared = int(steps[0].block_tables[0, 0])
    for step in steps[1:]:
        step.block_tables[0, 0] = shared
    compare(layers, steps, blocks)


def test_a_layer_without_an_index_needs_a_choice() -> None:
    case = Case(device=DEVICE)
    layers, (steps, blocks) = Layers(case), list_steps([20], [[20]])
    attention, cache = PagedIndexedAttention(torch.device(DEVICE)), case.cache(blocks, 2)
    turns = case.turns(torch.from_numpy(steps[0].positions))
    projected = case.projected(20, indexed=False)
    batch = attention.prepare(steps[0], cache)
    with pytest.raises(ValueError, match="layer 1 of the cache has no choice to go on with"):
        attention.attend_indexed(
            layers.layers[1], projected, layers.latents[1], None, 0, turns, batch
        )


def test_latents_that_kernels_do_not_hold_are_left_to_torch() -> None:
    with StandInDevice():
        device = torch.device("cuda:0")
        for rank, kind in ((512, PagedIndexedAttention), (513, IndexedAttention)):
            needs = AttentionNeeds(KVShape(1, 1, rank + 192, same=True), "tokens", rank=rank)
            assert type(make_attention(needs, device, torch.bfloat16)) is kind
            assert (make_capturable(needs, device) is None) == (kind is IndexedAttention)
