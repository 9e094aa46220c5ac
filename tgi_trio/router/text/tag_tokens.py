"""Formats of tokens in structural tags, as the formats of texts that they stand for.

A token is one of the tokenizer's added tokens, by its text or its id. Where it begins or ends a
tag, or may not come in free text, its text counts like the token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from tgi_trio.errors import ValidationError
from tgi_trio.router.text.tag_fields import (
    below,
    number_places,
    read_list,
    refuse_fields,
)

Given = Mapping[str, Any]
Added = Mapping[str, int]

_DEEPEST: Final = 64


def read_token(given: Any, path: str, added: Added) -> str:
    """Return the text of an added token, which is given by it or by its id.

    `added`: text -> id of the tokenizer's added tokens. Raises ValidationError for any other.
    """
    for text, id in added.items():
        if type(given) in (str, int) and given in (text, id):
            return text
    raise ValidationError(
        f"`{path}` must be one of the tokenizer's added tokens, by its text or its id: others are "
        "read as the texts that they are, by `const_string`"
    )


def to_texts(given: Any, path: str, added: Added, depth: int = 0) -> Any:
    """Return a format, and those inside it, with the texts of tokens in their place.

    What is no format stays as it is. Raises ValidationError.
    """
    if not isinstance(given, dict):
        return given
    if depth > _DEEPEST:
        raise ValidationError(f"the structural tag nests deeper than {_DEEPEST} formats")
    form = dict(given)
    if (convert := _CONVERSIONS.get(str(form.get("type")))) is not None:
        form = dict(convert(form, path, added))
    for name in ("begin", "end"):
        if name in form:
            form[name] = _read_mark(form[name], below(path, name), added)
    if "content" in form:
        form["content"] = to_texts(form["content"], below(path, "content"), added, depth + 1)
    for name in ("elements", "tags"):
        if isinstance(form.get(name), list):
            places = number_places(form[name], path, name)
            form[name] = [to_texts(each, at, added, depth + 1) for each, at in places]
    if isinstance(form.get("rules"), list):
        places = number_places(form["rules"], path, "rules")
        form["rules"] = [
            [each[0], to_texts(each[1], f"{at}[1]", added, depth + 1)] if _is_rule(each) else each
            for each, at in places
        ]
    return form


def _read_mark(given: Any, path: str, added: Added) -> Any:
    """Return the begin or the end of a tag; the text of a token, where it is one."""
    if isinstance(given, dict) and given.get("type") == "token":
        return read_token(given.get("token"), below(path, "token"), added)
    return given


def _is_rule(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2


def _any_tokens(form: Given, path: str, added: Added) -> Given:
    refuse_fields(form, path, ("max_tokens",))
    return {"type": "any_text", "excludes": list(_excluded(form, path, added))}


def _triggered_tags(form: Given, path: str, added: Added) -> Given:
    places = number_places(read_list(form, "trigger_tokens", path), path, "trigger_tokens")
    triggers = [read_token(each, at, added) for each, at in places]
    given = {"triggers": triggers, "excludes": list(_excluded(form, path, added))}
    return {**form, **given, "type": "triggered_tags"}


def _dispatch(form: Given, path: str, added: Added) -> Given:
    rules = []
    for each, at in number_places(read_list(form, "rules", path), path, "rules"):
        if not _is_rule(each):
            raise ValidationError(f"`{at}` must be a token and a format")
        rules.append([read_token(each[0], f"{at}[0]", added), each[1]])
    given = {"rules": rules, "excludes": list(_excluded(form, path, added))}
    return {**form, **given, "type": "dispatch"}


def _excluded(form: Given, path: str, added: Added) -> Iterator[str]:
    given = form.get("exclude_tokens") or []
    at = below(path, "exclude_tokens")
    if not isinstance(given, list):
        raise ValidationError(f"`{at}` must be a list of tokens")
    for i, each in enumerate(given):
        yield read_token(each, f"{at}[{i}]", added)


_CONVERSIONS: Final[Mapping[str, Callable[[Given, str, Added], Given]]] = MappingProxyType(
    {
        "any_tokens": _any_tokens,
        "token_triggered_tags": _triggered_tags,
        "token_dispatch": _dispatch,
    }
)
TOKEN_FORMATS: Final = tuple(_CONVERSIONS)
