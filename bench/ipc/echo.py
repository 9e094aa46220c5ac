"""The other process: `python -m bench.ipc.echo TRANSPORT CORE ARGUMENT`; core -1 is not pinned."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import sys
from collections.abc import Callable
from concurrent import futures

from bench.ipc.sampling import WORK, work

QUIT = b"q"


def ring(spec_text: str) -> None:
    """Echo over our channel; the loop has the shape of a shard's."""
    from tgi_trio.ipc.death import start_shard_end
    from tgi_trio.ipc.frames import Phase

    end = start_shard_end(spec_text)
    step = 0
    while True:
        frame = end.try_receive()
        if frame is None:
            end.wait(5.0)
            continue
        if frame[0] == WORK[0]:
            work()
        step += 1
        end.beat(step, Phase.DECODE)
        end.send(frame)
        end.release()


def unix_socket(fd: str) -> None:
    """Echo length-prefixed frames over a stream socket."""
    with socket.socket(fileno=int(fd)) as peer:
        peer.setblocking(True)
        stream = peer.makefile("rb", buffering=1 << 16)
        while header := stream.read(4):
            body = stream.read(struct.unpack("<I", header)[0])
            if body[:1] == WORK:
                work()
            peer.sendall(header + body)


def zmq_pair(path: str) -> None:
    """Echo over a pyzmq PAIR socket."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.connect(path)
        while (body := peer.recv()) != QUIT:
            if body[:1] == WORK:
                work()
            peer.send(body)


def grpc_server(address: str) -> None:
    """Echo protobuf messages from a thread pool, as grpcio's own examples do."""
    import grpc

    from bench.ipc.peers import GRPC_OPTIONS, METHOD, message_class

    message = message_class()

    def echo(request: object, context: object) -> object:
        if request.payload[:1] == WORK:  # type: ignore[attr-defined]
            work()
        return request

    handler = grpc.unary_unary_rpc_method_handler(
        echo, message.FromString, message.SerializeToString
    )
    server = grpc.server(futures.ThreadPoolExecutor(2), options=GRPC_OPTIONS)
    service, method = METHOD
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


def grpc_aio_server(address: str) -> None:
    """Echo protobuf messages from an asyncio server, as TGI's shards do."""
    import grpc

    from bench.ipc.peers import GRPC_OPTIONS, METHOD, message_class

    message = message_class()

    async def echo(request: object, context: object) -> object:
        if request.payload[:1] == WORK:  # type: ignore[attr-defined]
            work()
        return request

    async def serve() -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            echo, message.FromString, message.SerializeToString
        )
        server = grpc.aio.server(options=GRPC_OPTIONS)
        service, method = METHOD
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


SERVERS: dict[str, Callable[[str], None]] = {
    "ring": ring,
    "socket": unix_socket,
    "zmq": zmq_pair,
    "grpc": grpc_server,
    "grpc-aio": grpc_aio_server,
}

if __name__ == "__main__":
    transport, core, argument = sys.argv[1:]
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    gc.disable()
    SERVERS[transport](argument)
