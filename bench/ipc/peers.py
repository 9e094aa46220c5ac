"""The other transports: gRPC with protobuf messages, a plain Unix socket, pyzmq."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from bench.ipc.sampling import Budget, Case, Placement, Row, cases, sample, summarise

GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
METHOD = ("bench.Echo", "Echo")
_START_S = 240.0  # that a server may take to be there
Call = Callable[[bytes], Awaitable[object]]
Sleep = Callable[[float], Awaitable[object]]


def message_class() -> Any:
    """Return the protobuf class `message Frame { uint64 step = 1; bytes payload = 2; }`.

    One bytes field is the cheapest protobuf can be: repeated rows, which a decode reply would
    have, cost it several times more.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Frame")
    kinds = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind) in enumerate(
        (("step", kinds.TYPE_UINT64), ("payload", kinds.TYPE_BYTES)), start=1
    ):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Frame"))


@contextmanager
def echo(
    transport: str, place: Placement, argument: str, fds: tuple[int, ...] = ()
) -> Iterator[None]:
    """Run bench.ipc.echo for the time of the block."""
    core = place.peer
    command = [sys.executable, "-m", "bench.ipc.echo", transport, str(core), argument]
    with subprocess.Popen(command, pass_fds=fds) as process:
        try:
            yield
        finally:
            process.kill()


async def rows(name: str, call: Call, sleep: Sleep, place: Placement, budget: Budget) -> list[Row]:
    """Warm up and measure all cases."""
    await sample(call, sleep, Case("hot", 64, place.pinned), Budget(50, 5.0, 0))
    return [
        summarise(name, case, await sample(call, sleep, case, budget))
        for case in cases(place.pinned)
    ]


def grpc_sync(place: Placement, budget: Budget) -> list[Row]:
    """Blocking stub, thread-pool server: the fastest gRPC, but it blocks the router's loop."""
    import grpc

    message = message_class()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/echo"
        with echo("grpc", place, address), grpc.insecure_channel(address, GRPC_OPTIONS) as channel:
            stub = channel.unary_unary(
                "/" + "/".join(METHOD), message.SerializeToString, message.FromString
            )
            stub(message(step=1), wait_for_ready=True, timeout=_START_S)

            async def call(payload: bytes) -> object:
                return stub(message(step=1, payload=payload))

            return trio.run(rows, "gRPC sync", call, trio.sleep, place, budget)


def grpc_aio(place: Placement, budget: Budget) -> list[Row]:
    """asyncio stub and asyncio server: what TGI's shards speak."""
    import grpc

    message = message_class()

    async def main(address: str) -> list[Row]:
        async with grpc.aio.insecure_channel(address, GRPC_OPTIONS) as channel:
            stub = channel.unary_unary(
                "/" + "/".join(METHOD), message.SerializeToString, message.FromString
            )
            await stub(message(step=1), wait_for_ready=True, timeout=_START_S)

            async def call(payload: bytes) -> object:
                return await stub(message(step=1, payload=payload))

            return await rows("gRPC aio", call, asyncio.sleep, place, budget)

    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/echo"
        with echo("grpc-aio", place, address):
            return asyncio.run(main(address))


def unix_socket(place: Placement, budget: Budget) -> list[Row]:
    """Length-prefixed frames over a stream socket, read by trio."""

    async def main() -> list[Row]:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        with echo("socket", place, str(theirs.fileno()), (theirs.fileno(),)):
            theirs.close()
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))

            async def call(payload: bytes) -> object:
                await stream.send_all(struct.pack("<I", len(payload)) + payload)
                buffer = bytearray()
                while len(buffer) < 4 + len(payload):
                    buffer += await stream.receive_some(1 << 18)
                return buffer[4:]

            return await rows("Unix socket", call, trio.sleep, place, budget)

    return trio.run(main)


def zmq_pair(place: Placement, budget: Budget) -> list[Row]:
    """pyzmq PAIR over ipc://, its descriptor awaited by trio."""
    import zmq

    async def main(path: str) -> list[Row]:
        with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
            peer.bind(path)

            async def call(payload: bytes) -> object:
                peer.send(payload)
                while True:
                    try:
                        return peer.recv(zmq.NOBLOCK)
                    except zmq.Again:
                        if not peer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                            await trio.lowlevel.wait_readable(peer.getsockopt(zmq.FD))

            with echo("zmq", place, path):
                return await rows("pyzmq", call, trio.sleep, place, budget)

    with tempfile.TemporaryDirectory() as folder:
        return trio.run(main, f"ipc://{Path(folder) / 'echo'}")


PEERS: dict[str, Callable[[Placement, Budget], list[Row]]] = {
    "gRPC sync": grpc_sync,
    "gRPC aio": grpc_aio,
    "Unix socket": unix_socket,
    "pyzmq": zmq_pair,
}
