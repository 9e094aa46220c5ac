"""Copies in the host's memory: the same bytes come back, within the memory that was allowed."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.models_support import BLOCK
from tests.shard.torch_backend.stand_in_support import small_device, start
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.messages import PrefillRow, StateGrant
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.machine import memory
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend import host_copies
from tgi_trio.shard.torch_backend.host_copies import (
    HostRoom,
    Planes,
    TorchHostCopies,
    cut_pieces,
    share_room,
    staging_bytes,
)
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape, KVSize
from tgi_trio.shard.torch_backend.prefix_parts import find_parts
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner
from tgi_trio.testing.stand_in_device import StandInDevice

CPU = torch.device("cpu")
SIZES = {
    "alike": KVShape.of([KVSize(2, 8, 8)] * 3),
    "different": KVShape.of([KVSize(2, 8, 8), KVSize(1, 16, 16), KVSize(1, 16, 16)]),
    "odd": KVShape.of([KVSize(1, 3, 5)]),
    "one for both, and turns": KVShape.of([KVSize(1, 6, 6)] * 2, same=True, turns=True),
    "none in between": KVShape.of([KVSize(2, 8, 8), KVSize(0, 8, 8), KVSize(2, 8, 8)]),
}
KINDS = [(name, dtype) for name in SIZES for dtype in (torch.float32, torch.float8_e4m3fn)]


# --- how much ------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 34), st.integers(1, 1 << 30))
def test_pieces_never_take_more_than_there_is(nbytes: int, row: int) -> None:
    rows = cut_pieces(nbytes, row)
    pinned = [1 << (count * row - 1).bit_length() for count in rows]  # as torch rounds it up
    assert all(rows) and sum(pinned) <= nbytes
    assert rows == sorted(rows, reverse=True)
    if nbytes >= 2 * row:
        assert sum(rows) * row > nbytes // 4


@given(st.integers(0, 1 << 30), st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_states_leave_half_to_blocks(nbytes: int, block: int, slot: int) -> None:
    blocks, slots = share_room(nbytes, block, slot)
    pinned = [
        1 << (count * size - 1).bit_length()
        for count, size in [*((rows, block) for rows in blocks), *((rows, slot) for rows in slots)]
    ]
    assert sum(pinned) <= nbytes
    assert bool(slots) <= bool(slot)
    assert sum(1 << (count * slot - 1).bit_length() for count in slots) <= nbytes // 2


def test_what_takes_no_bytes_has_a_bounded_number_of_places() -> None:
    assert 0 < sum(cut_pieces(1 << 30, 0)) <= 1 << 20


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 5 << 20)
    cache = KVCache(SIZES["alike"], 4, torch.float32, CPU)
    with pytest.raises(ConfigurationError, match=r"asks for 6 MiB on a rank, .* has 5 for each"):
        TorchHostCopies(Planes(cache.planes, ()), 6 << 20, CPU)
    with pytest.raises(ConfigurationError, match=r"asks for 2 MiB on a rank, .* has 1 for each"):
        TorchHostCopies(Planes(cache.planes, ()), 2 << 20, CPU, neighbours=3)


def test_less_than_a_block_is_refused() -> None:
    cache = KVCache(SIZES["alike"], 4, torch.float32, CPU)
    with pytest.raises(ConfigurationError, match=r"a block takes 6144 and states 0: raise"):
        TorchHostCopies(Planes(cache.planes, ()), 100, CPU)


def test_all_ranks_have_as_many_places_as_the_one_with_the_least() -> None:
    cache = KVCache(SIZES["alike"], 4, torch.float32, CPU)
    copies = TorchHostCopies(Planes(cache.planes, ()), 1 << 20, CPU, lambda own: min(own, 7))
    assert copies.places[0] == 7
    assert copies.nbytes < 1 << 17


# --- what comes back -----------------------------------------------------------------------------


def fill(cache: KVCache) -> None:
    for tensor in cache.tensors:
        tensor.view(torch.uint8).random_(0, 256)


def rows_of(cache: KVCache, block: int) -> list[list[int]]:
    """Return the bytes of a block, by tensor."""
    return [each.view(cache.blocks, -1).view(torch.uint8)[block].tolist() for each in cache.tensors]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_copies_are_kept_in_files_as_their_blocks_are(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the layers in the order of a file's parts, what a drafter keeps behind them."""
    monkeypatch.setattr(host_copies, "_PIECE", 1 << 13)
    cache, drafted = KVCache(SIZES[name], 6, dtype, CPU), torch.zeros(6 * 16, 3)
    planes = Planes([*cache.planes, drafted.view(1, 6, -1)], ())
    copies = TorchHostCopies(planes, 1 << 17, CPU)
    fill(cache)
    drafted.uniform_()
    blocks, places = [3, 1, 5], [1, copies.places[0], 4]
    copies.launch([Transfer(*each, back=False) for each in zip(blocks, places, strict=True)])
    parts = find_parts(cache, [drafted], None, copies)
    assert len(parts.copies) == len(parts.blocks) and not parts.slot_copies
    for part, copy in zip(parts.blocks, parts.copies, strict=True):
        np.testing.assert_array_equal(part.take(np.array(blocks)), copy.take(np.array(places)))


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_what_is_copied_out_is_copied_back(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a dictionary, in random orders, over pieces of few rows and little staging."""
    monkeypatch.setattr(host_copies, "_PIECE", 1 << 13)
    monkeypatch.setattr(host_copies, "_STAGED", 1 << 13)
    rng = random.Random(name)
    cache = KVCache(SIZES[name], 12, dtype, CPU)
    planes = Planes(cache.planes, ())
    assert sum(each.numel() for each in planes.blocks) == sum(t.numel() for t in cache.tensors)
    copies = TorchHostCopies(planes, 100_000, CPU)
    places = min(9, copies.places[0])
    assert places > 2 and copies.nbytes <= 100_000
    fill(cache)
    kept: dict[int, list[list[int]]] = {}
    for launches in range(1, 40):
        blocks = {block: rows_of(cache, block) for block in range(12)}
        ordered = []
        for _ in range(rng.randint(1, 15)):
            block, place = rng.randint(0, 11), rng.randint(1, places)
            if place in kept and rng.random() < 0.5:
                blocks[block] = kept[place]
                ordered.append(Transfer(block, place, back=True))
            else:
                kept[place] = blocks[block]
                ordered.append(Transfer(block, place, back=False))
        copies.launch(ordered)
        assert copies.done == launches
        assert {block: rows_of(cache, block) for block in range(12)} == blocks


def test_states_and_what_a_drafter_keeps_are_copied_as_well() -> None:
    cache = KVCache(SIZES["alike"], 6, torch.float32, CPU)
    drafted = torch.randint(0, 99, (6 * BLOCK, 2, 4))
    states = [torch.randn(5, 3, 2), torch.randn(5, 7)]
    planes = Planes([*cache.planes, drafted.view(1, 6, -1)], [each[None] for each in states])
    copies = TorchHostCopies(planes, 1 << 20, CPU)
    before = [drafted.clone(), *(each.clone() for each in states)]
    copies.launch([Transfer(2, 4, False), Transfer(3, 4, False, states=True)])
    drafted[2 * BLOCK : 3 * BLOCK] = 0
    for each in states:
        each[3] = 0
    copies.launch([Transfer(5, 4, True), Transfer(1, 4, True, states=True)])
    assert torch.equal(drafted[5 * BLOCK :], before[0][2 * BLOCK : 3 * BLOCK])
    for each, old in zip(states, before[1:], strict=True):
        assert torch.equal(each[1], old[3]) and torch.equal(each[4], old[4])


# --- in a runner ---------------------------------------------------------------------------------

HOST_BYTES = 1 << 20
TEXT = [7 * i % 500 for i in range(2 * BLOCK + 5)]


def say(
    runner: Runner, text: list[int], blocks: list[int], cached: int = 0, new: int = 4
) -> list[tuple[ListLike[int], ListLike[float]]]:
    """Return the tokens of a sequence that has these blocks, and the logits' log-probabilities."""
    slots = 16 if runner.info.state_bytes else 0
    batch = Batch(vocab_size=512, block_size=BLOCK, blocks=64, eos_ids=(), state_slots=slots)
    ids = np.array(text, np.int32)
    states = StateGrant((1, 2)) if runner.info.state_bytes else None
    batch.add(PrefillRow(1, ids, len(ids), cached, blocks, new, states=states))
    said = []
    while (plan := batch.plan(100)) is not None:
        result = runner.launch(plan).result()
        said += [(row.token_ids, row.logprobs) for row in result.rows]
        for gone in batch.settle(plan, result).dropped:
            runner.drop(gone)
    return said


def check_there_and_back(runner: Runner) -> None:
    """Have a prefix computed, copied out, overwritten, and copied back to other blocks."""
    copies = runner.host_copies
    assert copies is not None
    whole = say(runner, TEXT, [1, 2, 3])
    copies.launch([Transfer(1, 5, False), Transfer(2, 6, False)])
    copies.finish()  # as the loop waits, which lets others go on meanwhile
    say(runner, TEXT[::-1], [1, 2, 3])
    copies.launch([Transfer(9, 5, True), Transfer(8, 6, True)])
    copies.finish()
    again = say(runner, TEXT, [9, 8, 3], cached=2 * BLOCK)
    assert [tokens for tokens, _ in again if tokens] == [tokens for tokens, _ in whole if tokens]
    ours, theirs = (
        [value for _, logprobs in said for value in logprobs] for said in (again, whole)
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "gemma3_text"])
def test_a_model_says_the_same_behind_what_comes_back(
    checkpoint: Callable[..., Path], family: str
) -> None:
    runner = start(checkpoint(family), "cpu", prefix_cache_host_bytes=HOST_BYTES)
    check_there_and_back(runner)


