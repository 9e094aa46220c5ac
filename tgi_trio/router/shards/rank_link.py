"""What the leader of a group and a machine that runs one of its ranks say to each other.

A rank of another machine has two connections to the leader's. One carries frames between rank 0 and
this rank, as a ring does. The other is this one: who is there, what to start, how it is doing, how
it has ended. It lives as long as one incarnation of the rank, and whoever closes it ends that.
Either machine may be the one that calls (`Join`, `Call`); all else is the same.

Its messages are lines of JSON, the structs below: the table of all there are.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import trio

from tgi_trio.errors import PeerGone, ProtocolMismatch
from tgi_trio.ipc import peering
from tgi_trio.ipc.peering import Side
from tgi_trio.ipc.tcp import prepare_connection

GREETING_S: Final = 10.0  # how long a peer may take to show who it is
_CONNECT_S: Final = 10.0  # how long a machine may take to answer at all
BEAT_S: Final = 0.5  # how often a rank's machine says how it is doing
_LONGEST: Final = 2**20  # bytes of a line
_CHUNK: Final = 2**16


class Join(msgspec.Struct, tag="join", frozen=True):
    """Rank's machine: this connection is that of a rank."""

    rank: int
    session: str  # of both connections of one incarnation
    carries_frames: bool


class Call(msgspec.Struct, tag="call", frozen=True):
    """Leader, to a machine that listens: this connection is that of the rank that it runs."""

    session: str  # as `Join` has it
    carries_frames: bool


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Rank's machine: the connection of a `Call` is taken."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """Leader: run the rank now."""

    settings: str  # `ShardSettings.text()`
    incarnation: int
    largest: int  # bytes of a frame at most
    model: str  # `config_digest` of the model's folder


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """Rank's machine, every `BEAT_S`: what the rank says of itself (`ipc.control.Vitals`)."""

    heartbeat: int
    phase: int
    step: int
    pid: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Rank's machine: the rank has ended; nothing follows."""

    report: str  # for the operator


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Whoever was called: this rank, or this leader, is not wanted; nothing follows."""

    why: str
    for_now: bool = False  # whether it may be wanted later


Message: TypeAlias = Join | Call | Welcome | Start | Beat | Ended | Refused
_DECODER: Final = msgspec.json.Decoder(Message)


class RankLink:
    """One end of the connection, once it is known who is at the other."""

    def __init__(self, stream: trio.SocketStream, peer: str) -> None:
        """`peer`: the other machine, for messages."""
        self.stream = stream
        self.peer = peer
        self._rest = b""

    @property
    def own_host(self) -> str:
        """The address of this machine that the other one has reached, or has been reached from."""
        host: str = self.stream.socket.getsockname()[0]
        return host

    async def say(self, message: Message) -> None:
        """Send a message; raises PeerGone."""
        try:
            await self.stream.send_all(msgspec.json.encode(message) + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._gone() from error

    def say_now(self, message: Message) -> None:
        """Send the first message, which the kernel has room for; raises PeerGone."""
        line = msgspec.json.encode(message) + b"\n"
        with socket.socket(fileno=os.dup(self.stream.socket.fileno())) as own:
            try:
                sent = own.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError as error:
                raise self._gone() from error
        if sent < len(line):
            raise PeerGone(self.peer, f"it has taken {sent} of {len(line)} bytes")

    async def hear(self) -> Message:
        """Return the next message; raises PeerGone at the end, ProtocolMismatch for another."""
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
    """Call another machine, and say who calls once both know the secret; return the connection.

    Raises OSError when nobody is there, and as `greet` does.
    """
    with trio.move_on_after(_CONNECT_S) as patience:
        stream = await trio.open_tcp_stream(host, port)
    if patience.cancelled_caught:
        raise PeerGone(host, f"it has not answered for {_CONNECT_S:g} s")
    try:
        await greet(stream, secret, Side.CALLER, host)
        link = RankLink(stream, host)
        await link.say(message)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return link


async def greet(stream: trio.SocketStream, secret: bytes, side: Side, peer: str) -> None:
    """Prove to the other end that this one knows the secret, and have it prove the same.

    Raises ProtocolMismatch when it does not or speaks otherwise, PeerGone when it leaves or is not
    done within `GREETING_S` seconds.
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
            raise PeerGone(peer, f"its connection broke: {error}") from error
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
    """Return what tells one model's folder from another's: the sha256 of its config.json."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
