"""The served adapters: names for clients, numbers for the shard, and who is in its memory.

A number is never given twice, so a name that is loaded again has another one, and with it prefixes
of its own in the cache. At most `max_loaded` adapters are in the shard's memory: a request for
another has the one unloaded that nobody has used for longest, never one in use, and waits where all
are. A new incarnation of the shard is told of all that are wanted before anything else.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from tgi_trio.errors import ConfigurationError, ValidationError
from tgi_trio.ipc.adapters import AdapterOrder, AdapterReport, encode_adapter, encode_drop

Send = Callable[[bytes], None]


class Place(enum.Enum):
    """Where an adapter is."""

    ABSENT = "absent"  # from the shard's memory
    LOADING = "loading"  # ordered, or to be ordered from the next incarnation
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One adapter."""

    name: str
    number: int
    folder: Path
    place: Place = Place.ABSENT
    users: int = 0  # requests that have it
    used: int = 0  # grows with every use of any
    sha256: bytes = b""  # of what was loaded first
    nbytes: int = 0
    failures: int = 0  # loads that failed
    why: str = ""  # the last one did
    listed: bool = True  # False: unloaded by name, and gone when its last request is

    @property
    def wanted(self) -> bool:
        """Whether the shard is to have it."""
        return self.place is not Place.ABSENT


