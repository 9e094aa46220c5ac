"""What `tests.stress.chaos` does to a server: each fault is one function, and a row of `FAULTS`."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import trio

from bench.harness.vitals import children

STALL_TIMEOUT = 2.0  # seconds; the server's, so that a hung shard is noticed within a run
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST

# Small to write down, large to compile.
BOMBS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "regex", "value": "((a{1,400}){1,400}){1,400}"},
    {"type": "regex", "value": "(" * 3000 + "a" + ")" * 3000},
    {
        "type": "json",
        "value": {
            "type": "object",
            "properties": {f"p{n}": {"multipleOf": 7919 + n} for n in range(2000)},
        },
    },
    {"type": "json", "value": {"$ref": "#"}},
)


@dataclass
class Victim:
    """The server under attack."""

    pid: int
    host: str
    port: int
    rng: random.Random
    requests: int = 0  # that the faults themselves have sent
    answers: Counter[str] = field(default_factory=Counter)  # to those that were read to the end

    @property
    def shard(self) -> int | None:
        """Process id of the shard; None while there is none."""
        for pid in children(self.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"_trio.shard\0" in command or b"fake_shard\0" in command:
                return pid
        return None

    def signal_shard(self, number: int) -> None:
        """Send a signal to the shard, if there is one at this moment."""
        if (pid := self.shard) is not None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, number)

    async def send(self, body: dict[str, Any], receive_buffer: int = 0) -> trio.SocketStream:
        """Send one streamed request on a connection of its own, and read nothing."""
        sock = trio.socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await sock.connect((self.host, self.port))
        stream = trio.SocketStream(sock)
        payload = orjson.dumps(body)
        head = (
            "POST /generate_stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        )
        await stream.send_all(head.encode() + payload)
        self.requests += 1
        return stream

    async def read(self, stream: trio.SocketStream) -> None:
        """Read an answer to its end; raises RuntimeError for one without a terminal event."""
        data = b"".join([bytes(piece) async for piece in stream])
        if b'"generated_text":"' in data and data.endswith(b"0\r\n\r\n"):
            self.answers["finished"] += 1
        elif b'"error":' in data:
            self.answers["told why not"] += 1
        else:
            raise RuntimeError("an answer has no terminal event")


def _query(rng: random.Random, tokens: int) -> dict[str, Any]:
    return {"inputs": f"Chaos {rng.random()}", "parameters": {"max_new_tokens": tokens}}


def reset(stream: trio.SocketStream) -> None:
    """Break the connection off without a goodbye."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    stream.socket.close()


async def kill(victim: Victim) -> None:
    """kill -9 of the shard."""
    victim.signal_shard(signal.SIGKILL)


async def pause(victim: Victim) -> None:
    """Stop the shard for less than --stall-timeout, then let it go on."""
    victim.signal_shard(signal.SIGSTOP)
    await trio.sleep(victim.rng.uniform(0.05, STALL_TIMEOUT / 2))
    victim.signal_shard(signal.SIGCONT)


async def hang(victim: Victim) -> None:
    """Stop the shard for good: the router has to notice, kill and replace it."""
    stopped = victim.shard
    victim.signal_shard(signal.SIGSTOP)
    with trio.move_on_after(10 * STALL_TIMEOUT):
        while victim.shard == stopped:
            await trio.sleep(0.05)


async def fill_log(victim: Victim) -> None:
    """The log's disk is full for a second: no file of the router can grow."""
    soft, hard = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, hard))
    await trio.sleep(1)
    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (soft, hard))


async def drop_clients(victim: Victim) -> None:
    """Clients that leave: while they wait, at the first token, or in the middle."""

    async def client() -> None:
        stream = await victim.send(_query(victim.rng, 200))
        await trio.sleep(victim.rng.choice((0, 0.01, 0.1, 0.5)))
        reset(stream)

    await _together(client, 20)


async def stall_readers(victim: Victim) -> None:
    """Clients that stop reading; half of them go on later and read to the end."""

    async def client() -> None:
        body = _query(victim.rng, 400)
        body["parameters"]["top_n_tokens"] = 5  # more bytes than the kernel buffers
        stream = await victim.send(body, receive_buffer=4096)
        await trio.sleep(victim.rng.uniform(0.2, 2))
        if victim.rng.random() < 0.5:
            await victim.read(stream)
            await stream.aclose()
        else:
            reset(stream)

    await _together(client, 8)


async def slow_tokenisers(victim: Victim) -> None:
    """Prompts of nearly two megabytes, which are tokenised before they can be refused."""

    async def client() -> None:
        text = victim.rng.choice(("a", " the", "\u00e9\u4e00", "\n \t")) * 400_000
        stream = await victim.send({"inputs": text[:600_000]})
        await victim.read(stream)
        await stream.aclose()

    await _together(client, 3)


async def grammar_bombs(victim: Victim) -> None:
    """Grammars that cost far more to compile than to write."""

    async def client() -> None:
        body = _query(victim.rng, 5)
        body["parameters"]["grammar"] = victim.rng.choice(BOMBS)
        stream = await victim.send(body)
        await victim.read(stream)
        await stream.aclose()

    await _together(client, 4)


async def _together(client: Callable[[], Awaitable[None]], count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(_once, client)


async def _once(client: Callable[[], Awaitable[None]]) -> None:
    try:
        await client()
    except (OSError, trio.BrokenResourceError) as error:
        raise RuntimeError("the server broke a connection off") from error


Fault = Callable[[Victim], Awaitable[None]]

# How often each comes up, relative to the others.
FAULTS: Final[dict[Fault, int]] = {
    kill: 3,
    pause: 3,
    hang: 1,
    fill_log: 2,
    drop_clients: 3,
    stall_readers: 2,
    slow_tokenisers: 2,
    grammar_bombs: 2,
}
