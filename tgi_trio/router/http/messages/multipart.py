"""Forms with a file, as browsers and OpenAI's clients send them: multipart/form-data (RFC 7578)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Final

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import (
    Data,
    Epilogue,
    Event,
    Field,
    File,
    MultipartDecoder,
    NeedData,
)

from tgi_trio.errors import TgiTrioError, ValidationError, name_param
from tgi_trio.router.http.messages.problems import BodyRejected

_MOST_PARTS: Final = 64
_MOST_TEXT: Final = 1 << 16  # bytes of a field that is no file
_SHOWN: Final = 60  # most characters of a field's name in an error
# Bytes that the decoder is given at a time: each call holds the interpreter (GIL). Of megabytes at
# once it would search all again and again, which takes ten times as long.
_PIECE: Final = 1 << 14
_LONGEST_HEAD: Final = 2 * _PIECE  # bytes of a part's head, or before the first part
_TOO_MUCH: Final = (
    f"it has more than {_MOST_PARTS} parts, or a head of more than {_LONGEST_HEAD} bytes"
)


def wrong_field(name: str, what: str) -> TgiTrioError:
    """Return the error for a field of a form."""
    return name_param(ValidationError(f"`{name[:_SHOWN]}` {what}"), name[:_SHOWN])


class FormData:
    """The fields of a form, each of them once; of a list the last one."""

    def __init__(self, fields: Mapping[str, str], files: Mapping[str, bytes]) -> None:
        """`files` by the names of their fields, not of the files."""
        self.fields = fields
        self.files = files

    def refuse_others(self, known: Collection[str], advice: Mapping[str, str]) -> None:
        """Raise ValidationError for a field that is none of these.

        `advice`: what to do without those that others read.
        """
        for given in (*self.fields, *self.files):
            name = given.partition("[")[0]  # a list or an object has fields of that name
            if name in advice:
                raise wrong_field(name, f"is not supported: {advice[name]}")
            if given not in known:
                raise wrong_field(
                    name, f"is not read, only {', '.join(f'`{each}`' for each in known)}"
                )


def read_form(headers: Mapping[bytes, bytes], body: bytes | bytearray | memoryview) -> FormData:
    """Return the form in a body; it may have megabytes, which take a few milliseconds each.

    Raises BodyRejected (415 for another content type) and ValidationError.
    """
    kind, options = parse_options_header(headers.get(b"content-type", b"").decode("latin-1"))
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise BodyRejected(
            415, "Expected request with `Content-Type: multipart/form-data` and a boundary"
        )
    mark = boundary.encode("latin-1", "replace")
    decoder = MultipartDecoder(mark, _LONGEST_HEAD, max_parts=_MOST_PARTS)
    try:
        return _collect(_decode(decoder, _cut(bytes(body), b"--" + mark)))
    except (ValueError, RequestEntityTooLarge) as error:
        why = _TOO_MUCH if isinstance(error, RequestEntityTooLarge) else error
        raise BodyRejected(400, f"Failed to parse the form in the body: {why}") from error


def _cut(body: bytes, mark: bytes) -> Iterator[bytes]:
    """Yield a body in pieces, none of which ends in a line behind `mark`, which ends a part.

    Of such a piece the decoder would take the end of the line before for data.
    """
    start = 0
    while start < len(body):
        end = start + _PIECE
        found = body.rfind(mark, max(0, start - len(mark)), end)
        if found >= 0 and body.find(b"\n", found + len(mark), end) < 0:
            end = body.find(b"\n", found + len(mark)) + 1 or len(body)
        yield body[start:end]
        start = end


def _decode(decoder: MultipartDecoder, pieces: Iterator[bytes]) -> Iterator[Event]:
    """Yield the parts of a body, each with its head before its data.

    Raises ValueError and RequestEntityTooLarge.
    """
    for piece in chain(pieces, (None,)):
        decoder.receive_data(piece)
        while not isinstance(event := decoder.next_event(), Epilogue | NeedData):
            yield event


def _collect(events: Iterator[Event]) -> FormData:
    """Return the form of which these are the parts.

    Raises what `events` does, ValueError for a text that is not UTF-8, and ValidationError for a
    field twice.
    """
    fields: dict[str, str] = {}
    files: dict[str, bytes] = {}
    name, is_file, parts = "", False, bytearray()
    for event in events:
        if isinstance(event, Field | File):
            name, is_file, parts = event.name or "", isinstance(event, File), bytearray()
            if (name in fields and not name.endswith("[]")) or name in files:
                raise wrong_field(name, "stands in the form twice")
        elif isinstance(event, Data):
            parts += event.data
            if not is_file and len(parts) > _MOST_TEXT:
                raise wrong_field(name, f"has more than {_MOST_TEXT} bytes")
            if not event.more_data and is_file:
                files[name] = bytes(parts)
            elif not event.more_data:
                fields[name] = parts.decode("utf-8")
    return FormData(fields, files)
