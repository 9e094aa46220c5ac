"""A house that is called over HTTP: the router's application, its adapters, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from tests.company.behind import Behind, Speaking, make_reader
from tests.company.bodies import ADAPTERS, MOST_ANSWER, MOST_FEATURES, MOST_TEXT
from tests.company.desk import Desk, Visit
from tests.company.guests import Answer, Guest
from tests.company.house import TURN_S, House
from tests.company.shard import WARMUP, Shard
from tests.company.telling import read_answer
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.http.app import Application
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.media.media_reader import MediaReader

# What is refused however many others there are: one of two adapters of one prompt.
_REFUSED: Final = "cannot be used here: this model has one of its own"


class CallHouse(House):
    """A house that is called over HTTP."""

    warmup = WARMUP | {
        "max_prefill_tokens": MOST_TEXT + MOST_FEATURES,
        "max_total_tokens": MOST_TEXT + MOST_FEATURES + MOST_ANSWER,
    }

    def __init__(
        self, *given: Any, speaking: Speaking, own: Mapping[str, Path], **more: Any
    ) -> None:
        """`speaking`: what reads and writes texts; `own`: the model's own adapters, by kind.

        The rest is as `House` has it.
        """
        self._speaking, self._own = speaking, own
        super().__init__(*given, **more)

    def _begin(self) -> None:
        named = dict(zip(ADAPTERS, self._adapters, strict=False))
        most, grows = self._customs.adapters, bool(named)
        self._known = AdapterRegistry(named, most, grows=grows, own=self._own)
        super()._begin()

    def _registry(self) -> AdapterRegistry:
        return self._known

    def _start(self) -> Shard:
        shard = super()._start()
        for report in shard.reports:
            self._known.settle(report)
        return shard

    def _orders(self) -> Sequence[AdapterOrder]:
        return self._known.orders()

    def _to_come(self) -> int:
        return self._known.to_come

    def send_frame(self, frame: bytes) -> None:
        self._counters["orders of adapters"] += 1
        self._commands.append(frame)

    async def _live(self) -> bool:
        self._visits: dict[int, Visit] = {}
        self._images: MediaReader | None = None
        if self._seeing is not None and self._studio is not None:
            self._images = make_reader(
                *(self._seeing, self._studio.store, self._tokenizer, self._metrics)
            )
        behind = Behind(
            *(self._engine, self._metrics, self._speaking, self._known, self._images),
            self._ids.append,
        )
        root = self._adapters[0].parent if self._adapters else None
        settings = HttpSettings(adapter_folder=root, response_store_bytes=self._customs.responses)
        self._app = Application(behind, settings)
        async with trio.open_nursery() as nursery:
            self._desk = Desk(self._app, nursery)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trio.to_thread, "run_sync", _run_at_once)
                is_over = await super()._live()
            nursery.cancel_scope.cancel()
        return is_over

    async def wait(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        await super().wait()

    def _see_off(self) -> None:
        for i, visit in list(self._visits.items()):
            leaves = self._guests[i].leaves
            visit.turns += 1
            if visit.is_over:
                self._answers[i].told = read_answer(visit)
                self._check(visit, self._answers[i])
                del self._visits[i]
            elif leaves is not None and visit.events >= leaves:
                visit.leave()

    def _check(self, visit: Visit, answer: Answer) -> None:
        """Raise AssertionError for an answer that says of anything that it cannot be answered."""
        self._counters["bodies left"] += visit.has_left and not visit.streams
        self._counters["timed out"] += answer.timed_out
        for exchange in visit.exchanges:
            self._counters["sent whole"] += exchange.sent_whole
            told = b"".join(exchange.pieces)
            forgotten = exchange.call.body is None and exchange.status == 404
            if forgotten and self._customs.forgets:
                self._counters["forgotten"] += 1
                continue
            refused = _REFUSED.encode() in told or answer.timed_out
            answered = exchange.status == 200 or (exchange.status == 0 and visit.has_left)
            if not answered and not refused:
                raise AssertionError(f"{exchange.call}: {exchange.status} {told!r}")

    async def _let_in(self, i: int, guest: Guest) -> None:
        assert guest.call is not None
        patience = None if guest.patience is None else guest.patience * TURN_S
        self._visits[i] = visit = Visit(guest.call, i, patience)
        await self._desk.begin(visit)

    def _is_empty(self) -> bool:
        return not self._visits and not self._engine.scheduler.held_blocks

    def _close(self) -> None:
        super()._close()
        self._known.check()
        if busy := [each.name for each in self._known.loaded if each.users or each.waiting]:
            raise AssertionError(f"{busy} are in use by nobody")
        self._app.responses.check()
        if self._images is not None:
            self._images.spool.close()
            if used := self._images._bytes.used:
                raise AssertionError(f"{used} bytes of images are held by nobody")


async def _run_at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Do in this thread what would be done in another, in the same order each time."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)
