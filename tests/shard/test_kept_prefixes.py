"""Files of computed prefixes: what is written is read, and what is damaged is never used."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tgi_trio.ipc.prefixes import KeepOrder, RestoreOrder
from tgi_trio.shard.prefixes import kept_prefixes
from tgi_trio.shard.prefixes.kept_prefixes import (
    Bytes,
    HostPart,
    Ints,
    Part,
    PrefixParts,
    RankPrefixes,
    find_file,
)
from tgi_trio.shard.torch_backend.prefix_parts import TensorPart, copy_parts

BLOCKS, SLOTS = 20, 6
KEY = bytes(range(16))


class Memory:
    """K and V of two layers, in tensors of torch and of numpy, and the states of one.

    And copies of them in the host's memory, in pieces of a few rows.
    """

    def __init__(self, seed: int | None, *, copies: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.keys = torch.zeros((BLOCKS * 16, 2, 4), dtype=torch.bfloat16)
        self.values = np.zeros((BLOCKS, 3, 16), np.float32)
        self.states = np.zeros((SLOTS, 24), np.uint8)
        if seed is not None:
            self.keys.copy_(torch.from_numpy(rng.standard_normal(self.keys.shape)))
            self.values[:] = rng.standard_normal(self.values.shape)
            self.states[:] = rng.integers(0, 256, self.states.shape)
        blocks: list[Part] = [TensorPart(self.keys, BLOCKS), HostPart(self.values, BLOCKS)]
        width = sum(part.item_bytes for part in blocks)
        self.rows = [torch.zeros((count, width), dtype=torch.uint8) for count in (4, 2, 1)]
        self.state_rows = [torch.zeros((3, 24), dtype=torch.uint8)]
        if seed is not None:
            for piece in (*self.rows, *self.state_rows):
                piece.copy_(torch.from_numpy(rng.integers(0, 256, piece.shape)))
        self.parts = PrefixParts(blocks, [HostPart(self.states, SLOTS)])
        if copies:
            self.parts = replace(
                self.parts,
                copies=copy_parts(blocks, self.rows),
                slot_copies=copy_parts(self.parts.slots, self.state_rows),
            )

    def blocks(self, numbers: list[int]) -> tuple[list[float], list[float]]:
        keys = self.keys.view(BLOCKS, -1)[numbers]
        return keys.flatten().tolist(), self.values[numbers].flatten().tolist()

    @property
    def empty(self) -> bool:
        return not (self.keys.any() or self.values.any() or self.states.any())


def keep(folder: Path, memory: Memory) -> KeepOrder:
    order = KeepOrder(folder, KEY, (7, 3, 12, 19), (5, 1))
    report = RankPrefixes(lambda: memory.parts).keep(order)
    assert not report.error and report.nbytes == find_file(order, 0).stat().st_size
    return order


@pytest.mark.parametrize("at_once", [1, 300, 1 << 20])
def test_blocks_come_back_in_order(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is copied at a time; some of them alone as well."""
    monkeypatch.setattr(kept_prefixes, "_AT_ONCE", at_once)
    old, new, less = Memory(1), Memory(None), Memory(None)
    order = keep(tmp_path, old)
    assert stat.S_IMODE(find_file(order, 0).stat().st_mode) == 0o600
    report = RankPrefixes(lambda: new.parts).restore(RestoreOrder(tmp_path, KEY, 4, 2))
    assert not report.error
    assert new.blocks([1, 2, 3, 4]) == old.blocks([7, 3, 12, 19])
    assert (new.states[[1, 2]] == old.states[[5, 1]]).all()
    assert not new.keys[: 1 * 16].any() and not new.keys[5 * 16 :].any()
    report = RankPrefixes(lambda: less.parts).restore(RestoreOrder(tmp_path, KEY, 2, 0))
    assert not report.error and less.blocks([1, 2]) == old.blocks([7, 3])
    assert not less.states.any() and not less.values[3:].any()


