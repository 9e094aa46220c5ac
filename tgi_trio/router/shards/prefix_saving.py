"""Keeps computed prefixes now and then while a server is idle, for the case that it is killed.

They are listed piece by piece and written part by part, each in some milliseconds, and no further
part is ordered once a request has come: so a request waits for one part at most. What was kept
before stays until everything is on the disk.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from tgi_trio.ipc.prefixes import KeepOrder, explain_failure
from tgi_trio.ipc.startup import ShardInfo, WarmupResult
from tgi_trio.process.thread_limit import describe_failure
from tgi_trio.router.shards.prefix_store import PrefixStore

if TYPE_CHECKING:  # they come in while the first shards load
    from tgi_trio.router.engine.shard_link import ShardLink
    from tgi_trio.router.scheduling import Scheduler
    from tgi_trio.router.scheduling.kept_prefixes import Collected

log = logging.getLogger(__name__)

_LOOK_AGAIN: Final = 1.0  # seconds, in which nobody has come before anything is written
_PART: Final = 8 << 20  # bytes of a rank that are written at a time, at least one block or slot
_MOST: Final = 4096  # blocks or slots that an order names: 100,000 take 10 ms to write down
_MEGABYTE: Final = 1e6


class PrefixSaver:
    """Keeps the prefixes of one incarnation of a shard group."""

    def __init__(self, store: PrefixStore, info: ShardInfo, memory: WarmupResult) -> None:
        self._store = store
        self._info = info
        self._memory = memory
        self._writing = trio.Lock()
        self._stopped = False
        self._saved = 0  # requests that had been added when prefixes were kept last

    async def run(self, scheduler: Scheduler, link: ShardLink) -> None:
        """Keep prefixes every so many seconds, unless nothing was added; until cancelled."""
        while (seconds := self._store.seconds) and not self._stopped:
            await trio.sleep(seconds)
            await self._until_idle(scheduler)
            async with self._writing:
                if not self._stopped:
                    await self._save(scheduler, link)

    async def stop(self) -> None:
        """Write no further part; returns once the one that is being written is answered."""
        self._stopped = True
        async with self._writing:
            pass

    async def _until_idle(self, scheduler: Scheduler) -> None:
        seen = -1
        while True:
            added = scheduler.counters["added"]
            idle = not scheduler.held_blocks and not scheduler.queue_size
            if idle and added == seen and added != self._saved:
                return
            seen = added
            await trio.sleep(_LOOK_AGAIN)

    async def _save(self, scheduler: Scheduler, link: ShardLink) -> None:
        """Keep what there is, unless somebody comes meanwhile."""
        store, began = self._store, trio.current_time()
        added = scheduler.counters["added"]
        found = await self._collect(scheduler)
        if found is None:  # of what was seen some may be gone: another time
            return
        if not found.blocks:
            self._saved = added
            return
        order, nbytes, failure = store.order(found), 0, ""
        block = self._info.kv_bytes_per_token * self._info.block_size
        sizes = (block, self._info.state_bytes)
        at_once = (min(_MOST, max(1, _PART // max(1, each))) for each in sizes)
        try:
            for part in order.cut(*at_once):
                if self._stopped or scheduler.counters["added"] != added:
                    store.sweep()
                    return
                report = await link.keep_prefixes(part)
                nbytes += report.nbytes
                if failure := report.error:
                    store.sweep()
                    break
            else:
                await trio.to_thread.run_sync(self._finish, order, found)
        except OSError as error:
            failure = explain_failure(error)
        except RuntimeError as error:
            if (problem := describe_failure(error)) is None:
                raise
            failure = problem
        self._saved = added
        if failure:
            log.warning("prefixes are not kept in %s: %s", store.folder, failure)
            return
        log.info(
            "prefixes: %d tokens are kept in %s while nobody is served (%.0f MB in %.1f s)",
            len(found.blocks) * found.prefixes.block_size,
            *(store.folder, nbytes / _MEGABYTE, trio.current_time() - began),
        )

    async def _collect(self, scheduler: Scheduler) -> Collected | None:
        """Return what there is, with others running meanwhile; None if that has changed it."""
        for found in scheduler.collect_prefixes(self._store.budget(self._info, self._memory)):
            if found is not None:
                return found
            await trio.lowlevel.checkpoint()
        return None

    def _finish(self, order: KeepOrder, found: Collected) -> None:
        self._store.sync(order)
        self._store.save(self._info, order, found.prefixes)
