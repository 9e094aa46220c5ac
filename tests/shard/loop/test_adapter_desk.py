"""What becomes of orders to load adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tgi_trio.errors import TgiTrioError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import LoadedAdapter
from tgi_trio.shard.loop.adapter_desk import AdapterDesk


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

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        return _Read()

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        if len(self.numbers) == self.room:
            raise TgiTrioError("there is no room")
        self.numbers.add(number)

    def drop(self, number: int) -> None:
        self.numbers.discard(number)


def test_an_adapter_that_finds_no_room_is_told_of_and_refused() -> None:
    host = _Host(room=1)
    desk = AdapterDesk(host)
    for number in (1, 2):
        desk.order(AdapterOrder(number, Path("a")))
    told = list(desk.finish(wait=True))
    assert [report.error for report in told] == ["", "there is no room"]
    assert desk.refusal(1) is None and "there is no room" in (desk.refusal(2) or "")
    desk.drop(2)
    desk.drop(1)
    desk.order(AdapterOrder(3, Path("a")))
    assert [report.error for report in desk.finish(wait=True)] == [""]
    assert host.numbers == {3} and "not been loaded" in (desk.refusal(1) or "")
    desk.close()
