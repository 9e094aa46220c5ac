"""What a model may write when it may call tools, as one grammar for the shard.

One generation does both: prose is free until the trigger of the format appears, and from there on
only calls of the given functions are possible, with arguments that fit their schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.formats import Format
from tgi_trio.router.text.tools.functions import ToolUse

_ANY = "(?s:.*)"


def tool_grammar(form: Format, use: ToolUse, special: Mapping[str, int]) -> str:
    """Return the grammar of an answer.

    `special`: text -> id of the tokens that the tokenizer marks as special. Such a token is no text
    to the grammar: where the format has one, it is named by its id.
    """
    more = f" (next call){{0,{use.most - 1}}}" if use.most > 1 and form.next else ""
    rules = {
        **_beginning(form, use, special),
        "calls": f"opening call{more} closing",
        "opening": _terms(form.opening, special),
        "next": _terms(form.next, special),
        "closing": _terms(form.closing, special),
        "call": " | ".join(f"call_{i}" for i in range(len(use.functions))),
    }
    for i, function in enumerate(use.functions):
        rules[f"call_{i}"] = f"{_terms(function.name + form.middle, special)} arguments_{i}"
        rules[f"arguments_{i}"] = grammars.embedded(function.schema)
    return grammars.lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()))


def _beginning(form: Format, use: ToolUse, special: Mapping[str, int]) -> dict[str, str]:
    """Return the rules up to and with the trigger."""
    trigger = _terms(form.trigger, special)
    if use.required:
        return {"start": f"{trigger} calls"}
    if form.trigger in special:  # it cannot be part of any text, so any text may come before it
        return {"start": f"PROSE ({trigger} calls)?", "PROSE": f"/{_ANY}/"}
    pattern = re.escape(form.trigger).replace("/", "\\/")
    if form.anchored:
        return {"start": f"PROSE | {trigger} calls", "PROSE": f"/{_ANY}/ & ~/{pattern}{_ANY}/"}
    # A lazy terminal ends where the trigger is first complete.
    return {
        "start": "PROSE | lead calls",
        "lead[lazy]": f"/{_ANY}/ {trigger}",
        "PROSE": f"/{_ANY}/ & ~/{_ANY}{pattern}{_ANY}/",
    }


def _terms(text: str, special: Mapping[str, int]) -> str:
    """Return `text` as terms of a rule: strings, and the special tokens that are in it."""
    names = sorted((name for name in special if name and name in text), key=len, reverse=True)
    either = "|".join(map(re.escape, names))
    parts = re.split(f"({either})", text) if names else [text]
    terms = [
        f"<[{special[part]}]>" if part in special else grammars.literal(part)
        for part in parts
        if part
    ]
    return " ".join(terms) or '""'
