"""Arguments as keywords of a Python call, whose values are Python or JSON literals.

The grammar allows only what both languages read: strings in double quotes, and JSON inside lists
and objects. Only a constant that is a value by itself is Python's.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.arguments_json import (
    CONSTANTS,
    escape,
    write_json,
    write_scalar,
)
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.schemas import (
    Schema,
    find_literals,
    find_members,
    find_type,
    list_alternatives,
    with_definitions,
)
from tgi_trio.router.text.tools.terms import share_rule

_WORDS = {value: key for key, value in CONSTANTS.items()}  # JSON -> Python
_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_MOST_MORE = 16  # most arguments of a call that its schema does not list


@dataclass(frozen=True, slots=True)
class PythonArguments:
    """`key=value, key=value`, up to the closing parenthesis."""

    texts: tuple[str, ...] = ()
    quote: str = '"'  # around strings, as templates write them; the grammar forces double quotes
    json_words: bool = False  # true, false and null as in JSON

    def write(self, arguments: Any) -> str:
        """Return arguments, an object, as templates write them; text is returned unchanged."""
        if not isinstance(arguments, Mapping):
            return str(arguments)
        return ", ".join(f"{key}={self._literal(value)}" for key, value in arguments.items())

    def _literal(self, value: Any) -> str:
        if isinstance(value, str) and self.quote == "'":
            inner = escape(value).replace('\\"', '"').replace("'", "\\'")
            return f"'{inner}'"
        return self._word(write_json(value))

    def rules(self, name: str, function: Function, added: Mapping[str, int]) -> dict[str, str]:
        """Return rules (name -> right side) for a function's arguments; `name` is the top one."""
        root = function.schema
        rules: dict[str, str] = {}
        whole = []
        for i, plain in enumerate(list_alternatives(root, root)):
            members, items = find_members(plain, root), []
            for j, (key, schema, required) in enumerate(members.items):
                rule = f"{name}_{i}_{j}"
                rules[rule] = f"{grammars.literal(f'{key}=')} ({self._value(rules, schema, root)})"
                items.append((rule, required))
            if members.more is not False:
                rule = f"{name}_{i}_more"
                rules[rule] = f"{rule.upper()}_KEY ({self._value(rules, members.more, root)})"
                taken = "|".join(members.listed)
                rules[f"{rule.upper()}_KEY"] = f"/{_KEY}=/" + (f" & ~/({taken})=/" if taken else "")
                items += [(rule, False)] * _MOST_MORE
            rules |= chain_rules(f"{name}_{i}", items, '", "')
            whole.append(f"{name}_{i}")
        return {name: " | ".join(whole) or '""', **rules}

    def _value(self, rules: dict[str, str], schema: Any, root: Schema) -> str:
        """Return alternative terms for a value; adds to `rules`."""
        alternatives = []
        for plain in list_alternatives(schema, root):
            listed, kind = find_literals(plain), find_type(plain)
            if listed is not None:
                alternatives += [grammars.literal(self._word(write_json(v))) for v in listed]
            elif kind == "boolean":
                alternatives += [grammars.literal(self._word(each)) for each in ("true", "false")]
            elif kind == "null":
                alternatives.append(grammars.literal(self._word("null")))
            else:
                json = grammars.embed_schema(with_definitions(_joined(plain), root))
                alternatives.append(share_rule(rules, "json", json))
        return " | ".join(dict.fromkeys(alternatives))

    def _word(self, text: str) -> str:
        """Return a JSON value, with a constant as this style writes it."""
        return text if self.json_words else _WORDS.get(text, text)

    def reader(self, function: Function | None) -> PythonReader:
        """Return a reader for the arguments of one call."""
        return PythonReader()


def _joined(plain: Schema) -> Schema:
    """Return a plain schema as valid JSON Schema: several patterns become an `allOf`."""
    patterns = plain.get("pattern")
    if not isinstance(patterns, tuple):
        return plain
    rest = {key: value for key, value in plain.items() if key != "pattern"}
    return {**rest, "allOf": [{"pattern": each} for each in patterns]}


def chain_rules(name: str, items: Sequence[tuple[str, bool]], separator: str) -> dict[str, str]:
    """Return the rules of a list whose items may be missing but keep their order.

    `items`: (term, whether it is required). `separator`: a term, between any two items that are
    there.
    """
    rules: dict[str, str] = {}
    behind = [""] * (len(items) + 1)  # [i]: the rule for items i and later, after an earlier one
    for i in reversed(range(1, len(items))):
        term, required = items[i]
        behind[i] = f"{name}n{i}"
        alternatives = [f"{separator} {term} {behind[i + 1]}".rstrip()]
        if not required:
            alternatives.append(behind[i + 1] or '""')
        rules[behind[i]] = " | ".join(alternatives)
    begins = []
    for i, (term, required) in enumerate(items):
        begins.append(f"{term} {behind[i + 1]}".rstrip())
        if required:
            break
    else:
        begins.append('""')
    return {name: " | ".join(begins), **rules}


