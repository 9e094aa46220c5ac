"""Images as they come: in blocks of memory that is used again, read where images are decoded."""

from __future__ import annotations

import base64
import binascii
import json
import os
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.errors import GenerationError, ValidationError
from tgi_trio.media import image_names
from tgi_trio.media.image_names import ImageNames, read_quoted
from tgi_trio.media.image_text import BLOCK, INVALID, decode_quoted, start_key
from tgi_trio.router.media import spool as spool_module
from tgi_trio.router.media.spool import EncodedImage, Spool, keeping


@pytest.fixture
def spool() -> Iterator[Spool]:
    spool = Spool()
    yield spool
    spool.close()


def read_blocks(fd: int, blocks: list[int], length: int) -> bytes:
    """What a process that decodes reads."""
    quoted = read_quoted(fd, blocks, length)
    assert quoted[:1] == quoted[-1:] == b'"'
    return bytes(quoted[1:-1])


def spooled(spool: Spool, written: bytes, *ends: int) -> EncodedImage:
    image = EncodedImage(spool)
    for begin, end in pairwise([0, *ends, len(written)]):
        image.append(written[begin:end])
    return image


def test_images_are_read_as_they_came_wherever_their_pieces_end(spool: Spool) -> None:
    random.seed(0)
    texts = [random.randbytes(size) for size in (1, BLOCK, 3 * BLOCK + 5, 2 * BLOCK - 1)]
    images = [
        spooled(spool, text, *sorted(random.sample(range(len(text)), min(len(text), 7))))
        for text in texts
    ]
    assert len({block for image in images for block in image.blocks}) == 8 == spool.used
    for text, image in zip(texts, images, strict=True):
        assert image.written() == text == read_blocks(spool.fd, image.blocks, image.length)


def test_images_are_written_where_they_stay(spool: Spool) -> None:
    """Also to blocks that are no neighbours; what is behind an end is cut off again."""
    others = [spooled(spool, bytes(BLOCK)) for _ in range(12)]
    for each in others[::3]:
        each.let_go()
    text = random.Random(1).randbytes(7 * BLOCK + 9).replace(b'"', b"_")
    image = spooled(spool, text[:5])
    room = image.room(9 * BLOCK)
    assert len(room) > 1 and sum(map(len, room)) == 9 * BLOCK
    rest = text[5:] + b'"behind"'
    for view in room:
        with view:
            part, rest = rest[: len(view)], rest[len(view) :]
            view[: len(part)] = part
    image.fill(len(text) - 5 + len(b'"behind"'))
    assert len(image.blocks) == 8, "nothing is kept but what was written"
    assert image.find(b'"', 5) == len(text) and image.find(b'"', len(text) + 1) == len(text) + 7
    assert image.find(b"\n", image.length) == -1
    assert image.cut_off(len(text)) == b'"behind"'
    assert image.written() == text == read_blocks(spool.fd, image.blocks, image.length)
    assert image.written(len(text) - 3) == text[-3:]
    spool.take(200)  # none of the views holds the memory where it is


def test_blocks_are_used_again_once_nobody_keeps_the_image(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "_GROWTH", 4)
    monkeypatch.setattr(spool_module, "_KEPT", 8)
    kept = spooled(spool, b"kept" * BLOCK)
    blocks = set(kept.blocks)
    for number in range(40):
        written = b"%d" % number * BLOCK * 2
        one = spooled(spool, written)
        assert one.written() == written and not blocks & set(one.blocks)
        one.let_go()
    assert kept.written() == b"kept" * BLOCK and spool.nbytes <= 12 * BLOCK
    kept.let_go()
    assert not spool.used
    many = spooled(spool, bytes(30 * BLOCK))
    assert os.fstat(spool.fd).st_size == spool.nbytes >= 30 * BLOCK
    many.let_go()
    spooled(spool, b"x")  # what was needed once is given back with the next
    assert os.fstat(spool.fd).st_size == spool.nbytes == 8 * BLOCK


