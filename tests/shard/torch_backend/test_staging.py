"""Numbers on their way to a device: pinned memory is taken in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.shard.torch_backend import staging
from tgi_trio.shard.torch_backend.staging import (
    Array,
    PinnedPool,
    Sheet,
    Staging,
    packed_size,
    split,
)


@dataclass
class SlowDevice:
    """Has read nothing until somebody waits for it."""

    recorded: int = 0
    waited: list[int] = field(default_factory=list)

    def record(self, device: torch.device) -> Event:
        self.recorded += 1
        return Event(self, self.recorded - 1)


@dataclass
class Event:
    device: SlowDevice
    number: int

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.device.waited.append(self.number)


@pytest.mark.parametrize("turns", [2, 4, 7])
def test_all_buffers_are_filled_before_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    slow = SlowDevice()
    plain = torch.empty
    monkeypatch.setattr(staging, "is_accelerator", lambda device: True)
    monkeypatch.setattr(staging, "record_event", slow.record)
    monkeypatch.setattr(staging, "_host_bytes", lambda size, pinned: plain(size, dtype=torch.uint8))
    uploads = Staging(torch.device("cpu"), turns=turns)
    for i in range(3 * turns):
        (found,) = uploads.send([np.full(3, i, np.int32)])
        assert found.tolist() == [i] * 3
    assert slow.waited == list(range(2 * turns))


def test_memory_that_steps_came_down_into_is_that_of_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Tensor] = []

    def make(size: int, pinned: bool) -> torch.Tensor:
        made.append(torch.empty(size, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(staging, "_host_bytes", make)
    pool = PinnedPool()
    first, second = pool.lend(), pool.lend()
    small = torch.arange(6, dtype=torch.float64).view(2, 3)
    big = torch.arange(3000, dtype=torch.int32)
    here = [first.keep(small), second.keep(small + 1), first.keep(big)]
    assert len(made) == 3  # both steps are still to be read
    assert [torch.equal(*pair) for pair in zip(here, (small, small + 1, big), strict=True)]
    del first, here
    for turn in range(5):
        step = pool.lend()
        assert torch.equal(step.keep(small + turn), small + turn)
        assert torch.equal(step.keep(big), big)
        del step
    assert len(made) == 3


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=12),
)
def test_a_sheet_says_what_the_last_arrays_and_nothing_behind_them_say(
    shared: bool, steps: list[tuple[int, int, bool]]
) -> None:
    """Whatever was written before, shorter arrays leave what is idle behind them.

    So says the device's memory, though a table that it has is not sent again, but where others
    write there.
    """
    idle: list[Array] = [np.full(5, -1, np.int32), np.arange(6), np.zeros((3, 6), np.int16)]
    widest = np.zeros((5, 4), np.int32)
    target = torch.zeros(packed_size([*idle, widest]), dtype=torch.uint8)
    sheet, kept = Sheet([*idle, widest], target, shared=shared), np.full(5, 7, np.int32)
    table = np.zeros((0, 1), np.int32)
    kept.flags.writeable = False
    uploads = Staging(torch.device("cpu"))
    for number, (count, width, same) in enumerate(steps, start=1):
        column = kept if same else np.full(count, number, np.int32)
        arrays = [column, np.full(count + 1, number), np.full((3, 6), number, np.int16)]
        if not same or number == 1:
            table = np.full((count, width), number, np.int32)
            table.flags.writeable = number % 2 == 0
        if shared:
            target.zero_()
        uploads.fill_from(sheet, [*arrays, table])
        wanted: list[Array] = [column.copy() for column in idle]
        for behind, array in zip(wanted, arrays, strict=True):
            behind[: len(array)] = array
        rows = np.zeros((5, table.shape[1]), np.int32)
        rows[: len(table)] = table
        wanted.append(rows)
        for memory in (torch.from_numpy(sheet.bytes), target):
            for part, array in zip(split(memory, wanted), wanted, strict=True):
                assert np.array_equal(part.numpy(), array)


def test_views_of_arrays_that_may_change_are_written_again() -> None:
    every = np.zeros((2, 3), np.int32)
    target = torch.zeros(packed_size([every[0], every]), dtype=torch.uint8)
    sheet = Sheet([every[0], every.copy()], target, shared=False)
    view, table = every[0], np.zeros((2, 3), np.int32)
    view.flags.writeable = table.flags.writeable = False
    uploads = Staging(torch.device("cpu"))
    for number in range(3):
        every[0] = number
        uploads.fill_from(sheet, [view, table])
        assert split(target, [view])[0].tolist() == [number] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_a_sheet_is_sent_where_it_says_something_new_or_others_write_there(shared: bool) -> None:
    column, others, table = np.arange(3), np.full(3, 5), np.ones((2, 3), np.int32)
    for array in (column, others, table):
        array.flags.writeable = False
    told: list[Array] = [column, others, table]
    target = torch.zeros(packed_size(told), dtype=torch.uint8)
    sheet = Sheet([array.copy() for array in told], target, shared=shared)
    uploads = Staging(torch.device("cpu"))
    uploads.fill_from(sheet, told)
    target.zero_()
    uploads.fill_from(sheet, told)
    assert bool(target.any()) is shared
    moved = np.full(3, 9)
    uploads.fill_from(sheet, [moved], [1])
    assert [part.tolist() for part in split(target, told)[:2]] == [[0, 1, 2], [9, 9, 9]]
    assert split(target, told)[2].any() == shared  # it has no table that nobody has written over
