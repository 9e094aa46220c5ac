"""Streaming requests against a server under test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import orjson

TIMEOUT = httpx.Timeout(240.0)  # seconds; the machine may be busy
# Nothing here is asked over TLS. Left alone, httpx reads all certificates of the machine for each
# request: 30 ms of a core that the server could use.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def get(url: str, **options: Any) -> httpx.Response:
    """GET on a connection of its own, with patience."""
    return httpx.get(url, timeout=TIMEOUT, verify=NO_TLS, **options)


def post(url: str, **options: Any) -> httpx.Response:
    """POST on a connection of its own, with patience."""
    return httpx.post(url, timeout=TIMEOUT, verify=NO_TLS, **options)


def post_stream(url: str, **options: Any) -> AbstractContextManager[httpx.Response]:
    """POST on a connection of its own, whose answer is read as it comes."""
    return httpx.stream("POST", url, timeout=TIMEOUT, verify=NO_TLS, **options)


def open_session() -> httpx.AsyncClient:
    """Return a client for any number of requests at a time, with patience."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=TIMEOUT, verify=NO_TLS, limits=limits)


def decode(line: str) -> dict[str, Any] | None:
    """Return the event of one SSE line; None for anything else."""
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    return None if data == "[DONE]" else orjson.loads(data)


def generate(url: str, prompt: str, **parameters: Any) -> dict[str, Any]:
    """POST /generate and return the body; raises for an error status."""
    body = {"inputs": prompt, "parameters": parameters}
    response = post(f"{url}/generate", json=body)
    response.raise_for_status()
    return dict(response.json())


async def stream(
    client: httpx.AsyncClient, url: str, prompt: str, **parameters: Any
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of /generate_stream."""
    body = {"inputs": prompt, "parameters": parameters}
    async with client.stream("POST", f"{url}/generate_stream", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if (event := decode(line)) is not None:
                yield event


def chat_events(url: str, content: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat completion."""
    body = {"messages": [{"role": "user", "content": content}], "stream": True, **fields}
    with post_stream(f"{url}/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if (event := decode(line)) is not None:
                yield event
