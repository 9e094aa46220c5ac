"""Where a server listens."""

from __future__ import annotations

import pytest
import trio

from tgi_trio.client.address import Address, connect, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:3000", Address("localhost", 3000)),
        ("http://a.example", Address("a.example", 80)),
        ("https://a.example/gate/", Address("a.example", 443, "/gate", tls=True)),
        ("http://[::1]:8", Address("::1", 8)),
        ("unix:/run/s", Address("localhost", unix="/run/s")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "http://", "ftp://a", "ftp://a:21", "htp://a:3000", "a:x", "a:99999", "http://[::1"),
        *("unix:relative", "a:1/two words", "a:1/\u00e9", "me:key@a:1", "a:1/v1?x=y", "a:1/#top"),
    ],
)
def test_mistakes(text: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        parse_address(text)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.invalid", "http://nowhere.invalid:80: "),  # and what the resolver says
        ("a..b", "http://a..b:80: 'a..b' can be no name of a host"),
        ("unix:/no/such/socket", "unix:/no/such/socket: No such file or directory"),
        ("https://127.0.0.1:{port}", "https://127.0.0.1:{port}: Connection refused"),
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}: Connection refused"),
    ],
)
async def test_what_cannot_be_reached_is_named(text: str, said: str) -> None:
    with trio.socket.socket() as held:  # and nobody listens there
        await held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=r":/") as raised:
            await connect(parse_address(text.format(port=port)))
    assert str(raised.value).startswith(said.format(port=port))
    assert "[Errno" not in str(raised.value)
