"""What a model may write when it may call tools, as one grammar for the shard.

One generation does both: prose is free until the trigger of the format appears, and from there on
only calls of the given functions are possible, with arguments that fit their schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.call_formats import Format
from tgi_trio.router.text.tools.functions import ToolUse

_TEXT = "(?s:.+)"


def tool_grammar(form: Format, use: ToolUse, added: Mapping[str, int]) -> str:
    """Return the grammar of an answer.

    `added`: text -> id of the tokens that were added to the vocabulary. Such a token may be no text
    to llguidance, so where the format has one, it may come as that token or spelled, and prose may
    contain all others: a model that thinks aloud marks its thoughts with them.
    """
    more = f" (next call){{0,{use.most - 1}}}" if use.most > 1 and form.next else ""
    rules = {
        **_write_beginning(form, use, added),
        "calls": f"opening call{more} closing",
        "opening": _terms(form.opening, added),
        "next": _terms(form.next, added),
        "closing": _terms(form.closing, added),
        "call": " | ".join(f"call_{i}" for i in range(len(use.functions))),
    }
    for i, function in enumerate(use.functions):
        rules[f"call_{i}"] = f"{_terms(function.name + form.middle, added)} arguments_{i}"
        rules[f"arguments_{i}"] = grammars.embed_schema(function.schema)
    return grammars.lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()))


def _write_beginning(form: Format, use: ToolUse, added: Mapping[str, int]) -> dict[str, str]:
    """Return the rules up to and with the trigger."""
    if use.required:
        return {"start": f"{_terms(form.trigger, added)} calls"}
    trigger, spelled = _regex(form.trigger), grammars.literal(form.trigger)
    token = added.get(form.trigger)
    others = _tokens(id for id in added.values() if id != token)
    if form.anchored:
        return {
            "start": f"{others}* (FIRST ({others} TEXT?)* | {spelled} calls)?",
            "FIRST": f"/{_TEXT}/ & ~/{trigger}(?s:.*)/",
            "TEXT": f"/{_TEXT}/",
        }
    ends = ["TEXT?", "lead calls"]
    if token is not None:
        ends.append(f"TEXT? {_tokens([token])} calls")
    return {
        "start": f"(TEXT? {others})* ({' | '.join(ends)})",
        # A lazy terminal ends where the trigger is first complete.
        "lead[lazy]": f"/(?s:.*)/ {spelled}",
        "TEXT": f"/{_TEXT}/ & ~/(?s:.*){trigger}(?s:.*)/",
    }


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _terms(text: str, added: Mapping[str, int]) -> str:
    """Return `text` as terms of a rule: strings, and the added tokens that are in it."""
    names = sorted((name for name in added if name and name in text), key=len, reverse=True)
    either = "|".join(map(re.escape, names))
    parts = re.split(f"({either})", text) if names else [text]
    terms = []
    for part in filter(None, parts):
        spelled = grammars.literal(part)
        terms.append(f"(<[{added[part]}]> | {spelled})" if part in added else spelled)
    return " ".join(terms) or '""'


def _tokens(ids: Iterable[int]) -> str:
    """Return any one of these tokens as a term; without any one that never comes."""
    ranges: list[list[int]] = []
    for id in sorted(ids):
        if ranges and ranges[-1][1] == id - 1:
            ranges[-1][1] = id
        else:
            ranges.append([id, id])
    return f"<[{','.join(f'{first}-{last}' for first, last in ranges)}]>" if ranges else '""'
