"""Fetching images: from a server that may be anybody's."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from tgi_trio.errors import ValidationError
from tgi_trio.router.media.fetch import FetchLimits, MediaFetcher
from tgi_trio.router.media.policy import parse_policy

pytestmark = pytest.mark.trio

CERTIFICATE = str(Path(__file__).parents[1] / "http" / "wire" / "data" / "localhost.pem")
MOST = 1000
LIMITS = FetchLimits(max_image_fetch_size=MOST, seconds=5)
Handler = Callable[[trio.SocketStream, bytes], Awaitable[None]]


class Names:
    """A resolver with a table; each name has a list of what it answers, one after the other."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        await trio.lowlevel.checkpoint()
        answers = self._answers.get(host.replace(".", "_"))
        if answers is None:
            raise OSError(-2, "Name or service not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@asynccontextmanager
async def serving(handler: Handler, host: str = "0.0.0.0") -> AsyncIterator[int]:
    """Serve on a port, of 127.0.0.1 too, where nobody may knock: only the policy keeps it apart."""
    async with trio.open_nursery() as nursery:

        async def serve(stream: trio.SocketStream) -> None:
            assert stream.socket.getsockname()[0] != "127.0.0.1", "an address inside was dialled"
            with suppress(trio.BrokenResourceError):  # the client has gone
                await handler(stream, await stream.receive_some(65536))

        listeners = await trio.open_tcp_listeners(0, host=host)
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def fetcher(port: int, names: Names | None = None, limits: FetchLimits = LIMITS) -> MediaFetcher:
    """A fetcher to which 127.0.0.2 and .3 are public, and 127.0.0.1 is inside."""
    names = names or Names(a_example=[["127.0.0.2"]])
    return MediaFetcher(parse_policy(f"public,127.0.0.2/31,:{port}"), limits, names)


def sends(*pieces: bytes) -> Handler:
    async def handler(stream: trio.SocketStream, request: bytes) -> None:
        for piece in pieces:
            await stream.send_all(piece)

    return handler


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", body])


async def test_an_image_comes_whole() -> None:
    asked = []

    async def handler(stream: trio.SocketStream, request: bytes) -> None:
        asked.append(request)
        await stream.send_all(answer(b"x" * 600, b"Content-Length: 1000"))
        await stream.send_all(b"y" * 400)

    async with serving(handler) as port:
        found = await fetcher(port).fetch(f"http://a.example:{port}/b%20c.png?d=1#e")
    assert found == b"x" * 600 + b"y" * 400
    [request] = asked
    assert request.startswith(b"GET /b%20c.png?d=1 HTTP/1.1\r\n")
    assert f"host: a.example:{port}".encode() in request.lower()
    assert b"cookie" not in request.lower() and b"authorization" not in request.lower()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([answer(b"", status=b"404 Not Found")], "a.example answered 404"),
        ([answer(b"", status=b"204 No Content")], "a.example answered 204"),
        ([answer(b"", b"Content-Length: 1001")], "Image size 1001 bytes exceeds maximum .* 1000"),
        ([answer(b"x" * 1001)], "Image size 1001 bytes exceeds maximum"),
        ([answer(b"")] + [b"x" * 600] * 10000, "Image size 1001 bytes exceeds maximum"),
        ([answer(b"abc", b"Content-Length: 10")], "the answer is not HTTP"),
        ([answer(b"abc", b"Content-Length: -1")], "the answer is not HTTP"),
        ([answer(b"abc", b"Content-Encoding: gzip")], "compressed, unasked"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "the answer is not HTTP"),
        ([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000], "the answer is not HTTP"),
        ([b""], "not HTTP|without an answer"),
        ([answer(b"", b"Location: file:///etc/passwd", status=b"302 Found")], "not file"),
        ([answer(b"", b"Location: http://[::1", status=b"302 Found")], "redirect is not a URL"),
        ([answer(b"", b"Location: http://inside.example/", status=b"301 M")], "not at a public"),
        ([answer(b"", b"Location: http://127.0.0.1/", status=b"307 T")], "not at a public"),
        ([answer(b"", b"Location: /again", status=b"302 Found")], "more than 3 redirects"),
    ],
)
async def test_what_a_server_may_do(pieces: list[bytes], words: str) -> None:
    names = Names(
        a_example=[["127.0.0.2"]],
        inside_example=[["169.254.169.254"]],
        **{"127_0_0_1": [["127.0.0.1"]]},
    )
    async with serving(sends(*pieces)) as port:
        with pytest.raises(ValidationError, match=words) as caught:
            await fetcher(port, names).fetch(f"http://a.example:{port}/b.png")
    assert "127.0.0.2" not in str(caught.value) and "169.254" not in str(caught.value)


async def test_a_name_beyond_ascii_is_asked_for_as_it_is_registered() -> None:
    asked = []

    async def handler(stream: trio.SocketStream, request: bytes) -> None:
        asked.append(request)
        await stream.send_all(answer(b"abc"))

    names = Names(**{"xn--bcher-kva_example": [["127.0.0.2"]]})
    async with serving(handler) as port:
        found = await fetcher(port, names).fetch(f"http://b\u00fccher.example:{port}/")
    assert found == b"abc"
    assert f"host: xn--bcher-kva.example:{port}".encode() in asked[0].lower()


