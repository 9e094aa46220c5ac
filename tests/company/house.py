"""A whole server but for HTTP in one thread: an engine, and a shard's loop that it drives.

Nothing waits and nothing is measured, so a company meets the same way each time: requests come,
leave and are lost with their shard at given turns, frames lie in the rings as long as is said.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import trio

from tests.company.foretold import Foretelling
from tgi_trio.ipc.adapters import AdapterOrder, encode_adapter, encode_drop
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import Kind
from tgi_trio.ipc.messages import encode_filter
from tgi_trio.ipc.startup import WarmupResult, decode_warmup_reply
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink, encode_command
from tgi_trio.router.engine.stream import StreamEnd, TokenStream
from tgi_trio.router.request import Outcome, Request, Token
from tgi_trio.router.scheduling import SchedulingLimits
from tgi_trio.router.scheduling.shard_commands import Command
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.contract import ShardSequence, StepPlan, StepResult
from tgi_trio.shard.loop.worker import Worker
from tgi_trio.shard.runner import Drafter, Pending, Runner

Context = Callable[[], AbstractContextManager[object]]

TURN_S = 0.01  # of the engine's clock
MOST_TURNS = 5_000  # of a company: more of them, and somebody is never served
_PATIENCE_S = 60.0  # for a grammar to be compiled
_FRAME = 2048  # bytes of the largest reply: long ones come in parts

WARMUP = {
    "max_prefill_tokens": 64,
    "max_total_tokens": 128,
    "max_batch_size": 16,
    "max_batch_total_tokens": 95 * 16,
    "adapters_to_come": 0,
    "max_images": 0,
    "tower_bytes": 0,
    "blocks": 0,
    "state_slots": 0,
}


class Stuck(AssertionError):
    """Somebody is never served."""


class _Turn(Exception):
    """A shard has done what it could in one turn of its loop."""


class _Lost(Exception):
    """The shard has died."""


class _Over(Exception):
    """Everybody has been served."""


class Rings:
    """Both rings of a shard, whose loop is left at the end of each turn."""

    def __init__(self) -> None:
        self.down: deque[bytes] = deque()
        self.up: deque[bytes] = deque()
        self._drained = False

    @property
    def writer(self) -> Rings:
        return self

    @property
    def max_payload(self) -> int:
        return _FRAME

    def begin(self) -> None:
        """Let the loop read commands once."""
        self._drained = False

    def try_receive(self) -> memoryview | None:
        if self.down:
            return memoryview(self.down[0])
        if self._drained:
            raise _Turn
        self._drained = True
        return None

    def release(self) -> None:
        self.down.popleft()

    def wait(self, timeout: float | None) -> bool:
        raise _Turn

    def send(self, payload: bytes | memoryview) -> None:
        self.up.append(bytes(payload))

    def beat(self, step: int, phase: int) -> None:
        return None


class _Retold:
    """A step whose times are what is said, and which may fail after all."""

    def __init__(self, pending: Pending, nanoseconds: Callable[[], int], fails: bool) -> None:
        self._pending, self._nanoseconds, self._fails = pending, nanoseconds, fails

    def proceed(self) -> None:
        self._pending.proceed()

    def result(self) -> StepResult:
        result = self._pending.result()
        if self._fails:
            raise RuntimeError("this step was to fail")
        return replace(result, forward_ns=self._nanoseconds(), sample_ns=0, processor_ns=0)


class _Unhurried:
    """A runner whose steps take the time that is said, and which waits for grammars.

    Some steps of several rows fail when they are computed first.
    """

    def __init__(
        self,
        runner: Runner,
        nanoseconds: Callable[[], int],
        texts: Mapping[int, Sequence[int]] | None,
        failing: int,
    ) -> None:
        """`texts`: what sequences will say, by id, for better guesses; None: no better ones.

        `failing`: every so many launches fail; 0: none.
        """
        self._runner, self._nanoseconds, self._texts = runner, nanoseconds, texts
        self._failing, self._launches = failing, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def drafter(self, most: int) -> Drafter | None:
        own = self._runner.drafter(most)
        if own is None or self._texts is None:
            return own
        return Foretelling(own, self._texts, self._runner.info.vocab_size)

    def launch(self, plan: StepPlan) -> Pending:
        self._launches += 1
        fails = bool(self._failing) and self._launches % self._failing == 0 and len(plan.rows) > 1
        return _Retold(self._runner.launch(plan), self._nanoseconds, fails)

    def prepare(self, sequence: ShardSequence | None) -> bool:
        deadline = time.monotonic() + _PATIENCE_S
        while not (ready := self._runner.prepare(sequence)) and sequence is not None:
            if time.monotonic() > deadline:
                raise TimeoutError("a grammar is never compiled")
            time.sleep(0.0002)
        return ready


class Shard:
    """A worker with its rings, warmed up and with its adapters."""

    def __init__(
        self,
        runner: Runner,
        speculate: int,
        adapters: Sequence[Path],
        nanoseconds: Callable[[], int],
        texts: Mapping[int, Sequence[int]] | None,
        failing: int,
    ) -> None:
        self.rings = Rings()
        self._adapters = len(adapters)
        options = ShardOptions(speculate=speculate)
        own = cast("Runner", _Unhurried(runner, nanoseconds, texts, failing))
        self._worker = Worker(self.rings, own, options, successor=True)
        for number, folder in enumerate(adapters, start=1):
            self.rings.down.append(encode_adapter(0, AdapterOrder(number, folder)))
        self.rings.down.append(encode(Kind.WARMUP, {"command": 0, **WARMUP}, {}))
        self.turn()
        *loaded, reply = self.rings.up
        self.memory: WarmupResult = decode_warmup_reply(Frame(memoryview(reply)))
        assert len(loaded) == self._adapters
        self.rings.up.clear()

    def turn(self) -> None:
        """Let the loop read what there is, and run a step."""
        self.rings.begin()
        try:
            self._worker.serve()
        except _Turn:
            return

    def end(self, sequences: Sequence[int]) -> None:
        """End it wherever it is; its runner, which the next one has, is to know nothing of it."""
        self.rings.down.clear()
        self.rings.down.append(encode_filter(0, sequences))
        for number in range(1, self._adapters + 1):
            self.rings.down.append(encode_drop(0, number))
        self.rings.down.append(encode(Kind.SHUTDOWN, {"command": 0}, {}))
        self._worker.serve()


@dataclass
class Answer:
    """What a client has got of one request."""

    tokens: list[Token] = field(default_factory=list)
    outcome: Outcome | None = None  # None: it left before the end
    failure: str = ""

    def take(self, tokens: list[Token], end: Outcome | BaseException | None) -> None:
        """Take in what the engine delivers."""
        self.tokens += tokens
        if isinstance(end, BaseException):
            self.failure = str(end)
        elif end is not None:
            self.outcome = end


@dataclass(frozen=True)
class Guest:
    """A request, and when it comes and goes."""

    request: Request
    comes: int | None = 0  # turn; None: when nobody else is there any more
    leaves: int | None = None  # after how many tokens its client has had enough; None: never


@dataclass(frozen=True)
class Customs:
    """How a house is run: memory, and what router, shard and rings make of their time."""

    blocks: int = 96  # block 0 included
    slots: int = 64
    host: bool = False
    caching: bool = False
    reserve: bool = False
    budget: int = 64
    batch: int = 16
    ask_ahead: int = 16
    grant_ahead: int = 64
    # By turn, again and again: steps of the shard, commands it may read, replies the router reads.
    paces: tuple[tuple[int, int, int], ...] = ((1, 99, 99),)
    crashes: tuple[int, ...] = ()  # turns
    failing: int = 0  # every so many steps fail when they are computed first; 0: none
    foretold: bool = False  # whether guesses are mostly right
    times: tuple[int, ...] = (0,)  # nanoseconds of steps, again and again


class House:
    """Serves one company, of whom everybody is answered."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        customs: Customs,
        guests: Sequence[Guest],
        *,
        speculate: int = 0,
        adapters: Sequence[Path] = (),
        foretold: Sequence[Sequence[int]] = (),
        around: Context = nullcontext,
        warming: Context = nullcontext,
    ) -> None:
        """`foretold`: what each guest will be told, if guesses are to be mostly right.

        `around`: entered while anything is computed; `warming`: while a shard starts.
        """
        self._customs, self._guests = customs, list(guests)
        self._steps = 0
        self._foretold = foretold
        self._texts: dict[int, Sequence[int]] | None = {} if foretold else None  # by sequence
        self._around, self._warming = around, warming
        self._open = partial(
            Shard, runner, speculate, adapters, self._time, self._texts, customs.failing
        )
        with around():
            self._shard = self._start()
        self._now, self._turns = 0.0, 0
        self._commands: deque[bytes] = deque()  # on their way
        limits = _limits(self._shard.memory, customs, speculate)
        self._engine = Engine(
            AdmissionLimits(256), limits, tokenizer, Metrics(), clock=lambda: self._now
        )
        self._streams: dict[int, TokenStream] = {}
        self._answers: dict[int, Answer] = {}
        self._ids: list[int] = []

    @property
    def counters(self) -> dict[str, int]:
        """What the scheduler has counted."""
        return dict(self._engine.scheduler.counters)

    def serve(self) -> list[Answer]:
        """Return everybody's answer. Raises Stuck when there is no end in sight."""
        with self._around():
            try:
                trio.run(self._serve)
            finally:
                self._shard.end(self._ids)
        scheduler = self._engine.scheduler
        scheduler.check()
        if scheduler.held_blocks or scheduler.queue_size or self._engine.active:
            raise AssertionError("something is left")
        return [self._answers[i] for i in range(len(self._guests))]

    async def _serve(self) -> None:
        while True:
            try:
                await self._engine.serve(cast("ShardLink", self))
            except _Over:
                return
            except _Lost:
                self._shard.end(self._ids)
                self._commands.clear()
                self._shard = self._start()

    def _start(self) -> Shard:
        with self._warming():
            return self._open()

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
        self._turns += 1
        self._now += TURN_S
        if self._turns > MOST_TURNS:
            raise Stuck(f"no end in sight: {self.counters}")
        self._meet()
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

    def _meet(self) -> None:
        for i, stream in list(self._streams.items()):
            leaves, said = self._guests[i].leaves, len(self._answers[i].tokens)
            if stream.end in (StreamEnd.FINISHED, StreamEnd.FAILED):
                del self._streams[i]
            elif leaves is not None and said >= leaves:
                self._engine.leave(self._streams.pop(i))
        for i, guest in enumerate(self._guests):
            if i not in self._answers and self._is_time(guest):
                self._streams[i] = stream = self._engine.submit(guest.request)
                self._answers[i] = answer = Answer()
                self._ids.append(stream.id)
                if self._texts is not None:
                    self._texts[stream.id] = self._foretold[i]
                stream.attach(answer.take)
        if len(self._answers) == len(self._guests) and self._is_empty():
            raise _Over

    def _is_time(self, guest: Guest) -> bool:
        return self._is_empty() if guest.comes is None else guest.comes < self._turns

    def _is_empty(self) -> bool:
        return not self._streams and not self._engine.scheduler.held_blocks


def _limits(memory: WarmupResult, customs: Customs, speculate: int) -> SchedulingLimits:
    """Return what the scheduler is told of a shard's memory."""
    return SchedulingLimits(
        blocks=min(customs.blocks, memory.blocks),
        block_size=memory.block_size,
        max_batch_size=customs.batch,
        max_batch_prefill_tokens=WARMUP["max_prefill_tokens"],
        max_batch_total_tokens=0,
        max_total_tokens=WARMUP["max_total_tokens"],
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
        speculate=speculate,
        ask_ahead=customs.ask_ahead,
        grant_ahead=customs.grant_ahead,
    )


def prompt(ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a prompt's ids as requests have them."""
    return np.array(ids, np.int32)
