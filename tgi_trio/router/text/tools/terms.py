"""Terms of Lark rules for the texts of a format."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from tgi_trio.router.text import grammars


def escape_regex(text: str) -> str:
    """Return a regular expression, for use between slashes, that matches exactly `text`."""
    # A terminal is one line of the grammar, so a newline is written as two characters.
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def write_terms(text: str, added: Mapping[str, int]) -> str:
    """Return `text` as terms of a rule: string literals, and the added tokens in it.

    `added`: text -> id of the tokenizer's added tokens. llguidance may not know such a token by its
    text, so both the token and its spelling are allowed.
    """
    names = sorted((name for name in added if name and name in text), key=len, reverse=True)
    either = "|".join(map(re.escape, names))
    parts = re.split(f"({either})", text) if names else [text]
    terms = []
    for part in filter(None, parts):
        spelled = grammars.literal(part)
        terms.append(f"(<[{added[part]}]> | {spelled})" if part in added else spelled)
    return " ".join(terms) or '""'


def spell_json(text: str) -> str:
    """Return the beginning of a JSON text as terms of a rule, one for each part of its syntax.

    Another JSON text that has some of them in common can be told from it at any of them.
    """
    parts = re.findall(r'"[^"]*"|\s*[^"\s]|\s*"$', text)
    return " ".join(map(grammars.literal, parts))


def find_token(text: str, added: Mapping[str, int]) -> str | None:
    """Return the first added token in `text`, the longest if several begin there."""
    found = [(text.index(name), -len(name), name) for name in added if name and name in text]
    return min(found)[2] if found else None


def write_tokens(ids: Iterable[int]) -> str:
    """Return a term for any one of these tokens; for the empty text if there are none."""
    ranges: list[list[int]] = []
    for id in sorted(ids):
        if ranges and ranges[-1][1] == id - 1:
            ranges[-1][1] = id
        else:
            ranges.append([id, id])
    return f"<[{','.join(f'{first}-{last}' for first, last in ranges)}]>" if ranges else '""'


def share_rule(rules: dict[str, str], kind: str, right: str) -> str:
    """Add a rule that several parts of a grammar share; return its name.

    The name is a hash of the right side, so that a grammar for many tools has the rule once.
    """
    mark = hashlib.sha256(right.encode()).hexdigest()[:12]
    name = f"{kind}_{mark.upper() if kind.isupper() else mark}"
    rules[name] = right
    return name
