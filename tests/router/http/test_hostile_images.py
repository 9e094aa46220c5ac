"""Images that are none, or are not where they say: each is refused, with its reason."""

from __future__ import annotations

import struct
import zlib

import pytest
import trio

from tests.router.http.image_requests import UNIT, data_url, seeing_engine, seen
from tests.router.http.served import Client, served
from tests.router.media.image_files import claimed_png, encode, noise
from tests.router.media.test_fetch import Names, serving
from tgi_trio.router.media.fetch import FetchLimits, MediaFetcher
from tgi_trio.router.media.policy import parse_policy

pytestmark = pytest.mark.trio

IMAGE = encode(noise(2 * UNIT, 3 * UNIT))  # 6 tokens


async def refusal(client: Client, url: str) -> str:
    answer = await client.post("/generate", {"inputs": f"![]({url})"})
    assert answer.status == 422, (url[:80], answer.text)
    assert answer.json()["error_type"] == "validation"
    return answer.json()["error"]


def claimed_gif(width: int, height: int) -> bytes:
    small = encode(noise(2, 2, mode="L"), "GIF")
    return small[:6] + struct.pack("<HH", width, height) + small[10:]


def text_bomb() -> bytes:
    """A PNG with a note of 64 MiB in as many kilobytes."""
    note = b"zTXt" + b"a\0\0" + zlib.compress(bytes(64 * 2**20), 9)
    chunk = struct.pack(">I", len(note) - 4) + note + struct.pack(">I", zlib.crc32(note))
    whole = claimed_png(2, 2)
    return whole[:33] + chunk + whole[33:]


PNG = encode(noise(64, 64))
HOSTILE_DATA = [
    ("no bytes", b"", "it has 0 bytes"),
    ("60,000 x 60,000 PNG", claimed_png(60_000, 60_000), "60000 x 60000 pixels, 1000000 are"),
    ("65,535 x 65,535 GIF", claimed_gif(65535, 65535), "--max-image-pixels"),
    ("a PNG of no rows", claimed_png(5, 0), "invalid image: "),
    ("truncated PNG", PNG[:3000], "it cannot be decoded"),
    ("truncated JPEG", encode(noise(64, 64), "JPEG")[:900], "it cannot be decoded"),
    ("truncated WebP", encode(noise(64, 64), "WEBP")[:900], "invalid image: "),
    ("truncated TIFF", encode(noise(64, 64), "TIFF")[:900], "invalid image: "),
    ("broken in the middle", PNG[:99] + bytes(200) + PNG[299:], "invalid image: "),
    ("a header alone", PNG[:8], "it is none of PNG"),
    ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
     "it is none of PNG, JPEG, GIF, WEBP, TIFF"),
    ("a page", b"<!doctype html><title>Sign in</title>", "it is none of PNG"),
    ("BMP", encode(noise(2, 2), "BMP"), "it is none of PNG"),
    ("EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is none of PNG"),
    ("a note of 64 MiB", text_bomb(), "invalid image: "),
    ("300 times as long", encode(noise(1, 300)), "must be smaller than 200, got 300"),
    ("too many bytes", bytes(200_001), "exceeds maximum allowed size of 200000 bytes"),
]  # fmt: skip
HOSTILE_URLS = [
    ("data:image/png;base64,####", "base64 encoding is invalid"),
    ("data:image/png;base64,AAAA=AAA", "base64 encoding is invalid"),
    ("data:image/png,AAAA", "invalid image content: data:image/png,AAAA"),
    ("data:image/png;charset=x;base64,AAAA", "invalid image content"),
    ("picture.png", "invalid image content: picture.png"),
    ("file:///etc/passwd", "images are fetched over http and https, not file"),
    ("ftp://a.example/b.png", "not ftp"),
    ("gopher://127.0.0.1:6379/_INFO", "not gopher"),
    ("http://127.0.0.1:{port}/", "127.0.0.1 is not at a public address"),
    ("http://0x7f000001:{port}/", "no address of 0x7f000001 is known"),
    ("http://[::1]:{port}/", "::1 is not at a public address"),
    ("http://169.254.169.254/latest/meta-data/", "169.254.169.254 is not at a public address"),
    ("http://[::ffff:10.0.0.1]/", "is not at a public address"),
    ("http://inside.example:{port}/", "inside.example is not at a public address"),
    ("http://both.example:{port}/", "both.example is not at a public address"),
    ("http://nobody.example/", "no address of nobody.example is known"),
    ("http://user:word@a.example/", "must not hold a user or a password"),
    ("http://a.example:22/", "images are not fetched from port 22"),
    ("http://a.example:{port}/inside", "127.0.0.1 is not at a public address"),
    ("http://turns.example:{port}/again", "turns.example is not at a public address"),
    ("http://a.example:{port}/loop", "more than 3 redirects"),
    ("http://a.example:{port}/file", "not file"),
    ("http://a.example:{port}/endless", "exceeds maximum allowed size of 200000 bytes"),
    ("http://a.example:{port}/large", "exceeds maximum allowed size of 200000 bytes"),
    ("http://a.example:{port}/missing", "a.example answered 404"),
    ("http://a.example:{port}/packed", "sent it compressed, unasked"),
    ("http://a.example:{port}/smtp", "the answer is not HTTP"),
    ("http://a.example:{port}/page", "it is none of PNG"),
]


