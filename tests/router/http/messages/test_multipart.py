"""Forms with a file, in whatever pieces their bytes are parsed."""

from __future__ import annotations

import random

import httpx
import pytest

from tgi_trio.router.http.messages import multipart
from tgi_trio.router.http.messages.multipart import FormData, read_form
from tgi_trio.router.http.messages.problems import BodyRejected

BOUNDARY = b"--x-y"
HEADERS = {b"content-type": b"multipart/form-data; boundary=" + BOUNDARY}


def read(*parts: bytes) -> FormData:
    body = b"".join(b"--%b\r\n%b\r\n" % (BOUNDARY, each) for each in parts)
    return read_form(HEADERS, b"%b--%b--\r\n" % (body, BOUNDARY))


def part(name: str, data: bytes, more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%b"%b\r\n\r\n%b' % (name.encode(), more, data)


def make_data(source: random.Random, size: int) -> bytes:
    """Return bytes of which many begin as the end of a part does."""
    begin = (b"\r\n--" + BOUNDARY[:-1], b"\r\n" + BOUNDARY, b"\r\n--" + BOUNDARY + b"y")
    pieces = (b"\r\n", b"\r", b"\n", b"-", b"a", *begin)
    data = b""
    while len(piece := source.choice(pieces)) <= size - len(data):
        data += piece
    return data.ljust(size, b"a")


@pytest.mark.parametrize("seed", range(12))
def test_what_is_in_a_form_is_found_wherever_it_is_cut(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    monkeypatch.setattr(multipart, "_PIECE", source.randrange(20, 300))
    sound, other = make_data(source, source.randrange(3000)), make_data(source, 600)
    form = read(
        part("file", sound, b'; filename="a.wav"\r\nContent-Type: audio/wav'),
        part("prompt", "sch\u00f6n\r\n--".encode()),
        part("more", other, b'; filename="b.wav"'),
        part("model", b""),
    )
    assert form.files == {"file": sound, "more": other}
    assert form.fields == {"prompt": "sch\u00f6n\r\n--", "model": ""}


@pytest.mark.parametrize("size", [0, 1, (1 << 14) - 150, 1 << 14, 100_000])
def test_the_form_of_a_client_is_read(size: int) -> None:
    sound = make_data(random.Random(size), size)
    files, fields = (
        {"file": ("a.wav", sound, "audio/wav")},
        {"model": "tgi", "prompt": "sch\u00f6n"},
    )
    request = httpx.Request("POST", "http://a/", files=files, data=fields)
    form = read_form({b"content-type": request.headers["content-type"].encode()}, request.read())
    assert form.files == {"file": sound} and form.fields == fields


@pytest.mark.parametrize(
    "parts",
    [
        [part("file", b"", b"\r\nX: " + b"a" * 40_000)],
        [part("file", b"", b"\r\na: b" * 10_000)],
        [part(f"f{number}", b"") for number in range(65)],
    ],
    ids=["a long line", "many lines", "many parts"],
)
def test_heads_and_parts_have_a_bound(parts: list[bytes]) -> None:
    with pytest.raises(
        BodyRejected, match="more than 64 parts, or a head of more than 32768"
    ) as no:
        read(*parts)
    assert no.value.status == 400


def test_what_comes_before_the_first_part_is_passed_over() -> None:
    body = b"This is a form.\r\n--%b\r\n%b\r\n--%b--\r\n" % (BOUNDARY, part("a", b"1"), BOUNDARY)
    assert read_form(HEADERS, body).fields == {"a": "1"}
    with pytest.raises(BodyRejected, match="Failed to parse the form"):
        read_form(HEADERS, b"x" * 40_000 + body)