class AdapterRegistry:
    """See the module's docstring. Everything but `acquire` is synchronous."""

    def __init__(
        self, folders: Mapping[str, str | Path] | None = None, max_loaded: int = 1
    ) -> None:
        """`folders`: by name. As many as fit are loaded with the model, in this order."""
        self._max_loaded = max_loaded
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        self._by_name: dict[str, ServedAdapter] = {}
        self._by_number: dict[int, ServedAdapter] = {}
        self._told: set[int] = set()  # numbers that this incarnation was told to load
        self._send: Send | None = None
        self._news = trio.Event()
        for name, folder in (folders or {}).items():
            adapter = self._add(name, Path(folder))
            if self._count_wanted() < max_loaded:
                adapter.place = Place.LOADING

    # --- names --------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """The served names, in the order of their numbers."""
        return tuple(self._by_name)

    @property
    def loaded(self) -> Sequence[ServedAdapter]:
        """What is in the shard's memory."""
        return [each for each in self._by_number.values() if each.place is Place.RESIDENT]

    def find(self, name: str) -> ServedAdapter:
        """Return the adapter of a name; raises ValidationError, listing what is served."""
        adapter = self._by_name.get(name)
        if adapter is None:
            served = ", ".join(f"`{each}`" for each in self._by_name) or "none"
            raise ValidationError(f"`adapter_id` `{name}` is not served. Adapters served: {served}")
        return adapter

    # --- requests -----------------------------------------------------------------------------

    async def acquire(self, adapter: ServedAdapter) -> None:
        """Have an adapter in the shard's memory, and keep it there until `release`.

        Waits while it is loaded, and while all that are there are in use. Raises ValidationError
        where it cannot be loaded.
        """
        adapter.users += 1
        adapter.used = next(self._uses)
        failures = adapter.failures
        try:
            while adapter.place is not Place.RESIDENT:
                if adapter.failures != failures:
                    raise ValidationError(
                        f"the adapter `{adapter.name}` cannot be loaded: {adapter.why}"
                    )
                if adapter.place is Place.ABSENT and self._make_room():
                    self._order(adapter)
                await self._news.wait()
        except BaseException:
            self.release(adapter)
            raise

    def release(self, adapter: ServedAdapter) -> None:
        """Give back what `acquire` has given."""
        adapter.users -= 1
        if not adapter.users:
            if not adapter.listed:
                self._forget(adapter)
            self._wake()  # who waits for room may have it

    # --- by an operator -----------------------------------------------------------------------

    async def load(self, name: str, folder: Path) -> None:
        """Serve another adapter, once the shard has it.

        A name that is served already stands for this one from then on. Raises ValidationError
        where it cannot be loaded; what had the name keeps it.
        """
        adapter = ServedAdapter(name, next(self._numbers), folder)
        self._by_number[adapter.number] = adapter
        adapter.listed = False  # until it is there
        await self.acquire(adapter)
        if name in self._by_name:
            self.unload(name)
        adapter.listed = True
        self._by_name[name] = adapter
        self.release(adapter)

    def unload(self, name: str) -> None:
        """Serve a name no longer; requests that have it end as ever. Raises ValidationError."""
        adapter = self.find(name)
        del self._by_name[name]
        adapter.listed = False
        if not adapter.users:
            self._forget(adapter)

    # --- the shard ----------------------------------------------------------------------------

    def orders(self) -> Sequence[AdapterOrder]:
        """Return what a new incarnation is to load before anything else."""
        self._send = None
        wanted = [each for each in self._by_number.values() if each.wanted]
        self._told = {each.number for each in wanted}
        return [_order(each) for each in wanted]

    def attach(self, send: Send) -> None:
        """Have orders sent from now on, those that have come up since `orders` at once."""
        self._send = send
        wanted = {each.number for each in self._by_number.values() if each.wanted}
        for number in sorted(self._told - wanted):
            send(encode_drop(0, number))
        for number in sorted(wanted - self._told):
            send(encode_adapter(0, _order(self._by_number[number])))
        self._told = wanted

    def detach(self) -> None:
        """Keep orders for the next incarnation: this one has ended."""
        self._send = None

    def settle(self, report: AdapterReport) -> None:
        """Take note of what has come of an order."""
        adapter = self._by_number.get(report.number)
        if adapter is None or not adapter.wanted:
            return
        if report.error:
            adapter.place, adapter.why = Place.ABSENT, report.error
            adapter.failures += 1
            self._told.discard(adapter.number)
        else:
            adapter.place, adapter.nbytes = Place.RESIDENT, report.nbytes
            adapter.sha256 = report.sha256
        self._wake()

    def refuse_failed(self) -> None:
        """Raise ConfigurationError for an adapter that could not be loaded with the model."""
        for adapter in self._by_number.values():
            if adapter.failures:
                raise ConfigurationError(
                    f"--lora-adapters: `{adapter.name}` cannot be served: {adapter.why}"
                )

    # --- parts --------------------------------------------------------------------------------

    def _add(self, name: str, folder: Path) -> ServedAdapter:
        adapter = ServedAdapter(name, next(self._numbers), folder)
        self._by_name[name] = self._by_number[adapter.number] = adapter
        return adapter

    def _count_wanted(self) -> int:
        return sum(each.wanted for each in self._by_number.values())

    def _make_room(self) -> bool:
        """Unload what nobody has used for longest, if one must go; return whether one may come."""
        if self._count_wanted() < self._max_loaded:
            return True
        idle = [
            each
            for each in self._by_number.values()
            if each.place is Place.RESIDENT and not each.users
        ]
        if not idle:
            return False
        self._drop(min(idle, key=lambda each: each.used))
        return True

    def _order(self, adapter: ServedAdapter) -> None:
        adapter.place = Place.LOADING
        if self._send is not None:
            self._told.add(adapter.number)
            self._send(encode_adapter(0, _order(adapter)))

    def _drop(self, adapter: ServedAdapter) -> None:
        adapter.place, adapter.nbytes = Place.ABSENT, 0
        if self._send is not None and adapter.number in self._told:
            self._told.remove(adapter.number)
            self._send(encode_drop(0, adapter.number))

    def _forget(self, adapter: ServedAdapter) -> None:
        """Take an adapter out that has no name any more, nor a request."""
        if adapter.wanted:
            self._drop(adapter)
        self._by_number.pop(adapter.number, None)

    def _wake(self) -> None:
        """Have all that wait look again."""
        self._news.set()
        self._news = trio.Event()


def _order(adapter: ServedAdapter) -> AdapterOrder:
    return AdapterOrder(adapter.number, adapter.folder.absolute(), adapter.sha256)
