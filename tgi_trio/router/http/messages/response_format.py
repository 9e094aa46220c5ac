"""Builds one grammar from the form that a client asks for, in any server's notation.

| type | native `grammar`, and `response_format` | OpenAI's `response_format` |
|---|---|---|
| `json`, `json_object` | `value`: a schema, or its text | nothing more: any object; or `schema` |
| `json_schema` | `value`: `{"name", "schema"}` | `json_schema`: the same; or `schema` |
| `regex`, `lark` | `value`: text | |
| `choice` | `value`: texts | |
| `text` | | anything |
| `structural_tag` | `value`: the whole, or its text | `format`, or `structures` and `triggers` |

The fields of vLLM, SGLang and llama.cpp are in `shared_fields.py`. Only one form may be given. One
that exceeds the size limit is refused before it is processed, since that is work in Python during
which every stream would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import orjson

from tgi_trio.errors import ValidationError, naming_param
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import convert_body, invalid_value
from tgi_trio.router.http.messages.shared_fields import StructuredOutputs
from tgi_trio.router.text import grammars
from tgi_trio.router.text.gbnf import looks_like_gbnf
from tgi_trio.router.text.gbnf_lark import gbnf
from tgi_trio.router.text.structural_tags import structural_tag
from tgi_trio.router.text.tag_calls import CallPlace

_UNSUPPORTED = "grammar is not supported"  # TGI's message for a value of another kind

Builder = Callable[[str, Any, int], str]  # path of a value, the value, most bytes of the grammar
OpenAiRequest = schema.ChatRequest | schema.CompletionRequest


async def native_grammar(
    given: schema.GrammarType | None, most: int, added: Mapping[str, int]
) -> str | None:
    """Return the grammar of `parameters.grammar`, of at most `most` bytes.

    `added`: text -> id of the tokenizer's added tokens. Raises ValidationError and BodyRejected.
    """
    if given is None:
        return None
    if given.type == "structural_tag":
        return await _tag_grammar(given.value, most, added, None)
    return _BUILDERS[given.type]("parameters.grammar.value", given.value, most)


async def answer_grammar(
    request: OpenAiRequest, most: int, added: Mapping[str, int], calls: CallPlace | None = None
) -> str | None:
    """Return the grammar that an OpenAI request asks for, in any notation; at most `most` bytes.

    `added`: text -> id of the tokenizer's added tokens; `calls`: how calls of tools begin, which
    may come beside a structural tag. Raises ValidationError and BodyRejected, also if there are
    two. Grammars that take long to parse are parsed in a thread.
    """
    given = forms(request)
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name in given)
        raise ValidationError(f"{names} all say what the answer must look like: give one of them")
    ((name, value),) = given.items()
    with naming_param(name):
        if name == "response_format":
            if value.type != "structural_tag":
                return _response_grammar(value, most)
            value = _tag_fields(value)
        if name in _TAGS:
            return await _tag_grammar(value, most, added, calls)
        build = _FIELDS[name]
        if build in (_gbnf, _any_grammar):
            return await run_in_thread(partial(build, name, value, most))
        return build(name, value, most)


async def _tag_grammar(
    value: Any, most: int, added: Mapping[str, int], calls: CallPlace | None
) -> str:
    """Return the grammar of a structural tag, made in a thread. Raises ValidationError."""
    grammars.check_size(value, most)
    return await run_in_thread(partial(structural_tag, value, added, calls))


def forms(request: OpenAiRequest) -> dict[str, Any]:
    """Return the forms of the answer that a request gives, by field name.

    Raises ValidationError for what is not served.
    """
    given = dict(_structured(request.structured_outputs))
    for name in (*_FIELDS, "structural_tag"):
        if "." not in name and (value := getattr(request, name)) is not None:
            given[name] = value
    if given.get("grammar") == "":  # llama.cpp's clients send this for no grammar
        del given["grammar"]
    if request.response_format is not None and request.response_format.type != "text":
        given["response_format"] = request.response_format
    return given


def are_tags(given: Mapping[str, Any]) -> bool:
    """Return whether all of some forms, by field name, are structural tags."""
    return all(
        name in _TAGS and (name != "response_format" or value.type == "structural_tag")
        for name, value in given.items()
    )


def _structured(given: StructuredOutputs | None) -> Iterator[tuple[str, Any]]:
    """Yield the forms in `structured_outputs`, by path. Raises ValidationError."""
    if given is None:
        return
    for name, advice in _UNSERVED.items():
        if getattr(given, name) is not None:
            raise ValidationError(f"`structured_outputs.{name}` is not supported: {advice}")
    found = {
        name: getattr(given, name)
        for name in _STRUCTURED
        if getattr(given, name) not in (None, False)
    }
    if not found:
        raise ValidationError(
            "`structured_outputs` needs `json`, `regex`, `choice`, `grammar`, `json_object` or "
            "`structural_tag`"
        )
    for name, value in found.items():
        yield f"structured_outputs.{name}", value


_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Fields that hold structural tags.
_TAGS = frozenset({"response_format", "structural_tag", "structured_outputs.structural_tag"})
_UNSERVED = {
    "whitespace_pattern": "JSON has no whitespace; use `grammar` for a form of your own",
}


def _tag_fields(given: schema.ResponseFormat) -> dict[str, Any]:
    """Return a structural tag as an object of its own fields."""
    names = ("format", "structures", "triggers")
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def _response_grammar(given: schema.ResponseFormat, most: int) -> str:
    named, plain, value = given.json_schema, given.schema, given.value
    if sum(each is not None for each in (named, plain, value)) > 1:
        what = "`json_schema`, `schema` and `value` exclude one another"
        raise invalid_value("response_format", what)
    if named is not None:
        return _named_schema("response_format.json_schema", named, most)
    if plain is not None:
        if not given.type.startswith("json"):
            raise invalid_value("response_format", f"`{given.type}` takes no `schema`")
        return _schema("response_format.schema", plain, most)
    if given.type == "json_object" and value is None:
        return grammars.json_object()
    if value is None:
        wanted = "json_schema" if given.type == "json_schema" else "value"
        raise invalid_value("response_format", f"missing field `{wanted}`")
    return _BUILDERS[given.type]("response_format.value", value, most)


def _schema(path: str, value: Any, most: int) -> str:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"grammar is not valid: {error}") from error
        if not isinstance(value, dict | bool):
            raise ValidationError("grammar is not valid: a schema is an object or a boolean")
    elif not isinstance(value, dict):
        raise ValidationError(_UNSUPPORTED)
    grammars.check_size(value, most)
    return grammars.json_schema(value)


def _named_schema(path: str, value: Any, most: int) -> str:
    if not isinstance(value, dict) or "schema" not in value:
        raise invalid_value(path, "missing field `schema`")
    wanted = value["schema"]
    if not isinstance(wanted, dict | bool):
        raise ValidationError(_UNSUPPORTED)
    grammars.check_size(wanted, most)
    return grammars.json_schema(wanted)


def _any_object(path: str, value: Any, most: int) -> str:
    return grammars.json_object()


def _text(build: Callable[[str], str]) -> Builder:
    def built(path: str, value: Any, most: int) -> str:
        text = convert_body(value, str, path)
        grammars.check_size(text, most)
        return build(text)

    return built


def _choice(path: str, value: Any, most: int) -> str:
    options = convert_body(value, list[str], path)
    grammars.check_size(options, most)
    return grammars.choice(options)


def _gbnf(path: str, value: str, most: int) -> str:
    return gbnf(value)  # it limits the text itself: comments and names do not enlarge a grammar


def _any_grammar(path: str, value: str, most: int) -> str:
    """Return a grammar, parsed as vLLM does: rules with `::=` are GBNF, others Lark."""
    if looks_like_gbnf(value):
        return gbnf(value)
    grammars.check_size(value, most)
    return grammars.lark(value)


_BUILDERS: Mapping[str, Builder] = {
    "json": _schema,
    "json_object": _schema,
    "json_schema": _named_schema,
    "regex": _text(grammars.regex),
    "lark": _text(grammars.lark),
    "choice": _choice,
}

_FIELDS: Mapping[str, Builder] = {
    "structured_outputs.json": _schema,
    "structured_outputs.regex": _text(grammars.regex),
    "structured_outputs.choice": _choice,
    "structured_outputs.grammar": _any_grammar,
    "structured_outputs.json_object": _any_object,
    "guided_json": _schema,
    "guided_regex": _text(grammars.regex),
    "guided_choice": _choice,
    "guided_grammar": _any_grammar,
    "json_schema": _schema,
    "regex": _text(grammars.regex),
    "ebnf": _gbnf,
    "grammar": _gbnf,
}
