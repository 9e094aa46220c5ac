"""Builds one grammar text, in llguidance's format, from what a client asks for.

Every builder returns what `validation.GenerateParameters.grammar` takes and the wire's `grammar`
column carries to the shard. Nothing is compiled here. JSON is compact: no white space is allowed
between its parts, so that a model cannot go on with spaces and newlines for ever.

Source of the formats: llguidance's docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher

from tgi_trio.errors import GrammarError, ValidationError
from tgi_trio.router.text.closing import close_objects
from tgi_trio.router.text.exclusions import replace_exclusions
from tgi_trio.router.text.implied_types import say_types

Schema = dict[str, Any] | bool
_TOO_DEEP = "grammar is not valid: the schema nests too deeply"

_COMPACT = {"whitespace_flexible": False}
_OPTIONS = "x-guidance"  # the key of a schema for options of llguidance's compiler


def check_size(given: Any, most: int) -> None:
    """Raise GrammarError for more than `most` bytes (`--max-grammar-bytes`) of text or JSON.

    Both what a client sends and the grammar made of it are checked. Raises ValidationError for JSON
    that nests too deeply.
    """
    try:
        size = len(given.encode() if isinstance(given, str) else msgspec.json.encode(given))
    except RecursionError as error:
        raise ValidationError(_TOO_DEEP) from error
    if size > most:
        raise GrammarError(
            f"grammar is not valid: it has {size} bytes, {most} are allowed (--max-grammar-bytes)"
        )


def json_schema(schema: Schema) -> str:
    """Return the grammar of compact JSON that is valid for `schema` (draft 2020-12).

    Properties come in the schema's order, and only those that it lists (`closing.py`). What lists
    some and has no type is an object (`implied_types.py`). `not` leaves out values and types
    (`exclusions.py`). Raises ValidationError for a schema that nests too deeply, that cannot be
    closed, or whose `not` says something else.
    """
    return _dumps({"grammars": [{"json_schema": _compact(schema)}]})


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return the grammar of texts that match `pattern` as a whole.

    The syntax is that of Rust's `regex` crate: no look-around, no backreferences. Anchors have no
    effect.
    """
    return LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    """Return the grammar of exactly one of `options`. Raises ValidationError if there is none."""
    if not options:
        raise ValidationError("grammar is not valid: a choice needs at least one option")
    return lark("start: " + " | ".join(map(literal, options)))


def lark(text: str) -> str:
    """Return the grammar for a text in llguidance's dialect of Lark; its first rule is `start`.

    Special tokens are written `<|name|>` or `<[id]>`, JSON as `embedded(schema)`.
    """
    return _dumps({"grammars": [{"lark_grammar": text}]})


def embed_schema(schema: Schema) -> str:
    """Return a term for compact JSON that is valid for `schema`, for use in a Lark rule."""
    return f"%json {_dumps(_compact(schema))}"


def literal(text: str) -> str:
    """Return `text` as a string literal of a Lark rule."""
    return _dumps(text).replace("\x7f", "\\u007f")  # JSON allows it in strings, Lark does not


def _compact(schema: Schema) -> Schema:
    """Return a schema with types and closed objects, and llguidance's option for no white space."""
    if schema is True:
        schema = {}
    elif schema is False:
        raise ValidationError("grammar is not valid: the schema `false` allows nothing")
    try:
        left = replace_exclusions(close_objects(say_types(schema)))
    except RecursionError as error:
        raise ValidationError(_TOO_DEEP) from error
    return {**left, _OPTIONS: _COMPACT}


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise ValidationError(_TOO_DEEP) from error
