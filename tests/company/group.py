"""Several ranks in one process: the shard's loop leads, and each follower's is in a thread.

Rings and collectives are those of processes. Ranks wait for each other in every step, so a company
still meets the same way each time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.shard.ranks.rank_processes import groups
from tgi_trio.ipc.channel import LeaderEnd, ShardEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.ranks import distributed, follower
from tgi_trio.shard.ranks.leader import Followers, GroupRunner
from tgi_trio.shard.ranks.pipeline import PipelineRunner
from tgi_trio.shard.runner import Runner

_PATIENCE_S = 20.0  # for a follower that is dismissed, or for a rank that ends in a step


@contextmanager
def impatient() -> Iterator[None]:
    """Have collectives of groups that are made in the block fail if another rank has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_TIMEOUT", timedelta(seconds=_PATIENCE_S))
        yield


class Group:
    """The ranks of a model, which one shard after the other leads."""

    def __init__(self, settings: ShardSettings) -> None:
        """Load the parts of all `settings.world_size` ranks."""
        self._size, self._stages = settings.world_size, settings.pipeline_stages

        def load(rank: int) -> Runner:
            return load_runner(replace(settings, rank=rank), ranks=members[rank])

        with (
            impatient(),
            groups(self._size, self._stages, kept=True) as (
                together,
                members,
            ),
        ):
            self._runners = together(load)

    @contextmanager
    def lead(self) -> Iterator[Runner]:
        """Yield the runner of a shard's loop; the others follow within the block."""
        with ExitStack() as stack:
            followers = Followers(
                [stack.enter_context(self._follow(rank)) for rank in range(1, self._size)]
            )
            followers.greet()
            stack.callback(followers.dismiss)
            leads = PipelineRunner if self._stages > 1 else GroupRunner
            yield leads(self._runners[0], followers)

    @contextmanager
    def _follow(self, rank: int) -> Iterator[LeaderEnd]:
        """Have a rank follow; yields rank 0's end to it. Raises AssertionError if it never ends."""
        with Endpoints.create(rank, 1, spin_us=0) as endpoints, ExitStack() as stack:
            ends = [
                replace(endpoints.spec, segment=os.dup(endpoints.spec.segment)).text()
                for _ in range(2)
            ]
            end = stack.enter_context(closing(ShardEnd.attach(ends[0])))
            thread = threading.Thread(
                target=follower.run,
                args=(end, lambda: self._runners[rank]),
                kwargs={"rank": rank, "world_size": self._size},
                daemon=True,
            )
            thread.start()
            yield stack.enter_context(closing(LeaderEnd.attach(ends[1])))
            thread.join(_PATIENCE_S)
            assert not thread.is_alive(), f"rank {rank} never ends"
