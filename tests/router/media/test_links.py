"""Where a prompt's images are, and data URLs."""

from __future__ import annotations

import base64

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.errors import ValidationError
from tgi_trio.media.packed_frames import unpack_frames
from tgi_trio.router.media.data_urls import decode_data_url, decode_video_url, is_data_url
from tgi_trio.router.media.links import MediaLink, split_text, to_audio_link

MOST = 1000


def test_text_and_images_keep_their_order() -> None:
    text = "What is ![](https://a.example/b.png)![](data:image/png;base64,AAAA) this?"
    assert split_text(text) == [
        "What is ",
        MediaLink("https://a.example/b.png"),
        MediaLink("data:image/png;base64,AAAA"),
        " this?",
    ]


@pytest.mark.parametrize("text", ["", "![name](https://a.example)", "![](", "[](a)", "! [](a)"])
def test_other_links_are_text(text: str) -> None:
    assert split_text(text) == ([text] if text else [])


@given(st.text(alphabet="![]()ab:/", max_size=40))
def test_no_letter_is_lost(text: str) -> None:
    pieces = split_text(text)
    assert all(pieces)
    written = [each if isinstance(each, str) else f"![]({each.url})" for each in pieces]
    assert "".join(written) == text


@given(st.binary(max_size=MOST))
def test_data_urls_carry_any_bytes(data: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert trio.run(decode_data_url, url, MOST) == data


@pytest.mark.parametrize("header", ["DATA:image/png;base64", "Data:IMAGE/PNG;BASE64"])
def test_data_urls_may_begin_in_capitals(header: str) -> None:
    assert is_data_url(header) and to_audio_link(f"{header},AAEC", "x").url == f"{header},AAEC"
    assert trio.run(decode_data_url, f"{header},AAEC", MOST) == b"\0\1\2"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png,AAAA", "invalid image content: data:image/png,AAAA"),
        ("data:image/png;base64", "invalid image content"),
        ("data:image/svg+xml;utf8,<svg/>", "invalid image content"),
        ("data:image/png;charset=x;base64,AAAA", "invalid image content"),
        ("data:image/png;base64,AAA", "base64 encoding is invalid"),
        ("data:image/png;base64,AA A", "base64 encoding is invalid"),
        ("data:image/png;base64,AA\\/A", "base64 encoding is invalid"),
        ('data:image/png;base64,AAAA"', "base64 encoding is invalid"),
        ("data:image/png;base64,A===", "base64 encoding is invalid"),
        ("data:image/png;base64,\ud800AAA", "base64 encoding is invalid"),
        ("data:image/png;base64,ÄÄÄÄ", "base64 encoding is invalid"),
        ("file:///etc/passwd", "invalid image content: file:///etc/passwd"),
        ("data:image/png;base64," + "A" * 1336, "Image size 1002 bytes exceeds maximum allowed"),
        ("data:image/png;base64," + "A" * 40_000_000, "Image size 30000000 bytes exceeds"),
        ("data:image/png;base64" + "A" * 500, "invalid image content: data:image/png;base64AAA"),
    ],
)
def test_what_is_not_a_data_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace("+", r"\+")) as caught:
        trio.run(decode_data_url, url, MOST)
    assert len(str(caught.value)) < 200


def test_padding_ends_base64_wherever_it_is_cut_into_slices() -> None:
    url = "data:image/png;base64," + "AA==" * 40_000
    with pytest.raises(ValidationError, match="base64 encoding is invalid"):
        trio.run(decode_data_url, url, 200_000)


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=200))
def test_pictures_of_a_video_are_packed(frames: list[bytes]) -> None:
    texts = [base64.b64encode(frame).decode() for frame in frames]
    url = "data:video/jpeg;base64," + ",".join(texts)
    assert unpack_frames(bytes(trio.run(decode_video_url, url, 10 * MOST))) == frames


def test_a_video_of_very_many_pictures_lets_others_run() -> None:
    """Such a URL of 100 kB stopped everything for six seconds."""

    async def count_turns() -> int:
        turns, url = 0, "data:video/jpeg;base64," + ",".join(["AA=="] * 20_000)

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turns)
            assert await decode_video_url(url, 1 << 20)
            nursery.cancel_scope.cancel()
        return turns

    assert trio.run(count_turns) > 200


def test_pictures_of_a_video_are_bounded_together() -> None:
    url = "data:video/jpeg;base64," + ",".join(["AAAA"] * 400)
    with pytest.raises(ValidationError, match="Image size 1002 bytes exceeds maximum allowed"):
        trio.run(decode_video_url, url, MOST)
