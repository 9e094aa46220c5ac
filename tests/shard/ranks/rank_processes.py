"""Several ranks in one process: a thread each, over gloo and a store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.model.config import read_config
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.cpu_backend.cpu_runner import CpuRunner
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes, PrefixParts, RankPrefixes
from tgi_trio.shard.ranks.distributed import ProcessGroup, gloo_group
from tgi_trio.shard.ranks.follower import NoSampler
from tgi_trio.shard.ranks.neighbours import Neighbours
from tgi_trio.shard.ranks.plan_frames import decode_plan, encode_plan
from tgi_trio.shard.ranks.portions import Portions
from tgi_trio.shard.runner import (
    Computed,
    Drafter,
    Pending,
    Runner,
)
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

T = TypeVar("T")


class Together:
    """Calls the same on every rank at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)

    def __call__(self, call: Callable[[int], T]) -> list[T]:
        """Return `call(rank)` of every rank."""
        return list(self._pool.map(call, range(self.size)))

    def close(self) -> None:
        self._pool.shutdown()


class Ranks:
    """A runner of several ranks: rank 0 computes plans, the others what is sent of them."""

    def __init__(self, together: Together, runners: list[Runner]) -> None:
        self.runners = runners
        self.kv_beside = 0  # nobody sizes memory by it here
        self._together = together

    @property
    def info(self) -> ShardInfo:
        return self.runners[0].info

    @property
    def adapters(self) -> AdapterHost | None:
        return None

    @property
    def prefixes(self) -> Prefixes:
        return RankPrefixes(PrefixParts)  # nothing keeps any here

    @property
    def host_copies(self) -> HostCopies | None:
        return None

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        return self._together(lambda rank: self.runners[rank].warm_up(request))[0]

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False

    def step(self, plan: StepPlan) -> StepResult:
        frame = encode_plan(plan)

        def part(rank: int) -> StepResult:
            read = decode_plan(Frame(memoryview(frame))) if rank else plan
            return self.runners[rank].step(read)

        return self._together(part)[0]

    def launch(self, plan: StepPlan) -> Pending:
        return Computed(self.step(plan))

    def drafter(self, most: int) -> Drafter | None:
        return self.runners[0].drafter(most)

    def prove_sound(self) -> None:
        self._together(lambda rank: self.runners[rank].prove_sound())

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self.runners[0].prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self.runners[0].drop(sequence)


class ClosedAtEnd:
    """One of gloo's groups, whose connections close when nothing refers to it any more.

    Runners and recordings that do so may be left for the garbage collector.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def close(self) -> None:
        """Close the connections. No rank may be waiting for another one."""
        self._group = None


@contextmanager
def groups(
    size: int, stages: int = 1, *, in_order: bool = False, kept: bool = False
) -> Iterator[tuple[Together, list[ProcessGroup]]]:
    """The process groups of `size` ranks, and how to call something on all of them.

    `kept`: the groups outlive the block, until nothing refers to them.
    """
    store, together = HashStore(), Together(size)
    made: list[ClosedAtEnd] = []

    def make(store: Any, rank: int, size: int) -> ClosedAtEnd:
        made.append(ClosedAtEnd(gloo_group(store, rank, size)))
        return made[-1]

    try:
        yield (
            together,
            together(lambda r: ProcessGroup.form(make, store, r, size, stages, in_order=in_order)),
        )
    finally:
        together.close()
        for each in [] if kept else made:
            each.close()


@contextmanager
def ranks_of(folder: Path, size: int, sampler: RowSampler, **options: Any) -> Iterator[Ranks]:
    """A checkpoint over `size` ranks; rank 0 chooses with `sampler`."""
    settings = ShardSettings(model_path=folder, cpu_threads=1, **options)
    with groups(size, settings.pipeline_stages) as (together, members):

        def load(rank: int) -> Runner:
            chooses = NoSampler() if rank else sampler
            return load_torch_runner(
                settings, read_config(settings.model_path), ranks=members[rank], sampler=chooses
            )

        yield Ranks(together, together(load))


@contextmanager
def kernel_ranks_of(
    folder: Path, size: int, sampler: RowSampler, *, stages: int = 1, **options: Any
) -> Iterator[tuple[Ranks, list[CpuRunner]]]:
    """The same in the CPU kernels, and each rank's own; `stages`: of a pipeline."""
    settings = ShardSettings(model_path=folder, cpu_threads=1, world_size=size, **options)
    config = read_config(folder)
    with groups(size, stages) as (together, members), ExitStack() as at_end:

        def load_stage(rank: int) -> CpuRunner:
            parts = members[rank].parts
            return load_cpu_runner(
                replace(settings, rank=rank),
                config,
                sampler=NoSampler() if rank else sampler,
                neighbours=Neighbours(members[rank], stages) if stages > 1 else None,
                portions=None if parts is None else Portions(parts),
            )

        runners = together(load_stage)
        for runner in runners:
            at_end.callback(runner.close)
        yield Ranks(together, list(runners)), runners
