"""Which URLs are fetched and which addresses are dialled."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.errors import ConfigurationError, ValidationError
from tgi_trio.router.media.policy import FetchPolicy, parse_policy

PUBLIC = parse_policy("public")

INSIDE = [
    "0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.8.8.8", "169.254.169.254", "172.16.0.1",
    "192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::10.0.0.1",
    "64:ff9b:1::1", "2002:7f00:0001::", "2002:c0a8:0101::1", "2001:db8::1",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe", "fc00::1", "fd12::1", "fe80::1", "fec0::1", "ff02::1",
]  # fmt: skip
OUTSIDE = ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"]


@pytest.mark.parametrize("address", INSIDE)
def test_no_address_inside_is_dialled(address: str) -> None:
    assert not PUBLIC.allows(ip_address(address))


@pytest.mark.parametrize("address", OUTSIDE)
def test_public_addresses_are_dialled(address: str) -> None:
    assert PUBLIC.allows(ip_address(address))


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_an_address_within_an_address_counts_as_itself(address: IPv4Address) -> None:
    allowed = PUBLIC.allows(address)
    mapped = IPv6Address(0xFFFF << 32 | int(address))
    translated = IPv6Address(0x64FF9B << 96 | int(address))
    assert PUBLIC.allows(mapped) == PUBLIC.allows(translated) == allowed


def test_a_network_may_be_named() -> None:
    policy = parse_policy("public, 10.1.0.0/16, :8080")
    assert policy.allows(ip_address("10.1.2.3"))
    assert policy.allows(ip_address("::ffff:10.1.2.3"))
    assert not policy.allows(ip_address("10.2.2.3"))
    assert policy.check_url("http://images.corp:8080/a").port == 8080


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "over http and https, not file"),
        ("ftp://a.example/b", "over http and https, not ftp"),
        ("gopher://a.example", "not gopher"),
        ("//a.example/b", "not without a scheme"),
        ("a.png", "not without a scheme"),
        ("http://", "names no host"),
        ("http:///b.png", "names no host"),
        ("http://[::1", "invalid image URL"),
        ("http://a.example:99999/", "invalid image URL"),
        ("http://a..example/", "invalid image URL"),
        ("http://user:key@a.example/", "must not hold a user or a password"),
        ("http://[fe80::1%25eth0]/", "must not name an interface"),
        ("http://a.example:22/", "not fetched from port 22, only from 80, 443"),
        ("https://a.example:6379/", "port 6379"),
    ],
)
def test_urls_that_are_not_fetched(url: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PUBLIC.check_url(url)


def test_only_listed_hosts() -> None:
    policy = parse_policy("images.example,cdn.example")
    assert policy.check_url("https://CDN.example./b.png").tls
    with pytest.raises(ValidationError, match=r"only from cdn\.example, images\.example"):
        policy.check_url("https://evil.example/cdn.example")


def test_none_are_fetched() -> None:
    with pytest.raises(ValidationError, match="--image-urls none"):
        parse_policy("none").check_url("https://a.example/b.png")


def test_a_request_line_cannot_be_broken() -> None:
    target = PUBLIC.check_url("http://a.example/a b\u00e4?c=d e\x7f")
    assert target.path == "/a%20b%C3%A4?c=d%20e%7F"
    assert target.host_header == "a.example"


@given(st.text(max_size=40))
def test_any_url_is_taken_or_refused(text: str) -> None:
    try:
        path = PUBLIC.check_url(f"http://a.example/{text}").path
    except ValidationError:
        return
    assert path.isascii() and path.isprintable() and " " not in path


@pytest.mark.parametrize("text", ["", "none,public", "10.0.0.1/8", ":0", ":x", "http://a", "a b"])
def test_flags_that_name_nothing(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--image-urls"):
        parse_policy(text)


def test_the_default_is_public_and_two_ports() -> None:
    assert parse_policy("public") == FetchPolicy()
