"""Arguments in Gemma's own notation: keys without quotes, strings between special marks."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.arguments_json import escape, write_json, write_scalar
from tgi_trio.router.text.tools.arguments_python import chain_rules
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.matching import overlap
from tgi_trio.router.text.tools.schemas import (
    Schema,
    find_items,
    find_literals,
    find_members,
    find_type,
    list_alternatives,
)
from tgi_trio.router.text.tools.strings import write_terminal
from tgi_trio.router.text.tools.terms import escape_regex, share_rule, write_terms

_KEY = "[A-Za-z_][A-Za-z0-9_.$-]{0,63}"
_MOST_MORE = 16  # most members of an object that its schema does not list
_SCALARS = ("integer", "number", "boolean", "null")


@dataclass(frozen=True, slots=True)
class GemmaArguments:
    """`{key:value,key:[value],key:{key:value}}`, with `quote` on both sides of strings."""

    quote: str
    sorts: bool = True  # keys come in alphabetical order; else in the schema's

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the literal texts of the style."""
        return (self.quote,)

    def write(self, arguments: Any) -> str:
        """Return arguments as the templates write them, keys sorted; text is returned unchanged."""
        if isinstance(arguments, str):
            return arguments
        return self.write_value(arguments)

    def write_value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            items = sorted(value.items(), key=lambda item: str(item[0]).lower())
            return f"{{{','.join(f'{key}:{self.write_value(each)}' for key, each in items)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self.write_value, value))}]"
        return write_json(value)

    def rules(self, name: str, function: Function, added: Mapping[str, int]) -> dict[str, str]:
        """Return rules (name -> right side) for a function's arguments; `name` is the top one."""
        return _Rules(self, function.schema, added, name).write()

    def reader(self, function: Function | None) -> GemmaReader:
        """Return a reader for the arguments of one call."""
        return GemmaReader(self.quote)


