"""The best units of an index, and their tokens, found by kernels as torch finds them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import BLOCK, plan, sequence, tables

need_triton()

from tgi_trio.shard.torch_backend.attention.indexed import selecting  # noqa: E402  (it imports Triton)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch  # noqa: E402
from tgi_trio.shard.torch_backend.kernels.attention import selecting as kernels  # noqa: E402
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape  # noqa: E402
from tgi_trio.shard.torch_backend.layers.attention.index import (  # noqa: E402
    IndexQueries,
    choose_best,
    score_keys,
)
from tgi_trio.shard.torch_backend.recordings.mixed_plans import (  # noqa: E402
    MixedSize,
    idle_step,
)
from tgi_trio.shard.torch_backend.staging import packed_size  # noqa: E402

WIDE = 4  # numbers of a key before those of the index
CONTEXTS, COUNTS = [1, 3, 37, 8, 50, 21], [1, 3, 1, 5, 20, 1]


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


def batch_of(
    contexts: list[int], counts: list[int], dim: int, dtype: torch.dtype = torch.float32
) -> PagedBatch:
    """Return a batch over a cache of random keys with `dim` numbers."""
    blocks = tables([[0] * n for n in contexts], shuffle=2, new=0)
    rows = [sequence(i, [3] * n, blocks[i], new=0) for i, n in enumerate(contexts)]
    for row, context, count in zip(rows, contexts, counts, strict=True):
        row.computed = context - count
    held = 1 + sum(map(len, blocks))
    cache = KVCache(KVShape(1, 1, dim, same=True), held, dtype, torch.device(DEVICE))
    if not cache.codes:
        cache.key_slots[0].copy_(some(held * BLOCK, 1, dim))
    return PagedAttention(torch.device(DEVICE)).prepare(plan(rows, counts), cache)


def sequences(batch: PagedBatch) -> list[list[int]]:
    """Return the slots of each token's sequence up to itself."""
    starts, contexts = batch.query_starts.tolist(), batch.contexts.tolist()
    table = batch.tables.view(len(contexts), -1).cpu().numpy()
    found = []
    for row, context in enumerate(contexts):
        slots = (table[row][:, None] * BLOCK + np.arange(BLOCK)).ravel()
        count = starts[row + 1] - starts[row]
        found += [slots[: context - count + 1 + i].tolist() for i in range(count)]
    return found


class Reading(NamedTuple):
    """How rows are read: see the constants of the module."""

    read: int
    part: int = 16
    sample: int = 64
    readers: int = 8

    def use(self, patch: pytest.MonkeyPatch) -> None:
        names = {"READ": self.read, "PART": self.part, "SAMPLE": self.sample}
        for name, number in {**names, "READERS": self.readers}.items():
            patch.setattr(selecting, name, number)


