"""Forms with a file, as browsers and OpenAI's clients send them: multipart/form-data (RFC 7578)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from tgi_trio.errors import TgiTrioError, ValidationError, name_param
from tgi_trio.router.http.messages.problems import BodyRejected

_MOST_PARTS: Final = 64
_MOST_TEXT: Final = 1 << 16  # bytes of a field that is no file
_SHOWN: Final = 60  # most characters of a field's name in an error


def wrong_field(name: str, what: str) -> TgiTrioError:
    """Return the error for a field of a form."""
    return name_param(ValidationError(f"`{name[:_SHOWN]}` {what}"), name[:_SHOWN])


class Form:
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


def read_form(headers: Mapping[bytes, bytes], body: bytes | bytearray) -> Form:
    """Return the form in a body. Raises BodyRejected (415 for another content type) and
    ValidationError."""
    kind, options = parse_options_header(headers.get(b"content-type", b"").decode("latin-1"))
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise BodyRejected(
            415, "Expected request with `Content-Type: multipart/form-data` and a boundary"
        )
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), max_parts=_MOST_PARTS)
    try:
        return _collect(decoder, body)
    except (ValueError, RequestEntityTooLarge) as error:
        raise BodyRejected(400, f"Failed to parse the form in the body: {error}") from error


def _collect(decoder: MultipartDecoder, body: bytes | bytearray) -> Form:
    """Return the parts of a body; raises ValueError, and ValidationError for a field twice."""
    fields: dict[str, str] = {}
    files: dict[str, bytes] = {}
    decoder.receive_data(bytes(body))
    decoder.receive_data(None)
    name, is_file, parts = "", False, bytearray()
    while not isinstance(event := decoder.next_event(), Epilogue | NeedData):
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
    return Form(fields, files)
