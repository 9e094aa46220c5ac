"""Two ranks over stand-in devices: rank 0 in this thread, a follower's whole loop in another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from tests.shard.torch_backend.stand_in_support import REQUEST
from tgi_trio.ipc.channel import LeaderEnd, ShardEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.ranks import follower
from tgi_trio.shard.ranks.distributed import ProcessGroup, gloo_group
from tgi_trio.shard.ranks.leader import Followers, GroupRunner
from tgi_trio.shard.runner import Pending, Runner
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.logits_processors import GrammarMasks
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.stand_in_device import StandInDevice
from tgi_trio.testing.stand_in_driver import Counts
from tgi_trio.testing.stand_in_group import StandInGroup


class Turns:
    """Of two ranks that are threads one computes at a time, until it waits for the other.

    torch's dispatch to Python has ended the process with a segmentation fault where both were in
    it, one time in hundreds; ranks that are processes never are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> threading.Lock:
        return self._lock

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the other one compute."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class InTurn:
    """A runner that computes when it is its rank's turn."""

    def __init__(self, runner: Runner, turns: Turns) -> None:
        self._runner = runner
        self._turns = turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        with self._turns.take():
            return self._runner.warm_up(request)

    def launch(self, plan: StepPlan) -> Pending:
        with self._turns.take():
            return PendingInTurn(self._runner.launch(plan), self._turns)


class PendingInTurn:
    """What such a runner has launched."""

    def __init__(self, pending: Pending, turns: Turns) -> None:
        self._pending = pending
        self._turns = turns

    def proceed(self) -> None:
        with self._turns.take():
            self._pending.proceed()

    def result(self) -> StepResult:
        with self._turns.take():
            return self._pending.result()


class Counting(InTurn):
    """One whose every step is counted by its device, apart from the others."""

    def __init__(
        self, runner: Runner, turns: Turns, device: StandInDevice, steps: list[Counts]
    ) -> None:
        super().__init__(runner, turns)
        self._device = device
        self._steps = steps

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        with self._device.idle():
            return super().warm_up(request)

    def launch(self, plan: StepPlan) -> Pending:
        self._device.counts = Counts()
        self._steps.append(self._device.counts)
        return super().launch(plan)


def meet(
    rank: int,
    own: StandInDevice,
    told: ShardSettings,
    store: HashStore,
    turns: Turns,
    groups: list[StandInGroup],
) -> ProcessGroup:
    """Return the group of two ranks, once the other one has come; `groups`: gets what is open."""

    def make(store: Any, rank: int, size: int) -> StandInGroup:
        groups.append(StandInGroup(gloo_group(store, rank, size), own, turns.waiting))
        return groups[-1]

    stages, in_order = told.pipeline_stages, told.batch_invariant
    return ProcessGroup.form(make, store, rank, 2, stages, in_order=in_order)


def attach_both(endpoints: Endpoints) -> tuple[ShardEnd, LeaderEnd]:
    """Return the ends of the other rank and of its leader, each with descriptors of its own."""
    spec = endpoints.spec
    other, leader = (replace(spec, segment=os.dup(spec.segment)).text() for _ in range(2))
    return ShardEnd.attach(other), LeaderEnd.attach(leader)


@contextmanager
def two_ranks(
    folder: Path,
    device: StandInDevice,
    graphs: tuple[int, ...] = (),
    grammars: GrammarMasks | None = None,
    request: WarmupRequest = REQUEST,
    sampler: RowSampler | None = None,
    **settings: Any,
) -> Iterator[tuple[GroupRunner, list[Counts]]]:
    """Yield a checkpoint over two ranks, warmed up, and what the other one's device is asked.

    `device`: rank 0's, which this thread has entered.
    """
    told = ShardSettings(model_path=folder, dtype="float32", cpu_threads=1, **settings)
    store, steps, turns = HashStore(), list[Counts](), Turns()
    groups: list[StandInGroup] = []
    load_rank = partial(load_torch_runner, told, read_config(folder), graph_sizes=graphs)

    def load(own: StandInDevice) -> Runner:
        ranks = meet(1, own, told, store, turns, groups)
        with turns.take():  # stages tell one another what they keep
            runner: Any = load_rank(device="cuda:1", ranks=ranks, sampler=follower.NoSampler())
        return Counting(runner, turns, own, steps)

    def follow(end: ShardEnd) -> None:
        with StandInDevice("cuda:1", beside=device) as own:
            follower.run(end, partial(load, own), rank=1, world_size=2)

    with Endpoints.create(1, 1, spin_us=0) as endpoints:
        end, leader = attach_both(endpoints)
        thread = threading.Thread(target=follow, args=(end,), daemon=True)
        thread.start()
        followers = Followers([leader])
        followers.greet()
        ranks = meet(0, device, told, store, turns, groups)
        with turns.take():
            own: Any = load_rank(device="cuda:0", ranks=ranks, sampler=sampler, grammars=grammars)
        runner = GroupRunner(InTurn(own, turns), followers)
        with device.idle():
            runner.warm_up(request)
        yield runner, steps
        followers.dismiss()
        thread.join(60)
        assert not thread.is_alive()
        leader.close()
        end.close()
        for group in groups:
            group.close()
