"""Arguments as one JSON object, as most families write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.functions import Function


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """One compact JSON object."""

    texts: tuple[str, ...] = ()  # literal texts of the style

    def write(self, arguments: Any) -> str:
        """Return arguments, a JSON value, as a model would write them; text is left unchanged."""
        return arguments if isinstance(arguments, str) else write_json(arguments)

    def rules(self, name: str, function: Function, added: Mapping[str, int]) -> dict[str, str]:
        """Return rules (name -> right side) for a function's arguments; `name` is the top one."""
        return {name: grammars.embed_schema(function.schema)}

    def reader(self, function: Function | None) -> JsonReader:
        """Return a reader for the arguments of one call."""
        return JsonReader()


class JsonReader:
    """Passes a JSON object through as it arrives, up to its end."""

    def __init__(self) -> None:
        self._end = JsonEnd()
        self._begun = False
        self.ended = False
        self.rest = ""  # after the end

    def push(self, text: str) -> str:
        """Return the part of `text` that belongs to the arguments."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if (length := self._end.find(text)) < 0:
            return text
        self.ended, self.rest = True, text[length:]
        return text[:length]


class JsonEnd:
    """Finds the end of a JSON object that arrives in pieces, without parsing it."""

    _MARKS = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character belongs to an escape

    def find(self, piece: str) -> int:
        """Return the position in `piece` just after the end of the object, or -1."""
        position = 0
        while position < len(piece):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            mark = self._MARKS.search(piece, position)
            if mark is None:
                break
            position = mark.end()
            if self._mark(mark[0]):
                return position
        return -1

    def _mark(self, character: str) -> bool:
        """Take a quote, a backslash or a bracket; return whether it ends the object."""
        if self._in_string:
            self._in_string = character != '"'
            self._escaped = character == "\\"
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


def write_json(value: Any) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def escape(text: str) -> str:
    """Return text escaped for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def write_scalar(text: str) -> str:
    """Return text that a model wrote as a value, as JSON: itself if it is valid JSON.

    Python's constants become JSON's; anything else becomes a string.
    """
    text = text.strip()
    text = CONSTANTS.get(text, text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


JSON = JsonArguments()