# ---- reading -------------------------------------------------------------------------------------


class _State(enum.Enum):
    KEY = "key"
    VALUE = "value"  # at its beginning, or between two of its tokens
    STRING = "string"
    WORD = "word"  # a number or a constant


_HEAD = re.compile(r"[\s,]*([A-Za-z_]\w*)\s*=\s*")
_HEAD_BEGINS = re.compile(r"[\s,]*([A-Za-z_]\w*\s*)?\Z")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_AS_JSON = {"(": "[", ")": "]"}
_KEPT = '"\\/bfnrt'  # escapes that JSON has as well
_PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_WORD = re.compile(r"[^\s,:()\[\]{}'\"]+")


class PythonReader:
    """Converts a call's keywords to JSON as they arrive, up to the closing parenthesis."""

    def __init__(self) -> None:
        self._state = _State.KEY
        self._text = ""
        self._out: list[str] = []
        self._count = 0
        self._closing: list[str] = []  # the closing brackets of open ones
        self._quote = ""
        self.ended = False
        self.rest = ""  # after the arguments

    def push(self, text: str) -> str:
        """Take more text; return the JSON that it makes certain."""
        self._text += text
        self._out = []
        while not self.ended and _STEPS[self._state](self):
            pass
        return "".join(self._out)

    def _key(self) -> bool:
        head = _HEAD.match(self._text)
        if head is None:
            if not _HEAD_BEGINS.match(self._text):
                self._finish()
            return False
        if head.end() == len(self._text):
            return False  # more white space may follow the `=`
        self._out.append(f"{',' if self._count else '{'}{write_json(head[1])}:")
        self._count += 1
        self._text = self._text[head.end() :]
        self._state = _State.VALUE
        return True

    def _finish(self) -> None:
        self._out.append("}" if self._count else "{}")
        self.ended, self.rest, self._text = True, self._text.lstrip(), ""

    def _value(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        character = self._text[0]
        if not self._closing and character in ",)":
            self._state = _State.KEY
            return True
        if character in "'\"":
            self._quote, self._state = character, _State.STRING
            self._out.append('"')
        elif character in _PAIRS:
            self._closing.append(_PAIRS[character])
            self._out.append(_AS_JSON.get(character, character))
        elif character in ")]}":
            if self._closing:
                self._closing.pop()
            self._out.append(_AS_JSON.get(character, character))
        elif character in ",:":
            self._out.append(character)
        else:
            self._state = _State.WORD
            return True
        self._text = self._text[1:]
        return True

    def _word(self) -> bool:
        word = _WORD.match(self._text)
        if word is not None and word.end() == len(self._text):
            return False
        length = word.end() if word is not None else 0
        self._out.append(write_scalar(self._text[:length]))
        self._text = self._text[length:]
        self._state = _State.VALUE
        return True

    def _string(self) -> bool:
        text, quote = self._text, self._quote
        if not text:
            return False
        if text[0] == quote:
            self._out.append('"')
            self._text = text[1:]
            self._state = _State.VALUE
            return True
        if text[0] != "\\":
            plain = _PLAIN[quote].match(text)
            length = plain.end() if plain is not None else 1
            self._out.append(escape(text[:length]))
            self._text = text[length:]
            return True
        length, written = _unescape(text)
        self._out.append(written)
        self._text = text[length:]
        return length > 0


_STEPS = {
    _State.KEY: PythonReader._key,
    _State.VALUE: PythonReader._value,
    _State.STRING: PythonReader._string,
    _State.WORD: PythonReader._word,
}


def _unescape(text: str) -> tuple[int, str]:
    """Return the length of the escape at the start of `text` (0: incomplete), and its JSON."""
    if len(text) < 2:
        return 0, ""
    kind = text[1]
    if kind in _KEPT:
        return 2, text[:2]
    digits = {"x": 2, "u": 4}.get(kind)
    if digits is None:
        return 2, {"'": "'", "\n": ""}.get(kind, "\\\\" + escape(kind))
    code = text[2 : 2 + digits]
    if not re.fullmatch("[0-9a-fA-F]*", code):
        return 2, "\\\\" + kind
    return (2 + digits, f"\\u{code:0>4}") if len(code) == digits else (0, "")
