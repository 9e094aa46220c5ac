"""Ray keeps servers: raylets on this machine, real servers, and what is killed comes again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.cluster.controller import connect
from tgi_trio.errors import ConfigurationError
from tgi_trio.testing.ports import reserve_port

pytestmark = [pytest.mark.ray, pytest.mark.system]
pytest.importorskip("ray", reason="needs the extra `ray`")

PATIENCE_S = 240.0  # Ray starts in 10 s on an idle machine and in a minute on a busy one


def eventually(holds: Callable[[], Any], what: str) -> Any:
    """Return what `holds` returns once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head that computes nothing and two nodes that do, all on this machine.

    A raylet gives up when its agents have not come up within 15 s, which no setting changes
    (ray#65983), so a busy machine gets a second try.
    """
    from ray.cluster_utils import Cluster

    store = 80_000_000  # bytes, the least that Ray takes
    for last in (False, True):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=0, object_store_memory=store, include_dashboard=False)
            for _ in range(2):
                cluster.add_node(num_cpus=2, object_store_memory=store)
            break
        except Exception:
            cluster.shutdown()
            if last:
                raise
    yield cluster
    cluster.shutdown()


def addresses(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def process_at(address: str) -> int | None:
    """Return the process that serves at an address, by its command line."""
    port = address.rpartition(":")[2].encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"tgi_trio.cluster.kept_server" in words and port in words:
                return int(entry.name)
    return None


def node_of(nodes: Any, process: int) -> Any:
    """Return the node whose raylet started the actor that started this process."""
    actor = _parent(process)
    raylet = _parent(actor)
    return next(
        node for node in nodes.worker_nodes if node.all_processes["raylet"][0].process.pid == raylet
    )


def _parent(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


def serves(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://{address}/health", timeout=30) as got:
        return bool(got.status == 200)
    return False


def answers(address: str) -> bool:
    """Whether a prompt is answered there, by whichever server."""
    asked = urllib.request.Request(
        f"http://{address}/generate",
        b'{"inputs": "Once", "parameters": {"max_new_tokens": 4}}',
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as got:
        return b"generated_text" in got.read()


def test_servers_are_kept_over_the_deaths_of_one_and_of_a_node(nodes: Any, tmp_path: Path) -> None:
    file, secret = tmp_path / "replicas.txt", tmp_path / "secret"
    secret.write_text("a secret of the test's own\n")
    secret.chmod(0o600)
    with reserve_port() as port:
        front = f"127.0.0.1:{port}"
        controller = subprocess.Popen(
            [
                *(sys.executable, "-m", "tgi_trio", "cluster", "--replicas", "2"),
                *("--address", nodes.address, "--replicas-file", str(file)),
                *("--front-bind", front, "--cluster-secret-file", str(secret)),
                *("--cpu-threads", "1", "--max-total-tokens", "256"),
            ]
        )
    try:

        def two() -> list[str]:
            assert controller.poll() is None
            there = addresses(file)
            return there if len(there) == 2 and all(map(serves, there)) else []

        first = eventually(two, "two servers")
        eventually(lambda: serves(front), "a front before them")
        killed = process_at(first[0])
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        second = eventually(lambda: (found := two()) != first and found, "another for the killed")
        assert first[1] in second and first[0] not in second
        survivor = process_at(second[1])
        assert survivor is not None
        nodes.remove_node(node_of(nodes, survivor), allow_graceful=False)
        third = eventually(lambda: (found := two()) != second and found, "servers on one node")
        assert second[1] not in third
        assert answers(front)
    finally:
        controller.send_signal(signal.SIGTERM)
        try:
            ended = controller.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            controller.kill()
            raise
    assert ended == 0 and addresses(file) == []
    servers = {*first, *second, *third}
    eventually(lambda: not any(map(process_at, servers)), "no server stays behind")
    assert not serves(front)


def rank_processes() -> list[int]:
    """Return the processes that run `rank` on any node."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"tgi_trio.cluster.kept_server" in words and b"rank" in words:
                found.append(int(entry.name))
    return found


def test_a_server_over_two_nodes_starts_anew_when_one_of_its_ranks_dies(
    nodes: Any, tmp_path: Path
) -> None:
    while len(nodes.worker_nodes) < 2:  # the test before may have ended one
        nodes.add_node(num_cpus=2, object_store_memory=80_000_000)
    file, secret = tmp_path / "replicas.txt", tmp_path / "secret"
    secret.write_text("a secret of the test's own\n")
    secret.chmod(0o600)
    controller = subprocess.Popen(
        [
            *(sys.executable, "-m", "tgi_trio", "cluster", "--nodes-per-replica", "2"),
            *("--address", nodes.address, "--replicas-file", str(file), "--no-front"),
            *("--replica-cpus", "4", "--cluster-secret-file", str(secret)),
            *("--cpu-threads", "1", "--max-total-tokens", "256"),
        ]
    )
    try:

        def one() -> list[str]:
            assert controller.poll() is None
            there = addresses(file)
            return there if len(there) == 1 and all(map(serves, there)) else []

        first = eventually(one, "a server")
        assert answers(first[0])
        server, (rank,) = process_at(first[0]), rank_processes()
        assert server is not None
        assert node_of(nodes, server) is not node_of(nodes, rank)
        os.kill(rank, signal.SIGKILL)
        second = eventually(lambda: (found := one()) != first and found, "another for both")
        assert answers(second[0]) and process_at(first[0]) is None
    finally:
        controller.send_signal(signal.SIGTERM)
        try:
            ended = controller.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            controller.kill()
            raise
    assert ended == 0 and addresses(file) == []
    eventually(lambda: not rank_processes(), "no rank stays behind")
    assert process_at(second[0]) is None


def test_one_command_tries_it_on_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    words = ["--replicas", "1", "--replicas-file", str(file), "--cpu-threads", "1"]
    words.append("--no-front")
    both = subprocess.Popen([sys.executable, "-m", "tools.two_nodes", *words])
    try:
        (address,) = eventually(lambda: both.poll() is None and addresses(file), "a server")
        assert serves(address)
    finally:
        both.send_signal(signal.SIGINT)
        try:
            ended = both.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            both.kill()
            raise
    assert ended == 0 and addresses(file) == [] and process_at(address) is None


def test_no_cluster_at_an_address_is_said() -> None:
    for address in ("127.0.0.1:1", "nonsense"):
        with pytest.raises(ConfigurationError, match=f"--address {address}: .*ray start --head"):
            connect(address)
