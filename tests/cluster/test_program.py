"""The front as a program: its flags, its file of replicas, its end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import trio

from tests.cluster.fake_replica import SECRET, fake_replicas
from tests.cluster.served_front import ask
from tests.cluster.test_front import BODY, WHOLE
from tgi_trio.cli.front import program_settings
from tgi_trio.cli.options import FrontOptions
from tgi_trio.cluster.replicas_file import read_replicas
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import Options


def test_what_it_shares_with_the_server_has_the_servers_defaults() -> None:
    ours = {each.name: each.default for each in fields(FrontOptions)}
    theirs = {each.name: each.default for each in fields(Options)}
    shared = ours.keys() & theirs.keys() - {"max_concurrent_requests"}
    assert len(shared) > 8
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (FrontOptions(), "no replica"),
        (FrontOptions(replica=("a:1",), replica_timeout=0.1), "`replica_timeout` must be >= 0.5"),
        (FrontOptions(replica=("a:1",), payload_limit=0), "`payload_limit` must be > 0"),
        (
            FrontOptions(replica=("a:1",), graceful_termination_timeout=-1),
            "`graceful_termination_timeout` must be >= 0",
        ),
        (
            FrontOptions(replica=("a:1",), cluster_secret_file=Path("/nowhere")),
            "--cluster-secret-file /nowhere",
        ),
    ],
)
def test_what_cannot_work_is_said(options: FrontOptions, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        program_settings(options)


def test_a_file_of_replicas(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("# ours\na:1\n\n[::1]:2  # here\nunix:/run/x\n")
    assert read_replicas(file) == ["a:1", "[::1]:2", "unix:/run/x"]
    for wrong in ("a", "a:0", "a:70000", ":1", "::1:2", "http://a:1"):
        file.write_text(f"a:1\n{wrong}\n")
        with pytest.raises(ConfigurationError, match="line 2: expected host:port"):
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
        flags = ["--bind", "127.0.0.1:0", "--replicas-file", str(file)]
        flags += ["--cluster-secret-file", str(secret), "--logger-level", "error"]
        argv = [sys.executable, "-m", "tgi_trio", "front", *flags]
        process = await trio.lowlevel.open_process(argv, stderr=subprocess.PIPE)
        try:
            port = await listening_port(process)
            while (await ask(port, "GET", "/health")).status != 200:
                await trio.sleep(0.05)
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


async def listening_port(process: trio.Process) -> int:
    """Return the port that a front says it listens on."""
    assert process.stderr is not None
    line = b""
    while not line.endswith(b"\n"):
        more = await process.stderr.receive_some(1000)
        assert more, "the front has ended"
        line += more
    return int(line.rpartition(b":")[2])
