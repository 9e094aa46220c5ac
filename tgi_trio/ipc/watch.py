"""Watches a shard: its death by robust mutex and pidfd, a hang by its heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import trio

from tgi_trio.errors import PeerStalled
from tgi_trio.ipc.control import ControlPage, Vitals
from tgi_trio.ipc.robust import RobustMutex

_HELD_POLL_S = 0.02  # how often to check whether a starting shard holds its mutex yet
_THREAD_SLICE_S = 1.0  # how soon the waiting thread notices that it is no longer needed


async def wait_for_death(pidfd: int, page: ControlPage) -> None:
    """Return when the process behind `pidfd` has died or closed its end of the channel.

    The kernel may still be freeing its memory: reap it only once `pidfd` is readable
    (`spawn.ShardProcess.reap` does). Cancellable at once.
    """
    async with trio.open_nursery() as nursery:

        async def by_pidfd() -> None:
            await trio.lowlevel.wait_readable(pidfd)
            nursery.cancel_scope.cancel()

        async def by_mutex() -> None:
            while not page.alive_held:
                await trio.sleep(_HELD_POLL_S)
            await _wait_for_owner(page.alive_mutex())
            nursery.cancel_scope.cancel()

        nursery.start_soon(by_pidfd)
        nursery.start_soon(by_mutex)


async def _wait_for_owner(mutex: RobustMutex) -> None:
    # Not trio.to_thread: its threads are limited in number, and one that is abandoned on
    # cancellation would go on waiting as long as the shard lives.
    token = trio.lowlevel.current_trio_token()
    gone = trio.Event()
    abandoned = threading.Event()

    def wait() -> None:
        while not abandoned.is_set():
            if mutex.wait_for_owner(_THREAD_SLICE_S):
                break
        try:
            token.run_sync_soon(gone.set)
        except trio.RunFinishedError:
            return  # the router has ended meanwhile

    # A daemon thread: at exit the interpreter must not wait for the end of the slice.
    with suppress(RuntimeError):  # no thread can be started: the pidfd tells the death, if later
        threading.Thread(target=wait, name="alive-mutex", daemon=True).start()
    try:
        await gone.wait()
    finally:
        abandoned.set()


class StallDetector:
    """Decides from heartbeats that a living shard hangs. Pure: `observe` is told the time."""

    def __init__(self, limit_s: float, slow_phases: Mapping[int, float] | None = None) -> None:
        """`limit_s`: silence allowed, in seconds; `slow_phases`: other limits by phase."""
        self._limit_s = limit_s
        self._slow_phases = dict(slow_phases or {})
        self._heartbeat = -1
        self._since = 0.0

    def observe(self, now: float, vitals: Vitals, describe: Callable[[], str]) -> None:
        """Take the vitals at time `now` (seconds). Raises PeerStalled, which names the shard."""
        if vitals.heartbeat != self._heartbeat:
            self._heartbeat, self._since = vitals.heartbeat, now
            return
        limit = self._slow_phases.get(vitals.phase, self._limit_s)
        if now - self._since > limit:
            raise PeerStalled(
                describe(),
                f"no heartbeat for {now - self._since:.1f} s (allowed in this phase: {limit:g} s)",
            )
