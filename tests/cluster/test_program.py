"""The front as a program: its flags, its file of replicas, its end."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import trio

from tests.cluster.fake_replica import BODY, SECRET, WHOLE, fake_replicas
from tests.cluster.served_front import Answer, ask
from tgi_trio.cli.front import program_settings
from tgi_trio.cli.options import FrontOptions
from tgi_trio.cluster.fleet import Fleet
from tgi_trio.cluster.gossip import Outbox, RoutedRequest, read
from tgi_trio.cluster.peers import bind_feed
from tgi_trio.cluster.program import FrontProgram
from tgi_trio.cluster.replicas_file import read_replicas
from tgi_trio.cluster.routing import Routing
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import Options

# The replicas are of the test's own process: where that is held up, they are not gone.
PATIENT = ("--replica-timeout", "600")


def test_what_it_shares_with_the_server_has_the_servers_defaults() -> None:
    ours = {each.name: each.default for each in fields(FrontOptions)}
    theirs = {each.name: each.default for each in fields(Options)}
    shared = ours.keys() & theirs.keys() - {"max_concurrent_requests"}
    assert len(shared) > 8
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_a_secret_that_is_not_there_is_named() -> None:
    options = FrontOptions(replica=("a:1",), cluster_secret_file=Path("/nowhere"))
    with pytest.raises(ConfigurationError, match="--cluster-secret-file /nowhere"):
        program_settings(options)


@pytest.mark.parametrize("peer", ["b", "b:x", ":1", "::1:2", "b:70000"])
def test_a_peer_is_a_host_and_a_port(tmp_path: Path, peer: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    options = FrontOptions(replica=("a:1",), peer=(peer,), cluster_secret_file=secret)
    with pytest.raises(ConfigurationError, match="--peer: expected host:port"):
        program_settings(options)


def test_the_address_of_the_feed_is_taken_once() -> None:
    with bind_feed("127.0.0.1:0") as one:
        host, port = one.getsockname()
        with pytest.raises(ConfigurationError, match=f"--peer-bind {host}:{port} cannot be used"):
            bind_feed(f"{host}:{port}")
    with pytest.raises(ConfigurationError, match=r"--peer-bind nowhere\.invalid:1 cannot be used"):
        bind_feed("nowhere.invalid:1")
    with pytest.raises(ConfigurationError, match=r"--peer-bind a\.\.b:1 cannot be used: 'a\.\.b'"):
        bind_feed("a..b:1")


def test_a_file_of_replicas(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("# ours\na:1\n\n[::1]:2  # here\nunix:/run/x\n")
    assert read_replicas(file) == ["a:1", "[::1]:2", "unix:/run/x"]
    names = ("a", "a:0", "a:70000", ":1", "::1:2", "http://a:1", "a..b:1")
    for wrong in (*names, "a b:1", "a,b:1", "a/b:1", "me@a:1", "a\0:1", "[]:1", "[a b]:1"):
        file.write_text(f"a:1\n{wrong}\n")
        with pytest.raises(ConfigurationError, match="line 2: expected host:port"):
            read_replicas(file)
    file.write_text(f"{'a' * 300}:1")
    with pytest.raises(ConfigurationError, match="line 1: an address has 255 bytes at most"):
        read_replicas(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_replicas(tmp_path / "none")


@pytest.mark.trio
async def test_it_follows_its_file_and_ends_when_what_runs_has_ended(tmp_path: Path) -> None:
    secret, file = tmp_path / "secret", tmp_path / "replicas"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    async with fake_replicas(2) as replicas:
        first, second = replicas.all
        file.write_text(first.address)
        flags = ["--bind", "127.0.0.1:0", "--replicas-file", str(file), *PATIENT]
        flags += ["--cluster-secret-file", str(secret), "--logger-level", "error"]
        argv = [sys.executable, "-m", "tgi_trio", "front", *flags]
        process = await trio.lowlevel.open_process(argv, stderr=subprocess.PIPE)
        try:
            port = await listening_port(process)
            await until_up(port, 1)
            assert (await ask(port, "POST", "/generate_stream", BODY)).body == WHOLE
            file.write_text(second.address)
            while not second.seen:  # until it has answered its first question nobody is there
                assert (await ask(port, "POST", "/generate_stream", BODY)).status in (200, 503)
            second.pause, second.began = 0.2, trio.Event()
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await second.began.wait()
                    process.send_signal(signal.SIGTERM)

                nursery.start_soon(stop)
                assert (await ask(port, "POST", "/generate_stream", BODY)).body == WHOLE
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.trio
async def test_it_listens_when_it_knows_who_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_trio.cluster.program.FIRST_ANSWERS", 60.0)  # the machine may be busy
    async with fake_replicas(1) as replicas, trio.open_nursery() as nursery:
        (replica,) = replicas.all
        replica.delay = 0.2
        settings = program_settings(FrontOptions(replica=(replica.address,)))
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            nursery.start_soon(FrontProgram(settings, [bound]).run)
            while (answer := await ask_if_it_listens(bound.getsockname()[1])) is None:
                await trio.sleep(0.01)
            assert answer.body == WHOLE
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_it_tells_other_fronts_and_hears_them(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    body = b'{"inputs":"%b","seed":5}' % (b"x" * 600)
    other = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
    await other.bind(("127.0.0.1", 0))
    async with fake_replicas(2) as replicas:
        first, second = replicas.all
        flags = ["--bind", "127.0.0.1:0", "--cluster-secret-file", str(secret)]
        flags += ["--peer", f"localhost:{other.getsockname()[1]}", "--logger-level", "error"]
        flags += PATIENT
        flags += ["--replica", first.address, "--replica", second.address]
        argv = [sys.executable, "-m", "tgi_trio", "front", *flags]
        process = await trio.lowlevel.open_process(argv, stderr=subprocess.PIPE)
        try:
            port = await listening_port(process)
            await until_up(port, 2)
            assert (await ask(port, "POST", "/generate", body)).status == 200
            datagram, sender = await other.recvfrom(65535)
            ((went_to, chain),) = read(datagram, SECRET.encode()).items
            seen = first if first.seen else second
            assert (went_to, len(chain)) == (seen.address, 2)
            # The other front sends what begins alike to the other replica, the latest to have it.
            there = second if seen is first else first
            outbox = Outbox(SECRET.encode(), b"another.")
            outbox.put(RoutedRequest(there.address, chain))
            await other.sendto(next(outbox.datagrams()), sender)
            while b"tgi_front_news_heard 1" not in (await ask(port, "GET", "/metrics")).body:
                await trio.sleep(0.01)
            assert (await ask(port, "POST", "/generate", body)).status == 200
            assert there.seen
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            other.close()
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.trio
async def test_what_the_api_names_stays_when_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("a:1\nb:1\n")
    settings = program_settings(FrontOptions(replica=("r:1",), replicas_file=file))
    program = FrontProgram(settings, [])
    fleet = Fleet(Routing(random.Random(1)), 60.0)
    for name in ("r:1", "a:1", "b:1", "api:1"):
        fleet.name(name)
    program._take_names(fleet, ["b:1", "c:1"])
    assert {each.name for each in fleet.members} == {"r:1", "b:1", "c:1", "api:1"}
    program._take_names(fleet, [])
    assert {each.name for each in fleet.members} == {"r:1", "api:1"}


async def ask_if_it_listens(port: int) -> Answer | None:
    try:
        return await ask(port, "POST", "/generate_stream", BODY)
    except OSError:
        return None


async def until_up(port: int, count: int) -> None:
    """Wait until so many replicas take requests."""
    up = b'tgi_front_replicas{state="up"} %d\n' % count
    while up not in (await ask(port, "GET", "/metrics")).body:
        await trio.sleep(0.01)


async def listening_port(process: trio.Process) -> int:
    """Return the port that a front says it listens on."""
    assert process.stderr is not None
    line = b""
    while not line.endswith(b"\n"):
        more = await process.stderr.receive_some(1000)
        assert more, "the front has ended"
        line += more
    return int(line.rpartition(b":")[2])
