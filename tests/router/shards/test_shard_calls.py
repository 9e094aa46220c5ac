"""A shard that listens, and routers that call it: one is served at a time; over loopback."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.router.shards.remote_support import (
    REQUEST,
    SECRET,
    telling,
    wait_for_file,
    wait_until_gone,
)
from tgi_trio.cli.options import HostOptions
from tgi_trio.cli.shard import run_shard
from tgi_trio.errors import ConfigurationError, PeerGone
from tgi_trio.ipc import peering
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.router.shards import shard_host
from tgi_trio.router.shards.awaited_ranks import AwaitedRanks
from tgi_trio.router.shards.group import Group
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.router.shards.rank_host import RankHost, RankPlace
from tgi_trio.router.shards.rank_incarnation import OwnModel
from tgi_trio.router.shards.rank_link import Call, Ended, Refused, Start, Welcome, call
from tgi_trio.router.shards.shard_calls import ShardCalls, split_shard
from tgi_trio.router.shards.shard_host import ShardHost
from tgi_trio.router.shards.shard_instance import ShardArgv
from tgi_trio.testing.ports import reserve_port

HOST = "127.0.0.1"


def idle(spec: str, settings: str) -> list[str]:
    """A shard that says nothing, and lives until it is killed."""
    return ["sleep", "300"]


def speak_otherwise(patch: pytest.MonkeyPatch) -> None:
    """Have both sides say that they speak another layout than they understand."""
    true = peering.make_challenge
    patch.setattr(peering, "make_challenge", lambda: true()[:20] + b"othr" + true()[24:])


async def wait_for_words(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Return when something has been logged."""
    with trio.fail_after(60):
        while words not in caplog.text:
            await trio.sleep(0.01)


@asynccontextmanager
async def shard_at(port: int, argv: ShardArgv, model: Path | None = None) -> AsyncIterator[int]:
    """A shard that listens; its port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        async with trio.open_nursery() as nursery:
            await nursery.start(ShardHost([listener], SECRET, OwnModel(model), argv).run)
            yield int(listener.getsockname()[1])
            nursery.cancel_scope.cancel()


def calls_of(*ports: int, first: int = 0, secret: bytes = SECRET) -> ShardCalls:
    """What calls shards for a router: the ranks from `first` on."""
    addresses = [f"tcp://{HOST}:{port}" for port in ports]
    return ShardCalls(addresses, secret, range(first, first + len(ports)))


async def wait_for_all(calls: ShardCalls) -> None:
    with trio.fail_after(60):
        await calls.wait_for_all()


@asynccontextmanager
async def waiting_for_all(calls: ShardCalls) -> AsyncIterator[trio.Event]:
    """What waits beside the block; the event is set when all are there."""
    there = trio.Event()

    async def wait() -> None:
        await wait_for_all(calls)
        there.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        yield there


async def wait_for_death(group: Group) -> None:
    """Return when a rank of the group has died, as supervision would find it."""
    async with trio.open_nursery() as watching:
        watching.start_soon(group.pump_output)
        with trio.fail_after(60):
            await group.wait_for_death()
        watching.cancel_scope.cancel()


@pytest.mark.trio
async def test_incarnations_come_and_go_and_nothing_of_them_stays(
    tmp_path: Path, model: Path
) -> None:
    """Its process is killed; then the router leaves, and another one calls."""
    settings = ShardSettings(model_path=model)
    async with shard_at(0, telling(tmp_path / "told"), model) as port:
        calls = calls_of(port)
        for incarnation, victim in enumerate(("its process", "the router", "none"), start=1):
            if victim == "none":
                calls = calls_of(port)
            await wait_for_all(calls)
            with LocalGroup.start_remote(settings, incarnation, calls) as group:
                there = await wait_for_file(tmp_path / "told0")
                assert (there.rank, there.world_size, there.local_size) == (0, 1, 1)
                assert f"incarnation={incarnation}" in there.frames
                async with trio.open_nursery() as watching:
                    watching.start_soon(group.pump_output)
                    with trio.fail_after(60):
                        while group.vitals(0).step != 7:
                            await trio.sleep(0.01)
                    watching.cancel_scope.cancel()
                pid = group.vitals(0).pid
                if victim == "its process":
                    os.kill(pid, signal.SIGKILL)
                    await wait_for_death(group)
                    report = await group.end_all(patient=False)
                    assert f"shard rank 0 (pid {pid}) was ended by SIGKILL" in report
            await wait_until_gone(pid)
            (tmp_path / "told0").unlink()


@pytest.mark.trio
async def test_a_machine_that_has_no_process_to_give_says_so_and_waits_for_the_next_call(
    tmp_path: Path, model: Path
) -> None:
    """It ended the program, and the router called in vain from then on."""
    settings, there = ShardSettings(model_path=model), telling(tmp_path / "told")
    wanted = [lambda spec, words: [str(tmp_path / "nothing")], there]
    async with shard_at(0, lambda spec, words: wanted.pop(0)(spec, words), model) as port:
        calls = calls_of(port)
        await wait_for_all(calls)
        with LocalGroup.start_remote(settings, 1, calls) as group:
            await wait_for_death(group)
            assert "rank 0 cannot be started: No such file" in await group.end_all(patient=False)
        await wait_for_all(calls)
        with LocalGroup.start_remote(settings, 2, calls) as group:
            assert "incarnation=2" in (await wait_for_file(tmp_path / "told0")).frames


@pytest.mark.trio
async def test_a_second_router_is_refused_until_the_first_has_left(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ShardSettings(model_path=model)
    async with shard_at(0, idle, model) as port:
        first, second = calls_of(port), calls_of(port)
        await wait_for_all(first)
        async with trio.open_nursery() as nursery:
            with LocalGroup.start_remote(settings, 1, first):
                nursery.start_soon(wait_for_all, second)
                await wait_for_words(caplog, "it serves a router on 127.0.0.1")
                await trio.sleep(0.5)  # it calls a few times more
                with pytest.raises(PeerGone, match="rank 0"):
                    second.take(0)
        second.take(0).close()
    both = [each for each in caplog.messages if "it serves a router on 127.0.0.1" in each]
    assert sorted(each.split(": ")[0] for each in both) == [  # once on each side
        f"--shard tcp://{HOST}:{port}",
        "a caller is sent away",
    ]


@pytest.mark.trio
async def test_a_shard_that_is_not_there_is_called_until_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start; and when it starts anew, even if it is of another version for a while."""
    with reserve_port() as port:
        calls = calls_of(port)
        async with waiting_for_all(calls) as there:
            await wait_for_words(caplog, "it cannot be reached")
            async with shard_at(port, idle):
                await there.wait()
                calls.take(0).close()
        async with waiting_for_all(calls) as there:
            with monkeypatch.context() as upgrade:
                speak_otherwise(upgrade)
                async with shard_at(port, idle):
                    await wait_for_words(caplog, "both machines need the same version of tgi-trio")
            async with shard_at(port, idle):
                await there.wait()
                calls.take(0).close()


