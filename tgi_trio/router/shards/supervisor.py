"""The supervisor: starts the shard group, watches it, and restarts it after a crash.

Clients see a crash as a pause: the engine queues every unfinished sequence again and replays it
into the next incarnation, and streams go on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from tgi_trio.errors import (
    CorruptFrame,
    PeerError,
    PeerStalled,
    SegmentError,
    ShardCannotStart,
    find_first_leaf,
)
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.frame_codec import encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.ipc.watch import StallDetector
from tgi_trio.process.shortages import tell_shortage
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.shards import handshake
from tgi_trio.router.shards.group import Group, StartGroup
from tgi_trio.router.shards.group_states import ShardEvent, ShardState, next_state
from tgi_trio.router.shards.prefix_keeping import (
    collect_prefixes,
    keep_prefixes,
    restore_prefixes,
    tell_copies,
)
from tgi_trio.router.shards.prefix_saving import PrefixSaver
from tgi_trio.router.shards.prefix_store import PrefixStore, Restoring
from tgi_trio.router.telemetry.metrics import Metrics

if TYPE_CHECKING:  # the engine comes in while the first shards load
    from tgi_trio.router.engine.engine import Engine
    from tgi_trio.router.engine.shard_link import ShardLink
    from tgi_trio.router.scheduling.kept_prefixes import Collected

log = logging.getLogger(__name__)

STOP_TIMEOUT: Final = 5.0  # seconds a shard gets to finish its step and exit when told to
STABLE_AFTER = 60.0  # seconds of life after which earlier crashes are forgotten
BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before the n-th restart in a row
SHORTAGE: Final = 10  # times as long where no process was to be had: others have to end first


@dataclass(frozen=True, slots=True)
class Watch:
    """The supervisor's limits."""

    stall_timeout: float = 60.0  # seconds without heartbeat, or without a step while it has work
    restart_limit: int = 5  # consecutive crashes after which it gives up
    stop_timeout: float = STOP_TIMEOUT


@dataclass(slots=True)
class CrashCount:
    """Counts consecutive crashes, for the back-off before the next start."""

    in_a_row: int = 0

    def note(self, lived: float, explained: bool, *, refused: bool = False) -> float:
        """Count a crash after `lived` seconds of being ready; returns the seconds to wait.

        A shard that has lived longer than the back-off is restarted at once. `explained`: the crash
        is blamed on a request, which will be found, so it does not count as one in a row.
        `refused`: it is none, as the machine had no process, descriptors or memory for a shard.
        """
        self.in_a_row = 1 if explained or lived > STABLE_AFTER else self.in_a_row + 1
        pause = BACK_OFF[min(self.in_a_row, len(BACK_OFF)) - 1]
        return pause * SHORTAGE if refused else max(0.0, pause - lived)


@dataclass(frozen=True, slots=True)
class Started:
    """The first incarnation's reports."""

    info: ShardInfo
    memory: WarmupResult


