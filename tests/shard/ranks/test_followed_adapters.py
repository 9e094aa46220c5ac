"""What a rank does with the adapters that rank 0 tells of."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import LoadedAdapter
from tgi_trio.shard.ranks.followed_adapters import FollowedAdapters


class Loaded:
    rank = nbytes = 1

    def __init__(self, sha256: bytes) -> None:
        self.sha256 = sha256


class Host:
    """Loads what `content` says lies there, once `gate` is open."""

    def __init__(self) -> None:
        self.content = b"first"
        self.gate = Event()
        self.loads = 0
        self.installed: dict[int, bytes] = {}

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        self.gate.wait(60)
        self.loads += 1
        if order.sha256 not in (b"", self.content):
            raise ModelLoadError("they have changed")
        return Loaded(self.content)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        self.installed[number] = loaded.sha256

    def drop(self, number: int) -> None:
        self.installed.pop(number, None)


@pytest.fixture
def host() -> Host:
    return Host()


def order(sha256: bytes = b"") -> AdapterOrder:
    return AdapterOrder(1, Path("/adapters/a"), sha256)


def test_loaded_while_rank_0_loads_and_installed_when_it_says_so(host: Host) -> None:
    adapters = FollowedAdapters(host)
    adapters.order(order())  # returns at once: the gate is closed
    assert not host.installed
    host.gate.set()
    adapters.order(order(b"first"))
    assert host.installed == {1: b"first"} and host.loads == 1
    adapters.drop(1)
    assert not host.installed
    adapters.close()


def test_files_that_change_between_two_ranks_reads(host: Host) -> None:
    """What is installed is what rank 0 has read, or this rank ends."""
    adapters = FollowedAdapters(host)
    host.gate.set()
    adapters.order(order())
    adapters._loading[1].result()
    host.content = b"second"
    adapters.order(order(b"second"))
    assert host.installed == {1: b"second"} and host.loads == 2
    adapters.order(order())
    with pytest.raises(ModelLoadError, match="they have changed"):
        adapters.order(order(b"third"))
    adapters.close()


def test_what_rank_0_refuses_is_dropped_whatever_has_become_of_it(host: Host) -> None:
    adapters = FollowedAdapters(host)
    adapters.order(order(b"none such"))  # this load will fail
    adapters.drop(1)
    host.gate.set()
    adapters.order(order())  # a number again: begun, not installed
    assert not host.installed
    adapters.order(order(b"first"))
    assert host.installed == {1: b"first"}
    adapters.close()
