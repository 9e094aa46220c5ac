"""A whole server but for HTTP in one thread: an engine, and a shard's loop that it drives.

Nothing waits and nothing is measured, so a company meets the same way each time: requests come,
leave and are lost with their shard at given turns, frames lie in the rings as long as is said.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing
from trio._core import _run

from tests.company.gallery import Seeing, Studio
from tests.company.guests import Answer, Customs, Guest
from tests.company.keeping import Shelf
from tests.company.shard import WARMUP, Lead, Shard
from tgi_trio.errors import Overloaded, find_first_leaf
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink, encode_command
from tgi_trio.router.engine.stream import StreamEnd, TokenStream
from tgi_trio.router.scheduling import SchedulingLimits
from tgi_trio.router.scheduling.shard_commands import Command
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.answer_text import output_text
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.settings.records import ShardOptions

Context = Callable[[], AbstractContextManager[object]]

TURN_S = 0.01  # of the engine's clock
MOST_TURNS = 5_000  # of a company: more of them, and somebody is never served


class Stuck(AssertionError):
    """Somebody is never served."""


class _Lost(Exception):
    """The shard has died."""


class _Empty(Exception):
    """Everybody has left, and nobody is let in before everything has begun anew."""


class _Over(Exception):
    """Everybody has been served."""


class House:
    """Serves one company, of whom everybody is answered."""

    warmup: Mapping[str, int] = WARMUP

    def __init__(
        self,
        lead: Lead,
        anew: Callable[[], Lead],
        tokenizer: Tokenizer,
        customs: Customs,
        guests: Sequence[Guest],
        *,
        options: ShardOptions,
        adapters: Sequence[Path] = (),
        foretold: Sequence[Sequence[int]] = (),
        seeing: Seeing | None = None,
        around: Context = nullcontext,
        warming: Context = nullcontext,
    ) -> None:
        """`lead`: yields what computes; `anew`: loads a model, and returns what yields it.

        `foretold`: what each guest will be told, if drafts are to be mostly right.
        `seeing`: what sees images; None: nobody shows any. `around`: entered while anything is
        computed; `warming`: while a shard starts.
        """
        self._customs, self._guests = customs, list(guests)
        self._lead, self._anew = lead, anew
        self._tokenizer, self._options, self._seeing = tokenizer, options, seeing
        self._adapters = adapters
        self._steps = 0
        self._foretold = foretold
        self._texts: dict[int, Sequence[int]] | None = {} if foretold else None  # by sequence
        self._around, self._warming = around, warming
        self._clock, self._turns = trio.testing.MockClock(), 0
        self._commands: deque[bytes] = deque()  # on their way
        self._restarts = sorted(customs.restarts, reverse=True)  # those to come, the last one first
        self._counters = Counter[str]()  # of earlier lives
        self._folder = tempfile.TemporaryDirectory() if customs.restarts else None
        with around():
            self._begin()
        self._shelf: Shelf | None = None
        if self._folder is not None and self._shard.info.prefix_reuse:
            self._shelf = Shelf(Path(self._folder.name), self._shard.info)
        self._streams: dict[int, TokenStream] = {}
        self._answers: dict[int, Answer] = {}
        self._ids: list[int] = []

    @property
    def counters(self) -> dict[str, int]:
        """What the scheduler has counted, and what has come of calls."""
        return dict(self._counters + Counter(self._engine.scheduler.counters))

    def serve(self) -> list[Answer]:
        """Return everybody's answer. Raises Stuck when there is no end in sight."""
        with self._around():
            try:
                with _in_order():
                    trio.run(self._serve, clock=self._clock)
            except ExceptionGroup as several:
                raise find_first_leaf(several) from several
            finally:
                self._shard.end(self._ids)
                if self._folder is not None:
                    self._folder.cleanup()
        self._close()
        return [self._answers[i] for i in range(len(self._guests))]

    def _begin(self) -> None:
        """Begin a life, with a router that knows nothing and its first shard."""
        customs = self._customs
        self._metrics = Metrics()
        self._studio: Studio | None = None
        if self._seeing is not None:
            self._studio = Studio(
                *(self._seeing, customs.arena, customs.features, customs.decoding)
            )
        self._shard = self._start()
        limits = self._limits()
        if self._seeing is not None:
            limits = replace(limits, image_sight=self._seeing.rules.image_attention)
        self._engine = Engine(
            *(AdmissionLimits(256), limits, self._tokenizer, self._metrics),
            clock=self._clock.current_time,
            adapters=self._registry(),
            pixels=None if self._studio is None else self._studio.store,
        )

    def _start(self) -> Shard:
        images = None if self._studio is None else self._studio.queue
        with self._warming():
            return Shard(
                *(self._lead, self._options, self._orders(), self._time, self._texts),
                *(self._customs.failing, {**self.warmup, "adapters_to_come": self._to_come()}),
                images=images,
            )

    def _orders(self) -> Sequence[AdapterOrder]:
        """Return the adapters that a shard loads before it serves."""
        return [AdapterOrder(number, each) for number, each in enumerate(self._adapters, start=1)]

    def _to_come(self) -> int:
        """Return how many adapters may be loaded later."""
        return 0

    def _registry(self) -> AdapterRegistry | None:
        """Return what knows the adapters by their names; None: requests have their numbers."""
        return None

    async def _serve(self) -> None:
        """Live one life after the other until everybody has been served."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._engine.watch_deadlines)
                if self._studio is not None:
                    nursery.start_soon(self._studio.store.run)
                is_over = await self._live()
                nursery.cancel_scope.cancel()
            if is_over:
                return
            self._restart()

    async def _live(self) -> bool:
        """Serve with one shard after the other; return whether everybody has been served."""
        while True:
            try:
                await self._engine.serve(cast("ShardLink", self))
            except _Over:
                return True
            except _Empty:
                return False
            except _Lost:
                self._shard.end(self._ids)
                self._commands.clear()
                self._renew()
                self._shard = self._start()

    def _restart(self) -> None:
        """End everything and begin anew, with the prefixes that have been kept."""
        self._restarts.pop()
        while self._commands:
            self._shard.rings.down.append(self._commands.popleft())
        self._shard.turn()
        self._counters.update(self._engine.scheduler.counters)
        if self._shelf is not None:
            self._shelf.keep(self._shard, self._customs.part)
        self._shard.end(self._ids)
        self._close()
        self._ids.clear()
        self._renew()
        self._begin()
        if self._shelf is not None:
            self._shelf.restore(self._shard, self._engine.scheduler)

    def _renew(self) -> None:
        """Have the next shard compute with a model that is loaded anew, if that is the custom."""
        if self._customs.anew:
            self._lead = self._anew()

    def _close(self) -> None:
        """Raise AssertionError or RuntimeError unless nothing is left of this life's requests."""
        scheduler = self._engine.scheduler
        scheduler.check()
        if scheduler.held_blocks or scheduler.queue_size or scheduler.batch_size:
            raise AssertionError("a sequence is left")
        if self._engine.active or self._engine.requests:
            raise AssertionError("a request is left")
        ends = ("finished", "cancelled", "failed")
        accepted, *ended = (
            self._metrics.value(f"tgi_request_{each}") for each in ("accepted", *ends)
        )
        if accepted != sum(ended):
            raise AssertionError(f"{accepted} requests were accepted, and {ended} have ended")
        if self._studio is not None:
            self._studio.close()

    # --- the engine's link ---

    def send(self, command: Command) -> None:
        self._commands.append(encode_command(command))

    def send_frame(self, frame: bytes) -> None:
        raise AssertionError("the engine has no adapters of its own here")

    def flush(self) -> None:
        return None

    def replies(self) -> Iterator[Frame]:
        _, _, most = self._pace()
        for _ in range(min(most, len(self._shard.rings.up))):
            yield Frame(memoryview(self._shard.rings.up.popleft()))

    async def wait(self) -> None:
        """Let a turn pass: guests come and go, the shard works."""
        await trio.lowlevel.checkpoint()
        if self._studio is not None:
            await self._studio.turn()
        self._turns += 1
        self._clock.jump(TURN_S)
        if self._turns > MOST_TURNS:
            raise Stuck(f"no end in sight: {self.counters}")
        await self._meet()
        self._engine.scheduler.check()
        if self._turns in self._customs.crashes:
            raise _Lost
        steps, most, _ = self._pace()
        for _ in range(steps):
            for _ in range(min(most, len(self._commands))):
                self._shard.rings.down.append(self._commands.popleft())
            self._shard.turn()

    def _pace(self) -> tuple[int, int, int]:
        return self._customs.paces[self._turns % len(self._customs.paces)]

    def _time(self) -> int:
        self._steps += 1
        return self._customs.times[self._steps % len(self._customs.times)]

    async def _meet(self) -> None:
        self._see_off()
        for i, guest in enumerate(self._guests):
            if i not in self._answers and self._is_time(guest) and not self._is_closing():
                self._answers[i] = Answer()
                await self._let_in(i, guest)
        if len(self._answers) == len(self._guests) and self._is_empty():
            raise _Over
        if self._is_closing() and self._is_empty():
            if self._shelf is not None:  # before the engine knows that there is no shard any more
                self._shelf.collect(self._shard, self._engine.scheduler)
            raise _Empty

    def _see_off(self) -> None:
        """Forget those who are served, and have those leave who have had enough."""
        for i, stream in list(self._streams.items()):
            leaves, said = self._guests[i].leaves, len(self._answers[i].tokens)
            if stream.end in (StreamEnd.FINISHED, StreamEnd.FAILED):
                del self._streams[i]
            elif leaves is not None and said >= leaves:
                self._engine.leave(self._streams.pop(i))

    async def _let_in(self, i: int, guest: Guest) -> None:
        """Submit what a guest asks for, whose answer is there."""
        request = guest.request
        if guest.patience is not None:
            until = self._clock.current_time() + guest.patience * TURN_S
            request = replace(request, deadline=until)
        output = output_text(self._tokenizer, request)
        for token in request.emitted:
            output.push(token, math.nan)
        try:
            self._streams[i] = stream = self._engine.submit(request, output=output)
        except Overloaded as error:  # there is no time for it any more
            self._answers[i].failure = str(error)
            return
        self._ids.append(stream.id)
        if self._texts is not None:
            self._texts[stream.id] = self._foretold[i]
        stream.attach(self._answers[i].take)

    def _is_time(self, guest: Guest) -> bool:
        return self._is_empty() if guest.comes is None else guest.comes < self._turns

    def _is_closing(self) -> bool:
        """Return whether nobody is let in any more before the house is opened again."""
        return bool(self._restarts) and self._restarts[-1] < self._turns

    def _is_empty(self) -> bool:
        return not self._streams and not self._engine.scheduler.held_blocks

    def _limits(self) -> SchedulingLimits:
        """Return what the scheduler is told of a shard's memory."""
        memory, customs = self._shard.memory, self._customs
        return SchedulingLimits(
            blocks=min(customs.blocks, memory.blocks),
            block_size=memory.block_size,
            max_batch_size=customs.batch,
            max_batch_prefill_tokens=self.warmup["max_prefill_tokens"],
            max_batch_total_tokens=0,
            max_total_tokens=self.warmup["max_total_tokens"],
            waiting_served_ratio=0.3,
            max_waiting_tokens=5,
            max_queued_requests=256,
            max_queued_tokens=100_000,
            token_budget=customs.budget,
            reserve=customs.reserve,
            prefix_caching=customs.caching,
            state_slots=min(customs.slots, max(0, memory.state_slots - 1)),
            host_blocks=memory.host_blocks if customs.host else 0,
            host_slots=memory.host_slots if customs.host else 0,
            speculate=self._options.speculate or 0,
            ask_ahead=customs.ask_ahead,
            grant_ahead=customs.grant_ahead,
        )


@contextmanager
def _in_order() -> Iterator[None]:
    """Have tasks of trio's run in the same order each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        _run._r.seed(0)
        yield


def prompt(ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a prompt's ids as requests have them."""
    return np.array(ids, np.int32)
