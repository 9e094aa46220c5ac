"""A shard's loop in no process of its own, between queues, which is left after each turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, cast

from tests.company.foretold import Foretelling
from tgi_trio.ipc.adapters import (
    AdapterOrder,
    AdapterReport,
    decode_adapter_reply,
    encode_adapter,
    encode_drop,
)
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import encode_filter
from tgi_trio.ipc.startup import ShardInfo, WarmupResult, decode_warmup_reply
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.contract import ShardSequence, StepPlan, StepResult
from tgi_trio.shard.loop.image_queue import ImageQueue
from tgi_trio.shard.loop.worker import Worker
from tgi_trio.shard.runner import Drafter, Pending, Runner

Lead = Callable[[], AbstractContextManager[Runner]]  # what has all ranks follow for a block

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


class _Turn(Exception):
    """A shard has done what it could in one turn of its loop."""


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
        """`texts`: what sequences will say, by id, for better drafts; None: no better ones.

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
        lead: Lead,
        options: ShardOptions,
        adapters: Sequence[AdapterOrder],
        nanoseconds: Callable[[], int],
        texts: Mapping[int, Sequence[int]] | None,
        failing: int,
        warmup: Mapping[str, int],
        *,
        images: Callable[[], ImageQueue] | None = None,
    ) -> None:
        """`lead`: entered until `end`; the rest as `House` and `Worker` have it."""
        self.rings = Rings()
        self._ranks = ExitStack()
        runner = self._ranks.enter_context(lead())
        own = cast("Runner", _Unhurried(runner, nanoseconds, texts, failing))
        queue = None if images is None else images()
        self.info: ShardInfo = runner.info
        self._worker = Worker(self.rings, own, options, successor=True, images=queue)
        for order in adapters:
            self.rings.down.append(encode_adapter(0, order))
        self.rings.down.append(encode(FrameKind.WARMUP, {"command": 0, **warmup}, {}))
        self.turn()
        *loaded, reply = (Frame(memoryview(each)) for each in self.rings.up)
        self.memory: WarmupResult = decode_warmup_reply(reply)
        self.reports: list[AdapterReport] = [decode_adapter_reply(each) for each in loaded]
        assert len(loaded) == len(adapters)
        self.rings.up.clear()

    def turn(self) -> None:
        """Let the loop read what there is, and run a step; adapters take a turn to be loaded."""
        futures.wait(self._worker._adapters._loading.values())
        self.rings.begin()
        try:
            self._worker.serve()
        except _Turn:
            return

    def end(self, sequences: Sequence[int]) -> None:
        """End it wherever it is; its runner, which the next one has, is to know nothing of it."""
        loader = self._worker._adapters
        self.rings.down.clear()
        self.rings.down.append(encode_filter(0, sequences))
        for number in (*loader._installed, *loader._loading):
            self.rings.down.append(encode_drop(0, number))
        self.rings.down.append(encode(FrameKind.SHUTDOWN, {"command": 0}, {}))
        with self._ranks:
            self._worker.serve()
