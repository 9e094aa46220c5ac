"""Ranks of other machines: how they are let in, started, watched and ended; over loopback."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
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
from tgi_trio.cli.options import RankOptions
from tgi_trio.cli.rank import find_place
from tgi_trio.errors import ConfigurationError, PeerGone, ProtocolMismatch
from tgi_trio.ipc import peering
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.tcp import TcpSpec
from tgi_trio.router.shards.awaited_ranks import AwaitedRanks
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.router.shards.rank_host import RankHost, RankPlace
from tgi_trio.router.shards.rank_incarnation import OwnModel
from tgi_trio.router.shards.rank_link import Beat, Ended, Join, RankLink


@asynccontextmanager
async def awaited_ranks(*ranks: int) -> AsyncIterator[tuple[AwaitedRanks, int]]:
    """A source that waits for `ranks`, and its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        awaited = AwaitedRanks([listener], SECRET, ranks)
        async with trio.open_nursery() as nursery:
            await nursery.start(awaited.run)
            yield awaited, listener.getsockname()[1]
            nursery.cancel_scope.cancel()


def place(port: int, rank: int = 1, secret: bytes = SECRET, model: Path | None = None) -> RankPlace:
    return RankPlace("127.0.0.1", port, rank, secret, OwnModel(model))


@pytest.mark.trio
async def test_a_group_of_two_machines_lives_and_dies_together(tmp_path: Path, model: Path) -> None:
    argv = telling(tmp_path / "told")
    settings = ShardSettings(model_path=model, world_size=2, tokenizer_file=Path("t.json"))
    async with awaited_ranks(1) as (awaited, port), trio.open_nursery() as nursery:
        nursery.start_soon(RankHost(place(port), argv).run)
        for incarnation, victim in enumerate(("its process", "the group"), start=1):
            with trio.fail_after(60):
                await awaited.wait_for_all()
            with LocalGroup.spawn(argv, settings, REQUEST, incarnation, 0, awaited) as group:
                assert awaited.missing == [1]
                assert group.world_size == 2 and len(group.pids) == 1
                here = await wait_for_file(tmp_path / "told0")
                there = await wait_for_file(tmp_path / "told1")
                async with trio.open_nursery() as watching:
                    watching.start_soon(group.pump_output)
                    with trio.fail_after(60):
                        while group.vitals(1).step != 7:
                            await trio.sleep(0.01)
                    pid = group.vitals(1).pid
                    assert "rank 1 on 127.0.0.1 (pid" in group.describe(1)
                    if victim == "its process":
                        os.kill(pid, signal.SIGKILL)
                        with trio.fail_after(60):
                            await group.wait_for_death()
                    watching.cancel_scope.cancel()
                report = await group.end_all(patient=False)
            if victim == "its process":
                assert "shard rank 1 (pid" in report and "SIGKILL" in report
                assert "rank 0" not in report
            await wait_until_gone(pid)
            assert TcpSpec.parse(there.frames).incarnation == incarnation
            assert TcpSpec.is_one(here.followers[0])
            assert here.meeting == there.meeting != ""
            assert (here.local_rank, here.local_size) == (0, 1)
            assert (there.local_rank, there.local_size) == (0, 1)
            assert here.rendezvous >= 0 > there.rendezvous
            assert there.tokenizer_file is None
            (tmp_path / "told0").unlink()
            (tmp_path / "told1").unlink()
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_rank_of_another_model_says_so(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    none = tmp_path / "none"
    argv = ["sleep", "300"]
    settings = ShardSettings(model_path=model, world_size=3)
    async with awaited_ranks(1, 2) as (awaited, port), trio.open_nursery() as nursery:
        nursery.start_soon(RankHost(place(port, 1, model=other)).run)
        nursery.start_soon(RankHost(place(port, 2, model=none)).run)
        with trio.fail_after(60):
            await awaited.wait_for_all()
        with LocalGroup.spawn(lambda *_: argv, settings, REQUEST, 1, 0, awaited) as group:
            async with trio.open_nursery() as watching:
                watching.start_soon(group.pump_output)
                with trio.fail_after(60):
                    await group.wait_for_death()
                watching.cancel_scope.cancel()
            for rank in (1, 2):  # each says it, whichever was first
                assert group.describe(rank).startswith(f"rank {rank} on 127.0.0.1")
            report = await group.end_all(patient=False)
        assert "another model than the leader's" in report or "the model is not here" in report
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_whoever_does_not_know_the_secret_is_sent_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with awaited_ranks(1) as (awaited, port):
        with pytest.raises(PeerGone, match="does it have the same --cluster-secret-file"):
            await RankHost(place(port, secret=b"another secret, as long"))._incarnation()
        assert awaited.missing == [1]
        stranger = await trio.open_tcp_stream("127.0.0.1", port)
        await stream_all(stranger, b"GET / HTTP/1.1\r\nhost: this.one.speaks.http.and.is.long\r\n")
        assert awaited.missing == [1]
    assert "it knows another secret" in caplog.text
    assert "it speaks another protocol" in caplog.text


async def stream_all(stream: trio.SocketStream, data: bytes) -> None:
    """Send `data` and read until the other end closes."""
    async with stream:
        await stream.send_all(data)
        try:
            while await stream.receive_some():
                continue
        except trio.BrokenResourceError:
            return


@pytest.mark.trio
async def test_a_leader_that_is_none_is_not_obeyed() -> None:
    """It may say what it likes: without the secret it starts nothing."""

    async def pretend(stream: trio.SocketStream) -> None:
        await stream.send_all(peering.make_challenge())
        await stream.receive_some()
        await stream.send_all(bytes(peering.PROOF_BYTES) + b'{"type":"start"}\n')
        await stream.receive_some()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, pretend, [listener])
        port = listener.socket.getsockname()[1]
        with pytest.raises(ProtocolMismatch, match="it knows another secret"):
            await RankHost(place(port))._incarnation()
        with pytest.raises(ConfigurationError, match=r"--leader: 127\.0\.0\.1: it knows another"):
            await RankHost(place(port)).run()
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_rank_that_nobody_waits_for_is_told_which_are() -> None:
    async with awaited_ranks(1, 2) as (_, port):
        with pytest.raises(ConfigurationError, match=r"--rank 3 is not wanted: .* here: 1, 2"):
            await RankHost(place(port, 3))._incarnation()