def test_an_image_stays_as_long_as_anybody_keeps_it(spool: Spool) -> None:
    image = spooled(spool, b"text")
    with keeping(b"bytes"), keeping(image):
        image.let_go()  # its request has ended
        assert spool.used == 1 and image.written() == b"text"
    assert not spool.used and not image.blocks
    with pytest.raises(GenerationError, match="the client has left"), keeping(image):
        pass
    with pytest.raises(RuntimeError, match="more often than it is kept"):
        image.let_go()


@pytest.mark.parametrize(
    "letters", [{}, {"/": "\\/"}, {"+": "\\u002B", "/": "\\u002f", "=": "\\u003d"}]
)
def test_base64_is_read_as_any_json_writer_escapes_it(
    spool: Spool, letters: dict[str, str]
) -> None:
    data = random.Random(0).randbytes(150_001)
    written = base64.b64encode(data).decode()
    for letter, escaped in letters.items():
        written = written.replace(letter, escaped)
    image = spooled(spool, written.encode(), 1, 77)
    assert image.text() == base64.b64encode(data).decode()
    assert decode_quoted(b'"%b"' % image.written(), len(data)) == data
    assert image.length == len(written)
    with pytest.raises(ValueError, match="exceeds maximum allowed size of 150000 bytes"):
        decode_quoted(b'"%b"' % image.written(), 150_000)
    with pytest.raises(ValueError, match="Image size 150003 bytes exceeds"):
        decode_quoted(b'"%b"' % image.written(), 1000)


def test_a_text_that_has_come_before_is_not_decoded_again(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is that of its bytes, however it is escaped, and of how they are processed."""
    decoded: list[int] = []

    def decode(quoted: bytearray, most: int) -> bytes:
        decoded.append(len(quoted))
        return decode_quoted(quoted, most)

    monkeypatch.setattr(image_names, "decode_quoted", decode)
    monkeypatch.setattr(image_names, "_REMEMBERED", 3)
    names, others = ImageNames("{}"), ImageNames('{"a": 1}')
    datas = [random.Random(i).randbytes(1000 + i) for i in range(4)]

    def name(data: bytes, by: ImageNames = names, most: int = 2000) -> tuple[str, int]:
        written = base64.b64encode(data).replace(b"/", b"\\/" if len(data) % 2 else b"/")
        image = spooled(spool, written)
        try:
            return by.name(read_quoted(spool.fd, image.blocks, image.length), most)
        finally:
            image.let_go()

    for data in datas[:3]:
        key = start_key("{}")
        key.update(data)
        assert name(data) == name(data) == (key.hexdigest(), len(data))
    assert len(decoded) == 3
    assert name(datas[0], others)[0] != name(datas[0])[0] and len(decoded) == 4
    with pytest.raises(ValueError, match="Image size 1000 bytes exceeds"):
        name(datas[0], most=900)
    name(datas[3])  # the second one has waited longest
    assert len(decoded) == 5
    assert name(datas[0])[1] == 1000 and len(decoded) == 5
    assert name(datas[1])[1] == 1001 and len(decoded) == 6


BROKEN = [b"AA\\", b"AA\\qA", b"AA\nA", b"AA\xffA", b"A\\ud800A", b'AA"A', b"AA\\\\u0041A"]


@pytest.mark.parametrize("written", BROKEN)
def test_what_json_does_not_escape_so_is_no_base64(spool: Spool, written: bytes) -> None:
    with pytest.raises(ValueError, match=INVALID):
        decode_quoted(b'"%b"' % written, 1000)
    if written.startswith(b"AA\\q"):
        with pytest.raises(ValidationError, match=INVALID):
            spooled(spool, written).text()


@given(st.text(alphabet="AZaz09+/= \\u003d\n-_", max_size=13))
def test_base64_is_what_the_standard_library_takes_for_it(text: str) -> None:
    """`binascii`, where it is strict, save that it lets `=` stand behind whole groups."""
    written = json.dumps(text).encode()[1:-1]
    try:
        expected: bytes | None = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        expected = None
    if len(text) % 4 or text.endswith("==="):
        expected = None
    try:
        found: bytes | None = decode_quoted(b'"%b"' % written, 1000)
    except ValueError as error:
        assert str(error) == INVALID
        found = None
    assert found == expected