class Supervisor:
    """Runs incarnations of the shard group one after the other until told to stop."""

    def __init__(
        self,
        metrics: Metrics,
        start: StartGroup,
        warmup: WarmupRequest,
        *,
        watch: Watch,
        on_move: Callable[[ShardState], None] | None = None,
        adapters: AdapterRegistry | None = None,
        gather: Callable[[], Awaitable[None]] | None = None,
        prefixes: PrefixStore | None = None,
    ) -> None:
        """`on_move` is called with every new state of the group.

        `gather` returns once ranks of other machines have connected; None: there are none.
        `prefixes`: where computed prefixes are kept from one start to the next, if anywhere.
        """
        self.state = ShardState.GONE
        self.why = "no shard has been started yet"  # shown to clients: no paths, no output in it
        self.given_up = False  # too many crashes in a row: nothing will be served any more
        self.started: Started | None = None
        self.pids: list[int] = []  # of the latest incarnation, in rank order
        self.spawned = trio.Event()  # set when the first processes are running
        self.ended = trio.Event()  # `run` has returned: no shard process is left
        self._engine: Engine | None = None
        self._attached = trio.Event()
        self._metrics = metrics
        self._start = start
        self._warmup = warmup
        self._watch = watch
        self._on_move = on_move
        self._adapters = AdapterRegistry() if adapters is None else adapters
        self._gather = gather
        self._prefixes = prefixes
        self._saver: PrefixSaver | None = None  # of the latest incarnation
        self._link: ShardLink | None = None  # likewise, once it serves
        self._stop = trio.Event()
        self._trouble = ""  # why the supervisor itself has ended this incarnation
        self._refused = False  # by this machine, which had nothing to start it with
        self._ready_at: float | None = None

    @property
    def ready(self) -> bool:
        return self.state is ShardState.READY and self._engine is not None

    def attach(self, engine: Engine) -> None:
        """Take the engine, which is made once the first incarnation has sized the KV cache."""
        self._engine = engine
        self._attached.set()

    def stop(self) -> None:
        """Let the shard finish its step and exit; `run` returns then."""
        self._stop.set()

    async def run(self, task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervise until `stop`. `task_status` gets `Started` when the group is first ready.

        Raises ShardCannotStart when the first incarnation ends before it was ever ready.
        """
        try:
            await self._run(task_status)
        finally:
            self.ended.set()

    async def _run(self, task_status: trio.TaskStatus[Started]) -> None:
        incarnation, crashes = 0, CrashCount()
        while True:
            incarnation += 1
            if self._gather is not None and not await self._unless_stopped(self._gather):
                return
            self._move(ShardEvent.RESPAWN, f"incarnation {incarnation} is starting")
            report = await self._incarnation(incarnation, task_status)
            ready_at, now = self._ready_at, trio.current_time()
            self._move(ShardEvent.EXIT, "it has ended")
            self._metrics.gauge("tgi_shard_ready", 0)
            if self._stop.is_set():
                return
            if self.started is None:
                raise ShardCannotStart(report)
            engine, served = self._engine, ready_at is not None
            explained = served and engine is not None and engine.scheduler.loss_explained
            lived = now - ready_at if ready_at is not None else 0.0
            pause = crashes.note(lived, explained, refused=self._refused)
            log.error("%s", report)
            if crashes.in_a_row > self._watch.restart_limit:
                self._give_up(crashes.in_a_row)
                await self._stop.wait()
                return
            self._metrics.inc("tgi_shard_restarts")
            self.why = f"it crashed and is started again in {pause:.1f} s"
            with trio.move_on_after(pause):
                await self._stop.wait()
                return

    async def _unless_stopped(self, wait: Callable[[], Awaitable[None]]) -> bool:
        """Wait for `wait`; returns False if the supervisor is told to stop meanwhile."""
        self.why = "it waits for ranks of other machines"
        done = False
        async with trio.open_nursery() as nursery:

            async def until_stopped() -> None:
                await self._stop.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_stopped)
            await wait()
            done = True
            nursery.cancel_scope.cancel()
        return done

    def _give_up(self, crashes: int) -> None:
        """Fail waiting and future requests; the report of the last crash is in the log already."""
        self.given_up = True
        self.why = f"the shard crashed {crashes} times in a row and is not started again"
        log.error("%s (--shard-restart-limit %d)", self.why, self._watch.restart_limit)
        if self._engine is not None:
            self._engine.close(self.why)

    def _move(self, event: ShardEvent, why: str) -> None:
        self.state, self.why = next_state(self.state, event), why
        log.info("shard group: %s", self.state.value)
        if self._on_move is not None:
            self._on_move(self.state)

    async def _incarnation(self, number: int, task_status: trio.TaskStatus[Started]) -> str:
        """Run one incarnation until it ends; returns the report of its end."""
        self._trouble, self._ready_at, self._link = "", None, None
        self._refused = False
        with ExitStack() as stack:
            try:
                group = stack.enter_context(self._start(self._warmup, number))
            # There may be enough memory later, and a rank that has just left may be back.
            except (OSError, SegmentError, PeerError) as error:
                self._refused = not isinstance(error, PeerError)
                return f"shard group {number} cannot be started: {tell_shortage(error)}"
            self.pids = list(group.pids)
            self.spawned.set()
            async with trio.open_nursery() as nursery:
                scope = nursery.cancel_scope

                async def until_death() -> None:
                    await group.wait_for_death()
                    scope.cancel()

                async def life() -> None:
                    try:
                        await self._live(group, number, task_status)
                    # Errors come bare while it loads, but in a group from the nursery that serves.
                    except* PeerError as found:
                        self._trouble = str(find_first_leaf(found))
                    except* CorruptFrame as found:
                        self._trouble = f"{group.describe(0)}: {find_first_leaf(found)}"
                    scope.cancel()

                async def until_stopped() -> None:
                    await self._stop.wait()
                    if self.state in (ShardState.SPAWNED, ShardState.LOADING, ShardState.WARMING):
                        scope.cancel()  # there is nothing to finish yet

                nursery.start_soon(until_stopped)
                nursery.start_soon(group.pump_output)
                nursery.start_soon(until_death)
                nursery.start_soon(self._watch_stalls, group, scope)
                nursery.start_soon(life)
            with trio.CancelScope(shield=True):  # a killed process is reaped in milliseconds
                report = await group.end_all(bool(self._trouble) or not self._stop.is_set())
            return f"{self._trouble}\n{report}" if self._trouble else report

    async def _live(self, group: Group, number: int, task_status: trio.TaskStatus[Started]) -> None:
        """Run the handshake and serve until told to stop; cancelled when a shard dies."""
        end = group.end
        await handshake.hello(end, number, group.world_size)
        self._move(ShardEvent.HELLO, "loading weights")
        info = await handshake.info(end)
        self._move(ShardEvent.LOADED, "warming up")
        for order in self._adapters.orders():
            self._adapters.settle(await handshake.load_adapter(end, order))
        if self.started is None:
            self._adapters.refuse_failed()
        warmup = replace(self._warmup, adapters_to_come=self._adapters.to_come)
        memory = await handshake.warm_up(end, warmup)
        tell_copies(memory, self._metrics)
        store, kept, found, self._saver = self._prefixes, None, None, None
        if store is not None and info.prefix_reuse:
            kept = await restore_prefixes(store, end, info, memory)
            self._saver = PrefixSaver(store, info, memory)
        self._move(ShardEvent.WARMED, "")
        self._ready_at = trio.current_time()
        self._metrics.gauge("tgi_shard_ready", 1)
        if self.started is None:
            self.started = Started(info, memory)
            # Replays need the same sizes, so later incarnations get those that the first one found.
            self._warmup = replace(
                self._warmup, blocks=memory.blocks, state_slots=memory.state_slots
            )
            task_status.started(self.started)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, end, kept)
            await self._stop.wait()
            if self._saver is not None:
                await self._saver.stop()
            if store is not None and self._engine is not None:
                found = await collect_prefixes(store, self._engine, info, memory)
            nursery.cancel_scope.cancel()
        self._move(ShardEvent.DRAIN, "shutting down")
        await self._dismiss(end, info, found)

    async def _dismiss(self, end: CommandChannel, info: ShardInfo, found: Collected | None) -> None:
        """Have a shard that serves nobody any more keep what was `found`, and exit.

        Its death ends this wait.
        """
        from tgi_trio.router.engine.shard_link import ShardLink

        link, limit = self._link or ShardLink(end), self._watch.stop_timeout
        async with trio.open_nursery() as nursery:
            # What found no room before goes first: it may be the rest of a prompt.
            nursery.start_soon(link.send_waiting)
            if self._prefixes is not None and found is not None:
                await keep_prefixes(self._prefixes, end, link.send_frame, info, found)
            link.send_frame(encode(FrameKind.SHUTDOWN, {"command": 0}, {}))
            await trio.sleep(limit)
            nursery.cancel_scope.cancel()
        self._trouble = f"did not exit within {limit:g} s of being told to; killed"

    async def _serve(self, end: CommandChannel, kept: Restoring | None) -> None:
        from tgi_trio.router.engine.shard_link import ShardLink  # loaded with the engine

        await self._attached.wait()
        if self._engine is not None:
            if kept is not None:
                self._engine.scheduler.restore_prefixes(kept.prefixes, kept.on_device)
            link = self._link = ShardLink(end)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.send_waiting)
                if self._saver is not None:
                    nursery.start_soon(self._saver.run, self._engine.scheduler, link)
                await self._engine.serve(link)

    async def _watch_stalls(self, group: Group, scope: trio.CancelScope) -> None:
        """Move between READY and STALLED; end a group that stays stalled for as long again."""
        limit = self._watch.stall_timeout
        detectors = [StallDetector(limit) for _ in range(group.world_size)]
        stalled_since, now = 0.0, trio.current_time()
        while True:
            await trio.sleep(limit / 10)
            before, now = now, trio.current_time()
            if self.state not in (ShardState.READY, ShardState.STALLED):
                continue  # no heartbeat while it imports, reads weights or warms up
            if now - before > limit:
                continue  # this process stood still itself: what came meanwhile is read first
            why = self._why_stalled(now, group, detectors)
            if self.state is ShardState.READY and why:
                self._move(ShardEvent.NO_STEP, why)
                self._metrics.gauge("tgi_shard_ready", 0)
                stalled_since = now
            elif self.state is ShardState.STALLED and not why:
                self._move(ShardEvent.STEP, "")
                self._metrics.gauge("tgi_shard_ready", 1)
            elif self.state is ShardState.STALLED and now - stalled_since > limit:
                self._trouble = f"{why}; killed and started again"
                scope.cancel()
                return

    def _why_stalled(self, now: float, group: Group, detectors: list[StallDetector]) -> str:
        """Return why the group counts as stalled, naming the ranks; "" if it does not."""
        silent_ranks = []
        for rank, detector in enumerate(detectors):
            try:
                detector.observe(now, group.vitals(rank), partial(group.describe, rank))
            except PeerStalled as error:
                silent_ranks.append(str(error))
        if silent_ranks:
            return f"{'; '.join(silent_ranks)} (--stall-timeout)"
        engine, limit = self._engine, self._watch.stall_timeout
        if engine is None or (batch_size := engine.scheduler.batch_size) == 0:
            return ""
        silent = now - engine.last_step_at
        if silent <= limit:
            return ""
        return (
            f"{group.describe(0)}: no step for {silent:.0f} s with {batch_size} "
            f"sequences in the batch (--stall-timeout {limit:g})"
        )
