"""What `chat` and `bench` say of an address that has no server of ours."""

from __future__ import annotations

import ssl
from contextlib import suppress
from functools import partial

import pytest
import trio

from tests.router.http.wire.http2_client import CERTIFICATE
from tgi_trio.cli.chat import read_info
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.errors import ConfigurationError

pytestmark = pytest.mark.trio


def reply(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


async def info(answer: bytes, tls: bool = False) -> dict[str, object]:
    """Return what is read from a server that answers anything with these bytes, then hangs up."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        found: dict[str, object] | ConfigurationError
        try:
            found = await read_info(Client(Address("127.0.0.1", port, "/v1", tls)))
        except ConfigurationError as error:
            found = error
        nursery.cancel_scope.cancel()
    if isinstance(found, ConfigurationError):
        raise found  # out of the nursery, which would put it into a group
    return found


@pytest.mark.parametrize(
    ("answer", "tls", "why"),
    [
        (reply(b'{"error":{"message":"Nothing"}}', b"404 Not Found"), False, "404: Nothing"),
        (reply(b"<html>"), False, "that is no JSON"),
        (reply(b"[1]"), False, "that names no `model_id`"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, "it does not speak HTTP ("),
        (reply(b"{}", b"400 Bad Request"), True, "it does not speak HTTPS ("),
    ],
)
async def test_what_is_no_such_server_is_named(answer: bytes, tls: bool, why: str) -> None:
    with pytest.raises(ConfigurationError, match="--url takes the server's own address") as raised:
        await info(answer, tls)
    assert f"/v1 has no /info of a server of TGI's API: {why}" in str(raised.value)


async def test_a_certificate_that_nobody_here_trusts_is_no_lack_of_https(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server of somebody's own has one that it signed itself; OpenSSL's variable names it."""

    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        with suppress(trio.BrokenResourceError):  # of a handshake that the client leaves
            await stream.receive_some()
            await stream.send_all(reply(b'{"model_id":"x"}'))
            await stream.aclose()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    async with trio.open_nursery() as nursery:
        opened = partial(trio.serve_ssl_over_tcp, https_compatible=True, host="localhost")
        listeners = await nursery.start(opened, serve, 0, context)
        port = listeners[0].transport_listener.socket.getsockname()[1]
        client = Client(Address("localhost", port, tls=True))
        with pytest.raises(ConfigurationError) as refused:
            await read_info(client)
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        found = await read_info(client)
        nursery.cancel_scope.cancel()
    said = str(refused.value)
    assert f"https://localhost:{port} shows a certificate that is not trusted here: self" in said
    assert "SSL_CERT_FILE" in said
    assert found == {"model_id": "x"}


async def test_the_info_of_one_is_read() -> None:
    assert await info(reply(b'{"model_id":"x"}')) == {"model_id": "x"}