READINGS = {
    "in registers": Reading(256),
    "by one program": Reading(128),
    "by one program, of which hardly any fit": Reading(32),
    "by several programs": Reading(128, part=32, readers=64),
    "by several programs, in several parts": Reading(128, readers=32),
    "by more programs than there are parts": Reading(128, part=128, readers=128),
    "with a sample that says little": Reading(128, sample=2, readers=64),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("most", (1, 5, 64))
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_the_best_are_those_that_torch_finds(
    monkeypatch: pytest.MonkeyPatch, most: int, reading: Reading
) -> None:
    reading.use(monkeypatch)
    batch = batch_of([1], [1], WIDE)
    scores = some(9, 203)
    scores[1] = scores[1].round()  # with many ties
    scores[2] = 0.0
    scores[3, ::3], scores[4, 5:20] = float("nan"), float("-inf")
    scores[5, ::2] = -0.0
    scores[5, 1::2] = 0.0
    scores[6] = 1000.0 + scores[6] / 100
    scores[7] = scores[7].sort().values  # the best ones last
    visible = torch.tensor([203, 203, 202, 190, 77, 203, 201, 203, 3], dtype=torch.int32)
    for own in (scores, -scores):  # with the same counters
        found = selecting.UnitScores(own.to(DEVICE), visible.to(DEVICE))
        units, count = (each.cpu() for each in selecting.select_best(found, most, batch))
        for row, seen in enumerate(visible.tolist()):
            assert count[row] == min(seen, most)
            reached = own[row, :seen].tolist() + [float("-inf")] * most
            expected = choose_best(torch.tensor([reached]), most)[0]
            assert units[row, : count[row]].tolist() == expected[expected < seen].tolist(), row
    assert bool(batch._counters) == (reading.readers > 9)
    assert not any(counters.any() for counters in batch._counters.values())


def test_long_rows_are_hardly_ever_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sample says of ten thousand scores is enough to keep few that hold the best."""
    monkeypatch.setattr(selecting, "READ", 4096)
    again = "select_from_row"  # its passes are what a sample is to save
    scores = some(2, 10_000)
    scores[1] = scores[1].sort().values ** 3
    found = selecting.UnitScores(
        scores.to(DEVICE), torch.full((2,), 10_000, dtype=torch.int32, device=DEVICE)
    )
    if DEVICE == "cpu":  # an interpreter calls what is there
        monkeypatch.delattr(kernels, again)
    units, _ = selecting.select_best(found, 700, batch_of([1], [1], WIDE))
    assert torch.equal(units.cpu().long(), choose_best(scores, 700))


@pytest.mark.parametrize("contexts", ([1, 7, 20, 33], [18]))
@pytest.mark.parametrize("reading", (Reading(16), Reading(16, readers=64)))
def test_nothing_is_left_out_of_a_row_that_is_short(
    monkeypatch: pytest.MonkeyPatch, contexts: list[int], reading: Reading
) -> None:
    """Not even where nothing has been scored."""
    reading.use(monkeypatch)
    rows = len(contexts)
    scores = torch.full((rows, 64), float("nan"), device=DEVICE)
    visible = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    found = selecting.UnitScores(scores, visible)
    units, count = selecting.select_best(found, 33, batch_of([1], [1], WIDE))
    assert count.tolist() == contexts
    assert all(
        own[:seen] == list(range(seen)) for own, seen in zip(units.tolist(), contexts, strict=True)
    )


def test_many_rows_and_short_ones_have_a_program_each() -> None:
    counted = [
        [selecting.count_readers(rows, room) for room in (8192, 8193, 131072, 1 << 22)]
        for rows in (1, 16, 64, 512, 8192)
    ]
    assert counted == [[1, 3, 32, 512], [1, 3, 32, 32], [1, 3, 8, 8], [1] * 4, [1] * 4]


@pytest.mark.parametrize(("heads", "dim"), ((1, 16), (3, 8), (20, 24)))
@pytest.mark.parametrize("unit", (1, 4))
@pytest.mark.parametrize("weighted", (True, False))
def test_scores_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, heads: int, dim: int, unit: int, weighted: bool
) -> None:
    batch, most = batch_of(CONTEXTS, COUNTS, WIDE + dim), 2
    monkeypatch.setattr(selecting, "_SCORES", 8 * (batch.longest // unit))  # several pieces
    monkeypatch.setattr(selecting, "_PROGRAMS", 3)  # an interpreter has but one
    keys = batch.cache.key_slots[0][:, 0, WIDE:]
    total = sum(COUNTS)
    queries = some(total, heads, dim).to(DEVICE)
    weights = some(total, heads).to(DEVICE) if weighted else None
    room = batch.longest // unit
    pieces = list(selecting.cut_tokens(total, room))
    assert len(pieces) > 1 and [i for piece in pieces for i in piece] == list(range(total))
    own = sequences(batch)
    for piece in pieces:
        scores, visible = selecting.score_units(
            selecting.Asking(queries, weights), keys, batch, piece, unit=unit, most=most
        )
        for place, token in enumerate(piece):
            ends = own[token][unit - 1 :: unit]
            assert visible[place] == len(ends)
            if len(ends) <= most:
                continue
            asked = queries[token : token + 1]
            told = torch.ones_like(asked[..., 0]) if weights is None else weights[token][None]
            expected = score_keys(IndexQueries(asked, told), keys[ends])[0]
            torch.testing.assert_close(scores[place, : len(ends)], expected)


@pytest.mark.parametrize("heads", (1, 3, 8))
def test_a_piece_has_no_more_rows_than_a_grid_takes(heads: int) -> None:
    """Of the longest steps, where contexts are so short that scores would fit into memory."""
    pieces = list(selecting.cut_tokens(1 << 17, 20, heads))
    assert [i for piece in pieces for i in piece] == list(range(1 << 17))
    assert max(len(piece) for piece in pieces) * heads < 1 << 16


@pytest.mark.parametrize("codes", ("fp8_e4m3fn", "fp8_e5m2"))
def test_keys_of_eight_bits_are_read(codes: str) -> None:
    dtype: torch.dtype = getattr(torch, codes.replace("fp8", "float8"))
    batch, dim = batch_of([40], [1], 16, dtype), 16
    keys = some(len(batch.cache.key_slots[0]), 1, dim).to(DEVICE)
    slots = torch.arange(len(keys), device=DEVICE)
    stored = batch.cache.write(0, slots, keys, keys)[0][:, 0]
    queries = some(1, 2, dim).to(DEVICE)
    asking, stored_keys = selecting.Asking(queries, None), batch.cache.key_slots[0][:, 0]
    scores, _ = selecting.score_units(asking, stored_keys, batch, range(1), unit=1, most=2)
    told = torch.ones_like(queries[..., 0])
    expected = score_keys(IndexQueries(queries, told), stored[sequences(batch)[0]])
    torch.testing.assert_close(scores[:, :40], expected)


def scores_of(rows: list[list[int]], visible: list[int]) -> selecting.UnitScores:
    """Return scores of which the best are those of some units."""
    scores = torch.full((len(rows), max(visible)), -1.0)
    for row, own in enumerate(rows):
        scores[row, own] = 1.0
    return selecting.UnitScores(
        scores.to(DEVICE), torch.tensor(visible, dtype=torch.int32, device=DEVICE)
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tail", (True, False))
@pytest.mark.parametrize(("unit", "heads"), ((1, 1), (4, 1), (4, 3)))
@pytest.mark.parametrize("reading", (Reading(16), Reading(8, 4, readers=512)))
def test_the_tokens_of_chosen_units_are_listed(
    monkeypatch: pytest.MonkeyPatch, unit: int, heads: int, tail: bool, reading: Reading
) -> None:
    monkeypatch.setattr(selecting, "LISTED", 8)  # some at a time
    reading.use(monkeypatch)
    batch, most = batch_of(CONTEXTS, COUNTS, WIDE), 3
    own = sequences(batch)
    generator, rows, expected = np.random.default_rng(1), list[list[int]](), list[list[int]]()
    visible = list[int]()
    for slots in own:
        seen = len(slots)
        units = seen // unit if tail else -(-seen // unit)
        for head in range(heads):
            picked = sorted(generator.choice(units, min(units, most), replace=False).tolist())
            inside: list[Any] = [slots[i * unit : (i + 1) * unit] for i in picked]
            inside += [slots[units * unit :]] if tail else []
            rows.append(picked)
            visible.append(units)
            expected.append([slot * heads + head for part in inside for slot in part])
    listed = selecting.make_list(len(rows), most * unit + unit - 1, torch.device(DEVICE))
    for piece in (range(7), range(7, len(own))):
        mine = slice(piece.start * heads, piece.stop * heads)
        found = scores_of(rows[mine], visible[mine])
        into = listed.part(range(mine.start, mine.stop))
        selecting.select_tokens(
            found, batch, piece, into, most=most, unit=unit, tail=tail, heads=heads
        )
    counts = listed.counts.tolist()
    assert [each[:n] for each, n in zip(listed.slots.tolist(), counts, strict=True)] == expected


def test_attention_over_a_list_sees_its_tokens_alone() -> None:
    """With one key for all heads, whose beginning is its value; some heads to a program."""
    heads, rank, extra = 20, 16, 4
    batch = batch_of(CONTEXTS, COUNTS, rank + extra)
    layer = AttentionLayer(0, heads, 1, rank + extra, scale=0.3, value_dim=rank)
    own = [slots[::2][-9:] for slots in sequences(batch)]
    listed = selecting.make_list(len(own), 12, torch.device(DEVICE))
    listed.slots.fill_(1 << 30)  # what is not listed is not read
    for row, slots in enumerate(own):
        listed.slots[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    listed.counts.copy_(torch.tensor([len(slots) for slots in own]))
    query = some(len(own), heads, rank + extra).to(DEVICE)
    attention = PagedAttention(torch.device(DEVICE))
    for _ in range(2):  # what batches over lists have in common is made once
        found = attention.attend_written(layer, query, batch.over(*listed))
        for row, slots in enumerate(own):
            key = batch.cache.key_slots[0][slots, 0]
            weights = torch.softmax(query[row] @ key.T * layer.scale, dim=-1)
            expected = (weights @ key[:, :rank]).flatten()
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def test_a_reserved_batch_has_rows_as_long_as_there_is_memory_for() -> None:
    """However narrow the tables are of the plan that it is reserved for."""
    attention, size = PagedAttention(torch.device(DEVICE)), MixedSize(8, 2)
    memory = torch.zeros(packed_size(attention.arrays(idle_step(size, 5))), dtype=torch.uint8)
    cache = KVCache(KVShape(1, 1, 16), 2, torch.float32, torch.device(DEVICE))
    batch = attention.reserve(idle_step(size, 1), cache, memory.to(DEVICE), decodes=False)
    assert batch.longest == 5 * BLOCK