@pytest.mark.trio
async def test_a_machine_that_starts_anew_takes_its_place_again() -> None:
    """Half a caller is none, one that has left neither; the last is the one that counts."""
    async with awaited_ranks(1) as (awaited, port):
        host = RankHost(place(port))
        first = (await host._call("first", frames=False)).stream
        assert awaited.missing == [1]
        await first.aclose()
        streams = [(await host._call("second", frames=each)).stream for each in (True, False)]
        with trio.fail_after(60):
            await awaited.wait_for_all()
        await streams[1].aclose()
        with trio.fail_after(60):
            while awaited.missing != [1]:
                await trio.sleep(0.01)
        with pytest.raises(PeerGone, match="rank 1: it has disconnected again"):
            awaited.take(1)
        await streams[0].aclose()


@pytest.mark.trio
async def test_a_machine_that_starts_anew_just_before_it_is_taken_is_waited_for_again() -> None:
    """Others run between the end of the wait and the start of a group."""
    async with awaited_ranks(1) as (awaited, port):
        host = RankHost(place(port))
        streams = [(await host._call("first", frames=each)).stream for each in (True, False)]
        await awaited.wait_for_all()
        streams.append((await host._call("second", frames=False)).stream)
        while awaited.missing != [1]:
            await trio.sleep(0.01)
        with pytest.raises(PeerGone, match="rank 1: it has disconnected again"):
            awaited.take(1)
        streams.append((await host._call("second", frames=True)).stream)
        await awaited.wait_for_all()
        awaited.take(1).close()
        for stream in streams:
            await stream.aclose()


@pytest.mark.trio
async def test_messages_are_whole_lines_and_no_others() -> None:
    left, right = trio.socket.socketpair()
    sender, receiver = trio.SocketStream(left), RankLink(trio.SocketStream(right), "peer")
    link = RankLink(sender, "me")
    for message in (Join(1, "s", True), Beat(1, 2, 3, 4), Ended("over\nand out")):
        await link.send(message)
        assert await receiver.receive() == message
    await sender.send_all(b'{"type":"join","rank":"one"}\n')
    with pytest.raises(ProtocolMismatch, match="peer: no message of ours"):
        await receiver.receive()
    await sender.aclose()
    with pytest.raises(PeerGone, match="peer: its connection has closed"):
        await receiver.receive()
    await receiver.stream.aclose()


def test_what_rank_needs_to_be_told(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET.decode())
    secret.chmod(0o600)
    told = RankOptions(leader="[::1]:29400", rank=2, cluster_secret_file=secret)
    assert find_place(told) == RankPlace("::1", 29400, 2, SECRET, OwnModel())
    for missing in (
        replace(told, leader=None),
        replace(told, rank=None),
        replace(told, cluster_secret_file=None),
    ):
        with pytest.raises(ConfigurationError, match="say whose rank runs here"):
            find_place(missing)
    with pytest.raises(ConfigurationError, match="--leader must be host:port"):
        find_place(replace(told, leader="unix:/leader"))