def test_the_warm_up_says_how_many_there_are(checkpoint: Callable[..., Path]) -> None:
    runner = start(checkpoint("llama"), "cpu", prefix_cache_host_bytes=HOST_BYTES)
    found = runner.warm_up(WarmupRequest(24, 64, 4, 63 * BLOCK))
    assert found.host_blocks > 4 and found.host_slots == 0
    assert found.host_blocks * BLOCK * runner.info.kv_bytes_per_token <= found.host_bytes
    assert found.host_bytes <= HOST_BYTES
    without = start(checkpoint("llama"), "cpu")
    assert without.host_copies is None
    assert without.warm_up(WarmupRequest(24, 64, 4, 63 * BLOCK)).host_blocks == 0


def test_a_device_copies_without_a_wait(checkpoint: Callable[..., Path]) -> None:
    with small_device(checkpoint) as device:
        folder = checkpoint("llama", **SMALL)
        runner = start(folder, "cuda:0", prefix_cache_host_bytes=HOST_BYTES)
        check_there_and_back(runner)
        assert isinstance(runner, TorchRunner) and runner.host_copies is not None
        device.counts.waits.clear()
        before = device.counts.event_waits, device.counts.received
        copies = runner.host_copies
        done = copies.done
        copies.launch([Transfer(block, block, False) for block in range(1, 9)])
        copies.launch([Transfer(block, block, True) for block in range(1, 9)])
        assert not device.counts.waits and device.counts.event_waits == before[0]
        planes = 2  # K and V of all layers, in one row
        assert device.counts.received - before[1] <= planes, "neighbours are copied at once"
        assert copies.done == done + 2
        copies.finish()


