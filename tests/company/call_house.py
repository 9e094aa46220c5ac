"""A house that is called over HTTP."""

from __future__ import annotations

import trio
import trio.testing

from tests.company.calling import MOST_TOKENS
from tests.company.desk import Desk, Visit
from tests.company.guests import Guest
from tests.company.house import House
from tests.company.shard import WARMUP
from tests.company.telling import read_answer


class CallHouse(House):
    """A house that is called over HTTP."""

    warmup = WARMUP | {"max_prefill_tokens": MOST_TOKENS, "max_total_tokens": 2 * MOST_TOKENS}

    async def _live(self) -> bool:
        self._visits: dict[int, Visit] = {}
        async with trio.open_nursery() as nursery:
            self._desk = Desk(self._engine, self._tokenizer, nursery)
            is_over = await super()._live()
            nursery.cancel_scope.cancel()
        return is_over

    async def wait(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        await super().wait()

    def _see_off(self) -> None:
        for i, visit in list(self._visits.items()):
            leaves = self._guests[i].leaves
            if visit.is_over:
                self._answers[i].told = read_answer(visit)
                if visit.status not in (0, 200):  # 0: it has left before
                    raise AssertionError(f"{self._guests[i].call}: {visit.pieces}")
                del self._visits[i]
            elif leaves is not None and len(visit.pieces) >= leaves:
                visit.leave()

    async def _let_in(self, i: int, guest: Guest) -> None:
        assert guest.call is not None
        self._visits[i] = visit = Visit(guest.call)
        await self._desk.begin(visit, guest.call)
        self._ids[:] = self._desk.ids

    def _is_empty(self) -> bool:
        return not self._visits and not self._engine.scheduler.held_blocks
