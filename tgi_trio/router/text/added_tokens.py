"""Tokens that files beside tokenizer.json add to its vocabulary, or give a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class AddedTokenSpec:
    """An entry of `added_tokens_decoder`, or a special token known only by its text."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def text_of(token: Any) -> str | None:
    """Return the text of a token given as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _decoder_entries(config: Mapping[str, Any]) -> list[AddedTokenSpec]:
    entries = config.get("added_tokens_decoder") or {}
    fields = ("special", "lstrip", "rstrip", "single_word", "normalized")
    for entry in entries.values():
        expect_text("an added token", entry["content"])
    return [
        AddedTokenSpec(entry["content"], **{name: bool(entry.get(name, False)) for name in fields})
        for _, entry in sorted(entries.items(), key=lambda item: int(item[0]))
    ]


def list_added_tokens(
    config: Mapping[str, Any], older: Mapping[str, Any], ids: Mapping[str, Any]
) -> tuple[AddedTokenSpec, ...]:
    """Return the tokens that files beside tokenizer.json add to its vocabulary.

    `config`: tokenizer_config.json; `older`: special_tokens_map.json; `ids`: added_tokens.json.
    Those of the latter two count where the first has no list, as in transformers. Raises TypeError
    and KeyError for what is no token.
    """
    if config.get("added_tokens_decoder"):
        return (*_decoder_entries(config), *_extra_special(config))
    extra = _extra_special(config, older)
    named = (config.get(name, older.get(name)) for name in NAMED_TOKENS)
    special = {spec.content for spec in extra}.union(filter(None, map(text_of, named)))
    for text, number in ids.items():
        if not isinstance(number, int):
            raise TypeError(f"added_tokens.json has {number!r} for the id of {text!r}")
    own = [
        AddedTokenSpec(text, special=text in special, normalized=text not in special)
        for text in sorted(ids, key=lambda text: int(ids[text]))
    ]
    return (*own, *extra)


def name_own_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens for which only this model has a role, such as `image_token`.

    As in transformers, its chat template may write them by these names.
    """
    named = {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and key not in NAMED_TOKENS
    }
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, Mapping) else {}
    return {name: text for name, value in named.items() if (text := text_of(value))}


def _extra_special(*configs: Mapping[str, Any]) -> list[AddedTokenSpec]:
    """Return the special tokens without a role, by their keys before and since version 5."""
    found: dict[str, AddedTokenSpec] = {}
    for config in configs:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = config.get(key) or []
            values = tokens.values() if isinstance(tokens, Mapping) else tokens
            for text in filter(None, map(text_of, values)):
                found[text] = AddedTokenSpec(text)
    return list(found.values())


def expect_text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a text, found {type(value).__name__}")
