"""Where a server listens."""

from __future__ import annotations

import pytest

from tgi_trio.client.address import Address, parse_address


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


@pytest.mark.parametrize("text", ["", "http://", "ftp://a", "a:x", "a:99999", "unix:relative"])
def test_mistakes(text: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        parse_address(text)
