"""Images are cut out of large bodies before these are read as JSON, which takes time by the byte.

An image of megabytes is one long string without a quote in it, so that its ends are found at the
speed of memory. In its place a mark is left, `#0` for the first: no base64 has that letter. What is
left of the body is read as JSON and must have each mark once, all of them where images are taken;
otherwise the body is left whole, since something else was cut than images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from tgi_trio.router.images.data_urls import EncodedImage
from tgi_trio.router.images.image_prompt import ImagePrompt
from tgi_trio.router.images.links import ImageLink

SHORTEST: Final = 1 << 15  # bytes of a string in which images are looked for

_DATA_URL: Final = re.compile(rb"data:[\w/+.\\-]{0,60};base64,")
_DATA_KEY: Final = re.compile(rb'"data"\s{0,4}:\s{0,4}\Z')  # of a `source` in /v1/messages
_KEY_LENGTH: Final = 16  # bytes, of that
_LINK: Final = b"![]("
_MARKED_URL: Final = re.compile(r"data:[^,]*;base64,#([0-9]{1,4})")
_MARKED_LINK: Final = re.compile(r"(?<=!\[\]\()data:[^,()]*;base64,#([0-9]{1,4})(?=\))")

# Fields of a body on the way to images.
_WAYS: Final = ("instances", "messages", "input", "content")


@dataclass(frozen=True, slots=True)
class CutBody:
    """A body without its large images."""

    body: bytes
    images: tuple[EncodedImage, ...] = ()

    def restore(self, prompt: ImagePrompt) -> ImagePrompt:
        """Return a prompt whose images are those of the body."""
        if not self.images:
            return prompt
        pieces = (
            piece if isinstance(piece, str) else self._restore_link(piece)
            for piece in prompt.pieces
        )
        return ImagePrompt(tuple(pieces))

    def _restore_link(self, link: ImageLink) -> ImageLink:
        found = _MARKED_URL.fullmatch(link.url)
        if found is None or int(found[1]) >= len(self.images):
            return link
        return replace(link, encoded=self.images[int(found[1])])

    def count(self, text: str) -> int:
        """Return the characters of one of `inputs` as the client wrote it."""
        marks = (match[1] for match in _MARKED_LINK.finditer(text)) if self.images else ()
        return len(text) + sum(self.images[int(each)].length - len(each) - 1 for each in marks)

    def write_out(self, text: str) -> str:
        """Return one of `inputs` as the client wrote it, before its images are decoded."""
        if not self.images:
            return text
        return _MARKED_LINK.sub(
            lambda match: match[0].rpartition("#")[0] + self.images[int(match[1])].text(), text
        )


UNCUT: Final = CutBody(b"")


def cut_images(body: bytes | bytearray) -> CutBody:
    """Return a body without its large images; as it is where it has none."""
    pieces: list[bytes | bytearray] = []
    images: list[EncodedImage] = []
    done = 0
    for begin, end in _find_base64(body):
        pieces += [body[done:begin], b"#%d" % len(images)]
        images.append(EncodedImage(body, begin, end))
        done = end
    if not images:
        return CutBody(bytes(body))
    rest = b"".join([*pieces, body[done:]])
    try:
        marks = sorted(_find_marks(msgspec.json.decode(rest)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return CutBody(bytes(body))  # who reads it says what is wrong with it
    if marks != list(range(len(images))):
        return CutBody(bytes(body))
    return CutBody(rest, tuple(images))


def _find_base64(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what may be large images, in their order."""
    last = -1  # quote that was looked at
    place = SHORTEST
    while place < len(body):  # no string of SHORTEST bytes is between two of these places
        first = body.rfind(b'"', max(last, 0), place)
        end = body.find(b'"', place)
        if end < 0:
            return
        if first >= 0 and end - first > SHORTEST:
            yield from _find_in_string(body, first + 1, end)
        last = end
        place = (end // SHORTEST + 1) * SHORTEST


def _find_in_string(body: bytes | bytearray, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the images in what stands between two quotes."""
    url = _DATA_URL.match(body, begin, end)
    if url is not None or _DATA_KEY.search(body, max(begin - 1 - _KEY_LENGTH, 0), begin - 1):
        if body[end - 1 : end] != b"\\":  # an escape that goes on behind the quote
            yield begin if url is None else url.end(), end
        return
    while (link := body.find(_LINK, begin, end)) >= 0:
        begin = link + len(_LINK)
        url = _DATA_URL.match(body, begin, end)
        begin = begin if url is None else url.end()
        close = body.find(b")", begin, end)
        if close < 0:
            return
        if url is not None and close - begin >= SHORTEST:
            yield begin, close
        begin = close


def _find_marks(value: Any) -> Iterator[int]:
    """Yield the marks that stand where images are taken, in a body or a part of it."""
    if isinstance(value, list):
        for each in value:
            yield from _find_marks(each)
    elif isinstance(value, dict):
        for way in _WAYS:
            if isinstance(value.get(way), list | dict):
                yield from _find_marks(value[way])
        inputs, url, source = (value.get(name) for name in ("inputs", "image_url", "source"))
        for text in inputs if isinstance(inputs, list) else [inputs]:
            if isinstance(text, str):
                yield from (int(match[1]) for match in _MARKED_LINK.finditer(text))
        if isinstance(url, dict):
            url = url.get("url")
        if isinstance(source, dict) and source.get("type") == "base64":
            url = f"data:;base64,{source.get('data')}"
        if isinstance(url, str) and (found := _MARKED_URL.fullmatch(url)):
            yield int(found[1])
