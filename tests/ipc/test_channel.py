"""Both ends of a channel: frames, bells, vitals, full rings, foreign layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from tests.ipc.conftest import attach_here
from tgi_trio.errors import CorruptRing, PeerGone, ProtocolMismatch, RingFull
from tgi_trio.ipc import layout
from tgi_trio.ipc.channel import LeaderEnd, ShardEnd
from tgi_trio.ipc.endpoints import ChannelSpec, Endpoints
from tgi_trio.ipc.fence import Ordering
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.spawn import ShardProcess
from tgi_trio.ipc.watch import wait_for_death

Pair = tuple[RouterEnd, ShardEnd]


def rings(fd: int) -> int:
    """Return how often an eventfd was rung, and reset it."""
    try:
        return os.eventfd_read(fd)
    except BlockingIOError:
        return 0


def test_frames_cross_both_ways_and_awake_peers_hear_no_bell(pair: Pair) -> None:
    router, shard = pair
    assert router.try_send(b"command")
    assert shard.try_receive() == b"command"
    shard.release()
    shard.reserve(5)[:] = b"reply"
    shard.commit()
    assert router.try_receive() == b"reply"
    router.release()
    assert shard.try_receive() is None
    assert router.try_receive() is None
    assert rings(router.bell.fd) == 0
    assert rings(shard.spec.request_bell) == 0


def test_a_sleeping_reader_is_rung_once(pair: Pair) -> None:
    router, shard = pair
    shard.flag.set()
    router.try_send(b"1")
    router.try_send(b"2")
    assert rings(shard.spec.request_bell) == 1
    router.flag.set()
    shard.send(b"1")
    shard.send(b"2")
    assert rings(router.bell.fd) == 1


def test_a_reader_that_has_not_attached_yet_is_always_rung(
    make_endpoints: Callable[..., Endpoints],
) -> None:
    with ReplyBell() as bell:
        endpoints = make_endpoints(reply_bell=bell.fd)
        with RouterEnd(endpoints, bell) as router:
            router.try_send(b"early")
            router.try_send(b"earlier")
            assert rings(endpoints.spec.request_bell) == 2
            assert attach_here(endpoints).try_receive() == b"early"


@pytest.mark.parametrize("who", ["router", "shard"])
def test_without_a_fence_every_frame_rings(
    who: str, make_endpoints: Callable[..., Endpoints]
) -> None:
    with ReplyBell() as bell:
        endpoints = make_endpoints(reply_bell=bell.fd, ordering=Ordering("none", None, None))
        with RouterEnd(endpoints, bell) as router:
            shard = attach_here(endpoints)
            sender = router if who == "router" else shard
            fd = endpoints.spec.request_bell if who == "router" else bell.fd
            for _ in range(3):
                sender.try_send(b"x")
                assert rings(fd) == 1


def test_a_reader_without_a_fence_is_rung_by_a_writer_that_has_one(pair: Pair) -> None:
    router, shard = pair
    type(shard.flag)(shard.page.sleeping("request"), Ordering("none", None, None))
    for _ in range(3):
        router.try_send(b"x")
        assert rings(shard.spec.request_bell) == 1


def test_a_filled_eventfd_cannot_block_the_writer(pair: Pair) -> None:
    router, shard = pair
    os.eventfd_write(shard.spec.request_bell, 2**64 - 2)
    shard.flag.set()
    assert router.try_send(b"x")
    assert shard.wait(1.0)


def test_wait_sees_what_came_before_and_times_out_when_nothing_comes(pair: Pair) -> None:
    router, shard = pair
    assert not shard.wait(0.0)
    assert not shard.wait(0.001)
    router.try_send(b"x")
    assert shard.wait(None)
    assert shard.page.sleeping("request")[0] == layout.AWAKE


def test_vitals(pair: Pair) -> None:
    router, shard = pair
    before = router.vitals.heartbeat
    shard.beat(41, Phase.DECODE)
    assert router.vitals == (before + 1, Phase.DECODE, 41, os.getpid())
    assert f"rank 0 (pid {os.getpid()}, incarnation 1, phase DECODE, step 41)" in str(
        router.describe_peer()
    )


def test_a_reply_ring_that_stays_full_raises_and_names_the_router(pair: Pair) -> None:
    router, shard = pair
    for _ in range(2):
        shard.send(bytes(shard.writer.max_payload))
    beat = router.vitals.heartbeat
    with pytest.raises(RingFull, match=rf"router \(pid {os.getpid()}\): has made no room for 64"):
        shard.send(bytes(64))
    assert router.vitals.heartbeat > beat, "a shard that waits is not a shard that hangs"
    router.try_receive()
    router.release()
    shard.send(bytes(64))


def test_a_reply_ring_that_stays_full_ends_with_the_router(pair: Pair) -> None:
    _, shard = pair
    spec = replace(shard.spec, full_timeout_ms=60_000)
    impatient = ShardEnd(spec, shard.page)
    impatient.send(bytes(impatient.writer.max_payload))
    impatient.send(bytes(impatient.writer.max_payload))
    router_dies(shard)
    with pytest.raises(PeerGone, match="while its ring was full"):
        impatient.send(b"x")


def router_dies(shard: ShardEnd) -> None:
    """Put an already closed pipe in the place of the death pipe."""
    read, write = os.pipe()
    os.dup2(read, shard.spec.death)
    os.close(read)
    os.close(write)


def test_the_router_is_gone_only_after_its_last_frame(pair: Pair) -> None:
    router, shard = pair
    router.try_send(b"last words")
    router_dies(shard)
    assert shard.wait(None)
    assert shard.try_receive() == b"last words"
    shard.release()
    with pytest.raises(PeerGone, match=rf"router \(pid {os.getpid()}\)"):
        shard.wait(None)


def test_a_request_ring_that_is_full_never_blocks_the_router(pair: Pair) -> None:
    router, _ = pair
    size = router.writer.max_payload
    assert router.try_send(bytes(size))
    assert router.try_send(bytes(size))
    assert not router.try_send(b"x")
    assert router.reserve(1) is None
    with pytest.raises(ValueError, match="allowed: 0 to"):
        router.reserve(size + 1)
    assert not router.try_send(bytes(size + 1))


@pytest.mark.trio
async def test_send_waits_for_room_but_not_for_ever(pair: Pair, autojump_clock: MockClock) -> None:
    router, shard = pair
    shard.beat(7, Phase.PREFILL)
    for _ in range(2):
        await router.send(bytes(router.writer.max_payload), 1.0)
    with pytest.raises(RingFull, match=r"phase PREFILL, step 7\): has made no room for 1 bytes"):
        await router.send(b"x", 1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.send, b"x", 5.0)
        await trio.sleep(2)
        shard.try_receive()
        shard.release()


@pytest.mark.trio
async def test_one_bell_wakes_for_every_shard(make_endpoints: Callable[..., Endpoints]) -> None:
    with ReplyBell() as bell:
        ends = []
        for rank in range(3):
            endpoints = make_endpoints(rank=rank, reply_bell=bell.fd)
            ends.append((RouterEnd(endpoints, bell), attach_here(endpoints)))
        for router, shard in ends:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bell.wait)
                await trio.testing.wait_all_tasks_blocked()
                shard.send(b"here")
            assert [end.try_receive() is not None for end, _ in ends].count(True) == 1
            assert router.try_receive() == b"here"
            router.release()
            assert bell.quiet()
        for router, _ in ends:
            router.close()


@pytest.mark.trio
async def test_a_shard_that_joins_while_the_router_sleeps_is_heard(
    make_endpoints: Callable[..., Endpoints],
) -> None:
    with ReplyBell() as bell, trio.fail_after(120):
        first = RouterEnd(make_endpoints(reply_bell=bell.fd), bell)
        heard = trio.Event()

        async def listen() -> None:
            while bell.quiet():
                await bell.wait()
            heard.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await trio.testing.wait_all_tasks_blocked()
            endpoints = make_endpoints(rank=1, reply_bell=bell.fd)
            second = RouterEnd(endpoints, bell)
            attach_here(endpoints).send(b"here")
            await heard.wait()
        first.close()
        second.close()


@pytest.mark.trio
async def test_wait_is_cancellable_and_leaves_the_flag_awake(pair: Pair) -> None:
    router, shard = pair
    with trio.move_on_after(0.001):
        await router.wait()
    shard.send(b"x")
    assert rings(router.bell.fd) == 0
    await router.wait()  # returns at once: something is there


@pytest.mark.trio
@pytest.mark.parametrize("options", [{}, {"spin_us": 200}, {"poll_us": 200}], ids=str)
async def test_other_tasks_run_while_replies_pour_in(
    options: dict[str, int], make_endpoints: Callable[..., Endpoints]
) -> None:
    with ReplyBell(**options) as bell:
        endpoints = make_endpoints(reply_bell=bell.fd)
        with RouterEnd(endpoints, bell) as router:
            shard = attach_here(endpoints)
            done = trio.Event()

            async def other() -> None:
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                with trio.fail_after(120):
                    while not done.is_set():
                        shard.send(b"x")
                        await bell.wait()
                        router.try_receive()
                        router.release()


def test_a_foreign_layout_is_refused(make_endpoints: Callable[..., Endpoints]) -> None:
    endpoints = make_endpoints(rank=2)
    endpoints.page.segment.words(layout.find_offset("layout_id"))[0] ^= 1
    with pytest.raises(ProtocolMismatch, match="rank 2: the segment has layout"):
        attach_here(endpoints)


@pytest.mark.parametrize("field", ["request_bytes", "reply_bytes", "segment_bytes"])
def test_sizes_that_do_not_add_up_are_refused(
    field: str, make_endpoints: Callable[..., Endpoints]
) -> None:
    endpoints = make_endpoints()
    endpoints.page.segment.words(layout.find_offset(field))[0] *= 2
    with pytest.raises(ProtocolMismatch):
        attach_here(endpoints)


def test_garbage_in_the_rings_names_the_shard(pair: Pair) -> None:
    router, shard = pair
    shard.beat(12, Phase.DECODE)
    router.page.ring("reply").head[0] = 2**40 + 1
    with pytest.raises(CorruptRing, match=r"rank 0 \(pid \d+, .* phase DECODE, step 12\)"):
        router.try_receive()
    router.page.ring("request").tail[0] = 2**40
    with pytest.raises(CorruptRing, match="rank 0"):
        router.check()


def test_the_spec_survives_the_command_line(make_endpoints: Callable[..., Endpoints]) -> None:
    spec = make_endpoints().spec
    assert ChannelSpec.parse(spec.text()) == spec
    assert " " not in spec.text()
    with pytest.raises(ValueError, match="expected the fields"):
        ChannelSpec.parse("segment=3")


@pytest.mark.parametrize("size", [0, 4095, 5000, 1024])
def test_ring_sizes_are_checked(size: int) -> None:
    with pytest.raises(ValueError, match=f"reply_bytes is {size}; allowed: a power of two"):
        Endpoints.create(0, 1, reply_bytes=size)


def test_a_leader_commands_its_follower_without_an_event_loop(
    make_endpoints: Callable[..., Endpoints],
) -> None:
    endpoints = make_endpoints(rank=1)
    spec = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
    leader, follower = LeaderEnd.attach(spec.text()), attach_here(endpoints)
    leader.send(b"step 1")
    assert follower.wait(1.0)
    assert follower.try_receive() == b"step 1"
    follower.release()
    follower.send(b"done")
    assert leader.wait(1.0)
    assert leader.try_receive() == b"done"


def test_the_shard_side_never_imports_trio() -> None:
    code = "import sys, tgi_trio.ipc.death, tgi_trio.ipc.channel; print('trio' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.trio
async def test_a_child_process_echoes(
    make_endpoints: Callable[..., Endpoints], spawn_child: Callable[..., ShardProcess]
) -> None:
    with ReplyBell() as bell:
        endpoints = make_endpoints(reply_bell=bell.fd)
        with RouterEnd(endpoints, bell) as router, trio.fail_after(120):
            child = spawn_child("echo", endpoints)
            for number in range(300):
                payload = bytes([number & 255]) * (number * 37 % router.writer.max_payload)
                await router.send(payload, 100)
                while (reply := router.try_receive()) is None:
                    await router.wait()
                assert reply == payload
                router.release()
            assert router.vitals.pid == child.pid
            await router.send(b"quit", 100)
            assert await child.reap() == 0
    assert child.process.stdout is not None
    assert child.process.stdout.read() == b"ready\n"


@pytest.mark.trio
async def test_a_reader_that_dies_leaves_a_full_ring_and_a_named_death(
    make_endpoints: Callable[..., Endpoints], spawn_child: Callable[..., ShardProcess]
) -> None:
    with ReplyBell() as bell:
        endpoints = make_endpoints(rank=3, reply_bell=bell.fd)
        with RouterEnd(endpoints, bell) as router, trio.fail_after(120):
            child = spawn_child("hold", endpoints, 1)
            await trio.to_thread.run_sync(child.process.stdout.readline)  # type: ignore[union-attr]
            while router.try_send(bytes(500)):
                pass
            child.kill()
            await wait_for_death(child.pidfd, endpoints.page)
            assert not router.try_send(bytes(500))
            with pytest.raises(RingFull, match=rf"rank 3 \(pid {child.pid}, .* step 3\)"):
                await router.send(bytes(500), 0.01)
            router.check()
