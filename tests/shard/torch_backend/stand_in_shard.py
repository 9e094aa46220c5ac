"""A shard's whole loop over a stand-in device, in a thread, and a scripted router above it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tests.shard.loop.scripted_router import ScriptedRouter, channel
from tests.shard.torch_backend.models_support import BLOCK
from tests.shard.torch_backend.stand_in_support import BLOCKS, TakingTurns
from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.loop import worker
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.stand_in_device import StandInDevice
from tgi_trio.testing.stand_in_driver import Counts


class LeashedEnd(ShardEnd):
    """A shard's end, at most two steps ahead of what its router has read of them.

    However late the router's thread gets to run, sequences are where it has seen them, nearly.
    """

    router: ScriptedRouter | None = None  # None: nobody is waited for

    def beat(self, step: int, phase: int) -> None:
        super().beat(step, phase)
        while (router := self.router) is not None and step > _last_read(router) + 2:
            time.sleep(0.001)


def _last_read(router: ScriptedRouter) -> int:
    return router.reports[-1].step if router.reports else 0


class DeviceShard:
    """A shard in a thread: what its device was asked, and what it ended with."""

    def __init__(
        self,
        end: LeashedEnd,
        folder: Path,
        graphs: tuple[int, ...],
        incarnation: int,
        **settings: Any,
    ) -> None:
        self.device = StandInDevice()
        self.error: BaseException | None = None
        self._settings = ShardSettings(
            model_path=folder, dtype="float32", cpu_threads=1, **settings
        )
        self._graphs = graphs
        self._incarnation = incarnation
        self._end = end
        self.thread = threading.Thread(target=self._main, daemon=True)

    def wait(self) -> None:
        """Wait until its loop has ended, whose reports nobody reads any more."""
        self._end.router = None
        self.thread.join(120)
        assert not self.thread.is_alive()

    def _main(self) -> None:
        try:
            with self.device:
                options = ShardOptions(speculate=self._settings.speculate)
                worker.run(self._end, self._load, options, incarnation=self._incarnation)
        except BaseException as error:
            self.error = error

    def _load(self) -> Runner:
        return load_torch_runner(
            self._settings,
            read_config(self._settings.model_path),
            device="cuda:0",
            graph_sizes=self._graphs,
            grammars=TakingTurns(),
        )


@contextmanager
def device_shard(
    folder: Path, graphs: tuple[int, ...], *, incarnation: int = 1, **settings: Any
) -> Iterator[tuple[ScriptedRouter, DeviceShard]]:
    """Yield a warmed-up shard, whose device counts what serving asks of it alone."""
    with channel(incarnation=incarnation) as (endpoints, router):
        own = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
        end = cast(LeashedEnd, LeashedEnd.attach(own.text()))
        shard = DeviceShard(end, folder, graphs, incarnation, **settings)
        shard.thread.start()
        router.greet()
        with shard.device.idle():
            router.send(
                FrameKind.WARMUP,
                max_prefill_tokens=24,
                max_total_tokens=64,
                max_batch_size=4,
                max_batch_total_tokens=(BLOCKS - 1) * BLOCK,
                adapters_to_come=0,
                max_images=0,
                tower_bytes=0,
                blocks=0,
                state_slots=0,
            )
            assert router.receive().word("blocks") == BLOCKS
        router.end.release()
        shard.device.counts = Counts()
        end.router = router
        yield router, shard
        if shard.thread.is_alive():
            router.send(FrameKind.SHUTDOWN)
        shard.wait()
        end.close()
