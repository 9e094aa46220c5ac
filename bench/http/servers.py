"""The servers that `bench.http` compares, each a process of its own.

    python -m bench.http.servers KIND PORT {lockstep,paced}

All of them generate in the same way: an engine inside the process gives every live stream one
token per step. In lockstep the next step begins when every stream has sent its token; paced, steps
are 10 ms apart. Only what turns tokens into bytes on sockets differs.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from bench.http.tokens import STEP, Streams, event, max_new_tokens, token_text

# ---- ours --------------------------------------------------------------------------------------


def ours(port: int, paced: bool, direct: bool = True, shortcut: bool = True) -> None:
    """Serve the project's application on an engine of a few lines."""
    import trio

    from tgi_trio.router.http.app import Application
    from tgi_trio.router.http.call import HttpSettings
    from tgi_trio.router.http.wire.server import ServerSettings, listen, serve

    async def main() -> None:
        engine = BenchEngine(paced)
        app = Application(engine, HttpSettings(direct_writes=direct, shortcut=shortcut))
        settings = ServerSettings(graceful_timeout=2.0)
        shutdown = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            nursery.start_soon(_on_sigterm, shutdown)
            gc.freeze()
            await serve(app, listen([f"127.0.0.1:{port}"]), settings, shutdown)
            nursery.cancel_scope.cancel()

    trio.run(main)


async def _on_sigterm(shutdown: Any) -> None:
    import signal

    import trio

    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            shutdown.set()


class BenchEngine:
    """Implements `router.http.engine_api.EngineApi` with made-up tokens."""

    def __init__(self, paced: bool) -> None:
        import tokenizers
        import trio

        from tgi_trio.router.adapters.registry import AdapterRegistry
        from tgi_trio.router.adapters.text_processors import TextProcessors
        from tgi_trio.router.engine.stream import TokenStream
        from tgi_trio.router.http.engine_api import ModelCard, ServedLimits
        from tgi_trio.router.parameters import ValidationLimits
        from tgi_trio.router.request import FinishReason, Outcome, Token
        from tgi_trio.router.telemetry.metrics import Metrics
        from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
        from tgi_trio.router.text.thoughts.derive import ThoughtSettings
        from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool
        from tgi_trio.router.text.tokenizer_files import TokenizerConfig
        from tgi_trio.router.validation import Validator

        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(
            tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, [])
        )
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        most = 2**40
        self.model = ModelCard("bench")
        self.limits = ServedLimits(max_concurrent_requests=4096)
        tokenizer = Tokenizer(backend, TokenizerConfig({}, (), {}))
        self.text_processors = TextProcessors(
            ModelTextProcessor(TextProcessor(tokenizer), frozenset(), {}, None, ThoughtSettings())
        )
        self.images = None
        self.validator = Validator(TokenizerPool(tokenizer, 1), ValidationLimits(most, most, 256))
        self.metrics = Metrics()
        self.adapters = AdapterRegistry()
        # Imported here, because the peers' processes do without all of this.
        self._token, self._outcome, self._stream = Token, Outcome, TokenStream
        self._length = FinishReason.LENGTH
        self._paced = paced
        self._live: dict[int, Any] = {}
        self._no_text: Any = None  # its tokens come with their text
        self._ends: dict[int, set[int]] = {}  # step -> streams that end with it
        self._step = 0
        self._next_id = 0
        self._work = trio.Event()

    @contextmanager
    def permit(self, count: int = 1) -> Iterator[None]:
        """Admit everything."""
        yield

    def submit(self, request: Any, timings: Any = None, output: Any = None) -> Any:
        """Return a stream."""
        self._next_id += 1
        timings.queued = timings.started = timings.received
        stream = self._stream(self._next_id, request, self._no_text, timings, self.leave)
        self._live[stream.id] = stream
        # As a shard does it: what a stream's end takes must not be looked up for each token.
        last = self._step + request.stopping.max_new_tokens
        self._ends.setdefault(last, set()).add(stream.id)
        self._work.set()
        return stream

    def leave(self, stream: Any) -> None:
        """Forget a stream."""
        if self._live.pop(stream.id, None) is not None:
            stream.cancel()

    def health(self) -> tuple[bool, str]:
        """Always well."""
        return True, ""

    def load(self) -> tuple[int, int]:
        return 0, 1

    def alive(self) -> tuple[bool, str]:
        """Always."""
        return True, ""

    async def run(self) -> None:
        """Make steps while there is work."""
        import trio

        due = trio.current_time()
        while True:
            if not self._live:
                self._work = trio.Event()
                await self._work.wait()
                due = trio.current_time()
            if self._paced:
                due = max(due + STEP, trio.current_time())
                await trio.sleep_until(due)
            else:
                await trio.lowlevel.checkpoint()
            self._step += 1
            ends = self._ends.pop(self._step, set())
            text = token_text(self._step, self._paced)
            for served, stream in enumerate(list(self._live.values()), start=1):
                if stream.end is None:
                    self._deliver(stream, text, ends)
                if served % 128 == 0:
                    await trio.lowlevel.checkpoint()

    def _deliver(self, stream: Any, text: str, ends: Set[int]) -> None:
        token = self._token(self._step % 32000, text, -0.25, False)
        if not ends or stream.id not in ends:
            stream.deliver([token], None)
            return
        del self._live[stream.id]
        count = stream.generated + 1
        stream.deliver([token], self._outcome(self._length, " Paris", count, 1, 0, None))


