"""Arguments as parameters between tags: strings verbatim, everything else as JSON.

A value's type follows from the function's schema: `2` is a string where the schema allows strings,
else a number. Where a style writes types, they choose among those that the schema allows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.arguments_json import JsonEnd, escape, write_json, write_scalar
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.matching import PARTIAL, TYPE, Match, find_text, overlap
from tgi_trio.router.text.tools.schemas import (
    Schema,
    find_members,
    find_type,
    list_alternatives,
    name_type,
    with_definitions,
)
from tgi_trio.router.text.tools.shapes import Shape, Shapes
from tgi_trio.router.text.tools.strings import write_terminal
from tgi_trio.router.text.tools.terms import escape_regex, find_token, share_rule, write_terms

_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # of a parameter that no schema lists
_MOST_MORE = 16  # most of these in a call
_LONGEST_KEY = 300
_LINE_END = "\n"


@dataclass(frozen=True, slots=True)
class XmlArguments:
    """`prefix key middle value suffix` for each parameter.

    Line breaks at the end of `middle` and at the beginning of `suffix` do not belong to the value.
    """

    prefix: str
    middle: str  # may contain TYPE
    suffix: str
    types: Mapping[str, str] = field(default_factory=dict)  # JSON type -> what is written for TYPE
    breaks: bool = False  # lines may end before parameters, between marks, around values

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the literal texts of the style."""
        return self.prefix, self.middle, self.suffix

    @property
    def mark(self) -> str:
        """Return the suffix without white space: it ends a value, so no text may contain it."""
        return self.suffix.strip()

    def write(self, arguments: Any) -> str:
        """Return arguments, an object, as a model would write them; text is returned unchanged."""
        if not isinstance(arguments, Mapping):
            return str(arguments)
        return "".join(
            f"{self.prefix}{key}{self._between(name_type(value))}{_plain(value)}{self.suffix}"
            for key, value in arguments.items()
        )

    def _between(self, kind: str) -> str:
        return self.middle.replace(TYPE, self.types.get(kind, ""))

    def reader(self, function: Function | None) -> XmlReader:
        """Return a reader for the arguments of one call; None: of an unknown function."""
        return XmlReader(self, Shapes(function.schema if function is not None else {}))

    # ---- writing rules ---------------------------------------------------------------------------

    def rules(self, name: str, function: Function, added: Mapping[str, int]) -> dict[str, str]:
        """Return rules (name -> right side) for a function's arguments; `name` is the top one."""
        root = function.schema
        rules: dict[str, str] = {}
        whole = []
        for i, plain in enumerate(list_alternatives(root, root)):
            members, terms = find_members(plain, root), []
            for j, (key, schema, required) in enumerate(members.items):
                rule = f"{name}_{i}_{j}"
                head = f"{self.prefix}{key}"
                rules[rule] = self._parameter(rules, head, schema, root, added)
                terms.append(rule if required else f"{rule}?")
            if members.more is not False:
                rule = f"{name}_{i}_more"
                key = f"{rule.upper()}_KEY"
                more = self._parameter(rules, "", members.more, root, added)
                rules[rule] = f"{self._begin(self.prefix, added)} {key} ({more})"
                taken = "|".join(map(escape_regex, members.listed))
                rules[key] = f"/{_KEY}/" + (f" & ~/{taken}/" if taken else "")
                terms.append(f"{rule}{{0,{_MOST_MORE}}}")
            whole.append(" ".join(terms) or '""')
        return {name: " | ".join(dict.fromkeys(whole)) or '""', **rules}

    def _parameter(
        self, rules: dict[str, str], head: str, schema: Any, root: Schema, added: Mapping[str, int]
    ) -> str:
        """Return terms for a parameter; `head` is its prefix and key. Adds to `rules`."""
        shape = Shape.of(schema, root)
        alternatives = []
        end, token, _ = self._cut_suffix(added)
        for terminal in self._texts_of(shape, (end + token).strip()):
            before = self._begin(head + self._between("string"), added)
            alternatives.append(f"{before} {self._text(rules, terminal, added)}")
        rules["value_end"] = write_terms(self.suffix, added)
        white = '"\\n"?' if self.breaks else ""
        for kind, term in self._values_of(shape, schema, root):
            if term.startswith("%"):
                term = share_rule(rules, "json", term)
            before = self._begin(head + self._between(kind), added)
            alternatives.append(f"{before} {white} {term} {white} value_end")
        return " | ".join(alternatives)

    def _begin(self, text: str, added: Mapping[str, int]) -> str:
        """Return terms for the beginning of a parameter, or for what is behind an unlisted key."""
        terms = write_terms(text, added)
        if not self.breaks or not text.startswith(self.prefix):
            return terms
        # Whole with its line breaks: what ends the arguments may begin with one, too.
        broken = text.replace("><", f">{_LINE_END}<")
        starts = dict.fromkeys((text, broken, _LINE_END + text, _LINE_END + broken))
        return f"({' | '.join(write_terms(start, added) for start in starts)})"

    def _texts_of(self, shape: Shape, end: str) -> Iterator[str]:
        """Yield terminals for values that are written as text and do not contain `end`."""
        for plain in shape.texts:
            yield write_terminal(plain, end)
        listed = [each for each in shape.literals if isinstance(each, str) and end not in each]
        if listed and not shape.texts:
            yield f"/{'|'.join(map(escape_regex, listed))}/"

    def _values_of(self, shape: Shape, schema: Any, root: Schema) -> Iterator[tuple[str, str]]:
        """Yield (type, term) for values that are written as JSON, if they can be told from text."""
        if shape.texts and not self.types:
            if shape.nullable:  # `null` is valid text as well, but is read as null
                yield "null", '"null"'
            return
        for each in shape.literals:
            if not isinstance(each, str):
                yield name_type(each), grammars.literal(write_json(each))
        if shape.nullable:
            yield "null", '"null"'
        plains = shape.values
        if plains and len(plains) == len(shape.plains):
            kinds = {find_type(plain) for plain in plains}
            if len(kinds) == 1 or not self.types:
                yield (
                    str(kinds.pop()),
                    grammars.embed_schema(with_definitions(schema, root)),
                )
                return
        for plain in plains:
            yield (
                str(find_type(plain)),
                grammars.embed_schema(with_definitions(plain, root)),
            )

    def _text(self, rules: dict[str, str], terminal: str, added: Mapping[str, int]) -> str:
        """Return the rule for text followed by the suffix; adds to `rules`.

        One terminal matches both, since one for the text alone would match the suffix as well. If
        the suffix contains an added token, the terminal may end before that.
        """
        end, token, behind = self._cut_suffix(added)
        text = share_rule(rules, "TEXT", terminal)
        if self.breaks:
            text = share_rule(rules, "LINES", f"/\\n?/ {text} /\\n?/")
        alternatives = [share_rule(rules, "SPELLED", f"{text} {grammars.literal(end + token)}")]
        if token:
            led = share_rule(rules, "LED", f"{text} {grammars.literal(end)}") if end else text
            alternatives.append(f"{led} <[{added[token]}]>")
        either = " | ".join(alternatives)
        return share_rule(rules, "text", f"({either}) {write_terms(behind, added)}")

    def _cut_suffix(self, added: Mapping[str, int]) -> tuple[str, str, str]:
        """Return the suffix in three parts: up to its first added token, that token, and the rest.

        If it has no added token, the first part ends with the mark.
        """
        token = find_token(self.mark, added)
        if token is None:
            end = self.suffix.index(self.mark) + len(self.mark)
            return self.suffix[:end], "", self.suffix[end:]
        return self.suffix.partition(token)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else write_json(value)


