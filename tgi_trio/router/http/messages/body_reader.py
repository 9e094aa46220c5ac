"""Reads bodies of requests, and fields of them, by msgspec; errors are worded as TGI's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import orjson
from msgspec import Struct

from tgi_trio.errors import name_param
from tgi_trio.router.http.messages.enum_values import say_allowed
from tgi_trio.router.http.messages.list_pieces import ListPieces
from tgi_trio.router.http.messages.problems import BodyRejected
from tgi_trio.router.http.messages.shared_fields import Json, Scheduling
from tgi_trio.router.http.messages.surrogates import mend_surrogates
from tgi_trio.router.http.messages.unserved import AnyBytes, UnservedFields
from tgi_trio.router.text.chat_template import RESERVED

Body = TypeVar("Body")

LARGE: Final = 1 << 15  # bytes of a body that is read in pieces, and beside the loop (`Call.read`)


class BodyReader:
    """Decodes bodies of one type; errors are worded as by TGI's JSON extractor.

    Halves of surrogate pairs become U+FFFD.
    """

    def __init__(self, shape: type[Body]) -> None:
        self._shape = shape
        self._decoder = msgspec.json.Decoder(shape)
        self._unserved = UnservedFields(shape) if issubclass(shape, Scheduling) else None
        self._pieces = ListPieces(shape)

    def read(self, headers: dict[bytes, bytes], body: AnyBytes, at: str = "") -> Any:
        """Return the decoded body. Raises BodyRejected (415, 400 or 422) and ValidationError.

        `at`: its place in the whole body, for errors.
        """
        if not _is_json(headers.get(b"content-type", b"")):
            raise BodyRejected(415, "Expected request with `Content-Type: application/json`")
        try:
            decoded = self._decode(body)
            if self._unserved is not None:
                self._unserved.check(body)
            return decoded
        except msgspec.ValidationError as error:
            raise BodyRejected(422, _shape_error(str(error), at, self._shape)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if (mended := mend_surrogates(body)) is not None:
                return self.read(headers, mended, at)
            raise BodyRejected(400, _SYNTAX + _syntax_error(error, bytes(body))) from error
        except RecursionError as error:
            raise BodyRejected(400, _SYNTAX + "recursion limit exceeded") from error

    def _decode(self, body: AnyBytes) -> Any:
        """Return the decoded body. Raises as msgspec's decoder does."""
        if not isinstance(body, msgspec.Raw) and len(body) >= LARGE:
            try:
                return self._pieces.decode(_FIELDS.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # of what is wrong, the whole body has the first, and its place
        return self._decoder.decode(body)


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class FirstFit:
    """Decodes a body as the first of several types that it fits."""

    def __init__(self, shapes: Mapping[str, type], needs: str) -> None:
        """`shapes`: types by a field that each must have; `needs`: the error if a body has none."""
        self._readers = {name: BodyReader(shape) for name, shape in shapes.items()}
        self._needs = needs

    def read(self, headers: dict[bytes, bytes], body: AnyBytes, at: str = "") -> Any:
        """Return the decoded body. Raises BodyRejected with the error of the intended type."""
        problem: BodyRejected | None = None
        for name, reader in self._readers.items():
            try:
                return reader.read(headers, body, at)
            except BodyRejected as error:
                if error.status != 422:
                    raise
                if f"missing required field `{name}`" not in str(error):
                    problem = problem or error
        raise problem or invalid_value(at or "body", self._needs)


_SYNTAX = "Failed to parse the request body as JSON: "
_SHAPE = "Failed to deserialize the JSON body into the target type: "


def convert_body(value: Json, shape: type[Body], path: str) -> Body:
    """Return a part of a body as `shape`. Raises BodyRejected (422) that names its `path`."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        inner = inner.rstrip("`")
        raise invalid_value(path + inner, say_allowed(what, shape, inner)) from error


def _is_json(content_type: bytes) -> bool:
    media = content_type.partition(b";")[0].strip().lower()
    kind, _, subtype = media.partition(b"/")
    return kind == b"application" and (subtype == b"json" or subtype.endswith(b"+json"))


def _syntax_error(error: Exception, body: bytes) -> str:
    """Return an error's text; msgspec's is wrong for half a surrogate pair, as for an early end.

    Of bytes that are not UTF-8 it names no place, or before 0.23 that in their string, which is
    none in the body.
    """
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
        try:
            body.decode()
        except UnicodeDecodeError as whole:
            return f"{whole.reason} of UTF-8 (byte {whole.start}: 0x{body[whole.start]:02x})"
    if "truncated" in str(error):
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError as better:
            return str(better)
    return str(error)


def _shape_error(message: str, at: str, shape: type) -> str:
    """Turn "what - at `$.path`" into "path: what", as TGI's extractor writes it."""
    what, _, path = message.partition(" - at `$")
    what = say_allowed(what, shape, path.rstrip("`"))
    path = (at + path.rstrip("`")).lstrip(".")
    return f"{_SHAPE}{path}: {what}" if path else _SHAPE + what


def read_aliases(body: Struct, *names: str) -> Any:
    """Return the value of a field that a body may give by several names; None: by none.

    Some clients send all names, with one value. Raises BodyRejected for two values, in TGI's words.
    """
    return choose_alias({name: getattr(body, name) for name in names})


def choose_alias(
    values: Mapping[str, Any], meaning: Callable[[str, Any], Any] = lambda name, value: value
) -> Any:
    """Return the one value that fields of one meaning have, by their names; None: none is given.

    `meaning`: what a field's value says, where names have values of their own. Raises BodyRejected
    where two say different things, in TGI's words.
    """
    given = {name: value for name, value in values.items() if value is not None}
    said = {name: meaning(name, value) for name, value in given.items()}
    if len(set(said.values())) > 1:
        first = next(iter(values))
        shown = " and ".join(f"`{name}` = {_show(value)}" for name, value in given.items())
        what = f"duplicate field `{first}`: {shown} are names of one field, send one of them"
        raise name_param(BodyRejected(422, _SHAPE + what), next(iter(given)))
    return next(iter(said.values()), None)


def _show(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def read_variables(given: Mapping[str, Any] | None, *fields: str) -> Mapping[str, Any]:
    """Return the template variables of `chat_template_kwargs`.

    Raises BodyRejected for one that `ChatTemplate.render` gets anyway, or that is among `fields`.
    """
    for name in given or {}:
        if name in RESERVED or name in fields:
            raise invalid_value("chat_template_kwargs", f"`{name}` has a field of its own")
    return given or {}


def invalid_value(path: str, what: str) -> BodyRejected:
    """Return the error for a field whose value has the wrong type."""
    return BodyRejected(422, f"{_SHAPE}{path}: {what}")