@pytest.mark.trio
async def test_what_can_never_be_a_shard_of_ours_ends_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another version, and what another server waits for its own ranks at."""
    async with shard_at(0, idle) as port:
        speak_otherwise(monkeypatch)
        why = f"--shard tcp://{HOST}:{port}: it has frames of another layout"
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigurationError, match=why)):
            await wait_for_all(calls_of(port))
        await wait_for_words(caplog, "a caller is sent away: 127.0.0.1: it has frames of another")
        monkeypatch.undo()
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        async with trio.open_nursery() as nursery:
            await nursery.start(AwaitedRanks([listener], SECRET, [1]).run)
            refused = pytest.RaisesExc(ConfigurationError, match="ranks of other machines are here")
            with pytest.RaisesGroup(refused):
                await wait_for_all(calls_of(listener.getsockname()[1]))
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_who_does_not_know_the_secret_is_not_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with shard_at(0, idle) as port, trio.open_nursery() as nursery:
        strangers = calls_of(port, secret=b"another secret, as long")
        nursery.start_soon(strangers.wait_for_all)
        await wait_for_words(caplog, "sent away: 127.0.0.1: it knows another secret")
        await wait_for_words(caplog, "does it have the same --cluster-secret-file?")
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_shard_of_another_model_says_so_on_both_sides(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    async with shard_at(0, idle, other) as port:
        calls = calls_of(port)
        await wait_for_all(calls)
        with LocalGroup.start_remote(ShardSettings(model_path=model), 1, calls) as group:
            await wait_for_death(group)
            report = await group.end_all(patient=False)
    assert report.startswith("On 127.0.0.1: ")
    assert "other holds another model than the leader's" in report
    assert report.removeprefix("On 127.0.0.1: ") in caplog.messages


@pytest.mark.trio
async def test_settings_that_a_shard_cannot_read_do_not_end_it() -> None:
    """They come from a router of another version whose frames are the same."""
    async with shard_at(0, idle) as port:
        calls = calls_of(port)
        await wait_for_all(calls)
        connection = calls.take(0)
        assert connection.link is not None
        connection.link.send_nowait(Start('{"unheard_of": 1}', 1, ""))
        with trio.fail_after(60):
            ended = await connection.link.receive()
        assert isinstance(ended, Ended) and "with the keys" in ended.report
        connection.close()
        await wait_for_all(calls)  # the next one is served
        calls.take(0).close()


@pytest.mark.trio
async def test_a_shard_that_is_told_to_end_says_so(tmp_path: Path, model: Path) -> None:
    async with AsyncExitStack() as shard:
        port = await shard.enter_async_context(shard_at(0, telling(tmp_path / "told"), model))
        calls = calls_of(port)
        await wait_for_all(calls)
        with LocalGroup.start_remote(ShardSettings(model_path=model), 1, calls) as group:
            await wait_for_file(tmp_path / "told0")
            await shard.aclose()
            await wait_for_death(group)
            assert "was told to end" in await group.end_all(patient=False)


@pytest.mark.trio
async def test_only_a_router_with_both_connections_of_one_call_is_taken() -> None:
    """A rank that calls its leader is not, nor frames that nobody has called for."""
    async with shard_at(0, idle) as port:
        place = RankPlace(HOST, port, 1, SECRET, OwnModel())
        with pytest.raises(ConfigurationError, match="a shard is here, and waits for a router"):
            await RankHost(place)._incarnation()
        frames = await call(HOST, port, SECRET, Call("mine", carries_frames=True))
        assert isinstance(await frames.receive(), Refused)
        link = await call(HOST, port, SECRET, Call("mine", carries_frames=False))
        assert isinstance(await link.receive(), Welcome)
        other = await call(HOST, port, SECRET, Call("other", carries_frames=True))
        assert isinstance(await other.receive(), Refused)
        await link.send(Start(ShardSettings(model_path=Path("none")).text(), 1, ""))
        with pytest.raises(PeerGone):  # it runs nothing without frames
            while not isinstance(await link.receive(), Welcome):
                pass
        for each in (frames, link, other):
            await each.stream.aclose()


@pytest.mark.trio
async def test_a_router_that_says_nothing_does_not_lock_others_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It hangs, or waits for another machine: then it calls again."""
    caplog.set_level("INFO")
    monkeypatch.setattr(shard_host, "_START_S", 0.2)
    async with shard_at(0, idle) as port:
        half = await call(HOST, port, SECRET, Call("half", carries_frames=False))
        with pytest.raises(PeerGone), trio.fail_after(60):
            while isinstance(await half.receive(), Welcome):
                pass  # its other connection never comes
        first, second = calls_of(port), calls_of(port)
        await wait_for_all(first)
        await wait_for_all(second)
        assert "has not said for 0.2 s what to run" in caplog.text
        second.take(0).close()
        await wait_for_all(first)  # which it has noticed
        first.take(0).close()
        await half.stream.aclose()


