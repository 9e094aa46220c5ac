"""A front, two replicas of the embedded model, and the end of one of them under streams."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_start import start_warm
from tests.system.client import decode, get, post_stream
from tests.system.server import PATIENCE, SECRET, ServerProcess, serving

pytestmark = pytest.mark.system

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate_stream"
USER = [{"role": "user", "content": "Tell me"}]
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 150}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "l", "schema": LIST}}
NOTE = {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}}
TOOL = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
LONG: dict[str, Any] = {"stream": True, "max_tokens": 150, "ignore_eos": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER, **LONG}),
    (CHAT, {"messages": USER, "n": 2, **LONG}),
    (CHAT, {"messages": USER, "response_format": SCHEMA, **LONG}),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required", **LONG}),
    (TEXT, {"prompt": ["The", "A"], "frequency_penalty": 0.5, **LONG}),
    (TEXT, {"prompt": "Once", "stop": ["never said"], **LONG}),
    (TEXT, {"prompt": "Once", "temperature": 0.0, **LONG}),
    (
        NATIVE,
        {
            "inputs": "The",
            "parameters": {
                "do_sample": True,
                "repetition_penalty": 1.1,
                "max_new_tokens": 150,
                "seed": 5,
            },
        },
    ),
]


class Begun:
    """Streams that have begun; each waits here until it is to go on."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._go_on = threading.Event()

    def wait(self) -> None:
        """Called by a stream."""
        self._arrived.release()
        self._go_on.wait(PATIENCE)

    def wait_for_all(self, streams: list[Future[Any]]) -> None:
        """Return when all have begun, or one has failed before."""
        for _ in streams:
            while not self._arrived.acquire(timeout=0.2):
                if any(stream.done() for stream in streams):
                    return

    def go_on(self) -> None:
        self._go_on.set()


def said(url: str, path: str, body: dict[str, Any], begun: Begun | None) -> Any:
    """Return what each choice of a stream says; once it has begun, wait for others to begin."""
    found: dict[int, list[str]] = {}
    seed = {} if path == NATIVE else {"seed": 5}
    with post_stream(url + path, json={**body, **seed}) as answer:
        assert answer.status_code == 200, answer.read()
        for count, event in enumerate(filter(None, map(decode, answer.iter_lines()))):
            if begun is not None and count == 3:
                begun.wait()
            assert "error" not in event, event
            if "token" in event:
                found.setdefault(0, []).append(event["token"]["text"])
            for choice in event.get("choices", ()):
                delta = choice.get("delta", choice)
                text = delta.get("content") or delta.get("text") or ""
                for call in delta.get("tool_calls", ()):
                    text += call["function"]["arguments"]
                found.setdefault(choice["index"], []).append(text)
    return {index: "".join(parts) for index, parts in found.items()}


@contextmanager
def front(secret: Path, *replicas: ServerProcess) -> Iterator[str]:
    """Yield the address of a front that knows both replicas.

    It takes long to give up one that is only slow; of one that is killed it learns at once.
    """
    output = secret.with_name("front")
    named = [word for each in replicas for word in ("--replica", f"127.0.0.1:{each.port}")]
    words = ("--hostname", "127.0.0.1", "--port", "0", "--cluster-secret-file", str(secret))
    patient = ("--replica-timeout", "600")
    with output.open("wb") as sink:
        argv = ["-m", "tgi_trio", "front", *words, *patient, *named]
        program = start_warm(argv, sink.fileno(), sink.fileno())
    try:
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(r"Front at (http://\S+)", output.read_text())) is None:
            assert program.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        while 'tgi_front_replicas{state="up"} 2' not in get(f"{found[1]}/metrics").text:
            assert program.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        yield found[1]
    finally:
        program.kill()
        program.wait()


def test_streams_outlive_their_replica(demo: ServerProcess, tmp_path: Path) -> None:
    """Its router and its shard die at once, with some of eight streams of many kinds on them."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    expected = [said(demo.url, path, body, None) for path, body in BODIES]
    with serving("--cluster-secret-file", str(secret)) as victim:
        with front(secret, demo, victim) as url:
            begun = Begun()
            with ThreadPoolExecutor(len(BODIES)) as pool:
                streams = [pool.submit(said, url, path, body, begun) for path, body in BODIES]
                begun.wait_for_all(streams)
                os.killpg(victim.process.pid, signal.SIGKILL)
                begun.go_on()
                assert [stream.result() for stream in streams] == expected
