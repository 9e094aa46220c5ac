"""The control connection between a group's leader and a machine that runs one of its ranks.

There are two connections between the machines. One carries frames between rank 0 and this rank,
instead of a ring. The other is this one: it says who connects, what to start, how the rank is
doing, and how it has ended. It exists as long as one incarnation of the rank; if either side closes
it, the incarnation ends. Either machine may be the one that connects (`Join`, `Call`).

Messages are lines of JSON; the structs below are all there are.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import trio

from tgi_trio.errors import PeerGone, ProtocolMismatch, tell_reason
from tgi_trio.ipc import peering
from tgi_trio.ipc.peering import Side
from tgi_trio.ipc.tcp import prepare_connection
from tgi_trio.process.name_lookups import connect_by_name
from tgi_trio.whole_files import read_file

GREETING_S: Final = 10.0  # timeout of authentication
_CONNECT_S: Final = 10.0  # timeout of connecting
BEAT_S: Final = 0.5  # interval of a rank's vitals
_LONGEST: Final = 2**20  # bytes of a line
_CHUNK: Final = 2**16


class Join(msgspec.Struct, tag="join", frozen=True):
    """From the rank's machine: what this connection, which it has made, is for."""

    rank: int
    session: str  # of both connections of one incarnation
    carries_frames: bool


class Call(msgspec.Struct, tag="call", frozen=True):
    """From the leader: what this connection, which it has made, is for."""

    session: str  # as `Join` has it
    carries_frames: bool


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """From the rank's machine: the connection of a `Call` is accepted."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """From the leader: run the rank now."""

    settings: str  # `ShardSettings.text()`
    incarnation: int
    model: str  # `config_digest` of the model's folder


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """From the rank's machine, every `BEAT_S`: the rank's vitals (`ipc.control.Vitals`)."""

    heartbeat: int
    phase: int
    step: int
    pid: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """From the rank's machine: the rank has ended. Nothing follows."""

    report: str  # for the operator


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """From the side that was called: this rank, or leader, is not wanted. Nothing follows."""

    why: str
    for_now: bool = False  # whether it may be wanted later


Message: TypeAlias = Join | Call | Welcome | Start | Beat | Ended | Refused
_DECODER: Final = msgspec.json.Decoder(Message)


class RankLink:
    """One end of the connection; messages may be exchanged once the peers are authenticated."""

    def __init__(self, stream: trio.SocketStream, peer: str) -> None:
        """`peer`: the other machine, for messages."""
        self.stream = stream
        self.peer = peer
        self._rest = b""

    @property
    def own_host(self) -> str:
        """This machine's address on the connection."""
        host: str = self.stream.socket.getsockname()[0]
        return host

    async def send(self, message: Message) -> None:
        """Send a message. Raises PeerGone."""
        try:
            await self.stream.send_all(msgspec.json.encode(message) + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._gone() from error

    def send_nowait(self, message: Message) -> None:
        """Send a message without waiting, into the socket's buffer. Raises PeerGone."""
        line = msgspec.json.encode(message) + b"\n"
        with socket.socket(fileno=os.dup(self.stream.socket.fileno())) as own:
            try:
                sent = own.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError as error:
                raise self._gone() from error
        if sent < len(line):
            raise PeerGone(self.peer, f"it has taken {sent} of {len(line)} bytes")

    async def receive(self) -> Message:
        """Return the next message. Raises PeerGone at the end, ProtocolMismatch for a bad one."""
        while b"\n" not in self._rest:
            if len(self._rest) > _LONGEST:
                raise ProtocolMismatch(self.peer, f"a message of more than {_LONGEST} bytes")
            try:
                data = await self.stream.receive_some(_CHUNK)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise self._gone() from error
            if not data:
                raise self._gone()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message: Message = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ProtocolMismatch(self.peer, f"no message of ours: {error}") from None
        return message

    def _gone(self) -> PeerGone:
        return PeerGone(self.peer, "its connection has closed")


async def call(host: str, port: int, secret: bytes, message: Join | Call) -> RankLink:
    """Connect to another machine, authenticate, send the first message; returns the connection.

    Raises OSError if it cannot be reached, and as `greet` does.
    """
    with trio.move_on_after(_CONNECT_S) as patience:
        stream = await connect_by_name(host, port)
    if patience.cancelled_caught:
        raise PeerGone(host, f"it has not answered for {_CONNECT_S:g} s")
    try:
        await greet(stream, secret, Side.CALLER, host)
        link = RankLink(stream, host)
        await link.send(message)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return link


async def greet(stream: trio.SocketStream, secret: bytes, side: Side, peer: str) -> None:
    """Authenticate both ends by challenge and response: each proves that it knows the secret.

    Raises ProtocolMismatch if the peer does not know it or has another protocol, PeerGone if it
    disconnects or takes longer than `GREETING_S` seconds.
    """
    with trio.move_on_after(GREETING_S) as patience:
        try:
            prepare_connection(stream.socket)
            ours = peering.make_challenge()
            await stream.send_all(ours)
            theirs = await _receive(stream, peering.CHALLENGE_BYTES, peer)
            peering.check_challenge(theirs, peer)
            if side is Side.CALLER:
                await stream.send_all(peering.prove(secret, side, ours, theirs))
                proof = await _receive(stream, peering.PROOF_BYTES, peer)
                known = peering.check_proof(proof, secret, Side.CALLED, ours, theirs)
            else:
                proof = await _receive(stream, peering.PROOF_BYTES, peer)
                known = peering.check_proof(proof, secret, Side.CALLER, theirs, ours)
                if known:
                    await stream.send_all(peering.prove(secret, side, theirs, ours))
        except (trio.BrokenResourceError, OSError) as error:
            raise PeerGone(peer, f"its connection broke: {tell_reason(error)}") from error
        if not known:
            raise ProtocolMismatch(peer, "it knows another secret (--cluster-secret-file)")
    if patience.cancelled_caught:
        raise PeerGone(peer, f"it has not shown who it is for {GREETING_S:g} s")


async def _receive(stream: trio.SocketStream, size: int, peer: str) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise PeerGone(
                peer, "it has closed the connection: does it have the same --cluster-secret-file?"
            )
        data += more
    return data


def config_digest(folder: Path) -> str:
    """Return the sha256 of a model's config.json, by which two machines compare their models."""
    return hashlib.sha256(read_file(folder / "config.json")).hexdigest()