@pytest.mark.trio
async def test_ranks_of_several_machines_are_called_together(model: Path, tmp_path: Path) -> None:
    """Rank 0 is here, the others where they are called; they are waited for at a time."""
    settings = ShardSettings(model_path=model, world_size=3)
    argv = telling(tmp_path / "told")
    async with shard_at(0, argv, model) as first, shard_at(0, argv, model) as second:
        calls = calls_of(first, second, first=1)
        await wait_for_all(calls)
        with LocalGroup.spawn(argv, settings, REQUEST, 1, 0, calls) as group:
            assert group.world_size == 3 and len(group.pids) == 1
            told = [await wait_for_file(tmp_path / f"told{rank}") for rank in range(3)]
            assert [each.rank for each in told] == [0, 1, 2]
            assert len({each.meeting for each in told}) == 1
            await group.end_all(patient=False)


def test_addresses_of_shards() -> None:
    assert split_shard("tcp://10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert split_shard("tcp://[::1]:7") == ("::1", 7)


def test_what_shard_needs_to_be_told(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET.decode())
    with pytest.raises(ConfigurationError, match="--cluster-secret-file says which routers"):
        run_shard(HostOptions())
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        address = f"{HOST}:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="choose another with --listen"):
            run_shard(HostOptions(cluster_secret_file=secret, listen=address))
