"""Requests with images: what is sent, and how long the answers take."""

from __future__ import annotations

import base64
import io
import itertools
import struct
import zlib
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import trio
from PIL import Image

from tgi_trio.client.http import Client

MB = 10**6
QUESTION = "What is it?"


def make_picture(nbytes: int) -> bytes:
    """Return a PNG of noise of about so many bytes."""
    side = max(8, int((nbytes / 3) ** 0.5))
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def chat(picture: bytes, before: str = "", **more: Any) -> dict[str, Any]:
    """Return a chat about a picture; `before`: what is said in front of it."""
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    if before:
        parts.insert(0, {"type": "text", "text": before})
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0, **more}


async def chat_in_words(client: Client, tokens: int, first: str) -> dict[str, Any]:
    """Return a chat without pictures whose prompt has `tokens` tokens, or one less.

    `first`: a word with which it begins, for one that nobody has asked before.
    """
    words = [first]
    while True:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": " ".join(words)}]}
        missing = tokens - await count_tokens(client, {**body, "max_tokens": 1})
        if missing <= 1:
            return {**body, "temperature": 0}
        words += ["cat"] * (missing // 2)  # a word takes two


async def post(
    client: Client, path: str, body: bytes, kind: str = "application/json"
) -> tuple[int, bytes]:
    """Return status and body of an answer, on a connection of its own."""
    stream = await trio.open_tcp_stream(client.address.host, client.address.port)
    async with stream:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        await stream.send_all(head.encode())
        await stream.send_all(body)
        answer = b"".join([piece async for piece in stream])
    head_end = answer.index(b"\r\n\r\n")
    return int(answer[9:12]), answer[head_end + 4 :]


async def count_tokens(client: Client, body: Mapping[str, Any]) -> int:
    """Return how many tokens the prompt of a chat has."""
    status, answer = await post(client, "/v1/chat/completions", orjson.dumps(body))
    if status != 200:
        raise RuntimeError(f"{status}: {answer[:300]!r}")
    return int(orjson.loads(answer)["usage"]["prompt_tokens"])


@dataclass(frozen=True)
class Pace:
    """Of one stream, in seconds."""

    first: float  # until the first token
    gaps: list[float]  # between tokens


async def stream(client: Client, path: str, body: Mapping[str, Any], tokens: int) -> Pace:
    """Stream an answer of so many tokens; raises HTTPFailure, and RuntimeError for an error."""
    start, events = trio.current_time(), []
    length = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "stream": True}
    async with aclosing(client.events(path, {**body, **length})) as found:
        async for at, event in found:
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if event["choices"]:
                events.append(at)
    return Pace(events[0] - start, [b - a for a, b in itertools.pairwise(events)])


def hostile_pictures() -> dict[str, bytes]:
    """Return files that ask for much, or are no pictures."""
    note = b"zTXta\0\0" + zlib.compress(bytes(256 * 2**20), 9)
    chunk = struct.pack(">I", len(note) - 4) + note + struct.pack(">I", zlib.crc32(note))
    whole = make_picture(3000)
    claimed = b"IHDR" + struct.pack(">2I", 60_000, 60_000) + whole[24:29]
    claimed += struct.pack(">I", zlib.crc32(claimed))
    return {
        "60,000 x 60,000 pixels": whole[:12] + claimed + whole[33:],
        "a note of 256 MiB": whole[:33] + chunk + whole[33:],
        "truncated": make_picture(5 * MB)[: 4 * MB],
        "zeros": bytes(10 * MB),
        "a page": b"<!doctype html>" + b" " * 5 * MB,
        "as many pixels as are allowed": _plain(4400),
        "no bytes": b"",
    }


def _plain(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG", compress_level=9)
    return file.getvalue()
