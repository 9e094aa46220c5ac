"""Cuts large media out of bodies as they arrive, so that they are never in memory as one piece.

An image, a video or a sound of megabytes is one long string without a quote in it, so its end is
found at the speed of memory, in whatever pieces it arrives. The image goes to the spool, and a mark
takes its place, `#0` for the first: `#` does not occur in base64. The rest of the body is parsed as
JSON. It must contain each mark once, all of them where images are taken, and no mark that the
client wrote. Otherwise something other than images was cut out, and the body is restored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from tgi_trio.router.media.image_prompt import ImagePrompt
from tgi_trio.router.media.links import MediaLink, split_text, to_audio_link
from tgi_trio.router.media.spool import EncodedImage, Spool

SHORTEST: Final = 1 << 15  # bytes; shorter base64 stays in the body
BEGINNINGS: Final = 512  # most possible beginnings examined in a body, each in microseconds

# An image begins after the header of a data URL, which is a whole string or in a Markdown link, or
# it is the value of the key `data`, as in a `source` of /v1/messages. Only these markers are
# searched for; the rest is matched around them.
_MARKER: Final = b";base64,"
_KEY: Final = b'"data"'
_HEADER: Final = rb"data:[\w/+.\\-]{0,60};base64,"
_URL: Final = re.compile(rb'(?:"|!\[\]\()' + _HEADER + rb"\Z")
_VALUE: Final = re.compile(rb'"data"\s{0,4}:\s{0,4}"(' + _HEADER + rb")?")
_LONGEST_URL: Final = 77  # most bytes that `_URL` matches
_LONGEST_VALUE: Final = 89  # most bytes that `_VALUE` matches
_MARKED_URL: Final = re.compile(r"data:[^,]*;base64,#([0-9]{1,4})")
_MARKED_DATA: Final = re.compile(r"\A(?:data:[^,]*;base64,)?#[0-9]{1,4}\Z")
_MARKED_LINK: Final = re.compile(r"(?<=!\[\]\()data:[^,()]*;base64,#([0-9]{1,4})(?=\))")

# Fields of a body that lead to images.
_WAYS: Final = ("instances", "messages", "input", "content")


@dataclass(frozen=True, slots=True)
class CutBody:
    """A body without its large images."""

    body: bytes | bytearray | memoryview
    images: tuple[EncodedImage, ...] = ()

    def restore(self, prompt: ImagePrompt) -> ImagePrompt:
        """Return a prompt with the body's images in place of their marks."""
        if not self.images:
            return prompt
        pieces = (
            piece if isinstance(piece, str) else self._restore_link(piece)
            for piece in prompt.pieces
        )
        return ImagePrompt(tuple(pieces))

    def _restore_link(self, link: MediaLink) -> MediaLink:
        found = _MARKED_URL.fullmatch(link.url)
        if found is None or int(found[1]) >= len(self.images):
            return link
        return replace(link, encoded=self.images[int(found[1])])

    def count(self, text: str) -> int:
        """Return the number of characters of one of `inputs` as the client wrote it."""
        marks = (match[1] for match in _MARKED_LINK.finditer(text)) if self.images else ()
        return len(text) + sum(self.images[int(each)].length - len(each) - 1 for each in marks)

    def write_out(self, text: str) -> str:
        """Return one of `inputs` as the client wrote it, with its images in base64."""
        return _MARKED_LINK.sub(self._write_base64, text) if self.images else text

    def write_url(self, url: str) -> str:
        """Return the URL of an image as the client wrote it."""
        return _MARKED_URL.sub(self._write_base64, url) if self.images else url

    def write_data(self, data: str) -> str:
        """Return base64, or a data URL, as the client wrote it."""
        return _MARKED_DATA.sub(self._write_base64, data) if self.images else data

    def _write_base64(self, match: re.Match[str]) -> str:
        """Return what a match stands for: its last part is the mark of an image of the body."""
        before, _, mark = match[0].rpartition("#")
        return before + self.images[int(mark)].text()


UNCUT: Final = CutBody(b"")


