"""A server whose second rank is not its child: the tokens of one process, over a network too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.client import decode, generate, post_stream
from tests.system.networks import networks
from tests.system.remote_rank import running_rank, running_shard, write_secret
from tests.system.server import ServerProcess, serving, shards_of, wait_gone
from tgi_trio.testing.ports import reserve_port

# Two of them wait until no browser is there any more (`networks`): for a minute, or for three.
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROMPTS = ["Continuous batching is", "A ring buffer"]
FLAGS = ("--num-shard", "2", "--remote-ranks", "1", "--cpu-threads", "1")


@contextmanager
def over_two_machines(machine: Machine, folder: Path) -> Iterator[ServerProcess]:
    """A server whose second rank runs on what is as good as another machine."""
    secret = write_secret(folder)
    with reserve_port() as port:
        leader = f"{machine.host}:{port}"
        flags = (*FLAGS, "--rank-address", leader, "--cluster-secret-file", str(secret))
        rank = running_rank(leader, 1, secret, network=machine.namespace)
        with rank, serving(*flags) as server:
            yield server


def texts(server: ServerProcess) -> list[str]:
    sampled = {"do_sample": True, "seed": 7, "temperature": 0.9}
    return [
        generate(server.url, prompt, max_new_tokens=16, **more)["generated_text"]
        for prompt, more in zip(PROMPTS, ({}, sampled), strict=True)
    ]


def test_a_shard_that_is_on_another_machine_than_its_router(
    demo: ServerProcess, tmp_path: Path
) -> None:
    """With the CPU kernels, a grammar, and a rank that is killed in between."""
    grammar = {"type": "regex", "value": "[0-9]{6}"}
    secret = write_secret(tmp_path)
    with reserve_port() as port:
        leader = f"127.0.0.1:{port}"
        flags = ("--remote-ranks", "1", "--rank-address", leader)
        with (
            running_rank(leader, 0, secret) as agent,
            serving(*flags, "--cluster-secret-file", str(secret)) as server,
        ):
            assert server.shards() == []
            assert texts(server) == (expected := texts(demo))
            told = {"max_new_tokens": 6, "grammar": grammar}
            digits = generate(server.url, PROMPTS[0], **told)["generated_text"]
            assert digits == generate(demo.url, PROMPTS[0], **told)["generated_text"]
            assert digits.isdecimal() and len(digits) == 6
            os.kill(shards_of(agent.pid)[0], signal.SIGKILL)
            server.wait_metric("tgi_shard_restarts", 1)
            server.wait_ready()
            assert texts(server) == expected


def test_a_shard_that_is_called_where_it_listens(demo: ServerProcess, tmp_path: Path) -> None:
    """Its program is killed under a stream, which waits; then the router is, and nothing stays."""
    secret = write_secret(tmp_path)
    asked = {"max_new_tokens": 40, "do_sample": True, "seed": 3}
    with reserve_port() as port, another_machine() as machine:
        address = f"{machine.far_host}:{port}"
        flags = ("--shard", f"tcp://{address}", "--cluster-secret-file", str(secret))
        with ExitStack() as first, serving(*flags, ready=False) as server:
            where = {"network": machine.namespace}
            program = first.enter_context(running_shard(address, secret, **where))
            server.wait_ready()
            assert server.shards() == []
            body = {"inputs": PROMPTS[0], "parameters": asked}
            with post_stream(f"{server.url}/generate_stream", json=body) as reply:
                lines = reply.iter_lines()
                events = [next(event for line in lines if (event := decode(line)))]
                program.kill()
                program.wait()
                with running_shard(address, secret, **where) as second:
                    events += [event for line in lines if (event := decode(line))]
                    assert (
                        events[-1]["generated_text"]
                        == (generate(demo.url, PROMPTS[0], **asked)["generated_text"])
                    )
                    # The stream may have ended before its program did.
                    server.wait_metric("tgi_shard_restarts", 1)
                    server.wait_ready()
                    assert server.metric("tgi_shard_restarts") == 1
                    computing = shards_of(second.pid)
                    assert computing
                    server.process.kill()
                    assert wait_gone(computing) == []
                    assert second.poll() is None


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Machine:
    """A network namespace, and the link to it."""

    namespace: str
    link: str  # this side of it
    host: str  # of this side
    far_host: str  # of the other


LOOPBACK = Machine("", "", "127.0.0.1", "127.0.0.1")


@contextmanager
def another_machine() -> Iterator[Machine]:
    """A network namespace that is linked to this one; this one where none can be made."""
    if os.geteuid() or shutil.which("ip") is None:  # they are root's to make
        yield LOOPBACK
        return
    number = os.getpid() % 10**6
    net = f"10.{64 + number % 64}.{number // 64 % 250}"
    machine = Machine(f"tgi-trio-{number}", f"tt{number}a", f"{net}.1", f"{net}.2")
    name, far = machine.namespace, f"tt{number}b"
    within = ("ip", "-n", name)
    with networks(changed=True):
        try:
            try:
                run("ip", "netns", "add", name)
                run("ip", "link", "add", machine.link, "type", "veth", "peer", "name", far)
                run("ip", "link", "set", far, "netns", name)
                run("ip", "addr", "add", f"{net}.1/24", "dev", machine.link)
                run(*within, "addr", "add", f"{net}.2/24", "dev", far)
                run("ip", "link", "set", machine.link, "up")
                run(*within, "link", "set", far, "up")
            except subprocess.CalledProcessError as error:
                print(f"no network namespaces here: {error.stderr!r}")
                machine = LOOPBACK
            yield machine
        finally:
            for undo in (("link", "del", f"tt{number}a"), ("netns", "del", name)):
                subprocess.run(["ip", *undo], capture_output=True, timeout=60)


def test_a_rank_on_another_network_that_is_cut_off_and_comes_back(
    demo: ServerProcess, tmp_path: Path
) -> None:
    """Nothing says that the machine is gone but that nothing is heard of it."""
    with another_machine() as machine:
        with over_two_machines(machine, tmp_path) as server:
            assert len(server.shards()) == 1
            assert texts(server) == (expected := texts(demo))
            if machine is LOOPBACK:  # nothing can be cut there
                return
            run("ip", "link", "set", machine.link, "down")
            server.wait_metric("tgi_shard_restarts", 1)
            run("ip", "link", "set", machine.link, "up")
            server.wait_ready()
            assert texts(server) == expected
