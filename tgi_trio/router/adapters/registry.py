"""The served adapters: their names for clients, their numbers for the shard, and which are loaded.

Numbers are never reused: a name that is loaded again gets a new number, and with it prefixes of its
own in the cache. At most `max_loaded` adapters are in the shard's memory. A request for another one
evicts the least recently used adapter, but never one in use. If all are in use, it waits in turn;
after `PATIENCE` one of them takes no new requests until it has been unloaded, so that adapters in
constant demand cannot starve the others. A new incarnation of the shard loads all wanted adapters
before it serves. Adapters of the model's own, for prompts with images or sounds, have no name for
clients, and stay in memory beside those.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import trio

from tgi_trio.errors import ConfigurationError, Overloaded, Unavailable, ValidationError
from tgi_trio.ipc.adapters import AdapterOrder, AdapterReport, encode_adapter, encode_drop
from tgi_trio.router.adapters.adapter_states import AdapterEvent, AdapterState, next_state
from tgi_trio.router.adapters.served_adapter import ServedAdapter

log = logging.getLogger(__name__)

Send = Callable[[bytes], None]

PATIENCE: Final = 1.0  # seconds that one waits for room before another one has to yield
LONGEST_WAIT: Final = 600.0  # seconds that a request waits at most
AGAIN_S: Final = 30.0  # after which a request may try again whose adapter could not be loaded


class AdapterRegistry:
    """See the module's docstring. Everything but `acquire` and `load` is synchronous."""

    def __init__(
        self,
        folders: Mapping[str, str | Path] | None = None,
        max_loaded: int = 1,
        *,
        grows: bool = False,
        own: Mapping[str, str | Path] = MappingProxyType({}),
    ) -> None:
        """`folders`: by name; the first `max_loaded` are loaded with the model.

        `grows`: whether `load` may be called. `own`: folders of the model's own, by what a prompt
        has to hold; the first of them counts.
        """
        self._max_loaded = max_loaded + len(own)
        self._grows = grows
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        self._by_name: dict[str, ServedAdapter] = {}
        self._by_number: dict[int, ServedAdapter] = {}
        self._present: dict[int, ServedAdapter] = {}  # all that are not ABSENT, by number
        self._queue: dict[int, ServedAdapter] = {}  # wanted ones without room, first come first
        self._ordered: set[int] = set()  # numbers that this incarnation was told to load
        self._drops_owed: set[int] = set()  # those to be dropped as soon as a shard is attached
        self._send: Send | None = None
        self._on_forgotten: list[Callable[[int], None]] = []
        self._closed = ""  # why nothing is served any more
        self._own: dict[str, ServedAdapter] = {}
        for kind, folder in own.items():
            adapter = self._own[kind] = self._new(kind, Path(folder))
            adapter.own = True
            self._move(adapter, AdapterEvent.ORDER)
        for name, folder in (folders or {}).items():
            adapter = self._by_name[name] = self._new(name, Path(folder))
            if len(self._present) < self._max_loaded:
                self._move(adapter, AdapterEvent.ORDER)

    # --- names --------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """The served names, in the order of their numbers."""
        return tuple(self._by_name)

    def serves(self, name: str) -> bool:
        """Whether there is an adapter of that name."""
        return name in self._by_name

    @property
    def loaded(self) -> Sequence[ServedAdapter]:
        """The adapters in the shard's memory."""
        return [each for each in self._present.values() if each.state is not AdapterState.LOADING]

    def find(self, name: str) -> ServedAdapter:
        """Return the adapter of a name. Raises ValidationError, which lists what is served."""
        adapter = self._by_name.get(name)
        if adapter is None:
            served = ", ".join(f"`{each}`" for each in self._by_name) or "none"
            raise ValidationError(f"`adapter_id` `{name}` is not served. Adapters served: {served}")
        return adapter

    def find_own(self, kinds: Container[str]) -> ServedAdapter | None:
        """Return the model's own adapter for a prompt that holds these kinds, if it has one."""
        return next((each for kind, each in self._own.items() if kind in kinds), None)

    # --- requests -----------------------------------------------------------------------------

    async def acquire(self, adapter: ServedAdapter) -> None:
        """Wait until an adapter is in the shard's memory, and keep it there until `release`.

        Raises Unavailable if it cannot be loaded, which the log explains, and after `close`;
        Overloaded after LONGEST_WAIT.
        """
        adapter.waiting += 1
        # It may have been unloaded, and forgotten, since the request has found it.
        self._by_number[adapter.number] = adapter
        failures, now = adapter.failures, trio.current_time()
        limit, turn = now + LONGEST_WAIT, now + PATIENCE
        try:
            self._seek(adapter)
            while adapter.state is not AdapterState.RESIDENT:
                self._refuse(adapter, failures)
                with trio.move_on_at(min(limit, turn)):
                    await adapter.news.wait()
                    continue
                if trio.current_time() >= limit:
                    raise Overloaded(
                        f"the adapter `{adapter.name}` has not come into memory within "
                        f"{LONGEST_WAIT:g} s: all of --max-loaded-adapters "
                        f"{self._max_loaded - len(self._own)} are in use, or its files are slow to "
                        "read"
                    )
                self._ask_for_room(adapter)
                turn += PATIENCE
            adapter.users += 1
            adapter.used = next(self._uses)
        finally:
            adapter.waiting -= 1
            self._tidy(adapter)

    def release(self, adapter: ServedAdapter) -> None:
        """Undo one `acquire`."""
        adapter.users -= 1
        self._tidy(adapter)

    def close(self, why: str) -> None:
        """Fail present and future waits: nothing is served any more."""
        self._closed = why
        for adapter in self._by_number.values():
            self._wake(adapter)

    # --- by an operator -----------------------------------------------------------------------

    async def load(self, name: str, folder: Path, *, replace: bool = True) -> None:
        """Load an adapter and serve it by `name`, in place of another one of that name.

        Raises what `acquire` raises, but ValidationError if it cannot be loaded, or if the name has
        been taken meanwhile and `replace` is False. The name then stays as it was.
        """
        adapter = self._new(name, folder)
        adapter.listed = False  # until it is loaded
        await self.acquire(adapter)
        try:
            if name in self._by_name:
                if not replace:
                    raise ValidationError(f"`{name}` has been loaded by another request meanwhile")
                self.unload(name)
            adapter.listed = True
            self._by_name[name] = adapter
        finally:
            self.release(adapter)

    def unload(self, name: str) -> None:
        """Stop serving a name; its present requests finish. Raises ValidationError."""
        adapter = self.find(name)
        del self._by_name[name]
        adapter.listed = False
        self._tidy(adapter)

    # --- the shard ----------------------------------------------------------------------------

    def on_forgotten(self, call: Callable[[int], None]) -> None:
        """Have `call` called, too, with the number of every adapter that is forgotten."""
        self._on_forgotten.append(call)

    def orders(self) -> Sequence[AdapterOrder]:
        """Return the adapters that a new incarnation has to load before it serves."""
        self._send = None
        self._ordered, self._drops_owed = set(self._present), set()
        return [_order(each) for each in self._present.values()]

    @property
    def to_come(self) -> int:
        """How many further adapters may be loaded."""
        most = self._max_loaded if self._grows else min(self._max_loaded, len(self._by_number))
        return max(0, most - len(self._present))

    def attach(self, send: Send) -> None:
        """Send orders through `send` from now on; those since `orders` was called are sent now."""
        self._send = send
        numbers, self._drops_owed = self._drops_owed, set()
        for number in sorted(numbers):
            self._send_drop(number)
        self._assign()

    def detach(self) -> None:
        """Send no more orders: this incarnation has ended."""
        self._send = None

    def settle(self, report: AdapterReport) -> None:
        """Note the outcome of an order."""
        adapter = self._present.get(report.number)
        if adapter is None:
            return  # dropped meanwhile
        if report.error:
            adapter.failures += 1
            adapter.why = report.error
            self._move(adapter, AdapterEvent.FAILED)
            if adapter.listed and (self._send is not None or adapter.sha256):  # not at the start
                log.error("the adapter `%s` cannot be loaded: %s", adapter.name, adapter.why)
        else:
            adapter.nbytes, adapter.sha256 = report.nbytes, report.sha256
            self._move(adapter, AdapterEvent.LOADED)
        self._wake(adapter)
        self._assign()

    def refuse_failed(self) -> None:
        """Raise ConfigurationError for an adapter that could not be loaded with the model."""
        for adapter in self._by_number.values():
            if adapter.failures and adapter.own:
                raise ConfigurationError(
                    f"the model's own adapter in {adapter.folder} cannot be served: {adapter.why}"
                )
            if adapter.failures:
                raise ConfigurationError(
                    f"--lora-adapters: `{adapter.name}` cannot be served: {adapter.why}"
                )

    # --- parts --------------------------------------------------------------------------------

    def _new(self, name: str, folder: Path) -> ServedAdapter:
        adapter = ServedAdapter(name, next(self._numbers), folder)
        self._by_number[adapter.number] = adapter
        return adapter

    def _move(self, adapter: ServedAdapter, event: AdapterEvent) -> None:
        adapter.state = next_state(adapter.state, event)
        if adapter.state is AdapterState.ABSENT:
            adapter.nbytes = 0
            self._present.pop(adapter.number, None)
        else:
            self._present[adapter.number] = adapter

    def _refuse(self, adapter: ServedAdapter, failures: int) -> None:
        """Raise if waiting has become useless; `failures`: the number when the wait began."""
        if self._closed:
            raise Unavailable(self._closed)
        if adapter.failures == failures:
            return
        if not adapter.listed:  # who asks has named the folder
            raise ValidationError(f"the adapter `{adapter.name}` cannot be loaded: {adapter.why}")
        raise Unavailable(
            f"the adapter `{adapter.name}` cannot be loaded now, for a reason that the server's "
            "log names",
            AGAIN_S,
        )

    def _seek(self, adapter: ServedAdapter) -> None:
        """Load a wanted adapter, now or in its turn."""
        if adapter.state is AdapterState.ABSENT:
            self._queue.setdefault(adapter.number, adapter)
            self._assign()

    def _assign(self) -> None:
        """Load waiting adapters in turn, as long as there is room or it can be made."""
        while self._send is not None and self._queue and self._make_room():
            number = next(iter(self._queue))
            adapter = self._queue.pop(number)
            self._move(adapter, AdapterEvent.ORDER)
            self._ordered.add(number)
            self._send(encode_adapter(0, _order(adapter)))
        if not self._queue:
            for adapter in self._present.values():
                if adapter.state is AdapterState.LEAVING:
                    self._move(adapter, AdapterEvent.STAY)
                    self._wake(adapter)

    def _make_room(self) -> bool:
        """Unload the least recently used idle adapter if needed; returns whether there is room."""
        if len(self._present) < self._max_loaded:
            return True
        idle = [each for each in self._present.values() if each.idle]
        if idle:
            self._drop(min(idle, key=lambda each: each.used))
        return bool(idle)

    def _ask_for_room(self, adapter: ServedAdapter) -> None:
        """Have the least recently requested adapter in use yield to one that has waited long."""
        leaving = [each for each in self._present.values() if each.state is AdapterState.LEAVING]
        if adapter.number not in self._queue or len(leaving) >= len(self._queue):
            return
        used = [
            each
            for each in self._present.values()
            if each.state is AdapterState.RESIDENT
            and each.users
            and not each.waiting
            and not each.own
        ]
        if used:
            self._move(min(used, key=lambda each: each.used), AdapterEvent.YIELD)

    def _tidy(self, adapter: ServedAdapter) -> None:
        """Unload or forget an adapter if it has lost its last request or its name."""
        if not adapter.waiting:
            self._queue.pop(adapter.number, None)
        if not adapter.users:
            if adapter.state is AdapterState.LEAVING:
                self._drop(adapter)
                if adapter.waiting:
                    self._queue[adapter.number] = adapter
            if not adapter.waiting and not adapter.listed:
                self._forget(adapter)
        self._assign()

    def _drop(self, adapter: ServedAdapter) -> None:
        self._move(adapter, AdapterEvent.DROP)
        self._send_drop(adapter.number)

    def _send_drop(self, number: int) -> None:
        if number not in self._ordered:
            return
        if self._send is None:
            self._drops_owed.add(number)
        else:
            self._ordered.remove(number)
            self._send(encode_drop(0, number))

    def _forget(self, adapter: ServedAdapter) -> None:
        """Remove an adapter without a name and without requests."""
        if self._by_number.pop(adapter.number, None) is None:
            return
        if adapter.state is not AdapterState.ABSENT:
            self._drop(adapter)
        else:
            self._send_drop(adapter.number)  # the shard remembers why loading has failed
        for call in self._on_forgotten:
            call(adapter.number)

    def _wake(self, adapter: ServedAdapter) -> None:
        """Wake all requests that wait for an adapter, so that they check it again."""
        adapter.news.set()
        adapter.news = trio.Event()

    # --- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless names, numbers, states and the queue agree."""
        for name, adapter in self._by_name.items():
            if adapter.name != name or self._by_number.get(adapter.number) is not adapter:
                raise AssertionError(f"{name} is not known by its number")
        for adapter in self._by_number.values():
            label = f"{adapter.name} ({adapter.state.name})"
            if adapter.users < 0 or adapter.waiting < 0:
                raise AssertionError(f"{label} has been given back twice")
            if not adapter.listed and not adapter.users and not adapter.waiting:
                raise AssertionError(f"{label} has neither name nor request")
            if (adapter.state is not AdapterState.ABSENT) != (adapter.number in self._present):
                raise AssertionError(f"{label} is wrongly in or out of memory")
            if adapter.state is AdapterState.LEAVING and not adapter.users:
                raise AssertionError(f"{label} is in nobody's use and still there")
        if not self._by_number.keys() >= self._present.keys() | self._queue.keys():
            raise AssertionError("a forgotten adapter is in memory, or waits to be")
        if len(self._present) > self._max_loaded:
            raise AssertionError(f"{len(self._present)} adapters are where {self._max_loaded} may")
        for adapter in self._queue.values():
            if adapter.state is not AdapterState.ABSENT or not adapter.waiting:
                raise AssertionError(f"{adapter.name} waits for room in vain")
        if self._send is not None and not self._ordered >= self._present.keys():
            raise AssertionError("the shard was not told of an adapter")
        room = len(self._present) < self._max_loaded or any(
            each.idle for each in self._present.values()
        )
        if self._send is not None and self._queue and room:
            raise AssertionError("room is left empty while somebody waits for it")


def _order(adapter: ServedAdapter) -> AdapterOrder:
    return AdapterOrder(adapter.number, adapter.folder.absolute(), adapter.sha256)
