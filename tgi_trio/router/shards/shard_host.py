"""`python -m tgi_trio shard`: runs a shard for a router on another machine, which connects to it.

It serves one router at a time. The shard is a child process that ends with the connection; then the
next router, or the same one, may connect.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

import trio

from tgi_trio.errors import PeerError, PeerGone, ProtocolMismatch, TgiTrioError
from tgi_trio.router.shards.peer_acceptor import PeerAcceptor
from tgi_trio.router.shards.rank_connection import RankConnection
from tgi_trio.router.shards.rank_incarnation import OwnModel, run_incarnation
from tgi_trio.router.shards.rank_link import Call, Ended, Message, RankLink, Refused, Start, Welcome
from tgi_trio.router.shards.shard_instance import ShardArgv, real_shard

log = logging.getLogger(__name__)

# Seconds within which a connected router has to send `Start`; no other is accepted meanwhile. One
# that waits longer for other machines connects again (`ShardCalls.wait_for_all`).
_START_S: Final = 60.0


class ShardHost:
    """Runs incarnations of a shard for the routers that connect, one after the other."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        model: OwnModel,
        argv: ShardArgv = real_shard,
    ) -> None:
        """`listeners`: bound sockets."""
        self._acceptor = PeerAcceptor(listeners, secret, self._receive)
        self._model = model
        self._argv = argv
        self._router: RankConnection | None = None  # the one that is served
        self._called = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve routers until cancelled; main thread only."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._acceptor.run)
            task_status.started()
            while True:
                await self._called.wait()
                self._called = trio.Event()
                if (router := self._router) is not None and router.link is not None:
                    await self._serve(router, router.link)

    async def _receive(self, message: Message, link: RankLink) -> None:
        """Accept a router's connections; refuse all others."""
        if not isinstance(message, Call):
            await _refuse(link, "a shard is here, and waits for a router that has --shard")
        router = self._router
        if not message.carries_frames:
            if router is not None:
                await _refuse(link, f"it serves a router on {_peer(router)}", for_now=True)
            self._router = RankConnection(message.session, link)
            self._called.set()
        else:
            if router is None or router.session != message.session or router.frames is not None:
                await _refuse(link, "it has not been called for these frames", for_now=True)
            router.frames = link.stream
        await link.send(Welcome())

    async def _serve(self, router: RankConnection, link: RankLink) -> None:
        """Run a router's shard until either ends; then the next router may connect."""
        log.info("a router on %s has called", link.peer)
        over = False
        try:
            start = await _receive_start(link)
            if router.frames is None:
                raise ProtocolMismatch(link.peer, f"said {start} before it called for frames")
            report = await self._run(start, link, router.frames)
            log.info("%s", report)
            await link.send(Ended(report))
            over = True
        except PeerError as error:
            log.info("the router is served no more: %s", error)
            over = True
        finally:
            if not over:
                with suppress(PeerGone, OSError):  # the router may have disconnected
                    link.send_nowait(Ended("the program that runs the shard was told to end."))
            router.close()
            self._router = None
        log.info("waiting for a router")

    async def _run(self, start: Start, link: RankLink, frames: trio.SocketStream) -> str:
        """Run an incarnation; returns its report, or why it could not be run."""
        try:
            return await run_incarnation(start, link, frames, self._model, self._argv)
        except PeerError:
            raise
        except TgiTrioError as error:
            return str(error)


async def _receive_start(link: RankLink) -> Start:
    """Return the router's `Start`. Raises PeerError if it does not come in time."""
    with trio.move_on_after(_START_S) as patience:
        start = await link.receive()
    if patience.cancelled_caught:
        raise PeerGone(link.peer, f"it has not said for {_START_S:g} s what to run")
    if not isinstance(start, Start):
        raise ProtocolMismatch(link.peer, f"said {start} first")
    return start


async def _refuse(link: RankLink, why: str, *, for_now: bool = False) -> NoReturn:
    """Refuse a connection and raise that as a PeerError."""
    await link.send(Refused(why, for_now))
    raise PeerError(link.peer, f"it is not wanted: {why}")


def _peer(router: RankConnection) -> str:
    return "another machine" if router.link is None else router.link.peer