def test_steps_of_a_rank_that_does_not_plan_wait_on_the_device(
    checkpoint: Callable[..., Path],
) -> None:
    """Rank 0 says in the plan what has to be over; the host never waits for it."""
    with StandInDevice() as device, torch.inference_mode():
        cache = KVCache(SIZES["alike"], 6, torch.float32, torch.device("cuda:0"))
        copies = TorchHostCopies(Planes(cache.planes, ()), 1 << 20, torch.device("cuda:0"))
        for block in (1, 2, 3):
            copies.launch([Transfer(block, block, False)])
        device.counts.waits.clear()
        before = device.counts.stream_waits
        copies.precede(0)
        assert device.counts.stream_waits == before, "nothing it relies on is in flight"
        copies.precede(2)
        copies.precede(2)
        assert device.counts.stream_waits == before + 1
        copies.precede(3)
        assert device.counts.stream_waits == before + 2
        assert not device.counts.waits and not device.counts.event_waits


def test_room_for_rows_on_the_device_is_left_free() -> None:
    device = torch.device("cuda:0")
    assert HostRoom(1 << 30, device).staging_bytes(1 << 20, 0) == staging_bytes(1 << 20) == 64 << 20
    assert HostRoom(0, device).staging_bytes(1 << 20, 0) == 0
    assert HostRoom(1 << 30, CPU).staging_bytes(1 << 20, 0) == 0
    assert staging_bytes(1 << 30) == 2 << 30
