"""What becomes of orders to load adapters."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tgi_trio.errors import PeerError, TgiTrioError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import LoadedAdapter
from tgi_trio.shard.loop.adapter_loader import AdapterLoader


@dataclass
class _Read:
    sha256: bytes = bytes(32)
    rank: int = 4
    nbytes: int = 100


@dataclass
class _Host:
    """Has room for so many."""

    room: int
    numbers: set[int] = field(default_factory=set)
    raised: Exception | None = None  # by each load
    broken: Exception | None = None  # by each that is installed
    dropped: list[int] = field(default_factory=list)
    ready: threading.Event | None = None  # before it is set nothing is loaded

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        if self.ready is not None:
            self.ready.wait()
        if self.raised is not None:
            raise self.raised
        return _Read()

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if self.broken is not None:
            raise self.broken
        if len(self.numbers) == self.room:
            raise TgiTrioError("there is no room")
        self.numbers.add(number)

    def drop(self, number: int) -> None:
        self.numbers.discard(number)
        self.dropped.append(number)


def test_an_adapter_that_finds_no_room_is_told_of_and_refused() -> None:
    host = _Host(room=1)
    loader = AdapterLoader(host)
    for number in (1, 2):
        loader.order(AdapterOrder(number, Path("a")))
    told = list(loader.finish(wait=True))
    assert [report.error for report in told] == ["", "there is no room"]
    assert loader.refusal(1) is None and "there is no room" in (loader.refusal(2) or "")
    loader.drop(2)
    loader.drop(1)
    loader.order(AdapterOrder(3, Path("a")))
    assert [report.error for report in loader.finish(wait=True)] == [""]
    assert host.numbers == {3} and "not been loaded" in (loader.refusal(1) or "")
    loader.close()


@pytest.mark.parametrize("when", ["raised", "broken"])
def test_an_adapter_that_fails_as_nobody_foresaw_is_told_of_and_the_others_go_on(
    when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard that ended of it would be told to load it again, and end again."""
    host = _Host(room=2)
    loader = AdapterLoader(host)
    setattr(host, when, RuntimeError("out of memory"))
    loader.order(AdapterOrder(1, Path("a")))
    (report,) = loader.finish(wait=True)
    assert "RuntimeError: out of memory" in report.error
    assert "out of memory" in (loader.refusal(1) or "") and "Traceback" in capsys.readouterr().err
    setattr(host, when, None)
    loader.order(AdapterOrder(2, Path("a")))
    assert [each.error for each in loader.finish(wait=True)] == [""]
    assert host.numbers == {2} and loader.refusal(2) is None
    loader.close()


def test_a_rank_that_cannot_be_told_of_an_adapter_is_no_fault_of_the_adapter() -> None:
    """Python switches between threads as before: what else is in the process goes on."""
    usual = sys.getswitchinterval()
    loader = AdapterLoader(_Host(room=1, broken=PeerError("rank 1", "has made no room")))
    loader.order(AdapterOrder(1, Path("a")))
    with pytest.raises(PeerError, match="rank 1"):
        list(loader.finish(wait=True))
    loader.close()
    assert sys.getswitchinterval() == usual


def test_an_adapter_that_is_dropped_while_it_is_loaded_is_dropped_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others load it as well, and would keep what they have read for ever."""
    usual = 0.005
    interval = [usual]
    monkeypatch.setattr(sys, "getswitchinterval", lambda: interval[-1])
    monkeypatch.setattr(sys, "setswitchinterval", interval.append)
    ready = threading.Event()
    host = _Host(room=1, ready=ready)
    loader = AdapterLoader(host)
    loader.order(AdapterOrder(1, Path("a")))
    assert sys.getswitchinterval() < usual
    loader.drop(1)
    assert host.dropped == [1] and not loader.is_loading
    assert sys.getswitchinterval() == usual  # nothing is waited for that would set it back
    ready.set()
    loader.close()
