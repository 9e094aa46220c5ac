"""Pages of images that decodes attend to: what they hold, and what gives way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.torch_backend.cross_attention_support import (
    CPU,
    DIM,
    HEADS,
    LAYERS,
    LENGTH,
    seeing,
    states,
)
from tests.shard.torch_backend.models_support import BLOCK
from tgi_trio.model.specs.decoder import CrossAttentionSpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.media.features import CrossStates
from tgi_trio.shard.torch_backend.image_states import CrossShape, ImageSource
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.recordings.decode_plans import pad_plan
from tgi_trio.shard.torch_backend.recordings.image_pages import ImagePages
from tgi_trio.shard.torch_backend.staging import Array, rest, split

SHAPE = CrossShape(LAYERS, HEADS, DIM, torch.float32, slice(0, HEADS))
IMAGES = [states(number, 6 + 9 * (number % 3)) for number in range(5)]
Row = tuple[CrossStates, ...]
ROWS = st.lists(st.lists(st.sampled_from(IMAGES), max_size=3).map(tuple), min_size=1, max_size=3)


class NoAttention:
    """Has what a recording was told in its batch."""

    def arrays(self, plan: StepPlan) -> list[Array]:
        width = np.array([plan.block_tables.shape[1]], np.int32)
        return [plan.context_lengths.astype(np.int32), width, plan.block_tables]

    def reserve(self, plan: StepPlan, cache: KVCache, memory: torch.Tensor) -> SimpleNamespace:
        fixed = self.arrays(plan)[:-1]
        contexts, width = split(memory, fixed)
        tables = rest(memory, fixed, torch.int32)
        return SimpleNamespace(cache=cache, contexts=contexts, width=width, tables=tables)


def pages_of(blocks: int, blind: Any = "feeds") -> ImagePages:
    cross_attention = CrossAttentionSpec(blind, together=True, gate_shape=(1,), query_norm=False)
    most = blocks * BLOCK * SHAPE.bytes_per_token
    pages = ImagePages(ImageSource(SHAPE, CPU), cross_attention, cast("Any", NoAttention()), most)
    pages.make_room()
    return pages


def join(row: Row, read: str, layer: int) -> torch.Tensor:
    """Return what a row sees of its images."""
    return torch.cat([getattr(each, read)[layer][: each.visible] for each in row])


def check_launched(plan: StepPlan, pages: ImagePages, rows: list[Row]) -> None:
    found = [row.states for row in pages.find(plan)]
    for ours, theirs in zip(found, filter(None, rows), strict=True):
        for got, want in zip(ours, theirs, strict=True):
            assert (got.tokens, got.visible) == (want.tokens, want.visible)
            for layer in range(LAYERS):
                assert torch.equal(got.keys[layer], want.keys[layer])
                assert torch.equal(got.values[layer], want.values[layer])


def check_recorded(plan: StepPlan, pages: ImagePages, rows: list[Row]) -> None:
    recorded = pages.reserve(len(rows) + 1)
    pages.refill(recorded, pad_plan(plan, len(rows) + 1))
    assert recorded.cross_tokens.seeing[:, 0].tolist() == [*(float(bool(row)) for row in rows), 0.0]
    batch = recorded.cross_tokens.batch
    for i, row in enumerate(rows):
        count, width = int(batch.contexts[i]), int(batch.width)
        table = batch.tables[i * width : (i + 1) * width].long()
        for layer in range(LAYERS):
            keys, values = (
                of[layer][table].flatten(0, 1)[:count]
                for of in (batch.cache.key_blocks, batch.cache.value_blocks)
            )
            if row:
                assert torch.equal(keys, join(row, "keys", layer))
                assert torch.equal(values, join(row, "values", layer))
            else:
                assert count == 1 and not keys.any(), "the null block"


@settings(max_examples=40, deadline=None)
@given(blocks=st.integers(0, 5), steps=st.lists(st.tuples(st.booleans(), ROWS), max_size=6))
def test_steps_read_from_pages_what_they_see(
    blocks: int, steps: list[tuple[bool, list[Row]]]
) -> None:
    """Launched ones whole images, recorded ones what is seen together, if all of it has room."""
    pages = pages_of(blocks)
    for decodes, rows in steps:
        plan = seeing(*rows, computed=LENGTH - 1 if decodes else 0)
        if not decodes:
            check_launched(plan, pages, rows)
            continue
        seen = {tuple(each.number for each in row): row for row in rows if row}
        tokens = (
            row[0].tokens if len(row) == 1 else sum(each.visible for each in row)
            for row in seen.values()
        )
        fits = pages.fits(plan)
        assert fits == (sum(-(-count // BLOCK) for count in tokens) <= blocks)
        if fits:
            check_recorded(plan, pages, rows)


def test_a_token_before_all_images_is_computed_apart_where_it_sees_what_pads_them() -> None:
    row = seeing((IMAGES[0],), computed=LENGTH - 1)
    row.rows[0].images[0].positions[:] = LENGTH
    assert pages_of(9).fits(row) and not pages_of(9, "reads all").fits(row)
    assert not pages_of(9).wants(seeing((), ()))