async def hostile_server(stream: trio.SocketStream, request: bytes) -> None:
    """Answer as a server does that wants something of whoever asks it."""
    path = request.split(b" ")[1].decode()
    host = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"host: "))[6:]
    port = host.rpartition(b":")[2].decode()
    moved = {
        "/inside": f"http://127.0.0.1:{port}/",
        "/again": f"http://turns.example:{port}/",
        "/loop": "/loop",
        "/file": "file:///etc/passwd",
    }
    if path in moved:
        await stream.send_all(f"HTTP/1.1 302 Found\r\nLocation: {moved[path]}\r\n\r\n".encode())
    elif path == "/endless":
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.send_all(bytes(65536))
    else:
        await stream.send_all(
            {
                "/large": b"HTTP/1.1 200 OK\r\nContent-Length: 200001\r\n\r\n",
                "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
                "/packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\nx",
                "/smtp": b"220 mail.example ESMTP\r\n",
                "/page": b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n<html>",
                "/good": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + IMAGE,
            }[path]
        )


async def test_hostile_images_are_refused_each_with_its_reason() -> None:
    """None reaches the engine or an address inside (which `serving` looks after)."""
    names = Names(
        a_example=[["127.0.0.2"]],
        inside_example=[["127.0.0.1"]],
        both_example=[["127.0.0.2", "127.0.0.1"]],
        turns_example=[["127.0.0.2"], ["127.0.0.1"]],
        **{address: [[address.replace("_", ".")]] for address in ("127_0_0_1", "169_254_169_254")},
        **{"::1": [["::1"]], "::ffff:10_0_0_1": [["::ffff:10.0.0.1"]]},
    )
    async with serving(hostile_server) as port:
        policy = parse_policy(f"public,127.0.0.2/31,:{port}")
        fetcher = MediaFetcher(policy, FetchLimits(200_000, seconds=60.0), names)
        async with (
            seeing_engine(fetcher, nbytes=2**20, most=150) as engine,
            served(engine) as server,
        ):
            client = await server.connect()
            for name, data, words in HOSTILE_DATA:
                assert words in await refusal(client, data_url(data)), name
            for url, words in HOSTILE_URLS:
                assert words in await refusal(client, url.format(port=port)), url
            four = f"![]({data_url(IMAGE)})" * 4
            answer = await client.post("/generate", {"inputs": four})
            assert "4 images, 3 are allowed (--max-images-per-prompt)" in answer.text
            large = f"![]({data_url(encode(noise(224, 224)))})"  # 64 tokens, and two marks
            for inputs, given in [(large * 2 + "x" * 100, "233"), (large * 3, "192 of images")]:
                answer = await client.post("/generate", {"inputs": inputs})
                assert answer.status == 422 and f"Given: {given}" in answer.text
            assert not engine.submitted
            for url in (f"http://a.example:{port}/good", data_url(IMAGE, "image/svg+xml")):
                answer = await client.post("/generate", {"inputs": f"![]({url})"})
                assert answer.status == 200 and seen(engine)[0][1] == 6, url
