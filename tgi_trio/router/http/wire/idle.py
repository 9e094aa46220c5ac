"""Closes connections that are idle for too long, or whose place another client needs."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final

import trio

# Seconds that a connection has to wait before it may be closed for another client: whoever has just
# connected, or has just had an answer, may be about to send a request.
_LEAST_WAIT: Final = 1.0

# Seconds until it is looked again whether what a client has sent by its deadline has been read, and
# for how long at most: a loop with thousands of clients reads late, and a client may send for ever.
_LOOK: Final = 0.01
_LONGEST_LOOK: Final = 30.0


class IdleConnections:
    """The connections that wait for a request, the longest waiting first."""

    def __init__(self) -> None:
        self._watches: dict[IdleWatch, float] = {}  # since when (trio clock)

    def add(self, watch: IdleWatch) -> None:
        """Record that a connection waits from now on."""
        self._watches.pop(watch, None)
        self._watches[watch] = trio.current_time()

    def discard(self, watch: IdleWatch) -> None:
        """Record that a connection does not wait any more, if it did."""
        self._watches.pop(watch, None)

    def close_oldest(self) -> bool:
        """Close the connection that has waited longest, if for a second; return whether it has.

        A request that arrives before its task runs is still served.
        """
        watch, since = next(iter(self._watches.items()), (None, math.inf))
        if watch is None or since + _LEAST_WAIT > trio.current_time():
            return False
        self.discard(watch)
        watch.close_soon()
        return True


class IdleWatch:
    """Closes a connection that stays idle for too long, or when the server drains.

    The watch checks the deadline whenever it wakes. A new deadline is never before the end of the
    current wait, so setting one costs an assignment and not a timer.
    """

    def __init__(
        self,
        draining: trio.Event,
        keep_alive_timeout: float,
        head_timeout: float,
        waiting: IdleConnections,
    ) -> None:
        """`draining` is set when the server shuts down.

        `waiting`: the list of connections that wait for a request. Seconds:
        `keep_alive_timeout` between requests, `head_timeout` as in ConnectionLimits.
        """
        self._draining = draining
        self._keep_alive_timeout = keep_alive_timeout
        self._head_timeout = head_timeout
        self._waiting = waiting
        self._patience = min(keep_alive_timeout, head_timeout)  # longest single wait of the watch
        self._deadline = math.inf  # trio clock; infinite while a request is being served
        self._scope = trio.CancelScope()  # of the watch's current wait
        self._ended = False

    def begin(self) -> None:
        """Record that the connection has begun: its first request is due."""
        self.expect_head()
        self._waiting.add(self)

    def idle(self) -> None:
        """Record that the connection is idle from now on."""
        self._deadline = trio.current_time() + self._keep_alive_timeout
        self._waiting.add(self)

    def expect_head(self) -> None:
        """Record that a request's head has begun. Idempotent until `idle`."""
        self._deadline = min(self._deadline, trio.current_time() + self._head_timeout)
        self._waiting.discard(self)

    def busy(self) -> None:
        """Record that a request is being served."""
        self._deadline = math.inf
        self._waiting.discard(self)

    def close_soon(self) -> None:
        """Have the connection closed for another client, unless it is busy again by then."""
        self._deadline = trio.current_time()
        self._scope.cancel()

    def end(self) -> None:
        """Record that the connection has ended; otherwise its nursery would wait for the watch."""
        self._ended = True
        self._waiting.discard(self)
        self._scope.cancel()

    async def run(
        self, hang_up: Callable[[], Awaitable[None]], has_unread: Callable[[], bool]
    ) -> None:
        """Watch until the end; `hang_up` closes the connection.

        `has_unread`: whether the client has sent something that is yet to be read. It may be a
        request: closed now, the connection would be reset.
        """
        latest = math.inf  # when it is closed in any case (trio clock)
        while not self._ended:
            until = min(self._deadline, trio.current_time() + self._patience)
            with trio.CancelScope(deadline=until) as self._scope:
                await self._draining.wait()
            drains = self._draining.is_set()
            if self._ended or (drains and self._deadline == math.inf):
                return  # what is being served closes the connection after its answer
            now = trio.current_time()
            if not drains and self._deadline > now:
                latest = math.inf
                continue
            if now >= latest or not has_unread():
                await hang_up()
                return
            latest = min(latest, now + _LONGEST_LOOK)
            with trio.CancelScope(deadline=now + _LOOK) as self._scope:
                await trio.sleep_forever()
