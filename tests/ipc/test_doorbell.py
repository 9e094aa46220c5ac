"""The doorbell's parts: the sleeping word, the budget for staying awake, the table of states."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.doorbell import (
    STATES,
    AwakeBudget,
    Bell,
    BlockingWaiter,
    SleepFlag,
    spin_while,
)
from tgi_trio.ipc.fence import Ordering
from tgi_trio.ipc.layout import ALWAYS, ASLEEP, AWAKE

NAMES = {"AWAKE": AWAKE, "ASLEEP": ASLEEP, "ALWAYS": ALWAYS}


def word(value: int) -> memoryview:
    view = memoryview(bytearray(8)).cast("Q")
    view[0] = value
    return view


def test_a_fence_stands_between_the_sleeping_word_and_the_second_look() -> None:
    flag = word(ALWAYS)
    seen: list[int] = []
    sleeper = SleepFlag(flag, Ordering("test", lambda: seen.append(flag[0]), None))
    assert flag[0] == AWAKE
    sleeper.set()
    assert seen == [ASLEEP], "the word is stored before the fence"
    sleeper.clear()
    assert flag[0] == AWAKE


def test_a_fence_comes_before_the_writer_looks_at_the_word() -> None:
    flag = word(AWAKE)
    fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fall_asleep() -> None:  # the reader goes to sleep while the writer is in its fence
        flag[0] = ASLEEP

    Bell(fd, flag, Ordering("test", fall_asleep, None)).ring_if_asleep()
    assert os.eventfd_read(fd) == 1
    assert flag[0] == AWAKE
    os.close(fd)


def test_the_table_of_states_is_what_the_code_does() -> None:
    """Every writer row of STATES, played: word before, bell, word after."""
    fence = Ordering("test", lambda: None, None)
    blind = Ordering("none", None, None)
    for who, event, before, after, _ in STATES:
        if who != "writer":
            continue
        ordering = blind if "no fence" in event else fence
        for state in NAMES.values() if before == "any" else [NAMES[before]]:
            flag, fd = word(state), os.eventfd(0, os.EFD_NONBLOCK)
            Bell(fd, flag, ordering).ring_if_asleep()
            assert flag[0] == NAMES.get(after, state), event
            if "do nothing" in event:
                os.eventfd_write(fd, 1)  # reading an eventfd that was never rung would block
            assert os.eventfd_read(fd) == 1, event
            os.close(fd)


@given(st.lists(st.booleans(), max_size=400))
def test_staying_awake_is_bounded_and_comes_back_when_it_pays(pays: list[bool]) -> None:
    budget = AwakeBudget(50)
    misses = 0
    asleep = 0
    for paid in pays:
        taken = budget.take()
        assert taken in (0, 50_000)
        if taken == 0:
            asleep += 1
            assert asleep <= 256, "it never gives up for good"
            assert misses >= 4, "it sleeps at once only after misses in a row"
            continue
        asleep = 0
        budget.settle(paid)
        misses = 0 if paid else misses + 1
        if paid:
            assert budget.take() == 50_000


def test_in_vain_it_hardly_spins_at_all() -> None:
    budget = AwakeBudget(50)
    tries = 0
    for _ in range(10_000):
        if budget.take():
            tries += 1
            budget.settle(False)
    assert tries < 60


def test_no_budget_is_no_spin() -> None:
    assert AwakeBudget(0).take() == 0


def test_a_spin_ends_with_the_frame_or_with_the_time() -> None:
    looks = iter([True, True, False])
    assert spin_while(lambda: next(looks), 10**12)
    assert not spin_while(lambda: True, 1000)


def test_a_dead_peers_last_frame_is_read_before_its_death_counts() -> None:
    """The frame and the death arrive together, after the second look."""
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    read, write = os.pipe()
    os.close(write)
    looks = iter([True, True, False, False, True, True, True])
    flag = SleepFlag(word(ALWAYS), Ordering("test", lambda: None, None))
    waiter = BlockingWaiter(bell, read, flag, lambda: next(looks), 0)
    assert waiter.wait(None)
    with pytest.raises(ConnectionResetError):
        waiter.wait(None)
    os.close(read)
    os.close(bell)
