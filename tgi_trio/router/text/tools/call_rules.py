"""Grammar rules for tool calls: what a model may write after a format's trigger."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.functions import ToolUse
from tgi_trio.router.text.tools.matching import HOLES
from tgi_trio.router.text.tools.terms import write_terms


def call_rules(form: Format, use: ToolUse, added: Mapping[str, int]) -> dict[str, str]:
    """Return rules (name -> right side); `calls` matches all that follows the trigger.

    `added`: text -> id of the tokenizer's added tokens. Raises ValidationError for a schema that
    has no grammar.
    """
    # Only those that can occur: a vocabulary may have thousands of added tokens.
    texts = "".join(form.texts)
    added = {name: id for name, id in added.items() if name and name in texts}
    several = use.most > 1 and bool(form.next)
    more = f" (after next call){{0,{use.most - 1}}}" if several else ""
    shared = _find_shared(form, added) if several else 0
    rules = {
        "calls": f"opening call{more} after closing",
        "opening": write_holes(form.opening, added),
        "after": write_holes(form.closing[:shared], added),
        "next": write_holes(form.next[shared:], added),
        "closing": write_holes(form.closing[shared:], added),
        "call": " | ".join(f"call{i}" for i in range(len(use.functions))),
    }
    for i, function in enumerate(use.functions):
        head = write_holes(function.name + form.middle, added)
        if form.short_middle is not None:
            short = write_holes(function.name + form.short_middle, added)
            head = f"({head} | {short})"
        rules[f"call{i}"] = f"{head} a{i}"
        rules |= form.arguments.rules(f"a{i}", function, added)
    return rules


def _find_shared(form: Format, added: Mapping[str, int]) -> int:
    """Return the length of the common beginning of `next` and `closing`.

    It is made a rule of its own. Otherwise, if one of the two texts begins the other, the longer
    one would be taken as certain too early. No added token is cut in two.
    """
    length = 0
    for one, other in zip(form.next, form.closing, strict=False):
        if one != other:
            break
        length += 1
    while any(_cuts(text, length, name) for text in (form.next, form.closing) for name in added):
        length -= 1
    return length


def _cuts(text: str, position: int, name: str) -> bool:
    """Return whether a cut at `position` would divide an occurrence of `name` in `text`."""
    return name in text[max(0, position - len(name) + 1) : position + len(name) - 1]


def write_holes(text: str, added: Mapping[str, int]) -> str:
    """Return a text of a format as terms of a rule; holes become regular expressions."""
    parts = re.split(f"([{''.join(HOLES)}])", text)
    terms = [f"/{HOLES[part]}/" if part in HOLES else write_terms(part, added) for part in parts]
    return " ".join(term for term in terms if term != '""') or '""'