# ---- reading -------------------------------------------------------------------------------------


class _State(enum.Enum):
    BETWEEN = "between"  # parameters
    KEY = "key"
    BEGIN = "begin"  # of a value
    TEXT = "text"
    JSON = "json"  # an object or a list, passed through as it arrives
    HELD = "held"  # a value that is converted when it is complete
    SUFFIX = "suffix"  # after a value


class XmlReader:
    """Converts parameters to JSON as they arrive."""

    def __init__(self, style: XmlArguments, shapes: Shapes) -> None:
        self._style = style
        self._shapes = shapes
        self._mark = style.mark
        self._lines = style.middle.endswith("\n")  # values are on lines of their own
        self._state = _State.BETWEEN
        self._text = ""
        self._out: list[str] = []
        self._count = 0
        self._shape = Shape((), (), (), (), False)
        self._quoted = False  # the opening quote of a string has been written
        self._end = JsonEnd()
        self.ended = False
        self.rest = ""  # after the arguments

    def push(self, text: str) -> str:
        """Take more text; return the JSON that it makes certain."""
        self._text += text
        self._out = []
        while not self.ended and self._advance():
            pass
        return "".join(self._out)

    def _advance(self) -> bool:
        """Consume what is certain; return whether the state changed."""
        match self._state:
            case _State.BETWEEN:
                return self._between()
            case _State.KEY:
                return self._key()
            case _State.BEGIN:
                return self._begin()
            case _State.TEXT:
                return self._take_text()
            case _State.JSON:
                return self._take_json()
            case _State.HELD:
                return self._take_held()
            case _State.SUFFIX:
                return self._find_mark() is not None

    def _between(self) -> bool:
        prefix = self._style.prefix
        self._text = self._text.lstrip()
        if self._text.startswith(prefix):
            self._text = self._text[len(prefix) :]
            self._state = _State.KEY
            return True
        if prefix.startswith(self._text):
            return False
        self._out.append("}" if self._count else "{}")
        self.ended, self.rest, self._text = True, self._text, ""
        return False

    def _key(self) -> bool:
        found = find_text(self._text, self._style.middle)
        if not isinstance(found, Match):
            if found is PARTIAL and len(self._text) > _LONGEST_KEY:  # not a parameter
                self._out.append("}" if self._count else "{}")
                self.ended, self.rest, self._text = True, self._text, ""
            return False
        key = self._text[: found.start].strip()
        self._text = self._text[found.end :]
        self._out.append(f"{',' if self._count else '{'}{write_json(key)}:")
        self._count += 1
        self._quoted = False
        self._shape = self._choose(self._shapes.find(key), found.holes)
        self._state = _State.BEGIN
        return True

    def _choose(self, shape: Shape, holes: tuple[str, ...]) -> Shape:
        """Return a shape narrowed down to the type that was written, if any was."""
        if not holes or not (shape.has_text and shape.has_values):
            return shape
        if holes[0] == self._style.types["string"]:
            return Shape((), shape.texts or ({},), (), (), False)
        return Shape((), (), ({},), (), False)

    def _begin(self) -> bool:
        if self._shape.only_text:
            if self._lines:
                if not self._text:
                    return False
                self._text = self._text.removeprefix("\n")
            self._state = _State.TEXT
            return True
        held = self._text.lstrip()
        if not held:
            return False
        if held[0] in "{[" and not self._shape.literals:
            self._text, self._end, self._state = held, JsonEnd(), _State.JSON
        else:
            self._state = _State.HELD
        return True

    def _take_text(self) -> bool:
        position = self._text.find(self._mark)
        if position < 0:
            certain = len(self._text) - overlap(self._text, self._mark)
            if self._lines and self._text[:certain].endswith("\n"):
                certain -= 1
            if (
                self._shape.nullable
                and not self._quoted
                and "null".startswith(self._text[:certain])
            ):
                return False
            self._write_string(self._text[:certain])
            self._text = self._text[certain:]
            return False
        text = self._text[:position]
        if self._lines:
            text = text.removesuffix("\n")
        if text == "null" and self._shape.nullable and not self._quoted:
            self._out.append("null")
        else:
            self._write_string(text)
            self._out.append('"' if self._quoted else '""')
        self._state = _State.SUFFIX
        return True

    def _write_string(self, text: str) -> None:
        """Write a piece of a string."""
        if text:
            self._out.append(escape(text) if self._quoted else f'"{escape(text)}')
            self._quoted = True

    def _take_json(self) -> bool:
        length = self._end.find(self._text)
        self._out.append(self._text if length < 0 else self._text[:length])
        self._text = "" if length < 0 else self._text[length:]
        if length >= 0:
            self._state = _State.SUFFIX
        return length >= 0

    def _take_held(self) -> bool:
        text = self._find_mark()
        if text is None:
            return False
        if self._lines:
            text = text.removeprefix("\n").removesuffix("\n")
        found = [each for each in self._shape.literals if _plain(each) == text]
        self._out.append(write_json(found[0]) if found else write_scalar(text))
        return True

    def _find_mark(self) -> str | None:
        """Skip the end of a value; return the text before it, or None if it has not ended yet."""
        position = self._text.find(self._mark)
        if position < 0:
            return None
        text = self._text[:position]
        self._text = self._text[position + len(self._mark) :]
        self._state = _State.BETWEEN
        return text
