"""Requests, limits, and a scheduler driven together with its model shard."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from tests.router.scheduling.model_shard import EOS, ModelShard, next_token
from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.ipc.messages import Fault, SamplingParameters, StepReport
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.scheduling import (
    Command,
    Copy,
    Extend,
    Filter,
    Prefill,
    Progress,
    Scheduler,
    SchedulingLimits,
)

LIMITS = SchedulingLimits(
    blocks=65,
    block_size=4,
    max_batch_size=None,
    max_batch_prefill_tokens=64,
    max_batch_total_tokens=0,
    max_total_tokens=128,
    waiting_served_ratio=0.3,
    max_waiting_tokens=20,
    max_queued_requests=100,
    max_queued_tokens=10_000,
    token_budget=32,
    reserve=True,
    prefix_caching=False,
)


def limits(**changes: Any) -> SchedulingLimits:
    return replace(LIMITS, **changes)


def request(prompt: list[int] | int, max_new: int = 4, **changes: Any) -> Request:
    ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    sampling = changes.pop("sampling", SamplingParameters(ignore_eos=True))
    return Request(
        np.array(ids, dtype=np.int32), sampling, StoppingCriteria(max_new_tokens=max_new), **changes
    )


def expected(
    prompt: list[int] | int, max_new: int = 4, eos_every: int = 0, ignore_eos: bool = False
) -> list[int]:
    """Return what a greedy model generates."""
    ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    start = len(ids)
    while len(ids) < start + max_new:
        ids.append(next_token(ids, eos_every))
        if ids[-1] == EOS and not ignore_eos:
            break
    return ids[start:]


class AllPixels:
    """Has the pixels of every image."""

    def pin(self, image: PromptImage) -> ArenaPlace:
        return ArenaPlace(0, 64)

    def unpin(self, image: PromptImage) -> None:
        return None


class Pair:
    """A scheduler with its shard; `step` moves both, checking everything."""

    def __init__(self, limits: SchedulingLimits) -> None:
        self.scheduler = Scheduler(limits)
        self.scheduler.use_pixels(AllPixels())
        self.shard = ModelShard(
            limits.block_size,
            stateful=limits.state_slots > 0,
            places=(limits.host_blocks, limits.host_slots),
        )
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}

    def send(self) -> list[Any]:
        commands = self.scheduler.schedule(self.now)
        self.shard.apply(commands)
        self.scheduler.check()
        return commands

    def commit(self, report: StepReport) -> list[Progress]:
        self.now += 1.0
        progress = self.scheduler.commit(report, self.now)
        for part in progress:
            self.tokens.setdefault(part.sequence_id, []).extend(part.token_ids)
            if part.finish:
                self.finished[part.sequence_id] = part.finish
        self.scheduler.check()
        return progress

    def step(self) -> list[Progress]:
        self.send()
        return self.commit(self.shard.step())

    def run(self, most: int = 1000) -> None:
        while self.scheduler.queue_size or self.scheduler.held_blocks:
            self.step()
            most -= 1
            assert most, "no end in sight"


class BlockWatch:
    """Knows from the wire alone which blocks a step may still touch."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.filters: deque[tuple[int, list[int]]] = deque()

    def sent(self, command: Command) -> None:
        """Fail when a block is granted anew while some sequence may still use it."""
        match command:
            case Prefill(rows=rows):
                for row in rows:
                    assert row.cached_length % self.block_size == 0
                    held = row.states.held_length if row.states else 0
                    at = max(row.cached_length, held) // self.block_size
                    self._granted(row.sequence, list(row.block_ids[at:]))
                    self.tables[row.sequence] = list(row.block_ids)
            case Copy(transfers=transfers):
                self._granted(0, [each.item for each in transfers if each.back and not each.states])
            case Extend(rows=extends):
                for extend in extends:
                    self._granted(extend.sequence, list(extend.block_ids))
                    self.tables[extend.sequence] += extend.block_ids
            case Filter(number=number, sequences=sequences):
                self.filters.append((number, sequences))

    def _granted(self, sequence: int, blocks: list[int]) -> None:
        for other, table in self.tables.items():
            shared = set(table) & set(blocks)
            assert not shared, f"{sequence} is granted {shared}, which {other} may still write"

    def received(self, report: StepReport) -> None:
        """Take note of what has left the shard."""
        self.applied(report.acknowledged)
        for sequence, finish in zip(report.sequence, report.finish, strict=True):
            if finish:
                self.tables.pop(sequence, None)

    def applied(self, number: int) -> None:
        while self.filters and self.filters[0][0] <= number:
            for sequence in self.filters.popleft()[1]:
                self.tables.pop(sequence, None)


