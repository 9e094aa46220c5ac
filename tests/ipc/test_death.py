"""Who notices whose death, and what is left behind (nothing)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock

from tests.ipc.conftest import CHILDREN, ROOT, attach_here
from tgi_trio.errors import PeerStalled
from tgi_trio.ipc import watch
from tgi_trio.ipc.control import ControlPage
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.parent import guard_death_pipe
from tgi_trio.ipc.spawn import ShardProcess, spawn_shard
from tgi_trio.ipc.watch import StallDetector, wait_for_death
from tgi_trio.testing.segments import names_in_shm, names_left

MakeEndpoints = Callable[..., Endpoints]
SpawnChild = Callable[..., ShardProcess]


def until_ready(child: ShardProcess) -> None:
    assert child.process.stdout is not None
    assert child.process.stdout.readline() == b"ready\n"


def never_readable() -> int:
    """Return a descriptor that never becomes readable: a pidfd that never fires."""
    return os.eventfd(0, os.EFD_CLOEXEC)


@pytest.mark.trio
@pytest.mark.parametrize("by", ["mutex", "pidfd"])
async def test_a_killed_shard_is_noticed(
    by: str,
    make_endpoints: MakeEndpoints,
    spawn_child: SpawnChild,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    assert endpoints.page.alive_held
    if by == "pidfd":
        monkeypatch.setattr(ControlPage, "alive_held", False)
    pidfd = never_readable() if by == "mutex" else child.pidfd
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_death, pidfd, endpoints.page)
            await trio.sleep(0.05)
            child.kill()
        assert await child.reap() == -signal.SIGKILL


@pytest.mark.trio
async def test_a_killed_shard_is_noticed_where_no_thread_can_be_started(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    assert endpoints.page.alive_held
    with trio.fail_after(120), monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_death, child.pidfd, endpoints.page)
            await trio.testing.wait_all_tasks_blocked()
            child.kill()
        assert await child.reap() == -signal.SIGKILL


@pytest.mark.trio
async def test_death_is_noticed_however_late_one_starts_to_look(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    child.kill()
    await child.reap()
    with trio.fail_after(120):
        await wait_for_death(never_readable(), endpoints.page)
        await wait_for_death(never_readable(), endpoints.page)  # twice: the mutex stays dead


@pytest.mark.trio
async def test_a_shard_that_dies_while_it_starts_is_noticed(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, "not a number", stderr=subprocess.DEVNULL)
    with trio.fail_after(120):
        await wait_for_death(child.pidfd, endpoints.page)
        assert await child.reap() == 1


@pytest.mark.trio
async def test_nobody_waits_for_a_death_that_is_no_longer_of_interest(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_THREAD_SLICE_S", 0.01)
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    with trio.move_on_after(0.05) as scope:
        await wait_for_death(child.pidfd, endpoints.page)
    assert scope.cancelled_caught
    waiting = [t for t in threading.enumerate() if t.name == "alive-mutex"]
    for thread in waiting:
        await trio.to_thread.run_sync(thread.join, 120)
        assert not thread.is_alive()


@pytest.mark.trio
async def test_a_router_that_dies_takes_its_shards_with_it_and_leaves_no_names() -> None:
    before = names_in_shm()
    router = subprocess.Popen(
        [sys.executable, str(CHILDREN / "router.py"), "2", "family"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert router.stdout is not None
    pidfds = [os.pidfd_open(int(pid)) for pid in router.stdout.readline().split()]
    assert len(pidfds) == 2
    router.kill()
    with trio.fail_after(120):
        for pidfd in pidfds:
            await trio.lowlevel.wait_readable(pidfd)
            os.close(pidfd)
    router.wait()
    router.stdout.close()
    assert not names_left(before)


@pytest.mark.trio
async def test_what_tests_start_ends_with_the_tests() -> None:
    """Whoever ends pytest by a signal leaves no router behind that talks to its shards for ever."""
    code = (
        "import subprocess, sys, time\n"
        "router = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "print(router.pid, router.stdout.readline(), flush=True)\n"
        "time.sleep(3600)\n"
    )
    tests = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, str(CHILDREN / "router.py"), "1", "family"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert tests.stdout is not None
    pidfds = [os.pidfd_open(int(pid)) for pid in tests.stdout.readline().split()]
    assert len(pidfds) == 2
    tests.terminate()
    try:
        with trio.fail_after(120):
            for pidfd in pidfds:
                await trio.lowlevel.wait_readable(pidfd)
    finally:
        for pidfd in pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    tests.wait()
    tests.stdout.close()


def test_the_death_pipe_is_a_second_line() -> None:
    read, write = os.pipe()
    died = threading.Event()
    thread = guard_death_pipe(read, died.set)
    assert thread.daemon
    assert not died.is_set()
    os.close(write)
    assert died.wait(120)
    thread.join(120)
    os.close(read)


def test_a_shard_without_its_router_does_not_start() -> None:
    code = f"from tgi_trio.ipc.parent import die_with_parent; die_with_parent({os.getpid()} + 1)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "died before this process had started" in run.stderr


def test_die_with_parent_accepts_the_real_parent() -> None:
    code = f"from tgi_trio.ipc.parent import die_with_parent; die_with_parent({os.getpid()})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_shards_are_only_spawned_from_the_main_thread(make_endpoints: MakeEndpoints) -> None:
    endpoints = make_endpoints()
    errors: list[BaseException] = []

    def spawn() -> None:
        try:
            spawn_shard(["true"], endpoints)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.trio
async def test_a_shard_may_close_its_end_in_good_order(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1, "close")
    until_ready(child)
    child.kill()
    with trio.fail_after(120):
        await wait_for_death(child.pidfd, endpoints.page)


async def watch_heartbeat(page: ControlPage, detector: StallDetector, every_s: float) -> None:
    """Look again and again; raises PeerStalled."""
    while True:
        detector.observe(trio.current_time(), page.vitals, page.describe_shard)
        await trio.sleep(every_s)


@pytest.mark.trio
async def test_a_stopped_shard_is_named_with_its_phase_and_step(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    endpoints = make_endpoints(rank=5, incarnation=2)
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    os.kill(child.pid, signal.SIGSTOP)
    expected = rf"rank 5 \(pid {child.pid}, incarnation 2, phase DECODE, step 3\): no heartbeat"
    with pytest.raises(PeerStalled, match=expected), trio.fail_after(120):
        await watch_heartbeat(endpoints.page, StallDetector(0.05), 0.01)


@pytest.mark.trio
async def test_a_beating_shard_does_not_count_as_stalled(
    make_endpoints: MakeEndpoints, autojump_clock: MockClock
) -> None:
    endpoints = make_endpoints()
    shard = attach_here(endpoints)
    detector = StallDetector(10.0, {Phase.WARMING: 100.0})
    with trio.move_on_after(300) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_heartbeat, endpoints.page, detector, 1.0)
            for step in range(30):
                shard.beat(step, Phase.DECODE)
                await trio.sleep(9)
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught
    start = trio.current_time()
    shard.beat(31, Phase.WARMING)
    with pytest.raises(PeerStalled, match="allowed in this phase: 100 s"):
        await watch_heartbeat(endpoints.page, detector, 1.0)
    assert 100 < trio.current_time() - start < 104


def test_the_mutex_tells_the_living_from_the_dead(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    mutex = endpoints.page.alive_mutex()
    assert not mutex.wait_for_owner(0.01)
    child.kill()
    assert mutex.wait_for_owner(120)
    assert mutex.wait_for_owner(0.01), "the waiter must not be left holding it"
    with pytest.raises(OSError, match="trylock"):
        mutex.hold()


def test_a_clock_that_jumps_does_not_end_or_lengthen_the_wait_for_a_mutex(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set back by a day, it left an abandoned thread behind for that long."""
    endpoints = make_endpoints()
    child = spawn_child("hold", endpoints, 1)
    until_ready(child)
    mutex = endpoints.page.alive_mutex()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # every moment is long past by this clock
    died = threading.Timer(0.2, child.kill)
    died.start()
    assert mutex.wait_for_owner(120)
    died.join()