async def test_a_name_that_changes_is_dialled_as_it_was_checked() -> None:
    names = Names(a_example=[["127.0.0.2"], ["127.0.0.1"]])
    async with serving(sends(answer(b"abc"))) as port:
        client = fetcher(port, names)
        assert await client.fetch(f"http://a.example:{port}/") == b"abc"
        assert names.asked == ["a.example"]
        with pytest.raises(ValidationError, match="not at a public address"):
            await client.fetch(f"http://a.example:{port}/")  # looked up again, checked again


async def test_a_redirect_is_looked_up_and_checked_anew() -> None:
    names = Names(a_example=[["127.0.0.2"], ["127.0.0.1"]])
    moved = answer(b"", b"Location: /elsewhere", status=b"302 Found")
    async with serving(sends(moved)) as port:
        with pytest.raises(ValidationError, match="not at a public address"):
            await fetcher(port, names).fetch(f"http://a.example:{port}/")
    assert names.asked == ["a.example", "a.example"]


async def test_one_address_inside_refuses_the_name() -> None:
    names = Names(a_example=[["127.0.0.2", "10.0.0.1"]])
    async with serving(sends(answer(b"abc"))) as port:
        with pytest.raises(ValidationError, match="not at a public address"):
            await fetcher(port, names).fetch(f"http://a.example:{port}/")


async def test_the_next_address_is_tried() -> None:
    names = Names(a_example=[["127.0.0.3", "127.0.0.2"]])

    async with serving(sends(answer(b"abc")), "127.0.0.2") as port:
        assert await fetcher(port, names).fetch(f"http://a.example:{port}/") == b"abc"


@pytest.mark.parametrize("url", ["http://127.1:{}/", "http://2130706433:{}/", "http://0x7f.1:{}/"])
async def test_other_spellings_of_an_address_inside(url: str) -> None:
    async with serving(sends(answer(b"abc"))) as port:
        client = MediaFetcher(parse_policy(f"public,:{port}"), LIMITS)  # the system's resolver
        with pytest.raises(ValidationError, match=r"not at a public|no address"):
            await client.fetch(url.format(port))


async def test_nobody_at_home() -> None:
    async with serving(sends(), "127.0.0.2") as port:
        pass
    with pytest.raises(ValidationError, match="no connection could be made"):
        await fetcher(port).fetch(f"http://a.example:{port}/")
    with pytest.raises(ValidationError, match=r"no address of b\.example is known"):
        await fetcher(port).fetch(f"http://b.example:{port}/")


async def test_a_server_that_takes_its_time(autojump_clock: trio.testing.MockClock) -> None:
    """Virtual time: one that answers at once and then sends a byte a second, and a slow name."""

    async def slow(host: str, port: int) -> list[str]:
        await trio.sleep(100)
        raise AssertionError

    began = trio.current_time()
    with pytest.raises(ValidationError, match="it took more than 5 s"):
        await MediaFetcher(parse_policy("public"), LIMITS, slow).fetch("http://a.example/")
    assert trio.current_time() - began == 5


async def test_a_body_that_never_ends_in_time() -> None:
    async def drip(stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(answer(b""))
        while True:
            await stream.send_all(b"x")
            await trio.sleep(0.05)

    limits = FetchLimits(max_image_fetch_size=MOST, seconds=0.3)
    async with serving(drip, "127.0.0.2") as port:
        with pytest.raises(ValidationError, match=r"more than 0\.3 s"):
            await fetcher(port, limits=limits).fetch(f"http://a.example:{port}/")


async def test_tls_wants_the_name_as_written() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    names = Names(localhost=[["127.0.0.2"]], a_example=[["127.0.0.2"]])

    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        with suppress(trio.BrokenResourceError):  # the client did not like the certificate
            await stream.receive_some(65536)
            await stream.send_all(answer(b"abc"))
            await stream.aclose()

    def trusting() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=CERTIFICATE)

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.2")
        port = listener.socket.getsockname()[1]
        secured = [trio.SSLListener(listener, context, https_compatible=True)]
        nursery.start_soon(trio.serve_listeners, serve, secured)
        policy = parse_policy(f"public,127.0.0.2/31,:{port}")
        client = MediaFetcher(policy, LIMITS, names, trusting)
        assert await client.fetch(f"https://localhost:{port}/") == b"abc"
        with pytest.raises(ValidationError, match="TLS failed"):
            await client.fetch(f"https://a.example:{port}/")
        with pytest.raises(ValidationError, match="TLS failed"):
            await MediaFetcher(policy, LIMITS, names).fetch(f"https://localhost:{port}/")
        nursery.cancel_scope.cancel()


async def test_names_that_nobody_resolves_take_no_threads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver may take half a minute, and its threads go on when the fetch has been given up."""
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def resolve(*args: object, **options: object) -> list[object]:
        if threading.current_thread() is threading.main_thread():  # whether it is an address
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        asked.release()
        may_answer.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    images = MediaFetcher(parse_policy("public"), FetchLimits(seconds=0.05))
    others = trio.to_thread.current_default_thread_limiter()

    async def fetch(n: int) -> None:
        with pytest.raises(ValidationError, match="took more than"):
            await images.fetch(f"http://n{n}.example/")

    try:
        async with trio.open_nursery() as nursery:
            for n in range(int(others.total_tokens) + 8):
                nursery.start_soon(fetch, n)
        assert asked.acquire(timeout=10)
        assert others.borrowed_tokens == 0
        assert await trio.to_thread.run_sync(lambda: "a turn") == "a turn"
    finally:
        may_answer.set()