class World:
    """Router and shard with rings between them in which frames may lie for a while."""

    def __init__(self, limits: SchedulingLimits, eos_every: int = 0) -> None:
        self.limits = limits
        self.eos_every = eos_every
        self.scheduler = Scheduler(limits)
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self.open: set[int] = set()  # clients still listening
        self.number = 0
        self._boot()

    def _boot(self) -> None:
        limits = self.limits
        self.shard = ModelShard(
            *(limits.block_size, self.eos_every, limits.speculate),
            stateful=limits.state_slots > 0,
            places=(limits.host_blocks, limits.host_slots),
        )
        self.watch = BlockWatch(self.limits.block_size)
        self.down: deque[Command] = deque()
        self.up: deque[StepReport | tuple[list[Fault], int]] = deque()

    def submit(self, request: Request) -> int:
        """Add a request; raises Overloaded."""
        self.number += 1
        self.scheduler.add(self.number, request, self.now)
        self.requests[self.number] = request
        self.tokens[self.number] = []
        self.prompt_logprobs[self.number] = []
        self.open.add(self.number)
        return self.number

    def abort(self, sequence: int) -> None:
        assert self.scheduler.abort(sequence, self.now) == (sequence in self.open)
        self.open.discard(sequence)

    def finish(self, sequence: int) -> None:
        self.scheduler.finish(sequence, self.now)
        self.open.discard(sequence)

    def expire(self, most: int | None = None) -> None:
        for sequence in self.scheduler.expire(self.now, most):
            assert sequence in self.open
            self.open.remove(sequence)

    def send(self) -> None:
        """Let the router put its commands into the ring."""
        for command in self.scheduler.schedule(self.now):
            self.watch.sent(command)
            self.down.append(command)

    def apply(self, most: int) -> None:
        """Let the shard take up to `most` commands out of the ring."""
        for _ in range(min(most, len(self.down))):
            self.shard.apply([self.down.popleft()])

    def step(self) -> None:
        """Let the shard run a step."""
        self.up.append(self.shard.step())

    def fail(self, sequence: int) -> None:
        """Let a sequence fail alone, if the shard holds it."""
        if self.shard.rows.pop(sequence, None) is not None:
            self.up.append(([Fault(sequence, "bad luck")], self.shard.applied))

    def receive(self, most: int) -> None:
        """Let the router take up to `most` frames out of the reply ring."""
        for _ in range(min(most, len(self.up))):
            self.now += 1.0
            frame = self.up.popleft()
            if isinstance(frame, StepReport):
                self.watch.received(frame)
                for part in self.scheduler.commit(frame, self.now):
                    self._deliver(part)
            else:
                faults, number = frame
                self.watch.applied(number)
                for fault in faults:
                    self.watch.tables.pop(fault.sequence, None)
                for sequence in self.scheduler.fault(faults, number, self.now):
                    self.open.remove(sequence)

    def _deliver(self, part: Progress) -> None:
        sequence = part.sequence_id
        assert sequence in self.open, "progress for someone who has left"
        assert len(part.token_ids) == len(part.logprobs)
        tokens = self.tokens[sequence]
        assert part.first == (not tokens and bool(part.token_ids))
        tokens += part.token_ids
        self.prompt_logprobs[sequence] += part.prompt_logprobs
        assert self.scheduler.emitted(sequence) == tokens
        if part.finish:
            self.open.remove(sequence)
            request = self.requests[sequence]
            max_new, ignore_eos = request.stopping.max_new_tokens, request.sampling.ignore_eos
            prompt = request.prompt_ids.tolist()
            assert tokens == expected(prompt, max_new, self.eos_every, ignore_eos)
            assert (part.finish is Finish.EOS) == (tokens[-1] == EOS and not ignore_eos)
            if request.sampling.prompt_logprobs:
                count = len(request.prompt_ids)
                assert self.prompt_logprobs[sequence] == [-float(p) for p in range(count)]

    def crash(self) -> None:
        """Lose the shard and everything in its rings."""
        for sequence in self.scheduler.shard_lost(self.now):
            self.open.remove(sequence)
        self._boot()

    def turn(self) -> None:
        """One round without any delay."""
        self.send()
        self.apply(len(self.down))
        self.step()
        self.receive(len(self.up))

    def run(self, most: int = 20_000) -> None:
        """Go on until everybody has been served and every block is back."""
        while self.open or self.scheduler.held_blocks:
            self.turn()
            most -= 1
            assert most, f"no end in sight for {sorted(self.open)[:9]}"
        self.scheduler.check()
        assert self.scheduler.queue_size == self.scheduler.batch_size == 0
        assert self.scheduler.free_blocks + self.scheduler.cached_blocks == (
            self.scheduler.total_blocks
        )
        total, free, snapshots = self.scheduler.state_slots
        assert free + snapshots == total