def test_what_the_host_has_is_written_and_read_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of either memory, in any order, and to either memory."""
    monkeypatch.setattr(kept_prefixes, "_AT_ONCE", 700)  # a few blocks of a part
    old = Memory(1, copies=True)
    order = KeepOrder(tmp_path, KEY, (7, -3, 12, -7, -1, 4), (-2, 5, 1))
    assert not RankPrefixes(lambda: old.parts).keep(order).error

    def row(memory: Memory, block: int) -> bytes:
        if block < 0:
            return bytes(torch.cat(memory.rows)[-block - 1].numpy())
        keys = memory.keys.view(BLOCKS, -1)[block].view(torch.uint8)
        return bytes(keys.numpy()) + memory.values[block].tobytes()

    def states(memory: Memory, slot: int) -> bytes:
        return bytes(memory.state_rows[0][-slot - 1].numpy() if slot < 0 else memory.states[slot])

    for blocks, slots, hosted, hosted_slots in (
        (6, 3, 0, 0),
        (0, 0, 6, 3),
        (2, 1, 4, 2),
        (3, 1, 2, 1),
    ):
        new = Memory(None, copies=True)
        read = RestoreOrder(tmp_path, KEY, blocks, slots, hosted, hosted_slots)
        report = RankPrefixes(partial(getattr, new, "parts")).restore(read)
        assert not report.error
        assert report.nbytes == (blocks + hosted) * len(row(old, 1)) + (slots + hosted_slots) * 24
        places = [*range(1, 1 + blocks), *range(-1, -1 - hosted, -1)]
        for at, place in enumerate(places):
            assert row(new, place) == row(old, order.blocks[at])
        state_places = [*range(1, 1 + slots), *range(-1, -1 - hosted_slots, -1)]
        for at, place in enumerate(state_places):
            assert states(new, place) == states(old, order.slots[at])
        assert not any(row(new, -place).strip(b"\0") for place in range(1 + hosted, 8))
        assert not any(row(new, place).strip(b"\0") for place in range(1 + blocks, BLOCKS))


@pytest.mark.parametrize("at_a_time", [(1, 1), (2, 3), (9, 9)])
def test_a_file_written_part_by_part_is_the_one_written_at_once(
    tmp_path: Path, at_a_time: tuple[int, int]
) -> None:
    memory = Memory(1, copies=True)
    whole = KeepOrder(tmp_path, KEY, (7, -3, 12, -7, 4), (-2, 5, 1))
    ranks = RankPrefixes(lambda: memory.parts)
    expected = ranks.keep(whole, 5)
    reports = [ranks.keep(part) for part in whole.cut(*at_a_time)]
    assert not any(report.error for report in reports)
    assert find_file(whole, 0).read_bytes() == find_file(whole, 5).read_bytes()
    assert sum(report.nbytes for report in reports) == expected.nbytes
    first, *others = whole.cut(2, 3)
    assert not ranks.keep(first).error
    report = ranks.keep(replace(others[-1], key=KEY[::-1]))  # its file is not there
    assert "No such file" in report.error
    assert "not what was begun" in ranks.keep(replace(others[-1], behind=(0, 9))).error
    assert not find_file(whole, 0).exists(), "it cannot be continued any more"


def test_a_shard_without_copies_keeps_none(tmp_path: Path) -> None:
    memory = Memory(1)
    order = KeepOrder(tmp_path, KEY, (7, -3))
    assert "no copies" in RankPrefixes(lambda: memory.parts).keep(order).error
    assert not list(tmp_path.iterdir())
    keep(tmp_path, memory)
    report = RankPrefixes(lambda: memory.parts).restore(RestoreOrder(tmp_path, KEY, 3, 2, 1))
    assert "no copies" in report.error


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(150, len(content))] ^= 4
    path.write_bytes(content)


def _replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (_flip, "checksum"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut off"),
    "without a head": (lambda path: path.write_bytes(b"tgi"), "cut off"),
    "empty": (lambda path: path.write_bytes(b""), "cut off"),
    "gone": (Path.unlink, "No such file"),
    "a pipe that nobody writes to": (_replace_by_a_pipe, "no file, but a device or a pipe"),
    "of another program": (
        lambda path: path.write_bytes(b"TGITRIO1" + path.read_bytes()[8:]),
        "written together",
    ),
    "another key": (
        lambda path: path.write_bytes(path.read_bytes().replace(KEY, KEY[::-1])),
        "written together",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_not_used(tmp_path: Path, what: str) -> None:
    """And leaves nothing in the blocks: a mask does not hide NaN."""
    damage, words = DAMAGE[what]
    order = keep(tmp_path, Memory(1))
    damage(find_file(order, 0))
    new = Memory(None)
    report = RankPrefixes(lambda: new.parts).restore(RestoreOrder(tmp_path, KEY, 4, 2))
    assert words in report.error
    assert new.empty


def test_a_file_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, Memory(1))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    new = Memory(None)
    report = RankPrefixes(lambda: new.parts).restore(RestoreOrder(tmp_path, KEY, 4, 2))
    assert f"belongs to another user ({os.getuid()})" in report.error and new.empty


def test_other_memory_is_not_read_into(tmp_path: Path) -> None:
    keep(tmp_path, Memory(1))
    new = Memory(None)
    fewer = replace(new.parts, blocks=new.parts.blocks[:1])
    wider = replace(new.parts, slots=[HostPart(np.zeros((SLOTS, 25), np.uint8), SLOTS)])
    for parts, words in ((fewer, "other sizes"), (wider, "other sizes")):
        own = RankPrefixes(partial(replace, parts))
        assert words in own.restore(RestoreOrder(tmp_path, KEY, 4, 2)).error
    for order in (RestoreOrder(tmp_path, KEY, 5, 2), RestoreOrder(tmp_path, KEY, 4, 3)):
        assert "fewer blocks" in RankPrefixes(lambda: new.parts).restore(order).error
    assert new.empty


def test_one_rank_that_cannot_is_enough(tmp_path: Path) -> None:
    """None of them computes with what another lacks."""
    old, new = Memory(1), Memory(None)
    order = keep(tmp_path, old)
    said: list[int] = []

    def agree(own: int) -> int:
        said.append(own)
        return own

    for number in (order, replace(order, folder=tmp_path / "gone")):
        RankPrefixes(lambda: old.parts, agree).keep(number)
    for kept in (tmp_path, tmp_path / "gone"):
        RankPrefixes(lambda: old.parts, agree).restore(RestoreOrder(kept, KEY, 4, 2))
    assert said == [1, 0, 1, 0]
    old = Memory(1)
    report = RankPrefixes(lambda: new.parts, agree=lambda own: 0).restore(
        RestoreOrder(tmp_path, KEY, 4, 2)
    )
    assert "another rank" in report.error and new.empty
    report = RankPrefixes(lambda: old.parts, agree=lambda own: 0).keep(order)
    assert "another rank" in report.error


def test_a_folder_that_is_gone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = Memory(1)
    order = KeepOrder(tmp_path / "gone", KEY, (1,), ())
    report = RankPrefixes(lambda: memory.parts).keep(order)
    assert "No such file" in report.error and not capsys.readouterr().out
    RankPrefixes(lambda: memory.parts).keep(order, 1)
    assert "No such file" in capsys.readouterr().out  # rank 0 alone answers the router


class Failing(HostPart):
    """A part whose numbers cannot be copied, as on a device that has failed."""

    def take(self, items: Ints) -> Bytes:
        raise RuntimeError("no numbers")


def test_what_is_not_written_to_its_end_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, order = Memory(1), KeepOrder(tmp_path, KEY, (1,), (1,))
    failing = replace(memory.parts, slots=[Failing(memory.states, SLOTS)])
    with pytest.raises(RuntimeError, match="no numbers"):
        RankPrefixes(partial(replace, failing)).keep(order)
    assert not [*tmp_path.iterdir()]

    def refuse(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)  # where some file systems say so
    error = RankPrefixes(lambda: memory.parts).keep(order).error
    assert error.startswith("No space left on device: ") and "--prefix-cache-bytes" in error
    assert not [*tmp_path.iterdir()]