class _Rules:
    """Writes the rules for one function's arguments, one for each part of the schema."""

    def __init__(
        self, style: GemmaArguments, root: Schema, added: Mapping[str, int], name: str
    ) -> None:
        self._style = style
        self._root = root
        self._added = added
        self._name = name
        self._rules: dict[str, str] = {}
        self._named: dict[str, str] = {}  # reference -> rule: references may be circular

    def write(self) -> dict[str, str]:
        value = self._value({**self._root, "type": "object"})
        return {self._name: value, **self._rules}

    def _new(self) -> str:
        return f"{self._name}_{len(self._rules)}"

    def _value(self, schema: Any) -> str:
        """Return the name of a rule for the values of a schema."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference is not None and reference in self._named:
            return self._named[reference]
        name = ""
        if reference is not None and len(schema) == 1:
            name = self._named[reference] = self._new()
            self._rules[name] = ""  # reserved: the schema may refer to itself
        alternatives = dict.fromkeys(map(self._plain, list_alternatives(schema, self._root)))
        right = " | ".join(alternatives) or '""'
        if not name:
            return share_rule(self._rules, "value", right)
        self._rules[name] = right
        return name

    def _plain(self, plain: Schema) -> str:
        listed, kind = find_literals(plain), find_type(plain)
        if listed is not None:
            return " | ".join(write_terms(self._style.write_value(v), self._added) for v in listed)
        if kind in _SCALARS:
            return grammars.embed_schema(plain)
        if kind == "string":
            return self._string(plain)
        if kind == "array":
            return self._list(plain)
        return self._object(plain) if kind == "object" else self._anything()

    def _string(self, plain: Schema) -> str:
        quote, rules = self._style.quote, self._rules
        text = share_rule(rules, "TEXT", write_terminal(plain, quote))
        ends = [share_rule(rules, "SPELLED", f"{text} {grammars.literal(quote)}")]
        if quote in self._added:
            ends.append(f"{text} <[{self._added[quote]}]>")
        return f"{write_terms(quote, self._added)} ({' | '.join(ends)})"

    def _list(self, plain: Schema) -> str:
        found = find_items(plain, self._root)
        each = self._value(found.more) if found.more is not False else ""
        if not found.first:
            return f'"[" {_repeat(each, found.least, found.most)} "]"'
        count = len(found.first)
        least, most = max(found.least - count, 0), found.most
        inner = _repeat_more(each, least, None if most is None else most - count)
        for i, schema in reversed(list(enumerate(found.first))):
            head = self._value(schema)
            item = f"{head} {inner}" if i == 0 else f'"," {head} {inner}'
            inner = self._new()
            self._rules[inner] = item
            inner = inner if i < found.least else f"{inner}?"
        return f'"[" {inner} "]"'

    def _object(self, plain: Schema) -> str:
        members, items = find_members(plain, self._root), []
        listed = members.items
        if self._style.sorts:
            listed = sorted(listed, key=lambda item: item[0].lower())
        for key, schema, required in listed:
            items.append((f"({grammars.literal(f'{key}:')} {self._value(schema)})", required))
        if members.more is not False:
            name = self._new()
            terminal = f"{name.upper()}_KEY"
            taken = "|".join(map(escape_regex, members.listed))
            self._rules[name] = ""
            self._rules[terminal] = f"/{_KEY}:/" + (f" & ~/({taken}):/" if taken else "")
            self._rules[name] = f"{terminal} {self._value(members.more)}"
            items += [(name, False)] * _MOST_MORE
        return f'"{{" {self._chain(items)} "}}"'

    def _chain(self, items: list[tuple[str, bool]]) -> str:
        name = self._new()
        self._rules[name] = ""
        self._rules |= chain_rules(name, items, '","')
        return name

    def _anything(self) -> str:
        """Return the name of the rule for any value."""
        if (known := self._named.get("")) is not None:
            return known
        name = self._named[""] = self._new()
        self._rules[name] = ""
        member = f"{name.upper()}_KEY {name}"
        self._rules[f"{name.upper()}_KEY"] = f"/{_KEY}:/"
        scalar = grammars.embed_schema({"type": list(_SCALARS)})
        self._rules[name] = " | ".join(
            (
                self._string({}),
                scalar,
                f'"[" ({name} ("," {name})*)? "]"',
                f'"{{" ({member} ("," {member})*)? "}}"',
            )
        )
        return name


def _repeat(item: str, least: int, most: int | None) -> str:
    """Return terms for `least` to `most` items, separated by commas."""
    if most == 0:
        return '""'
    more = _repeat_more(item, max(least - 1, 0), None if most is None else most - 1)
    return f"{item} {more}" if least else f"({item} {more})?"


def _repeat_more(item: str, least: int, most: int | None) -> str:
    """Return terms for `least` to `most` items, each behind a comma."""
    if most == 0:
        return ""
    return f'("," {item}){{{least},{"" if most is None else most}}}'


# ---- reading -------------------------------------------------------------------------------------


class _State(enum.Enum):
    KEY = "key"
    VALUE = "value"
    STRING = "string"
    AFTER = "after"  # a value


_KEY_ENDS = re.compile(r"\s*([^:{}\[\],]*):")
_WORD_ENDS = re.compile(r"[,\]}]")


class GemmaReader:
    """Converts the notation to JSON as it arrives, up to its closing brace."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._state = _State.VALUE
        self._text = ""
        self._seen = 0  # characters of it in which a word does not end
        self._out: list[str] = []
        self._closing: list[str] = []  # the closing brackets of open ones
        self.ended = False
        self.rest = ""  # after the arguments

    def push(self, text: str) -> str:
        """Take more text; return the JSON that it makes certain."""
        self._text += text
        self._out = []
        while not self.ended and _STEPS[self._state](self):
            pass
        return "".join(self._out)

    def _value(self) -> bool:
        self._text = self._text.lstrip()
        text, quote = self._text, self._quote
        if not text or (quote.startswith(text) and text != quote):
            return False
        if text.startswith(quote):
            self._out.append('"')
            self._text, self._state = text[len(quote) :], _State.STRING
            return True
        if text[0] in "{[":
            self._closing.append("}" if text[0] == "{" else "]")
            self._out.append(text[0])
            self._text = text[1:]
            self._state = _State.KEY if text[0] == "{" else _State.VALUE
            return True
        if not self._closing:  # no object, so no arguments
            return self._finish("{}")
        if text[0] in ",]}":
            self._state = _State.AFTER
            return True
        end = _WORD_ENDS.search(text, self._seen)
        if end is None:
            self._seen = len(text)
            return False
        self._out.append(write_scalar(text[: end.start()]))
        self._text, self._state = text[end.start() :], _State.AFTER
        self._seen = 0
        return True

    def _key(self) -> bool:
        text = self._text.lstrip()
        if text.startswith("}"):
            self._text, self._state = text, _State.AFTER
            return True
        key = _KEY_ENDS.match(text)
        if key is None:
            return False
        name = key[1].strip().removeprefix(self._quote).removesuffix(self._quote).strip('"')
        self._out.append(f"{write_json(name)}:")
        self._text, self._state = text[key.end() :], _State.VALUE
        return True

    def _string(self) -> bool:
        position = self._text.find(self._quote)
        if position < 0:
            certain = len(self._text) - overlap(self._text, self._quote)
            self._out.append(escape(self._text[:certain]))
            self._text = self._text[certain:]
            return False
        self._out.append(escape(self._text[:position]) + '"')
        self._text, self._state = self._text[position + len(self._quote) :], _State.AFTER
        return True

    def _after(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        character, self._text = self._text[0], self._text[1:]
        if character == ",":
            self._out.append(",")
            self._state = _State.KEY if self._closing[-1] == "}" else _State.VALUE
        elif character in "]}":
            self._out.append(self._closing.pop())
            if not self._closing:
                return self._finish("")
        return True  # anything else is skipped

    def _finish(self, last: str) -> bool:
        self._out.append(last)
        self.ended, self.rest, self._text = True, self._text, ""
        return False


_STEPS = {
    _State.KEY: GemmaReader._key,
    _State.VALUE: GemmaReader._value,
    _State.STRING: GemmaReader._string,
    _State.AFTER: GemmaReader._after,
}
