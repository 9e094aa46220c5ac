"""One request to one replica, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tgi_trio.cluster.replica_http import (
    AnswerHead,
    AnswerReader,
    Connection,
    Connections,
    ReplicaLost,
)

LARGEST_ANSWER: Final = 1 << 26  # bytes of an answer that is no stream


class AnswerTooLarge(Exception):
    """An answer of more than `LARGEST_ANSWER` bytes."""


class Exchange:
    """A request and its answer; the caller always has to close it."""

    def __init__(self, connections: Connections, hear: Callable[[], None]) -> None:
        """`hear` is called whenever bytes have arrived."""
        self._connections = connections
        self._hear = hear
        self._connection: Connection | None = None
        self._reader = AnswerReader()
        self._early = b""  # the part of the body that arrived with the head

    async def ask(self, request: bytes) -> AnswerHead:
        """Send a request and return the head of its answer. Raises ReplicaLost.

        If a kept-alive connection turns out to be closed, the request is sent once more on a fresh
        one: servers close idle connections, so that says nothing about the replica. It is not if we
        have closed it, giving the replica up: its machine may take connections, and never answer.
        """
        connection = self._connection = await self._connections.take()
        try:
            return await self._ask(connection, request)
        except ReplicaLost:
            ours = connection not in self._connections.busy  # it was closed here
            if ours or connection.fresh or self._reader.head is not None:
                raise
            self._connections.give_back(connection, reusable=False)
            self._connection = None
            connection = self._connection = await self._connections.take(fresh=True)
            return await self._ask(connection, request)

    async def _ask(self, connection: Connection, request: bytes) -> AnswerHead:
        self._reader = AnswerReader()
        await connection.send(request)
        while self._reader.head is None:
            self._early = self._reader.feed(await connection.receive())
        self._hear()
        return self._reader.head

    @property
    def begun(self) -> bool:
        """Whether the replica may have received any of the request."""
        return self._connection is not None

    @property
    def whole(self) -> bool:
        """Whether all of the body has been returned."""
        return self._reader.whole and not self._early

    async def next(self) -> bytes:
        """Return the next part of the body, possibly empty. Raises ReplicaLost.

        Must not be called once the answer is `whole`.
        """
        if self._early:
            early, self._early = self._early, b""
            return early
        if self._connection is None:
            raise ReplicaLost("nothing was asked")
        part = self._reader.feed(await self._connection.receive())
        self._hear()
        return part

    async def follow(self, take: Callable[[bytes], bool]) -> None:
        """Call `take` with parts of the body as they arrive, until it returns False or at the end.

        Raises ReplicaLost and what `take` raises; `take` must not block.
        """
        reader, hear = self._reader, self._hear

        def feed(data: bytes) -> bool:
            hear()
            return take(reader.feed(data)) and not reader.whole

        early, self._early = self._early, b""
        if self._connection is None:
            raise ReplicaLost("nothing was asked")
        if take(early) and not reader.whole:
            await self._connection.follow(feed)

    async def rest(self) -> bytes:
        """Return the whole body. Raises ReplicaLost and AnswerTooLarge."""
        body = bytearray()
        while not self.whole:
            body += await self.next()
            if len(body) > LARGEST_ANSWER:
                raise AnswerTooLarge(f"the answer has more than {LARGEST_ANSWER} bytes")
        return bytes(body)

    def close(self) -> None:
        """Return the connection to its pool, which keeps it if the answer was read to its end.

        Synchronous, idempotent.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            self._connections.give_back(connection, self._reader.keep_alive)