class BodyCutter:
    """Takes a body in pieces of any size.

    A context manager, entered by the handler of the body. When it is left, the images are released,
    unless something else keeps them.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._rest = bytearray()  # the body, with marks in place of its images
        self._seen = 0  # bytes of `_rest` in which no image begins
        self._beginnings = 0  # number of beginnings that led to no large image
        self._open: _OpenImage | None = None
        self._images: list[EncodedImage] = []
        self._places: list[int] = []  # positions of the marks in `_rest`

    def __enter__(self) -> BodyCutter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
        self._let_go()

    def feed(self, piece: bytes) -> None:
        """Take the next bytes."""
        while piece:
            if self._open is None:
                piece = self._read_text(piece)
            else:
                piece = self._read_image(self._open, piece)

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` of the next bytes, as `EncodedImage.room` does.

        Empty outside of images: then the bytes are to be passed to `feed`.
        """
        return [] if self._open is None else self._open.room(most)

    def fill(self, count: int) -> None:
        """Take note of bytes that were written to `room`."""
        if self._open is None:
            raise RuntimeError("no image has begun")
        rest = self._open.fill(count)
        if rest:
            self._close(self._open, rest[:1])
            self.feed(rest)

    def finish(self) -> CutBody:
        """Return the complete body; unchanged if it has no large images."""
        if self._open is not None:  # parsing will report the missing end
            self._close(self._open, b"")
        if not self._images:
            return CutBody(self._rest)
        try:
            marks = sorted(_find_marks(msgspec.json.decode(self._rest)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._restore()  # parsing will report the error
        if marks != list(range(len(self._images))) or self._has_typed_marks():
            return self._restore()
        return CutBody(self._rest, tuple(self._images))

    def _has_typed_marks(self) -> bool:
        """Return whether the client wrote a mark where an image is taken."""
        signs = self._rest.count(b"#") + self._rest.count(rb"\u0023")
        if signs == len(self._images):
            return False
        without = self._fill_places([b""] * len(self._images))
        return next(_find_marks(msgspec.json.decode(without)), None) is not None

    def _restore(self) -> CutBody:
        """Return the body as it arrived."""
        body = self._fill_places([image.written() for image in self._images])
        self._let_go()
        return CutBody(body)

    def _fill_places(self, fillings: Sequence[bytes | bytearray]) -> bytes:
        """Return the body with `fillings` in place of the marks."""
        parts: list[bytes | bytearray] = []
        done = 0
        for i, (place, filling) in enumerate(zip(self._places, fillings, strict=True)):
            parts += [self._rest[done:place], filling]
            done = place + len(b"#%d" % i)
        return b"".join([*parts, self._rest[done:]])

    def _let_go(self) -> None:
        while self._images:
            self._images.pop().let_go()

    def _read_text(self, piece: bytes) -> bytes:
        """Take text up to the possible beginning of an image, and return the bytes after that."""
        self._rest += piece
        found = self._find_begin()
        if found is None:
            return b""
        begin, in_link = found
        behind = bytes(self._rest[begin:])
        del self._rest[begin:]
        self._open = _OpenImage(self._spool, in_link)
        return behind

    def _find_begin(self) -> tuple[int, bool] | None:
        """Return where in the text a possibly large image begins, and whether in a link.

        None if none is known. Each byte is examined a bounded number of times, however many
        beginnings of something small there are; after `BEGINNINGS` of these, nothing is searched
        for any more.
        """
        rest, seen = self._rest, self._seen
        if self._beginnings == BEGINNINGS:
            return None
        marker, key = rest.find(_MARKER, seen), rest.find(_KEY, seen)
        while marker >= 0 or key >= 0:
            found: tuple[int, bool] | None = None
            if key < 0 or 0 <= marker < key:
                seen = marker + len(_MARKER)
                if url := _URL.search(rest, max(seen - _LONGEST_URL, 0), seen):
                    found = seen, url[0][:1] != b'"'
            else:
                value = _VALUE.match(rest, key)
                if (value is None or value[1] is None) and len(rest) - key < _LONGEST_VALUE:
                    self._seen = key  # more of it has to arrive
                    return None
                seen = key + len(_KEY)
                if value is not None:
                    found = value.end(), False
            if found is not None:
                end = _find_end(rest, *found)
                if end < 0 or end - found[0] >= SHORTEST:
                    return found
                seen = end
            self._beginnings += 1
            if self._beginnings == BEGINNINGS:
                return None
            if 0 <= marker < seen:
                marker = rest.find(_MARKER, seen)
            if 0 <= key < seen:
                key = rest.find(_KEY, seen)
        self._seen = max(seen, len(rest) - len(_MARKER) + 1)
        return None

    def _read_image(self, open_image: _OpenImage, piece: bytes) -> bytes:
        """Take the bytes of the open image, and return the bytes after it."""
        end = _find_end(piece, 0, open_image.in_link)
        if end < 0:
            open_image.append(piece)
            return b""
        open_image.append(piece[:end])
        self._close(open_image, piece[end : end + 1])
        return piece[end:]

    def _close(self, open_image: _OpenImage, ending: bytes) -> None:
        """Put a mark in place of an image, or its bytes if it is not one."""
        image = open_image.cut(ending)
        if image is None:
            self._rest += open_image.written()
            open_image.close()
        else:
            self._places.append(len(self._rest))
            self._rest += b"#%d" % len(self._images)
            self._images.append(image)
        self._seen = len(self._rest)
        self._open = None


class _OpenImage:
    """What may be an image, as far as it has arrived."""

    def __init__(self, spool: Spool, in_link: bool) -> None:
        self.in_link = in_link
        self._spool = spool
        self._first = bytearray()  # the first bytes, until it is known to be large
        self._image: EncodedImage | None = None

    def append(self, piece: bytes) -> None:
        """Take the next bytes."""
        if self._image is not None:
            self._image.append(piece)
            return
        self._first += piece
        if len(self._first) >= SHORTEST:
            self._image = EncodedImage(self._spool)
            self._image.append(self._first)
            self._first.clear()

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` of the next bytes; empty while the image is small."""
        return [] if self._image is None else self._image.room(most)

    def fill(self, count: int) -> bytes:
        """Take note of bytes written to `room`; return those from the end of the image on."""
        image = self._image
        if image is None:
            raise RuntimeError("it has no room yet")
        begin = image.length
        image.fill(count)
        ends = [image.find(b'"', begin)]
        if self.in_link:
            ends.append(image.find(b")", begin))
        end = min((each for each in ends if each >= 0), default=image.length)
        return image.cut_off(end)

    def cut(self, ending: bytes) -> EncodedImage | None:
        """Return the image; None if it is small or `ending` is not the end of one."""
        image = self._image
        if image is None or ending != (b")" if self.in_link else b'"'):
            return None
        # An escaped quote does not end the string.
        return None if not self.in_link and image.written(image.length - 1) == b"\\" else image

    def written(self) -> bytes | bytearray:
        """Return the bytes that have arrived."""
        return self._first if self._image is None else self._image.written()

    def close(self) -> None:
        """Release its part of the spool: it is not an image."""
        if self._image is not None:
            self._image.let_go()


def _find_end(text: bytes | bytearray, begin: int, in_link: bool) -> int:
    """Return the end of what begins at `begin`; negative if it has not arrived."""
    quote = text.find(b'"', begin)
    if not in_link:
        return quote
    close = text.find(b")", begin, quote if quote >= 0 else len(text))
    return close if close >= 0 else quote


def _find_marks(value: Any) -> Iterator[int]:
    """Yield the marks where images are taken, in a body or a part of it."""
    if isinstance(value, list):
        for each in value:
            yield from _find_marks(each)
    elif isinstance(value, dict):
        for way in _WAYS:
            if isinstance(value.get(way), list | dict):
                yield from _find_marks(value[way])
        inputs, url, source = (value.get(name) for name in ("inputs", "image_url", "source"))
        others = [value.get(name) for name in ("video_url", "audio_url")]
        urls = [
            piece.url
            for text in (inputs if isinstance(inputs, list) else [inputs])
            if isinstance(text, str)
            for piece in split_text(text)
            if isinstance(piece, MediaLink)
        ]
        if isinstance(url, dict):
            url = url.get("url")
        others = [each.get("url") if isinstance(each, dict) else each for each in others]
        audio = value.get("input_audio")
        if isinstance(audio, dict) and isinstance(audio.get("data"), str):
            others.append(to_audio_link(audio["data"], "").url)
        if isinstance(source, dict) and source.get("type") == "base64":
            url = f"data:;base64,{source.get('data')}"
        for each in [*urls, url, *others]:
            if isinstance(each, str) and (found := _MARKED_URL.fullmatch(each)):
                yield int(found[1])
