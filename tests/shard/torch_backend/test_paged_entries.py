"""Attention to a window and to entries by kernels, which find what torch finds."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import plan, sequence, tables
from tgi_trio.model.specs.decoder import CompressionSpec, IndexSpec, RotarySpec

need_triton()

from tgi_trio.shard.torch_backend.attention.entries import paged_entries  # noqa: E402  (they import Triton)
from tgi_trio.shard.torch_backend.attention.entries.paged_entries import (  # noqa: E402
    PagedEntriesAttention,
)
from tgi_trio.shard.torch_backend.attention.entries.reference_entries import (  # noqa: E402
    EntriesAttention,
    LayerKind,
)
from tgi_trio.shard.torch_backend.attention.indexed import selecting  # noqa: E402  (they import Triton)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402  (they import Triton)
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape, KVSize  # noqa: E402
from tgi_trio.shard.torch_backend.layers.attention.compressor import Compressor  # noqa: E402
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary  # noqa: E402
from tgi_trio.shard.torch_backend.layers.attention.shared_key import (  # noqa: E402
    Entries,
    EntryIndex,
    SharedKey,
)
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.norm import Norm  # noqa: E402

HEADS, DIM, RANK, INDEX_HEADS, INDEX_DIM = 5, 24, 20, 3, 12
TURNED = RotarySpec(
    *(8, 1e4, "yarn"),
    interleaved=True,
    max_positions=64,
    parameters={"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.1},
)
# By name: tokens of a run, whether it overlaps the one before, entries that an index chooses.
KINDS: Final[dict[str, tuple[int, bool, int]]] = {
    "window": (0, False, 0),
    "all entries": (6, False, 0),
    "overlapping": (3, True, 0),
    "chosen": (4, True, 3),
    "long runs": (20, False, 2),
    "single tokens": (1, False, 4),
}
# Contexts and new tokens of two steps, one after the other: around the borders of windows (5
# tokens), runs and blocks, prompts beside decodes, and drafts behind what the cache has.
STEPS: Final[dict[str, tuple[list[int], list[int]]]] = {
    "prompts": ([1, 5, 12, 33, 48, 61], [1, 5, 12, 33, 48, 61]),
    "decodes": ([2, 6, 13, 34, 49, 62], [1, 1, 1, 1, 1, 1]),
    "beside": ([4, 9, 30, 36, 50, 64], [2, 3, 17, 2, 1, 2]),
}


class Layer:
    """A layer of random weights, and one cache that each backend has for itself."""

    def __init__(self, kind: str, dtype: torch.dtype, *, sinks: bool = True) -> None:
        rate, overlaps, most = KINDS[kind]
        self.generator, self.dtype = torch.Generator().manual_seed(rate + 100 * most), dtype
        self.turning = Rotary(TURNED, torch.device(DEVICE))
        self.entries, kept = None, 0
        if rate:
            index = None
            spec = IndexSpec(INDEX_HEADS, INDEX_DIM, most, TURNED) if most else None
            if spec:
                up = Linear(self.some(INDEX_HEADS * INDEX_DIM, RANK), None)
                index = EntryIndex(INDEX_HEADS, up, self.compressor(INDEX_DIM, rate, overlaps))
            own = self.compressor(DIM, rate, overlaps)
            self.entries = Entries(CompressionSpec(rate, overlaps, spec), own, index)
            kept = sum(2 * each.width for each in self.entries.compressors())
        self.outputs = RANK + DIM + kept + (INDEX_HEADS if most else 0)
        self.shared = SharedKey(
            dim=DIM,
            eps=1e-6,
            query_norm=self.norm(RANK),
            query_up=Linear(self.some(HEADS * DIM, RANK), None),
            key_norm=self.norm(DIM),
            output_down=self.some(1, 1, 1),
            entries=self.entries,
        )
        drawn = self.some(HEADS).float() if sinks else None
        self.shape = AttentionLayer(
            *(0, HEADS, 1, DIM + kept, DIM**-0.5), window=5, most=most, sinks=drawn
        )

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def norm(self, size: int) -> Norm:
        return Norm("rms", 1 + 0.1 * self.some(size), None, 1e-6, size)

    def compressor(self, dim: int, rate: int, overlaps: bool) -> Compressor:
        bias = self.some(rate, dim * (1 + overlaps)).float()
        return Compressor(dim, overlaps, bias, self.norm(dim))

    def backends(self) -> tuple[Any, Any]:
        device = torch.device(DEVICE)
        kind = LayerKind.of(self.shape, self.entries)
        return PagedEntriesAttention(device), EntriesAttention([kind], device)

    def cache(self) -> KVCache:
        size = KVSize(1, self.shape.head_dim, DIM)
        cache = KVCache(KVShape.of([size], same=True), 40, self.dtype, torch.device(DEVICE))
        cache.key.fill_(torch.nan)  # what nobody has written is not read
        return cache

    def attend(self, backend: Any, cache: KVCache, step: Any, projected: torch.Tensor) -> Any:
        batch = backend.prepare(step, cache)
        positions = torch.from_numpy(step.positions).to(DEVICE)
        table = self.turning.table(positions, positions, self.dtype)
        return backend.attend_shared_key(
            *(self.shape, projected, self.shared, self.turning, table, batch)
        )


def list_steps(names: list[str]) -> list[Any]:
    """Return plans of the same rows over the same blocks."""
    blocks = tables([[0] * 64] * 6, shuffle=2, new=0)
    found = []
    for contexts, counts in (STEPS[name] for name in names):
        rows = [sequence(i, [3] * n, blocks[i], new=0) for i, n in enumerate(contexts)]
        for row, context, count in zip(rows, contexts, counts, strict=True):
            row.computed = context - count
        found.append(plan(rows, counts))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("programs", [1, 64])
def test_results_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str, programs: int
) -> None:
    """Whether programs share a token's keys or not."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", programs)
    layer = Layer(kind, torch.float32)
    ours, theirs = layer.backends()
    mine, other = layer.cache(), layer.cache()
    for step in list_steps(["prompts", "decodes", "beside"]):
        projected = layer.some(len(step.token_ids), layer.outputs)
        found = layer.attend(ours, mine, step, projected)
        expected = layer.attend(theirs, other, step, projected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(mine.key, other.key, rtol=1e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("kind", ["overlapping", "chosen"])
def test_results_in_half_precision_are_close(kind: str) -> None:
    layer = Layer(kind, torch.bfloat16, sinks=False)
    ours, theirs = layer.backends()
    mine, other = layer.cache(), layer.cache()
    for step in list_steps(["prompts", "decodes"]):
        projected = layer.some(len(step.token_ids), layer.outputs)
        found = layer.attend(ours, mine, step, projected).float()
        expected = layer.attend(theirs, other, step, projected).float()
        torch.testing.assert_close(mine.key, other.key, rtol=2e-2, atol=2e-2, equal_nan=True)
        near = (found - expected).abs().amax(dim=(1, 2)) < 0.05
        # An index may choose another of two entries that rounding makes as good.
        assert near.float().mean() > (0.8 if layer.shape.most else 0.999)


def test_few_tokens_are_scored_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("chosen", torch.float32)
    ours, theirs = layer.backends()
    mine, other = layer.cache(), layer.cache()
    monkeypatch.setattr(selecting, "_SCORES", 7 * 15)  # of seven tokens
    pieces, launch = list[range](), selecting.score_units

    def note(*args: Any, **kwargs: Any) -> Any:
        pieces.append(args[3])
        return launch(*args, **kwargs)

    monkeypatch.setattr(paged_entries, "score_units", note)
    (step,) = list_steps(["prompts"])
    projected = layer.some(len(step.token_ids), layer.outputs)
    found = layer.attend(ours, mine, step, projected)
    expected = layer.attend(theirs, other, step, projected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert [len(piece) for piece in pieces] == [7] * 22 + [6]


def test_wrong_drafts_leave_nothing_behind() -> None:
    """What is computed in their place is what would be there without them."""
    layer = Layer("chosen", torch.float32)
    ours, _ = layer.backends()
    mine, other = layer.cache(), layer.cache()
    *before, beside = list_steps(["prompts", "decodes", "beside"])
    for step in before:
        projected = layer.some(len(step.token_ids), layer.outputs)
        for cache in (mine, other):
            layer.attend(ours, cache, step, projected)
    wrong, right = layer.some(2, len(beside.token_ids), layer.outputs)
    drafted = layer.attend(ours, mine, beside, wrong)
    found = layer.attend(ours, mine, beside, right)
    assert torch.equal(found, layer.attend(ours, other, beside, right))
    assert not torch.equal(found, drafted)


def test_a_prefix_is_read_where_another_row_has_written_it() -> None:
    layer = Layer("overlapping", torch.float32)
    ours, theirs = layer.backends()
    mine, other = layer.cache(), layer.cache()
    (blocks,) = tables([[0] * 64], shuffle=2, new=0)
    first, second = (
        sequence(i, [3] * length, own, new=0)
        for i, (length, own) in enumerate([(45, blocks), (46, [*blocks[:2], 30])])
    )
    second.computed = 32
    for row, count in ((first, 45), (second, 14)):
        step = plan([row], [count])
        projected = layer.some(count, layer.outputs)
        found = layer.attend(ours, mine, step, projected)
        expected = layer.attend(theirs, other, step, projected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