# ---- quart-trio and hypercorn as they come -----------------------------------------------------


def stock(port: int, paced: bool) -> None:
    """Serve with an async generator per stream on unmodified quart-trio and hypercorn."""
    import trio
    from hypercorn.config import Config
    from hypercorn.trio import serve
    from quart import Response, request
    from quart_trio import QuartTrio

    app = QuartTrio("stock")
    streams = Streams(trio.Event, paced)

    async def engine() -> None:
        step, due = 0, trio.current_time()
        while True:
            if paced or not streams:
                due = max(due + STEP, trio.current_time())
                await trio.sleep_until(due)
            else:
                await trio.lowlevel.checkpoint()
                if streams.behind:
                    continue  # lockstep: somebody has not sent yet
            step += 1
            streams.step(step)

    @app.post("/generate_stream")
    async def generate_stream() -> Response:
        count = max_new_tokens(await request.get_data())
        response = Response(streams.events(count), content_type="text/event-stream")
        response.timeout = None
        return response

    @app.post("/generate")
    async def generate() -> Response:
        count = max_new_tokens(await request.get_data())
        async for _ in streams.events(count):
            pass
        return Response(b'{"generated_text":" Paris"}', content_type="application/json")

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog, config.keep_alive_max_requests = 4096, 10**9
    config.accesslog = config.errorlog = None
    config.keep_alive_timeout = 75
    config.graceful_timeout = 2

    async def main() -> None:
        shutdown = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine)
            nursery.start_soon(_on_sigterm, shutdown)
            await serve(app, config, shutdown_trigger=shutdown.wait, mode="asgi")
            nursery.cancel_scope.cancel()

    trio.run(main)


# ---- FastAPI and uvicorn -----------------------------------------------------------------------


def fastapi(port: int, paced: bool) -> None:
    """Serve with FastAPI, pydantic, uvicorn, uvloop and httptools, as most peers do."""
    import asyncio

    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel

    class Parameters(BaseModel):
        max_new_tokens: int = 20
        temperature: float | None = None
        top_p: float | None = None
        seed: int | None = None

    class Body(BaseModel):
        inputs: str
        parameters: Parameters

    app = FastAPI()
    streams = Streams(asyncio.Event, paced)
    tasks: list[asyncio.Task[None]] = []

    async def engine() -> None:
        loop, step = asyncio.get_running_loop(), 0
        due = loop.time()
        while True:
            if paced or not streams:
                due = max(due + STEP, loop.time())
                await asyncio.sleep(due - loop.time())
            else:
                await asyncio.sleep(0)
                if streams.behind:
                    continue
            step += 1
            streams.step(step)

    async def start() -> None:
        tasks.append(asyncio.create_task(engine()))

    app.on_event("startup")(start)

    async def generate_stream(body: Body) -> StreamingResponse:
        count = body.parameters.max_new_tokens
        return StreamingResponse(streams.events(count), media_type="text/event-stream")

    async def generate(body: Body) -> dict[str, str]:
        async for _ in streams.events(body.parameters.max_new_tokens):
            pass
        return {"generated_text": " Paris"}

    # Annotations are strings here, and FastAPI cannot see local names through them.
    generate_stream.__annotations__.update(body=Body)
    generate.__annotations__.update(body=Body)
    app.post("/generate_stream", response_model=None)(generate_stream)
    app.post("/generate", response_model=None)(generate)
    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", access_log=False,
        log_level="warning", backlog=4096, timeout_keep_alive=75, timeout_graceful_shutdown=2,
    )  # fmt: skip


# ---- the floor ---------------------------------------------------------------------------------


def floor(port: int, paced: bool) -> None:
    """Write ready-made bytes to sockets in a plain loop: what is above it is Python's part."""
    import select
    import socket

    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    live: dict[int, int] = {}  # descriptor of a stream -> tokens still to be sent
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = b'HTTP/1.1 200 OK\r\ncontent-length: 27\r\n\r\n{"generated_text":" Paris"}'

    def read(wait: float) -> None:
        for number, _ in poll.poll(wait):
            if number == listener.fileno():
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients[accepted.fileno()] = accepted
                poll.register(accepted, select.EPOLLIN)
                continue
            data = clients[number].recv(1 << 16)
            if not data:
                live.pop(number, None)
                clients.pop(number).close()
            elif data.startswith(b"POST /generate_stream"):
                live[number] = max_new_tokens(data.partition(b"\r\n\r\n")[2])
                os.write(number, head)
            else:
                os.write(number, whole)

    step, due = 0, time.perf_counter()
    while True:
        read(0 if live or paced else -1)
        if paced:
            due = max(due + STEP, time.perf_counter())
            while (now := time.perf_counter()) < due:
                read(due - now)
        step += 1
        made = event(step, step, token_text(step, paced))
        chunk = b"%x\r\n%b\r\n" % (len(made), made)
        for number, left in list(live.items()):
            live[number] = left - 1
            os.write(number, chunk if left > 1 else chunk + b"0\r\n\r\n")
            if left == 1:
                del live[number]


KINDS: dict[str, Callable[[int, bool], None]] = {
    "ours": ours,
    "ours-plain": lambda port, paced: ours(port, paced, direct=False),
    "ours-quart": lambda port, paced: ours(port, paced, shortcut=False),
    "stock": stock,
    "fastapi": fastapi,
    "floor": floor,
}


if __name__ == "__main__":
    KINDS[sys.argv[1]](int(sys.argv[2]), sys.argv[3] == "paced")
